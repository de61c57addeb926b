"""Text to token ids and back: sentencepiece, bytes, or a Hugging Face tokenizer file."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import sentencepiece

SPACE_RUNS = (2, 3, 4, 8, 12, 16)
"""Lengths of the runs of spaces that are tokens of their own, so that indented text stays short."""
EOD_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")


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

    def encode(self, text: str) -> list[int]:
        """The ids of a text, without an end-of-document id."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids; end-of-document ids disappear."""
        ...


class ByteTokenizer:
    """UTF-8 bytes as ids 0..255; 256 ends a document."""

    vocab_size = 257
    eod = 256
    fingerprint = "byte"

    def encode(self, text: str) -> list[int]:
        """The bytes of `text`."""
        return list(text.encode())

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

    def encode(self, text: str) -> list[int]:
        """The ids of `text`; control pieces are never produced."""
        return self._model.encode(text, add_bos=False, add_eos=False)

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
        self.vocab_size: int = self._backend.get_vocab_size()
        found = [i for i in map(self._backend.token_to_id, EOD_NAMES) if i is not None]
        if not found:
            raise ValueError(f"{path} has none of {', '.join(EOD_NAMES)} to end documents with")
        self.eod: int = found[0]

    def encode(self, text: str) -> list[int]:
        """The ids of `text`, without special tokens."""
        return self._backend.encode(text, add_special_tokens=False).ids

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


def load_tokenizer(name: str | Path) -> Tokenizer:
    """The tokenizer called `name`: "byte", a sentencepiece .model file, or a Hugging Face tokenizer.json.

    Raises FileNotFoundError or ValueError naming the file.
    """
    if str(name) == "byte":
        return ByteTokenizer()
    path = Path(name)
    if path.is_dir():
        path = path / "tokenizer.json"
    if not path.is_file():
        raise FileNotFoundError(f"tokenizer {path} does not exist; it is a file, or 'byte'")
    return HuggingFaceTokenizer(path) if path.suffix == ".json" else SentencePieceTokenizer(path)


def train_sentencepiece(texts: Iterable[str], path: str | Path, vocab_size: int) -> SentencePieceTokenizer:
    """Trains a byte-pair-encoding model of exactly `vocab_size` ids on `texts` and writes it to `path`.

    The same texts give the same bytes (one thread, no sampling). Text survives encoding and decoding exactly: no
    normalisation, whitespace is kept, and what has no piece falls back to bytes. ValueError when the texts cannot
    fill the vocabulary, or when it is too small for the bytes and the alphabet.
    """
    model = io.BytesIO()
    lines = (line for text in texts for line in text.split("\n") if line)
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=lines,
            model_writer=model,
            model_type="bpe",
            vocab_size=vocab_size,
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
    Path(path).write_bytes(model.getvalue())
    return SentencePieceTokenizer(path)
