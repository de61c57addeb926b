"""Finding and opening text: .jsonl, .txt and .parquet files, compressed or not, folders of them, standard input."""

from __future__ import annotations

import gzip
import importlib
import io
import os
import sys
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO, Literal, NamedTuple, Protocol

Format = Literal["jsonl", "txt", "parquet"]
STDIN = "-"
TEXT_SUFFIXES = (".jsonl", ".txt", ".parquet")
COMPRESSED_SUFFIXES = (".gz", ".zst")
BOM = b"\xef\xbb\xbf"
_GZIP, _ZSTD, _PARQUET, _ZIP = b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"PAR1", b"PK\x03\x04"
_FED = 16 << 10  # compressed bytes handed to a decompressor at once: what comes out stays small


class TextError(ValueError):
    """A text that cannot be used; the message begins with file:line."""


class Source(NamedTuple):
    """One input."""

    path: str
    """"-" is standard input."""
    format: Format
    size: int
    """Bytes on disk; 0 where that is not known."""

    @property
    def is_stream(self) -> bool:
        """Whether it can be read once only: standard input, or a named pipe."""
        return self.path == STDIN or not os.path.isfile(self.path)


class Reader(Protocol):
    """A stream of decompressed bytes."""

    def read(self, size: int, /) -> bytes:
        """Up to `size` bytes; none at the end only."""
        ...


def optional_package(name: str, purpose: str) -> ModuleType:
    """Imports a package that only some inputs or tokenizers need; ImportError says which, what for, and how."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        raise ImportError(f"{purpose} needs the package {package}: pip install {package}") from error


def is_text_path(path: str | Path) -> bool:
    """Whether the name says text: .jsonl, .txt or .parquet, and .gz or .zst behind the first two."""
    return _suffix(path) in TEXT_SUFFIXES


def _suffix(path: str | Path) -> str:
    path = Path(path)
    if path.suffix in COMPRESSED_SUFFIXES:
        path = path.with_suffix("")
    return path.suffix


def find_sources(inputs: Sequence[str | Path]) -> list[Source]:
    """The files of `inputs` in order; a folder stands for the text files below it, sorted by path. Links are followed.

    Raises FileNotFoundError, also for a link to nothing, and ValueError for a name, or a content, of no known format.
    """
    found: list[Source] = []
    for given in inputs:
        path = Path(given)
        if str(given) == STDIN:
            found.append(Source(STDIN, "jsonl", 0))
        elif path.is_dir():
            files = sorted(p for p in _files_below(path) if is_text_path(p))
            if not files:
                raise ValueError(f"{path} holds no {', '.join(TEXT_SUFFIXES)} files (.gz and .zst may follow)")
            if others := [p for p in files if not p.is_file()]:
                raise ValueError(f"{others[0]} is no file; a pipe must be named itself, not by its folder")
            found += map(_source, files)
        elif not path.exists():
            raise FileNotFoundError(f"{path} does not exist")
        else:
            found.append(_source(path))
    return found


def _files_below(folder: Path, above: frozenset[tuple[int, int]] = frozenset()) -> Iterator[Path]:
    """What lies in a folder and its folders, linked ones too, save a link to a folder that holds the link."""
    found = folder.stat()
    here = found.st_dev, found.st_ino
    if here in above:
        return
    for path in folder.iterdir():
        if path.name.startswith("."):
            continue
        if path.is_symlink() and not path.exists():
            raise FileNotFoundError(f"{path} is a link to nothing; remove it, or put back {path.readlink()}")
        if path.is_dir():
            yield from _files_below(path, above | {here})
        else:
            yield path


def _source(path: Path) -> Source:
    if not is_text_path(path):
        known = ", ".join(TEXT_SUFFIXES)
        raise ValueError(f"{path}: expected a {known} file (.gz or .zst may follow), a folder of them, or -")
    if not path.is_file():  # a named pipe: looking at its first bytes would take them
        return Source(str(path), "txt" if _suffix(path) == ".txt" else "jsonl", 0)
    head = _head(path)
    if head.startswith(_ZIP):
        raise ValueError(f"{path} is a zip archive; unpack it first")
    if path.suffix in COMPRESSED_SUFFIXES and len(head) < 4:
        raise ValueError(
            f"{path} was cut: {len(head)} bytes are no {path.suffix} file; write it again, or leave it out"
        )
    kinds: dict[str, Format] = {".jsonl": "jsonl", ".txt": "txt", ".parquet": "parquet"}
    kind: Format = "parquet" if head.startswith(_PARQUET) else kinds[_suffix(path)]
    if kind == "parquet" and not head.startswith(_PARQUET):
        raise ValueError(f"{path} is not a parquet file: it begins with {head!r}")
    if kind == "parquet":
        optional_package("pyarrow.parquet", f"reading {path}")
    elif head.startswith(_ZSTD):
        optional_package("zstandard", f"reading {path}")
    return Source(str(path), kind, path.stat().st_size)


def _head(path: Path) -> bytes:
    with open(path, "rb") as file:
        return file.read(4)


class TextStream:
    """The decompressed bytes of a .jsonl or .txt source from `offset` on; compression is known by the first bytes.

    Damage (a file that was cut, a checksum that does not fit) is a TextError with the place, never a silent end.
    """

    def __init__(self, source: Source, offset: int = 0):
        self.source, self._offset = source, 0
        raw: BinaryIO = sys.stdin.buffer if source.path == STDIN else open(source.path, "rb")  # noqa: SIM115
        self._raw = raw
        file = io.BufferedReader(raw, 1 << 16) if isinstance(raw, io.RawIOBase) else raw
        head = file.peek(4)[:4] if isinstance(file, io.BufferedReader) else b""
        self._is_plain = False
        if head.startswith(_GZIP):
            self._reader: Reader = gzip.GzipFile(fileobj=file)
        elif head.startswith(_ZSTD):
            self._reader = ZstdReader(file)
        else:
            self._reader, self._is_plain = file, True
        self._skip(offset)

    def _skip(self, offset: int) -> None:
        if self._is_plain and self.source.path != STDIN and self.source.size:
            self._raw.seek(offset)
            self._offset = offset
        while self._offset < offset:
            if not self.read(min(offset - self._offset, 1 << 20)):
                raise TextError(f"{self.source.path}: ends at byte {self._offset}, an earlier run read up to {offset}")

    def read(self, size: int) -> bytes:
        """`size` bytes, fewer only at the end."""
        parts: list[bytes] = []
        while size > 0:
            try:
                part = self._reader.read(size)
            except (EOFError, zlib.error, gzip.BadGzipFile, DamagedStream) as error:
                raise TextError(f"{self.source.path}: damaged near byte {self._offset} of its text: {error}") from error
            if not part:
                break
            parts.append(part)
            size -= len(part)
            self._offset += len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def disk_position(self) -> int:
        """Bytes on disk that have been read so far, for showing progress."""
        try:
            return self._offset if self._is_plain else self._raw.tell()
        except OSError:
            return 0

    def close(self) -> None:
        """Closes the file (standard input stays open)."""
        if self.source.path != STDIN:
            self._raw.close()


class DamagedStream(Exception):
    """Compressed data that cannot be right."""


class ZstdReader:
    """Decompresses zstd frames one after another, and knows a file that ends inside one (zstandard's own does not)."""

    def __init__(self, file: BinaryIO):
        self._package = optional_package("zstandard", "reading zstd files")
        self._file, self._frame, self._fed = file, self._new(), False
        self._ready, self._left = b"", b""

    def _new(self) -> Any:
        return self._package.ZstdDecompressor().decompressobj()

    def read(self, size: int) -> bytes:
        """Up to `size` bytes; none at the end only."""
        while not self._ready:
            data = self._left or self._file.read(_FED)
            self._left = b""
            if not data:
                if self._fed:
                    raise DamagedStream("the last zstd frame is not complete")
                return b""
            try:
                self._ready = self._frame.decompress(data)
            except self._package.ZstdError as error:
                raise DamagedStream(str(error)) from error
            self._fed = not self._frame.eof
            if self._frame.eof:
                self._left = self._frame.unused_data
                self._frame = self._new()
        part, self._ready = self._ready[:size], self._ready[size:]
        return part


def parquet_rows(source: Source, columns: Sequence[str], first: int = 0) -> Iterator[tuple[Any, ...]]:
    """The values of `columns`, row by row, from row `first` on, texts as bytes; a few rows in memory at a time.

    Raises TextError for a missing column (naming those that exist) or one that is there twice, and for a damaged file.
    """
    pyarrow = optional_package("pyarrow", f"reading {source.path}")
    parquet = optional_package("pyarrow.parquet", f"reading {source.path}")
    try:
        with parquet.ParquetFile(source.path) as file:
            names = file.schema_arrow.names
            for column in columns:
                if column not in names:
                    raise TextError(f"{source.path}: no column {column!r}; columns are {', '.join(map(repr, names))}")
                if names.count(column) > 1:
                    raise TextError(
                        f"{source.path}: {names.count(column)} columns are called {column!r}; rename all but one"
                    )
            row = 0
            for group in range(file.num_row_groups):
                rows = file.metadata.row_group(group).num_rows
                if row + rows > first:
                    for batch in file.iter_batches(batch_size=64, row_groups=[group], columns=list(columns)):
                        values = [_undecoded(pyarrow, batch.column(c)).to_pylist() for c in columns]
                        yield from list(zip(*values, strict=True))[max(0, first - row) :]
                        row += batch.num_rows
                else:
                    row += rows
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise TextError(f"{source.path}: damaged parquet file: {error}") from error


def _undecoded(pyarrow: ModuleType, values: Any) -> Any:
    """A column of texts as bytes, which may be no UTF-8; another as it is."""
    types = pyarrow.types
    if types.is_dictionary(values.type):
        values = values.dictionary_decode()
    if types.is_string(values.type) or types.is_large_string(values.type) or types.is_string_view(values.type):
        return values.cast(pyarrow.large_binary())
    return values


def total_size(sources: Sequence[Source]) -> int:
    """Bytes on disk."""
    return sum(s.size for s in sources)


def same_place(source: Source) -> str:
    """How a source is called whatever the working directory."""
    return source.path if source.path == STDIN else os.path.abspath(source.path)
