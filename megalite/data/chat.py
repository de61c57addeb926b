"""Conversations to text by a chat template, and which of it the model is to learn.

Templates are Jinja, as Hugging Face tokenizers carry them, rendered in a sandbox with `messages`, `tools`,
`bos_token`, `eos_token` and `add_generation_prompt`. Special tokens count as such where the template writes them,
never where a message does.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ message['content'] }}<|im_end|>{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant{{ '\n' }}{% endif %}"
)
"""The template called "chatml"."""
# Unicode promises that these are no characters, so text has no use for them.
_OPEN, _CLOSE, _BREAK = "\ufdd0", "\ufdd1", "\ufdd2"
_MARKS = re.compile("[\ufdd0-\ufdd2]")


class ChatError(ValueError):
    """A conversation that the template cannot render."""


class ChatPiece(NamedTuple):
    """A stretch of a rendered conversation."""

    text: str | int
    """Plain text, or the id of a special token."""
    is_response: bool
    """Whether the model is to learn it."""


class GenerationTag(Extension):
    """`{% generation %} ... {% endgeneration %}` around what the assistant says."""

    tags = {"generation"}  # noqa: RUF012 (the interface of jinja2)

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        """Writes marks around what stands inside."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        marks = (nodes.Output([nodes.TemplateData(mark)], lineno=line) for mark in (_OPEN, _CLOSE))
        return [next(marks), *body, next(marks)]


def _raise(message: str) -> NoReturn:
    raise ChatError(message)


class ChatTemplate:
    """A template together with the special tokens of a tokenizer. `source` is Jinja."""

    def __init__(self, source: str, special_tokens: Mapping[str, int], *, bos: str = "", eos: str = ""):
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, "jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = lambda value, **kw: json.dumps(value, ensure_ascii=False, **kw)
        environment.globals["raise_exception"] = _raise
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise ValueError(f"the chat template is not valid: {error}") from error
        self._tokens = {"bos_token": bos, "eos_token": eos}
        self._special = dict(special_tokens)
        names = sorted(special_tokens, key=len, reverse=True)
        self._names = re.compile("|".join(map(re.escape, names)) or "(?!)")
        self._marks_responses = re.search(r"{%-?\s*generation\b", source) is not None

    def pieces(self, messages: Any, tools: Any = None) -> list[ChatPiece]:
        """The conversation as text and special tokens; ChatError when it is none, or has no response to learn."""
        checked = [self._disarmed(m) for m in _checked(messages)]
        render = self._render if self._marks_responses else self._with_marks
        marked = render(checked, tools)
        found = list(self._split(marked))
        if not any(piece.is_response for piece in found):
            raise ChatError("no message of the assistant to learn from")
        return found

    def _render(self, messages: Sequence[Any], tools: Any, prompt: bool = False) -> str:
        try:
            return self._template.render(messages=messages, tools=tools, add_generation_prompt=prompt, **self._tokens)
        except ChatError:
            raise
        except Exception as error:  # templates are programs: anything can happen in them
            raise ChatError(f"the chat template fails: {type(error).__name__}: {error}") from error

    def _with_marks(self, messages: list[Any], tools: Any) -> str:
        """The rendered conversation, with marks around what each assistant message adds to its prompt."""
        whole = self._render(messages, tools)
        parts, done = list[str](), 0
        for i, message in enumerate(messages):
            if message.get("role") != "assistant":
                continue
            prompt = self._render(messages[:i], tools, prompt=True)
            until = self._render(messages[: i + 1], tools)
            if not (until.startswith(prompt) and whole.startswith(until) and len(prompt) >= done):
                raise ChatError(
                    f"the chat template does not say where message {i + 1} begins; put {{% generation %}} and"
                    " {% endgeneration %} around what the assistant says"
                )
            parts += [whole[done : len(prompt)], _OPEN, whole[len(prompt) : len(until)], _CLOSE]
            done = len(until)
        return "".join((*parts, whole[done:]))

    def _disarmed(self, value: Any) -> Any:
        """`value` with a mark in each special token that is written in it, so that it is one no more."""
        if isinstance(value, str):
            clean = _MARKS.sub("\ufffd", value)
            return self._names.sub(lambda found: found[0][:1] + _BREAK + found[0][1:], clean)
        if isinstance(value, Mapping):
            return {key: self._disarmed(item) for key, item in value.items()}
        return [self._disarmed(item) for item in value] if isinstance(value, list) else value

    def _split(self, marked: str) -> Iterator[ChatPiece]:
        is_response = False
        for part in re.split(f"({_OPEN}|{_CLOSE})", marked):
            if part in (_OPEN, _CLOSE):
                is_response = part == _OPEN
                continue
            for text in self._texts(part):
                yield ChatPiece(text, is_response)

    def _texts(self, text: str) -> Iterator[str | int]:
        done = 0
        for found in self._names.finditer(text):
            if found.start() > done:
                yield text[done : found.start()].replace(_BREAK, "")
            yield self._special[found[0]]
            done = found.end()
        if done < len(text):
            yield text[done:].replace(_BREAK, "")


def _checked(messages: Any) -> Iterable[dict[str, Any]]:
    if not isinstance(messages, list) or not messages:
        raise ChatError(f"expected a list of messages, found {type(messages).__name__}")
    for i, message in enumerate(messages, start=1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ChatError(f"message {i} is no object with a role")
        if "content" not in message and "tool_calls" not in message:
            raise ChatError(f"message {i} has no content; its keys are {', '.join(map(repr, message))}")
    return messages
