"""Records to token ids: what a worker of preprocessing does."""

from __future__ import annotations

import base64
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megalite.data.fim import FimOptions, fim_pieces, fim_sentinels
from megalite.data.indexed import token_dtype
from megalite.data.text_blocks import Block, Broken, Record, cut_text, records
from megalite.data.text_sources import TextError
from megalite.data.tokenizer import Tokenizer

_ENCODE_BYTES = 1 << 20
_PART_TOKENS = 1 << 22
_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True, kw_only=True)
class TextOptions:
    """How texts become documents."""

    json_keys: tuple[str, ...] = ("text",)
    """The keys of the texts in each line of a .jsonl file (columns of a .parquet file)."""
    on_error: str = "fail"
    """What a broken line does: fail, or skip (counted, and written aside)."""
    keep_blank: bool = False
    """Keep blank texts as Megatron does: an empty one is a document without tokens."""
    append_eod: bool = True
    """End each document with the tokenizer's end-of-document id."""
    max_document_mb: float = 8.0
    """Longer documents are cut, at whitespace if there is any, into several; the last has the end-of-document id."""
    fim: FimOptions = field(default_factory=FimOptions)
    """Fill-in-the-middle."""
    chat_template: str = ""
    """Jinja: the values are conversations, and what the assistant says is what is learnt."""

    @property
    def max_document_bytes(self) -> int:
        """`max_document_mb` in bytes."""
        return max(4, int(self.max_document_mb * 1e6))


@dataclass
class Totals:
    """What has been read and written."""

    documents: int = 0
    tokens: int = 0
    bytes_read: int = 0
    """Bytes of text, decompressed."""
    blank: int = 0
    """Blank texts, left out unless keep_blank."""
    broken: int = 0
    """Lines skipped under on_error=skip."""
    replaced: int = 0
    """Texts with lone surrogates, replaced by U+FFFD."""
    cut: int = 0
    """Documents that were longer than max_document_mb."""
    rearranged: int = 0
    """Documents rearranged for fill-in-the-middle; each has three sentinels, counted in `tokens`."""
    learnt: int = 0
    """Tokens of responses, of conversations."""

    def add(self, other: Totals) -> None:
        """Adds another's counts to these."""
        for name in (f.name for f in fields(self)):
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def as_dict(self) -> dict[str, int]:
        """The counts by name."""
        return asdict(self)


class Rejected(NamedTuple):
    """A line that was skipped."""

    reason: str
    """Begins with its place."""
    raw: bytes

    def as_json(self) -> bytes:
        """A line of JSON: the reason, and the bytes as text, or as base64 where they are no UTF-8."""
        try:
            entry = {"reason": self.reason, "line": self.raw.decode()}
        except UnicodeDecodeError:
            entry = {"reason": self.reason, "base64": base64.b64encode(self.raw).decode()}
        return json.dumps(entry).encode() + b"\n"


class Stream(NamedTuple):
    """The documents of one key."""

    tokens: NDArray[Any]
    lengths: NDArray[np.int32]
    """Tokens of each document; 0 is an empty one."""
    mask: NDArray[np.uint8] | None
    """1 for tokens that are to be learnt (None: all are)."""


class Encoded(NamedTuple):
    """A block of records, or a part of a large one, as ids, and what was found on the way."""

    streams: list[Stream]
    rejected: list[Rejected]
    cuts: list[tuple[str, int]]
    """Place of each document that was cut, and the number of its pieces."""
    totals: Totals
    is_last: bool
    """Whether the block ends with it."""


class Piece(NamedTuple):
    """What documents are made of: text, or the id of a special token."""

    text: str | int
    is_learnt: bool = True


class Encoder:
    """Turns blocks of records into ids. ValueError when the tokenizer lacks what the options need."""

    def __init__(self, tokenizer: Tokenizer, options: TextOptions):
        self.tokenizer, self.options = tokenizer, options
        self.dtype = token_dtype(tokenizer.vocab_size)
        self._sentinels = fim_sentinels(tokenizer.special_tokens) if options.fim.rate else (-1, -1, -1)
        self._chat: Any = None
        if options.chat_template:
            from megalite.data.chat import ChatTemplate  # jinja is slow to import, and few need it

            names = {i: name for name, i in tokenizer.special_tokens.items()}
            self._chat = ChatTemplate(options.chat_template, tokenizer.special_tokens, eos=names.get(tokenizer.eod, ""))

    def encode(self, block: Block) -> Iterator[Encoded]:
        """The ids of a block, whose data is used up; a broken record raises TextError under on_error=fail."""
        encoded = _empty(block.size)
        builders = [_StreamBuilder(self) for _ in self.options.json_keys]
        for record in records(block, self.options.json_keys, only_text=self._chat is None):
            if isinstance(record, Broken):
                self._reject(encoded, record)
                continue
            try:
                documents = self._documents(record, encoded)
            except TextError as error:
                raw = json.dumps(dict(zip(self.options.json_keys, record.values, strict=True))).encode()
                self._reject(encoded, Broken(record.place, str(error), raw))
                continue
            for builder, pieces in zip(builders, documents, strict=True):
                for document in pieces:
                    builder.add(document)
                    if builder.num_tokens >= _PART_TOKENS:  # a long document may be longer in ids than in bytes
                        yield _finished(encoded, builders)
                        encoded = _empty(0)
        yield _finished(encoded, builders)._replace(is_last=True)

    def _reject(self, encoded: Encoded, broken: Broken) -> None:
        if self.options.on_error != "skip":
            raise TextError(broken.reason)
        encoded.totals.broken += 1
        encoded.rejected.append(Rejected(broken.reason, broken.raw))

    def _documents(self, record: Record, encoded: Encoded) -> list[Iterable[list[Piece]]]:
        """The documents of a record, for each key; nothing is counted when one of its values cannot be used."""
        if self._chat is not None:
            return [[self._conversation(value, record)] for value in record.values]
        values, record.values = record.values, []
        return [self._texts(values.pop(0), record, encoded) for _ in range(len(values))]

    def _texts(self, text: str, record: Record, encoded: Encoded) -> Iterator[list[Piece]]:
        """A text as one document or, where it is too long, several; blank ones are counted and left out."""
        totals = encoded.totals
        if not text or text.isspace():
            totals.blank += 1
            if not self.options.keep_blank:
                return
        held = [repaired(text)]
        totals.replaced += held[0] is not text
        del text
        count = 0
        for piece, is_last in cut_text(held, self.options.max_document_bytes):
            count += 1
            yield self._document(piece, is_end=record.is_end and is_last, totals=totals)
        if count > 1:
            totals.cut += 1
            encoded.cuts.append((record.place, count))

    def _document(self, text: str, *, is_end: bool, totals: Totals) -> list[Piece]:
        eod = [Piece(self.tokenizer.eod)] if is_end and self.options.append_eod and text else []
        parts = fim_pieces(text, self.options.fim, self._sentinels) if self.options.fim.rate and text else None
        totals.rearranged += parts is not None
        return [*map(Piece, parts or [text]), *eod]

    def _conversation(self, value: Any, record: Record) -> list[Piece]:
        from megalite.data.chat import ChatError

        try:
            pieces = self._chat.pieces(_repaired_all(value))
        except ChatError as error:
            raise TextError(f"{record.place}: {error}") from error
        document = [Piece(p.text, p.is_response) for p in pieces]
        if self.options.append_eod:
            document.append(Piece(self.tokenizer.eod, pieces[-1].is_response))
        return document


def _empty(size: int) -> Encoded:
    return Encoded([], [], [], Totals(bytes_read=size), False)


def _finished(encoded: Encoded, builders: Sequence[_StreamBuilder]) -> Encoded:
    streams, totals = [builder.finish() for builder in builders], encoded.totals
    totals.documents = sum(len(s.lengths) for s in streams)
    totals.tokens = sum(len(s.tokens) for s in streams)
    totals.learnt = sum(int(s.mask.sum()) for s in streams if s.mask is not None)
    return encoded._replace(streams=streams)


class _StreamBuilder:
    """Collects documents, encodes their texts in batches and joins the ids."""

    def __init__(self, encoder: Encoder):
        self._tokenizer, self._dtype = encoder.tokenizer, encoder.dtype
        self._masked = encoder.options.chat_template != ""
        self._documents: list[list[Piece]] = []
        self._size = 0
        self._tokens: list[NDArray[Any]] = []
        self._masks: list[NDArray[np.uint8]] = []
        self._lengths: list[int] = []
        self.num_tokens = 0

    def add(self, document: list[Piece]) -> None:
        self._documents.append(document)
        self._size += sum(len(p.text) for p in document if isinstance(p.text, str))
        if self._size >= _ENCODE_BYTES:
            self._flush()

    def _flush(self) -> None:
        pieces = [piece for document in self._documents for piece in document]
        encoded = iter(self._tokenizer.encode_batch([p.text for p in pieces if isinstance(p.text, str)]))
        ids: list[Any] = []
        for document in self._documents:
            found = [next(encoded) if isinstance(p.text, str) else (p.text,) for p in document]
            if not any(len(f) for f, p in zip(found, document, strict=True) if isinstance(p.text, str)):
                found = [()] * len(found)  # without a token of text there is nothing that could end
            self._lengths.append(sum(map(len, found)))
            ids += found
        sizes = list(map(len, ids))
        self._tokens.append(joined(ids, sizes, self._dtype, self._tokenizer.vocab_size))
        if self._masked:
            learnt = np.array([p.is_learnt for p in pieces], dtype=np.uint8)
            self._masks.append(np.repeat(learnt, sizes))
        self._documents, self._size = [], 0
        self.num_tokens += sum(sizes)

    def finish(self) -> Stream:
        """All that was added; begins anew."""
        self._flush()
        mask = np.concatenate(self._masks) if self._masked else None
        stream = Stream(np.concatenate(self._tokens), np.array(self._lengths, dtype=np.int32), mask)
        self._tokens, self._masks, self._lengths, self.num_tokens = [], [], [], 0
        return stream


def joined(ids: Sequence[Any], sizes: Sequence[int], dtype: np.dtype[Any], vocab_size: int) -> NDArray[Any]:
    """Lists and arrays of ids end to end, checked against the vocabulary."""
    total = sum(sizes)
    if any(isinstance(found, np.ndarray) for found in ids):
        arrays = (f if isinstance(f, np.ndarray) else np.array(f, dtype=np.int32) for f in ids)
        flat = np.concatenate(list(arrays))
    else:
        flat = np.fromiter(itertools.chain.from_iterable(ids), dtype=np.int32, count=total)
    if total and not (flat.min() >= 0 and flat.max() < vocab_size):
        wrong = flat[(flat < 0) | (flat >= vocab_size)][0]
        raise ValueError(f"the tokenizer gave id {wrong}, but its vocabulary has {vocab_size}")
    return flat.astype(dtype)


def repaired(text: str) -> str:
    """`text` with lone surrogates replaced by U+FFFD; the same object where there are none."""
    if text.isascii():
        return text
    return _SURROGATE.sub("\ufffd", text) if _SURROGATE.search(text) else text


def _repaired_all(value: Any) -> Any:
    if isinstance(value, str):
        return repaired(value)
    if isinstance(value, dict):
        return {key: _repaired_all(item) for key, item in value.items()}
    return [_repaired_all(item) for item in value] if isinstance(value, list) else value
