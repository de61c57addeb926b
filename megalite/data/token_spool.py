"""Token files that grow beside their final names, can go on after a crash, and need no memory for their index."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megalite.data.indexed import DTYPES, HEADER, MAGIC, MAX_SEQUENCE, VERSION
from megalite.files import sync_folder

_CHUNK = 1 << 20


class Committed(NamedTuple):
    """How much of a spool is on disk for good."""

    documents: int = 0
    tokens: int = 0
    largest_id: int = -1


class TokenSpool:
    """Writes PREFIX.bin.tmp and the lengths of its documents to PREFIX.lengths.tmp, and from them the final files.

    A document is one sequence, or none when it is empty. `committed` is what an earlier process vouched for: what lies
    beyond it is cut off. Raises OSError when less is there.
    """

    def __init__(self, prefix: str, dtype: np.dtype[Any], committed: Committed):
        self.prefix, self.dtype = prefix, np.dtype(dtype)
        self.documents, self.tokens, self.largest_id = committed
        Path(prefix).parent.mkdir(parents=True, exist_ok=True)
        self._bin = _open_at(prefix + ".bin.tmp", committed.tokens * self.dtype.itemsize)
        self._lengths = _open_at(prefix + ".lengths.tmp", committed.documents * 4)

    def add(self, tokens: NDArray[Any], lengths: NDArray[np.int32]) -> None:
        """Appends documents: their tokens end to end, and how many each has."""
        assert int(lengths.sum(dtype=np.int64)) == len(tokens), "lengths do not add up"
        assert tokens.dtype == self.dtype, f"{tokens.dtype} tokens in a file of {self.dtype}"
        if len(tokens) > MAX_SEQUENCE and int(lengths.max()) > MAX_SEQUENCE:
            raise ValueError(f"document {self.documents} has more than {MAX_SEQUENCE} tokens: cut it")
        self._bin.write(tokens.data.cast("B") if len(tokens) else b"")
        self._lengths.write(lengths.astype("<i4").tobytes())
        self.documents += len(lengths)
        self.tokens += len(tokens)
        self.largest_id = max(self.largest_id, int(tokens.max(initial=0)) if len(tokens) else -1)

    def commit(self) -> Committed:
        """Waits until all that was added is on disk."""
        for file in (self._bin, self._lengths):
            file.flush()
            os.fsync(file.fileno())
        return self.committed

    @property
    def committed(self) -> Committed:
        """What the last commit vouches for."""
        return Committed(self.documents, self.tokens, self.largest_id)

    def close(self) -> None:
        """Closes the files and leaves them, for a process that goes on."""
        for file in (self._bin, self._lengths):
            try:
                file.close()
            except OSError:  # what could not be flushed has not been committed
                continue

    def complete(self, side: dict[str, Any]) -> None:
        """Writes PREFIX.idx.tmp and PREFIX.json.tmp, which holds `side` and what is known of the tokens."""
        self.commit()
        self.close()
        sequences = sum(int((chunk > 0).sum()) for chunk in self._length_chunks())
        with open(self.prefix + ".idx.tmp", "wb") as file:
            code = next(code for code, dtype in DTYPES.items() if dtype == self.dtype)
            file.write(HEADER.pack(MAGIC, VERSION, code, sequences, self.documents + 1))
            for chunk in self._length_chunks():
                file.write(chunk[chunk > 0].tobytes())
            for starts in self.running_sums(lambda chunk: chunk[chunk > 0]):
                file.write((starts[:-1] * self.dtype.itemsize).tobytes())
            file.write(bytes(8))
            for marks in self.running_sums(lambda chunk: chunk > 0):
                file.write(marks[1:].tobytes())
            file.flush()
            os.fsync(file.fileno())
        known = {
            "dtype": self.dtype.name, "documents": self.documents, "sequences": sequences, "tokens": self.tokens,
            "largest_id": self.largest_id, "vocab_size": None, "sha256": self._sha256(),
        }  # fmt: skip
        with open(self.prefix + ".json.tmp", "w") as file:
            file.write(json.dumps(known | side, indent=1) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def _length_chunks(self) -> Iterator[NDArray[np.int32]]:
        with open(self.prefix + ".lengths.tmp", "rb") as file:
            while data := file.read(4 * _CHUNK):
                yield np.frombuffer(data, dtype="<i4")

    def running_sums(self, of: Any) -> Iterator[NDArray[np.int64]]:
        """int64 [n + 1] for each chunk: the sum before each of its values, and after the last."""
        total = 0
        for chunk in self._length_chunks():
            values = of(chunk)
            sums = np.zeros(len(values) + 1, dtype="<i8")
            np.cumsum(values, dtype=np.int64, out=sums[1:])
            sums += total
            total = int(sums[-1])
            yield sums

    def _sha256(self) -> str:
        with open(self.prefix + ".bin.tmp", "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()


def publish(prefix: str) -> None:
    """Gives completed files their names, .idx last; safe to repeat when a process died in the middle.

    Without its .idx a pair is missing, never mismatched.
    """
    if os.path.exists(prefix + ".bin.tmp"):
        Path(prefix + ".idx").unlink(missing_ok=True)
    for end in (".bin", ".json", ".idx"):
        if os.path.exists(f"{prefix}{end}.tmp"):
            os.replace(f"{prefix}{end}.tmp", prefix + end)
    Path(prefix + ".lengths.tmp").unlink(missing_ok=True)
    sync_folder(Path(prefix).parent)


def discard(prefix: str) -> None:
    """Removes everything temporary."""
    for end in (".bin", ".lengths", ".idx", ".json"):
        Path(f"{prefix}{end}.tmp").unlink(missing_ok=True)


def _open_at(path: str, size: int) -> BinaryIO:
    """Opens a file to append after its first `size` bytes."""
    file = open(path, "ab")  # noqa: SIM115 (the spool keeps it)
    found = file.tell()
    if found < size:
        file.close()
        raise OSError(f"{path} has {found} bytes, an earlier run had written {size}; begin again with --overwrite")
    file.truncate(size)
    return file
