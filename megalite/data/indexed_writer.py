"""Writing token files so that nothing half-written is ever taken for finished."""

from __future__ import annotations

import array
import contextlib
import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import ArrayLike, NDArray

from megalite.data.indexed_format import DTYPES, HEADER, MAGIC, MAX_SEQUENCE, VERSION, running_offsets, strip_suffix
from megalite.data.indexed_reader import IndexedDataset
from megalite.files import lock_for_writing, naming, replace_bytes, url_problem

Counts = Sequence[int] | NDArray[Any]
"""Lengths, or how many."""
_PART_TOKENS, _PART_DOCUMENTS = 1 << 24, 1 << 20


class IndexedWriter:
    """Writes PREFIX.bin/.idx/.json; nothing appears under these names before `finish`, and .idx comes last.

    Used as a context manager it finishes at the end of the block, or removes its temporary files when the block
    raises. Token ids are checked: 0 <= id < `vocab_size` when that is given, and always the range of `dtype`.

    Raises FileExistsError when the pair exists (unless `overwrite`), ValueError for a URL, for an id out of range
    (naming document and id) and for lengths that do not add up.
    """

    def __init__(
        self,
        prefix: str | Path,
        *,
        dtype: np.dtype[Any] | type | str,
        vocab_size: int | None = None,
        overwrite: bool = False,
    ):
        self.prefix = strip_suffix(prefix)
        if problem := url_problem(self.prefix):
            raise ValueError(problem)
        self.dtype = np.dtype(dtype).newbyteorder("<")
        self._code = next((c for c, d in DTYPES.items() if d == self.dtype), None)
        if self._code is None:
            names = ", ".join(d.name for d in DTYPES.values())
            raise ValueError(f"tokens cannot be stored as {self.dtype}; choose one of {names}")
        existing = [p for p in (self.prefix + ".bin", self.prefix + ".idx") if os.path.exists(p)]
        if existing and not overwrite:
            raise FileExistsError(f"{existing[0]} already exists; choose another prefix or overwrite it")
        self._lowest, self._highest = self._id_range(vocab_size)
        self.vocab_size = vocab_size
        self.num_tokens, self.largest_id = 0, -1
        self._lengths, self._documents, self._modes = array.array("i"), array.array("q", [0]), array.array("b")
        self._sha256 = hashlib.sha256()
        Path(self.prefix).parent.mkdir(parents=True, exist_ok=True)
        self._scratch = self.prefix + ".bin.tmp"
        self._file: BinaryIO | None = _open_exclusive(self._scratch)

    def _id_range(self, vocab_size: int | None) -> tuple[int, int]:
        if self.dtype.kind == "f":
            return 0, 0  # numbers that are not token ids: not checked
        limits = np.iinfo(self.dtype.name)
        if vocab_size is None:
            return int(limits.min), int(limits.max)
        return 0, min(vocab_size - 1, int(limits.max))

    def __enter__(self) -> IndexedWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.finish()
        else:
            self.abort()

    @property
    def num_documents(self) -> int:
        """Documents so far."""
        return len(self._documents) - 1

    @property
    def num_sequences(self) -> int:
        """Sequences so far."""
        return len(self._lengths)

    def add_document(
        self, tokens: ArrayLike, lengths: Sequence[int] | None = None, *, modes: Sequence[int] | None = None
    ) -> None:
        """Appends one document; `lengths` cuts it into sequences (default: one, or none when it has no tokens).

        `modes` (int8, one a sequence) make a multimodal file; then every document has them.
        """
        ids = np.asarray(tokens)
        if lengths is None:
            lengths = [ids.size] if ids.size else []
        self.add_documents(ids, lengths, [len(lengths)], modes=modes)

    def add_documents(
        self, tokens: ArrayLike, lengths: Counts, sequences: Counts, *, modes: Counts | None = None
    ) -> None:
        """Appends many documents at once: flat `tokens`, the length of each sequence, sequences of each document."""
        assert self._file is not None, "the writer is finished"
        ids = np.asarray(tokens).reshape(-1)
        sizes, counts = np.asarray(lengths, dtype=np.int64), np.asarray(sequences, dtype=np.int64)
        self._check_counts(ids.size, sizes, counts)
        self._check_modes(len(sizes), modes)
        if ids.size:
            if self.dtype.kind != "f":
                self._check_ids(ids, sizes, counts)
            data = np.ascontiguousarray(ids, dtype=self.dtype).data.cast("B")
            with naming(self._scratch):
                self._file.write(data)
            self._sha256.update(data)
        self.num_tokens += ids.size
        base = len(self._lengths)
        self._lengths.frombytes(sizes.astype(np.int32).tobytes())
        self._documents.frombytes((base + np.cumsum(counts)).tobytes())
        if modes is not None:
            self._modes.frombytes(np.asarray(modes, dtype=np.int8).tobytes())

    def _check_counts(self, size: int, lengths: NDArray[np.int64], sequences: NDArray[np.int64]) -> None:
        if lengths.sum() != size or sequences.sum() != len(lengths) or lengths.min(initial=0) < 0:
            raise ValueError(
                f"{size} tokens do not fill sequences of {lengths.sum()} tokens"
                f" ({len(lengths)} lengths for {sequences.sum()} sequences)"
            )
        if lengths.max(initial=0) > MAX_SEQUENCE:
            raise ValueError(f"document {self.num_documents} has more than {MAX_SEQUENCE} tokens: split it")

    def _check_modes(self, count: int, modes: Counts | None) -> None:
        if count == 0 or (modes is None and not self._modes):
            return
        if modes is None or len(modes) != count or len(self._modes) != len(self._lengths):
            raise ValueError(
                f"{0 if modes is None else len(modes)} modes for {count} sequences: all sequences of a file have a"
                " mode, or none has"
            )

    def _check_ids(self, ids: NDArray[Any], lengths: NDArray[np.int64], sequences: NDArray[np.int64]) -> None:
        if ids.dtype.kind not in "iu":
            raise ValueError(f"token ids must be integers, document {self.num_documents} has {ids.dtype}")
        low, high = ids.min(), ids.max()
        if low < self._lowest or high > self._highest:
            place = int(np.argmax((ids < self._lowest) | (ids > self._highest)))
            sequence = int(np.searchsorted(np.cumsum(lengths), place, side="right"))
            document = self.num_documents + int(np.searchsorted(np.cumsum(sequences), sequence, side="right"))
            raise ValueError(
                f"document {document} has id {ids[place]}, allowed are {self._lowest} .. {self._highest}"
                f" ({self.dtype.name}, vocabulary {self.vocab_size})"
            )
        self.largest_id = max(self.largest_id, int(high))

    def add_file(self, prefix: str | Path) -> None:
        """Appends all documents of another pair of the same dtype, a part at a time."""
        other = IndexedDataset(prefix)
        if other.dtype != self.dtype:
            raise ValueError(f"{other.prefix} holds {other.dtype.name}, {self.prefix} {self.dtype.name}")
        self.add_range(other, 0, other.num_documents)

    def add_range(self, source: IndexedDataset, first: int, last: int) -> None:
        """Appends documents `first` to `last` - 1 of `source`, a part at a time."""
        marks = source.document_index
        while first < last:
            end = _part_of(source, first, last)
            low, high = int(marks[first]), int(marks[end])
            lengths = source.lengths[low:high]
            tokens = source.read(source.position(low), int(lengths.sum(dtype=np.int64)))
            modes = None if source.modes is None else source.modes[low:high]
            self.add_documents(tokens, lengths, np.diff(marks[first : end + 1]), modes=modes)
            first = end

    def sync(self) -> None:
        """Puts what has been added on disk, still under a temporary name."""
        assert self._file is not None, "the writer is finished"
        with naming(self._scratch):
            self._file.flush()
            os.fsync(self._file.fileno())

    def finish(self, **extra: Any) -> None:
        """Puts the files in place; `extra` goes into the side file."""
        assert self._file is not None, "the writer is finished"
        try:
            self.sync()
            # Without its old .idx the pair is missing, never mismatched, should we die between the renames.
            Path(self.prefix + ".idx").unlink(missing_ok=True)
            os.replace(self._scratch, self.prefix + ".bin")
            replace_bytes(Path(self.prefix + ".json"), json.dumps(self._side_file(extra), indent=1).encode() + b"\n")
            replace_bytes(Path(self.prefix + ".idx"), self._index_bytes())
        except BaseException:
            self.abort()
            raise
        self._file.close()
        self._file = None

    def _index_bytes(self) -> bytes:
        lengths, documents = np.array(self._lengths, dtype="<i4"), np.array(self._documents, dtype="<i8")
        header = HEADER.pack(MAGIC, VERSION, self._code, len(lengths), len(documents))
        offsets = running_offsets(lengths, self.dtype.itemsize).astype("<i8")
        return b"".join((header, lengths.tobytes(), offsets.tobytes(), documents.tobytes(), self._modes.tobytes()))

    def _side_file(self, extra: dict[str, Any]) -> dict[str, Any]:
        return {
            "dtype": self.dtype.name,
            "documents": self.num_documents,
            "sequences": self.num_sequences,
            "tokens": self.num_tokens,
            "largest_id": self.largest_id,
            "vocab_size": self.vocab_size,
            "sha256": self._sha256.hexdigest(),
            **extra,
        }

    def abort(self) -> None:
        """Removes what has been written."""
        if self._file is not None:
            with contextlib.suppress(OSError):  # it writes what is left to a disk that may be full
                self._file.close()
            self._file = None
        Path(self._scratch).unlink(missing_ok=True)


def _part_of(source: IndexedDataset, first: int, last: int) -> int:
    """The end of a part of documents `first` to `last` - 1 that fits in memory; at least one document."""
    marks, low = source.document_index, int(source.document_index[first])
    begin = source.position(low)
    while last - first > 1 and (
        last - first > _PART_DOCUMENTS or source.position(int(marks[last])) - begin > _PART_TOKENS
    ):
        last = first + min((last - first) // 2, _PART_DOCUMENTS)
    return last


def _open_exclusive(path: str) -> BinaryIO:
    """Opens a temporary file that only one living process can write; one left by a killed process is reused."""
    file = open(path, "ab")  # noqa: SIM115 (the writer keeps it)
    lock_for_writing(file, path)
    file.truncate(0)
    return file
