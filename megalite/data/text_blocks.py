"""Cutting a source into blocks of whole records, and blocks into records.

Where a block ends depends only on the text and on where it begins. So a run that goes on after an interruption at the
end of some block cuts the rest as if it had never stopped, whatever the number of workers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from megalite.data.text_sources import BOM, Source, TextError, TextStream, parquet_rows

BLOCK_BYTES = 1 << 20
PIECE_BYTES = 64 << 10
"""A longer txt document is cut at its next blank line, so that workers, shuffle and splits have something to share."""
_BLOCK_ROWS = 1024


class Position(NamedTuple):
    """Where a record begins: bytes of decompressed text (rows in parquet), and its line or row number, from 1."""

    offset: int = 0
    number: int = 1


class Part(NamedTuple):
    """One value inside the data of a block."""

    number: int
    """Line at which it begins, or row."""
    size: int
    """Bytes; -1 when the table has no value here."""
    is_end: bool = True
    """Whether a document ends with it."""


@dataclass
class Block:
    """Whole records of one source, still undecoded: lines of JSON, or, where `parts` are given, texts end to end."""

    source: str
    data: bytes
    begin: Position
    end: Position
    parts: list[Part] | None = None
    disk_position: int = 0
    """Bytes of the source on disk that have been read."""
    size: int = field(init=False)

    def __post_init__(self) -> None:
        self.size = len(self.data)


@dataclass
class Record:
    """The values of one line or row, one for each key."""

    place: str
    values: list[Any]
    is_end: bool = True


@dataclass
class Broken:
    """A line that cannot be used."""

    place: str
    reason: str
    raw: bytes


def blocks(source: Source, begin: Position, keys: Sequence[str], max_bytes: int) -> Iterator[Block]:
    """The blocks of a source from `begin` (the end of an earlier block) on."""
    if source.format == "parquet":
        yield from _row_blocks(source, begin, keys)
        return
    stream = TextStream(source, begin.offset)
    try:
        cut = _line_blocks(stream, begin) if source.format == "jsonl" else _text_blocks(stream, begin, max_bytes)
        for block in cut:
            block.disk_position = stream.disk_position()
            yield block
    finally:
        stream.close()


def _line_blocks(stream: TextStream, begin: Position) -> Iterator[Block]:
    """Runs of whole lines of about BLOCK_BYTES; a longer line is a block with the lines that were read with its end."""
    rest, last = b"", False
    while not last:
        first = stream.read(BLOCK_BYTES - len(rest))
        last = len(first) < BLOCK_BYTES - len(rest)
        parts = [rest + first]
        cut = parts[0].rfind(b"\n") + 1
        while not cut and not last:
            more = stream.read(BLOCK_BYTES)
            last = len(more) < BLOCK_BYTES
            cut = more.find(b"\n") + 1
            parts.append(more)
        cut = len(parts[-1]) if last else cut
        tail = parts.pop()
        rest = tail[cut:]
        data = b"".join((*parts, tail[:cut]))
        del parts, first, tail  # a line may be as long as memory allows: hold it once
        if data:
            lines = data.count(b"\n")
            end = Position(begin.offset + len(data), begin.number + lines)
            yield Block(stream.source.path, data, begin, end)
            begin = end


def _text_blocks(stream: TextStream, begin: Position, max_bytes: int) -> Iterator[Block]:
    held: list[bytes] = []
    parts: list[Part] = []
    size = 0
    first = end = begin
    for data, part, end in _text_pieces(stream, begin, max_bytes):
        held.append(data)
        parts.append(part)
        size += len(data)
        if size >= BLOCK_BYTES or len(parts) >= _BLOCK_ROWS:
            yield Block(stream.source.path, b"".join(held), first, end, parts)
            held, parts, size, first = [], [], 0, end
    if parts:
        yield Block(stream.source.path, b"".join(held), first, end, parts)


def _text_pieces(stream: TextStream, begin: Position, max_bytes: int) -> Iterator[tuple[bytes, Part, Position]]:
    """Documents between form feeds; a long one in pieces that end at a blank line with text of it to follow.

    One of `max_bytes` without a blank line is cut where whitespace allows.
    """
    start, offset = begin.number, begin.offset
    ready, held, size = b"", list[bytes](), 0

    def piece(number: int, is_end: bool, *more: bytes) -> tuple[bytes, Part, Position]:
        nonlocal start, offset, ready, held, size
        data = b"".join((ready, *held, *more))
        place, start = start, number
        offset += len(data) + is_end
        ready, held, size = b"", [], 0
        return data, Part(place, len(data), is_end), Position(offset, number)

    for number, line in _lines(stream, begin.number):
        *ended, line = line.split(b"\f")
        for part in ended:
            yield piece(number, True, part)
        blank = line.isspace()
        if ready and not blank:
            yield piece(number, False)
        held.append(line)
        size += len(line)
        if blank and (ready or size >= PIECE_BYTES):
            ready, held = b"".join((ready, *held)), []
        while size > max_bytes:
            whole = b"".join((ready, *held))
            cut = cut_point(whole, 0, max_bytes)
            ready, held = b"", [whole[:cut]]
            yield piece(start + whole.count(b"\n", 0, cut), False)
            held, size = [whole[cut:]], len(whole) - cut
    if ready or (held and any(held)):
        yield piece(start, True)


def _lines(stream: TextStream, number: int) -> Iterator[tuple[int, bytes]]:
    """Lines with their numbers; one that is longer than a block comes in several parts."""
    rest, last = b"", False
    while not last:
        data = stream.read(BLOCK_BYTES)
        last = len(data) < BLOCK_BYTES
        *whole, rest = (rest + data).split(b"\n")
        for line in whole:
            yield number, line + b"\n"
            number += 1
        if len(rest) >= BLOCK_BYTES:
            yield number, rest
            rest = b""
    if rest:
        yield number, rest


def _row_blocks(source: Source, begin: Position, keys: Sequence[str]) -> Iterator[Block]:
    held: list[bytes] = []
    parts: list[Part] = []
    size, first, row = 0, begin, begin.offset
    for values in parquet_rows(source, keys, begin.offset):
        row += 1
        for key, value in zip(keys, values, strict=True):
            data = _cell(value, f"{source.path}:{row}", key)
            held.append(data or b"")
            parts.append(Part(row, -1 if data is None else len(data)))
            size += len(held[-1])
        if size >= BLOCK_BYTES or len(parts) >= _BLOCK_ROWS:
            end = Position(row, row + 1)
            yield Block(source.path, b"".join(held), first, end, parts)
            held, parts, size, first = [], [], 0, end
    if parts:
        yield Block(source.path, b"".join(held), first, Position(row, row + 1), parts)


def _cell(value: Any, place: str, key: str) -> bytes | None:
    if value is None or isinstance(value, bytes):
        return value
    if not isinstance(value, str):
        raise TextError(f"{place}: column {key!r} is {type(value).__name__}, expected text")
    return value.encode()


def records(block: Block, keys: Sequence[str], *, only_text: bool = True) -> Iterator[Record | Broken]:
    """The records of a block, decoded; the data of the block is taken out of it. Values are str under `only_text`."""
    data, block.data = block.data, b""
    skipped = len(BOM) if block.begin.offset == 0 and data.startswith(BOM) else 0
    if block.parts is None:
        return _json_records(block.source, [data], block.begin.number, skipped, keys, only_text)
    return _part_records(block.source, data, block.parts, len(keys), skipped)


def _json_records(
    source: str, held: list[bytes], number: int, begin: int, keys: Sequence[str], only_text: bool
) -> Iterator[Record | Broken]:
    data = held.pop()  # a line may be as long as memory allows: nobody else may hold it
    while begin < len(data):
        end = data.find(b"\n", begin) + 1 or len(data)
        line, data = (data[begin:end], data) if begin or end < len(data) else (data, b"")
        begin = end
        place = f"{source}:{number}"
        number += 1
        if line.isspace():
            continue
        try:
            text = line.decode()
        except UnicodeDecodeError as error:
            yield Broken(place, f"{place}: byte {error.start} is not UTF-8 ({error.reason})", line)
            continue
        del line
        try:
            found = Record(place, json_values(text, place, keys, only_text))
        except TextError as error:
            found = Broken(place, str(error), text.encode())
        del text
        yield found


def json_values(text: str, place: str, keys: Sequence[str], only_text: bool) -> list[Any]:
    """The values of a line under `keys`; TextError with its place when there are none."""
    try:
        record = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise TextError(f"{place}: not JSON ({error})") from error
    if not isinstance(record, dict):
        raise TextError(f"{place}: expected a JSON object, found {type(record).__name__}")
    for key in keys:
        if key not in record:
            raise TextError(f"{place}: no key {key!r}; keys are {', '.join(map(repr, record)) or 'none'}")
        if only_text and not isinstance(record[key], str):
            raise TextError(f"{place}: {key!r} is {type(record[key]).__name__}, expected text")
    return [record[key] for key in keys]


def _part_records(source: str, data: bytes, parts: list[Part], width: int, begin: int) -> Iterator[Record | Broken]:
    end = 0
    for first in range(0, len(parts), width):
        row = parts[first : first + width]
        place, raw = f"{source}:{row[0].number}", list[bytes]()
        for part in row:
            end += max(0, part.size)
            raw.append(data[begin:end])
            begin = end
        missing = [i for i, p in enumerate(row) if p.size < 0]
        if missing:
            yield Broken(place, f"{place}: column {missing[0] + 1} of {width} has no value", b"".join(raw))
            continue
        try:
            yield Record(place, [value.decode() for value in raw], row[-1].is_end)
        except UnicodeDecodeError as error:
            yield Broken(place, f"{place}: byte {error.start} is not UTF-8 ({error.reason})", b"".join(raw))


def cut_point(data: bytes, begin: int, limit: int) -> int:
    """Where to cut UTF-8 text that goes on for more than `limit` bytes after `begin`: at most `limit` further on.

    After a newline, else before a space, in the last quarter; without either, between two characters.
    """
    near, end = begin + limit - limit // 4, begin + limit
    cut = data.rfind(b"\n", near, end) + 1 or data.rfind(b" ", near, end)
    if cut > begin:
        return cut
    cut = end
    while cut > end - 4 and data[cut] & 0xC0 == 0x80:
        cut -= 1
    return cut


def cut_text(held: list[str], limit: int) -> Iterator[tuple[str, bool]]:
    """The one text of `held`, taken out of it, in pieces of at most `limit` bytes of UTF-8; together they are the text.

    Each comes with whether it is the last.
    """
    text = held.pop()  # it may be as long as memory allows
    if len(text) * 4 <= limit or (text.isascii() and len(text) <= limit):
        yield text, True
        return
    data = text.encode()
    del text
    begin = 0
    while len(data) - begin > limit:
        cut = cut_point(data, begin, limit)
        yield data[begin:cut].decode(), False
        begin = cut
    yield data[begin:].decode(), True
