"""One row of a generation: its tokens, its text, and when it ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from megalite.data.tokenizer import Tokenizer
from megalite.generate.text import TextStream

Reason = Literal["length", "stop_token", "stop_string"]
OnText = Callable[[int, str, bool], None]
"""Told of each piece of text: the row's number, the piece, and whether it is the last one."""


@dataclass(frozen=True, kw_only=True)
class Stop:
    """When a row ends. Neither the token nor the string that ended it is part of the result."""

    max_new_tokens: int = 100
    """Tokens to add to a prompt at most."""
    tokens: tuple[int, ...] = ()
    """Ids that end a row."""
    strings: tuple[str, ...] = ()
    """Texts that end a row; they need a tokenizer."""


@dataclass(frozen=True, kw_only=True)
class Completion:
    """What a row has got: its new tokens, their text (None without a tokenizer), and why it ended."""

    tokens: tuple[int, ...]
    text: str | None
    reason: Reason


class Row:
    """A prompt and its continuation; `number` keys its samples."""

    def __init__(
        self,
        number: int,
        prompt: Sequence[int],
        stop: Stop,
        tokenizer: Tokenizer | None = None,
        on_text: OnText | None = None,
    ):
        self.number, self.tokens, self.num_prompt, self.stop = number, list(prompt), len(prompt), stop
        self._stream = TextStream(tokenizer, prompt, stop.strings) if tokenizer is not None else None
        self._on_text = on_text
        self.reason: Reason | None = None

    @property
    def num_left(self) -> int:
        """Tokens that may still come."""
        return self.stop.max_new_tokens - (len(self.tokens) - self.num_prompt)

    def add(self, token: int) -> None:
        """Takes the next token, unless the row has ended."""
        if self.reason is not None:
            return
        if token in self.stop.tokens:
            self._end("stop_token")
            return
        self.tokens.append(token)
        if self._stream is not None:
            piece = self._stream.push(token)
            if self._stream.stopped:
                self._end("stop_string", piece)
                return
            if piece and self.num_left > 0:
                self._tell(piece, False)
                piece = ""
            if self.num_left <= 0:
                self._end("length", piece)
        elif self.num_left <= 0:
            self._end("length")

    def completion(self) -> Completion:
        """The result, once the row has ended."""
        assert self.reason is not None, f"row {self.number} has not ended"
        text = self._stream.text if self._stream is not None else None
        return Completion(tokens=tuple(self.tokens[self.num_prompt :]), text=text, reason=self.reason)

    def _end(self, reason: Reason, piece: str = "") -> None:
        self.reason = reason
        if self._stream is not None:
            self._tell(piece + self._stream.finish(), True)

    def _tell(self, piece: str, last: bool) -> None:
        if self._on_text is not None:
            self._on_text(self.number, piece, last)
