"""Text to token ids and back: sentencepiece, bytes, or a Hugging Face tokenizer file (more: tokenizer_backends)."""

from __future__ import annotations

import functools
import hashlib
import io
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import sentencepiece

from megalite.data.fim import SENTINELS
from megalite.data.sentencepiece_cuts import cuts_at_spaces, pieces_at_spaces
from megalite.files import replace_bytes

Ids = Sequence[int]
"""Token ids: a list or an array."""
SPACE_RUNS = (2, 3, 4, 8, 12, 16)
"""Lengths of the runs of spaces that are tokens of their own, so that indented text stays short."""
LONG_TEXT = 1 << 18
"""Longer texts are encoded in parts where that gives the same ids."""
EOD_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")
KINDS = ("sentencepiece", "huggingface", "hf", "tiktoken", "gigatoken")
"""What a tokenizer's name may begin with, before a colon."""


class Tokenizer(Protocol):
    """What the rest of megalite needs of a tokenizer. Text is always plain text: "</s>" in it is four characters."""

    @property
    def vocab_size(self) -> int:
        """Number of ids."""
        ...

    @property
    def eod(self) -> int:
        """The id that ends a document; no text encodes to it."""
        ...

    @property
    def fingerprint(self) -> str:
        """A hash of the tokenizer's definition."""
        ...

    @property
    def special_tokens(self) -> Mapping[str, int]:
        """Ids that no text encodes to, by name."""
        ...

    def encode(self, text: str) -> list[int]:
        """The ids of a text, without an end-of-document id."""
        ...

    def encode_batch(self, texts: Sequence[str]) -> Sequence[Ids]:
        """`encode` of each text, in one thread: the fastest way that the library has."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids; end-of-document ids disappear."""
        ...


class ByteTokenizer:
    """UTF-8 bytes as ids 0..255; 256 ends a document."""

    vocab_size = 257
    eod = 256
    fingerprint = "byte"
    special_tokens: Mapping[str, int] = {}

    def encode(self, text: str) -> list[int]:
        """The bytes of `text`."""
        return list(text.encode())

    def encode_batch(self, texts: Sequence[str]) -> Sequence[Ids]:
        """The bytes of each text, as arrays."""
        return [np.frombuffer(text.encode(), dtype=np.uint8) for text in texts]  # pyright: ignore[reportReturnType]

    def decode(self, ids: Sequence[int]) -> str:
        """The text; bytes that are not UTF-8 become U+FFFD."""
        return bytes(i for i in ids if i < 256).decode(errors="replace")


class SentencePieceTokenizer:
    """A sentencepiece model file."""

    def __init__(self, path: str | Path):
        model = Path(path).read_bytes()
        self._model: Any = sentencepiece.SentencePieceProcessor()
        try:
            self._model.LoadFromSerializedProto(model)
        except RuntimeError as error:
            raise ValueError(f"{path} is not a sentencepiece model: {error}") from error
        self.fingerprint = hashlib.sha256(model).hexdigest()[:16]
        self.vocab_size: int = self._model.vocab_size()
        self.eod: int = self._model.eos_id()
        if self.eod < 0:
            raise ValueError(f"{path} has no </s> piece to end documents with")
        control = filter(self._model.is_control, range(self.vocab_size))
        self.special_tokens: dict[str, int] = {self._model.id_to_piece(i): i for i in control}

    def encode(self, text: str) -> list[int]:
        """The ids of `text`; control pieces are never produced."""
        return self._model.encode(text, add_bos=False, add_eos=False)

    def encode_batch(self, texts: Sequence[str]) -> Sequence[Ids]:
        """The ids of each text."""
        if max(map(len, texts), default=0) > LONG_TEXT and self._cuts_at_spaces:
            return [self._long(text) if len(text) > LONG_TEXT else self.encode(text) for text in texts]
        return self._model.encode(list(texts), add_bos=False, add_eos=False, num_threads=1)

    @functools.cached_property
    def _cuts_at_spaces(self) -> bool:
        return cuts_at_spaces(self.serialized())

    def _long(self, text: str) -> Ids:
        """The ids of a text as an array, encoded a part at a time."""
        parts = [np.array(self.encode(part), dtype=np.int32) for part in pieces_at_spaces(text, LONG_TEXT)]
        return np.concatenate(parts)  # pyright: ignore[reportReturnType]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`."""
        return self._model.decode([int(i) for i in ids])

    def serialized(self) -> bytes:
        """The model file."""
        return self._model.serialized_model_proto()


class HuggingFaceTokenizer:
    """A tokenizer.json of the Hugging Face `tokenizers` package, which must be installed."""

    def __init__(self, path: str | Path):
        from tokenizers import Tokenizer as Backend  # optional: only this class needs it

        self.definition = definition = Path(path).read_text()
        self._backend: Any = Backend.from_str(definition)
        self._backend.encode_special_tokens = True  # "<|endoftext|>" typed in a text is text
        self.fingerprint = hashlib.sha256(definition.encode()).hexdigest()[:16]
        _declare_special(self._backend)
        self.vocab_size: int = max(self._backend.get_vocab().values()) + 1
        added = self._backend.get_added_tokens_decoder()
        self.special_tokens: dict[str, int] = {token.content: i for i, token in added.items() if token.special}
        found = [i for i in map(self._backend.token_to_id, EOD_NAMES) if i is not None]
        if not found:
            raise ValueError(f"{path} has none of {', '.join(EOD_NAMES)} to end documents with")
        self.eod: int = found[0]

    def encode(self, text: str) -> list[int]:
        """The ids of `text`, without special tokens."""
        return self._backend.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> Sequence[Ids]:
        """The ids of each text."""
        # In one thread: workers are processes, and the library refuses its threads in a forked one anyway.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        return [found.ids for found in self._backend.encode_batch_fast(list(texts), add_special_tokens=False)]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`."""
        return self._backend.decode([int(i) for i in ids], skip_special_tokens=True)

    @property
    def prefix(self) -> tuple[int, ...]:
        """The special tokens that the file says come before every text; `encode` leaves them out."""
        found = self._backend.encode("", add_special_tokens=True).ids
        return tuple(found[: found.index(self.eod)] if self.eod in found[1:] else found)

    def token(self, number: int) -> str:
        """How an id is written."""
        return self._backend.id_to_token(number)


def _declare_special(backend: Any) -> None:
    """Makes the end of a document and the sentinels of fill-in-the-middle special where they are merely added."""
    names = {*EOD_NAMES, *(name for group in SENTINELS for name in group)}
    added = backend.get_added_tokens_decoder().values()
    if found := [token.content for token in added if not token.special and token.content in names]:
        backend.add_special_tokens(found)


def split_name(name: str | Path) -> tuple[str, str]:
    """(kind, path) of a tokenizer's name; the kind is "" where the path alone is given."""
    kind, colon, path = str(name).partition(":")
    return (kind, path) if colon and kind in KINDS else ("", str(name))


def absolute_name(name: str | Path) -> str:
    """The name with a path that holds in any working directory."""
    kind, path = split_name(name)
    if str(name) == "byte" or not os.path.exists(path):
        return str(name)
    return f"{kind}:{os.path.abspath(path)}" if kind else os.path.abspath(path)


def load_tokenizer(name: str | Path) -> Tokenizer:
    """The tokenizer called `name`: "byte" or a file, with or without its kind before it (sentencepiece:FILE).

    Kinds are those of `KINDS`; without one, .json and folders are Hugging Face, .tiktoken is tiktoken, anything else
    sentencepiece. Raises FileNotFoundError or ValueError naming the file, ImportError naming a missing
    package.
    """
    if str(name) == "byte":
        return ByteTokenizer()
    kind, given = split_name(name)
    path = Path(given)
    if kind == "tiktoken" and not path.exists():
        return load_backend(kind, given)
    if path.is_dir():
        path = path / "tokenizer.json"
    if not path.is_file():
        raise FileNotFoundError(f"tokenizer {path} does not exist; it is a file, or 'byte'")
    kind = kind or {".json": "huggingface", ".tiktoken": "tiktoken"}.get(path.suffix, "sentencepiece")
    if kind in ("huggingface", "hf"):
        return HuggingFaceTokenizer(path)
    return SentencePieceTokenizer(path) if kind == "sentencepiece" else load_backend(kind, str(path))


def find_chat_template(choice: str, tokenizer_name: str) -> str:
    """The Jinja source of a chat template: a file, "chatml", or "tokenizer" for the one beside the tokenizer.

    Raises FileNotFoundError or ValueError when there is none.
    """
    if choice == "chatml":
        from megalite.data.chat import CHATML  # jinja is slow to import, and few need it

        return CHATML
    if choice != "tokenizer":
        return Path(choice).read_text()
    path = Path(split_name(tokenizer_name)[1])
    folder = path if path.is_dir() else path.parent
    if (folder / "chat_template.jinja").is_file():
        return (folder / "chat_template.jinja").read_text()
    settings = folder / "tokenizer_config.json"
    template = json.loads(settings.read_text()).get("chat_template") if settings.is_file() else None
    if isinstance(template, list):  # several, by name
        template = next((entry["template"] for entry in template if entry.get("name") == "default"), None)
    if not isinstance(template, str):
        raise ValueError(
            f"{folder} has no chat template (chat_template.jinja, or in tokenizer_config.json); name a file"
        )
    return template


def load_backend(kind: str, path: str) -> Tokenizer:
    """A tokenizer of an optional package."""
    from megalite.data.tokenizer_backends import GigaTokenizer, TiktokenTokenizer  # they build on this module

    return TiktokenTokenizer(path) if kind == "tiktoken" else GigaTokenizer(path)


def train_sentencepiece(
    texts: Iterable[str],
    path: str | Path,
    vocab_size: int,
    *,
    model_type: Literal["bpe", "unigram"] = "bpe",
    special_tokens: Sequence[str] = (),
) -> SentencePieceTokenizer:
    """Trains a model of exactly `vocab_size` ids on `texts` and writes it to `path`.

    `special_tokens` get the ids after </s>. The same texts give the same bytes (one thread, no sampling). Text survives
    encoding and decoding exactly: no normalisation, whitespace is kept, and what has no piece falls back to bytes.
    ValueError when the texts cannot fill the vocabulary, or when it is too small for the bytes and the alphabet.
    """
    model = io.BytesIO()
    lines = (line for text in texts for line in text.split("\n") if line)
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=lines,
            model_writer=model,
            model_type=model_type,
            vocab_size=vocab_size,
            control_symbols=list(special_tokens),
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=False,
            byte_fallback=True,
            character_coverage=0.9995,
            user_defined_symbols=["\n", *("\u2581" * n for n in SPACE_RUNS)],
            max_sentence_length=1 << 20,
            shuffle_input_sentence=False,
            num_threads=1,
            unk_id=0,
            eos_id=1,
            bos_id=-1,
            pad_id=-1,
            minloglevel=2,
        )
    except RuntimeError as error:
        raise ValueError(f"no vocabulary of {vocab_size} ids can be made of this text: {error}") from error
    replace_bytes(Path(path), model.getvalue())
    return SentencePieceTokenizer(path)
