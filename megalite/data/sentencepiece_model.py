"""What a sentencepiece .model file holds: a protocol buffer of pieces, read without that library's schema."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
BPE = 2


@dataclass(frozen=True)
class Piece:
    """An entry of the vocabulary: its text (spaces as U+2581), how early it is merged, and its kind."""

    text: str
    score: float
    kind: int


@dataclass(frozen=True, kw_only=True)
class SentencePieceModel:
    """The parts of a model that say how it cuts text."""

    pieces: tuple[Piece, ...]
    algorithm: int
    charsmap: bytes
    """Rules by which text is normalised first; none for `identity`."""
    adds_dummy_prefix: bool
    removes_extra_whitespaces: bool

    @staticmethod
    def parse(content: bytes) -> SentencePieceModel:
        """From the bytes of a file; ValueError or IndexError if they are none."""
        pieces: list[Piece] = []
        trainer: dict[int, int | bytes] = {}
        normalizer: dict[int, int | bytes] = {}
        for number, value in _fields(content):
            if number == 1 and isinstance(value, bytes):
                pieces.append(_piece(value))
            elif number == 2 and isinstance(value, bytes):
                trainer = dict(_fields(value))
            elif number == 3 and isinstance(value, bytes):
                normalizer = dict(_fields(value))
        algorithm, charsmap = trainer.get(3, 1), normalizer.get(2, b"")
        assert isinstance(algorithm, int) and isinstance(charsmap, bytes)
        return SentencePieceModel(
            pieces=tuple(pieces), algorithm=algorithm, charsmap=charsmap,
            adds_dummy_prefix=bool(normalizer.get(3, True)), removes_extra_whitespaces=bool(normalizer.get(4, True)),
        )  # fmt: skip


def _piece(content: bytes) -> Piece:
    found = dict(_fields(content))
    text, score, kind = found.get(1, b""), found.get(2, b"\0\0\0\0"), found.get(3, NORMAL)
    assert isinstance(text, bytes) and isinstance(score, bytes) and isinstance(kind, int)
    return Piece(text.decode(), struct.unpack("<f", score)[0], kind)


def _fields(content: bytes) -> Iterator[tuple[int, int | bytes]]:
    """(number, value) of each field of a message: varints as integers, all others as their bytes."""
    at = 0
    while at < len(content):
        key, at = _varint(content, at)
        number, wire = key >> 3, key & 7
        if wire == 0:
            value, at = _varint(content, at)
            yield number, value
            continue
        size = {1: 8, 5: 4}.get(wire)
        if wire == 2:
            size, at = _varint(content, at)
        if size is None or at + size > len(content):
            raise ValueError(f"no sentencepiece model: field {number} of kind {wire} at byte {at}")
        yield number, content[at : at + size]
        at += size


def _varint(content: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = content[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at
