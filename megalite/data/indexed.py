"""Token files in Megatron's format: PREFIX.bin holds token ids, PREFIX.idx says where each sequence lies.

All integers are little-endian. PREFIX.idx is a 34-byte header (magic, version, dtype code, number of sequences N,
length of the document index M), int32 lengths [N], int64 byte offsets [N], an int64 document index [M] (document k
is sequences D[k] .. D[k+1]-1) and, in multimodal files, int8 modes [N]. PREFIX.json, which Megatron ignores, is a
side file of ours: counts, largest id, checksum and the tokenizer.
"""

from __future__ import annotations

import array
import fcntl
import hashlib
import json
import os
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import ArrayLike, NDArray

from megalite.files import replace_bytes

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
DTYPES: dict[int, np.dtype[Any]] = {
    1: np.dtype("<u1"), 2: np.dtype("<i1"), 3: np.dtype("<i2"), 4: np.dtype("<i4"),
    5: np.dtype("<i8"), 6: np.dtype("<f8"), 7: np.dtype("<f4"), 8: np.dtype("<u2"),
}  # fmt: skip
MAX_SEQUENCE = 2**31 - 1
"""Longest sequence that the int32 lengths can hold."""
_CHECK_CHUNK = 1 << 22
_CHECK_LIMIT = 100_000_000


class FormatError(ValueError):
    """A .bin or .idx file is not what its header, or what describes it, says."""


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """The dtype that token ids of this vocabulary are stored in: uint16 below 65500 entries, as Megatron does."""
    return DTYPES[8] if vocab_size < 65500 else DTYPES[4]


def running_offsets(lengths: NDArray[np.int32], itemsize: int) -> NDArray[np.int64]:
    """The byte offset of each sequence: exclusive running sums in 64 bits."""
    offsets = np.zeros(len(lengths), dtype=np.int64)
    np.cumsum(lengths[:-1], dtype=np.int64, out=offsets[1:])
    return offsets * itemsize


def strip_suffix(prefix: str | Path) -> str:
    """PREFIX, also when it was given as PREFIX.bin or PREFIX.idx."""
    text = str(prefix)
    return text[:-4] if text.endswith((".bin", ".idx")) else text


def _map(path: Path) -> NDArray[np.uint8]:
    """The bytes of a file as a read-only array; views of it keep the mapping alive."""
    if path.stat().st_size == 0:
        return np.empty(0, dtype=np.uint8)  # an empty file cannot be mapped
    return np.memmap(path, dtype=np.uint8, mode="r").view(np.ndarray)


class IndexedDataset:
    """The sequences of PREFIX.bin/.idx, memory-mapped; `dataset[i]` is a read-only view of sequence i.

    lengths: int32 [N]. offsets: int64 [N], in bytes. document_index: int64 [M]. modes: int8 [N] or None. The
    header, both file sizes, the document index and the offsets are checked on opening (offsets only up to 1e8
    sequences unless `check_offsets` says so). Views stay valid when the dataset is gone. A dataset without
    sequences opens with length 0.

    Raises FileNotFoundError when a file is missing and FormatError when the pair is damaged; `allow_longer`
    accepts a .bin with bytes beyond the last sequence.
    """

    def __init__(self, prefix: str | Path, *, check_offsets: bool | None = None, allow_longer: bool = False):
        self.prefix = strip_suffix(prefix)
        self.bin_path, self.idx_path = Path(self.prefix + ".bin"), Path(self.prefix + ".idx")
        for path in (self.idx_path, self.bin_path):
            if not path.is_file():
                raise FileNotFoundError(f"{path} does not exist (the data prefix is {self.prefix!r})")
        index = _map(self.idx_path)
        self.dtype, count, marks = _read_header(self.idx_path, index)
        begin = HEADER.size
        self.lengths: NDArray[np.int32] = index[begin : begin + 4 * count].view("<i4")
        begin += 4 * count
        self.offsets: NDArray[np.int64] = index[begin : begin + 8 * count].view("<i8")
        begin += 8 * count
        self.document_index: NDArray[np.int64] = index[begin : begin + 8 * marks].view("<i8")
        begin += 8 * marks
        self.modes: NDArray[np.int8] | None = index[begin:].view("i1") if len(index) > begin else None
        self._check_documents()
        if check_offsets or (check_offsets is None and count <= _CHECK_LIMIT):
            self._check_offsets()
        self.num_tokens = int(self.lengths.sum(dtype=np.int64))
        self._check_size(allow_longer)
        data = _map(self.bin_path)
        self.tokens: NDArray[Any] = data[: self.num_tokens * self.dtype.itemsize].view(self.dtype)

    def __len__(self) -> int:
        return len(self.lengths)

    def __repr__(self) -> str:
        return f"IndexedDataset({self.prefix}, {len(self)} sequences, {self.num_tokens} tokens, {self.dtype.name})"

    def __getitem__(self, i: int) -> NDArray[Any]:
        return self.get(i)

    @property
    def num_documents(self) -> int:
        """Documents, empty ones included."""
        return len(self.document_index) - 1

    def get(self, i: int, offset: int = 0, length: int | None = None) -> NDArray[Any]:
        """A view of `length` tokens (default: the rest) of sequence i from `offset` on; IndexError outside of it."""
        count = len(self.lengths)
        if not -count <= i < count:
            raise IndexError(f"sequence {i} of {count} in {self.prefix}")
        have = int(self.lengths[i])
        want = have - offset if length is None else length
        if offset < 0 or want < 0 or offset + want > have:
            raise IndexError(f"tokens {offset}..{offset + want} of sequence {i}, which has {have}, in {self.prefix}")
        start = int(self.offsets[i]) // self.dtype.itemsize + offset
        return self.tokens[start : start + want]

    def largest_id(self) -> int:
        """The largest token id, by reading everything; -1 without tokens."""
        chunks = range(0, self.num_tokens, _CHECK_CHUNK)
        return max((int(self.tokens[i : i + _CHECK_CHUNK].max()) for i in chunks), default=-1)

    def side_file(self) -> dict[str, Any] | None:
        """What PREFIX.json says, or None without one; FormatError when it belongs to other data."""
        path = Path(self.prefix + ".json")
        if not path.is_file():
            return None
        try:
            side = json.loads(path.read_text())
            tokens = side["tokens"]
        except (ValueError, KeyError, TypeError) as error:
            raise FormatError(f"{path} is not a side file of token data ({error!r}); remove it") from error
        if tokens != self.num_tokens:
            raise FormatError(f"{path} describes {tokens} tokens but {self.bin_path} has {self.num_tokens}")
        return side

    def _check_documents(self) -> None:
        marks, count = self.document_index, len(self.lengths)
        if len(marks) == 0 or marks[0] != 0 or marks[-1] != count:
            ends = f"{marks[0]} .. {marks[-1]}" if len(marks) else "nothing"
            raise FormatError(f"{self.idx_path}: the document index is {ends}, expected 0 .. {count}")
        if np.any(marks[1:] < marks[:-1]):
            raise FormatError(f"{self.idx_path}: the document index decreases")

    def _check_offsets(self) -> None:
        total, size = 0, self.dtype.itemsize
        for begin in range(0, len(self.lengths), _CHECK_CHUNK):
            lengths = self.lengths[begin : begin + _CHECK_CHUNK]
            if lengths.min() < 0:
                i = int(np.argmax(lengths < 0))
                raise FormatError(f"{self.idx_path}: sequence {begin + i} has length {lengths[i]}")
            expected = running_offsets(lengths, size) + total * size
            found = self.offsets[begin : begin + _CHECK_CHUNK]
            if not np.array_equal(found, expected):
                i = int(np.argmax(found != expected))
                raise FormatError(
                    f"{self.idx_path}: sequence {begin + i} starts at byte {found[i]}, expected {expected[i]}"
                )
            total += int(lengths.sum(dtype=np.int64))

    def _check_size(self, allow_longer: bool) -> None:
        need, have = self.num_tokens * self.dtype.itemsize, self.bin_path.stat().st_size
        if have < need or (have > need and not allow_longer):
            raise FormatError(
                f"{self.bin_path} has {have} bytes but {self.idx_path.name} describes {need}"
                f" ({self.num_tokens} {self.dtype.name} tokens); was it written to the end?"
            )


def _read_header(path: Path, index: NDArray[np.uint8]) -> tuple[np.dtype[Any], int, int]:
    """(dtype, sequences, length of the document index), with the size of the file checked against them."""
    if len(index) < HEADER.size:
        raise FormatError(f"{path} has {len(index)} bytes, a header needs {HEADER.size}")
    magic, version, code, count, marks = HEADER.unpack(index[: HEADER.size].tobytes())
    if magic != MAGIC:
        raise FormatError(f"{path} begins with {magic!r}, expected {MAGIC!r}: not an index of token data")
    if version != VERSION:
        raise FormatError(f"{path} has version {version}, expected {VERSION}")
    if code not in DTYPES:
        known = ", ".join(f"{c} {d.name}" for c, d in DTYPES.items())
        raise FormatError(f"{path} has dtype code {code}; codes are {known}")
    need = HEADER.size + 12 * count + 8 * marks
    if len(index) not in (need, need + count):
        raise FormatError(
            f"{path} has {len(index)} bytes, expected {need} (or {need + count} with modes)"
            f" for {count} sequences and a document index of {marks}"
        )
    return DTYPES[code], count, marks


class IndexedWriter:
    """Writes PREFIX.bin/.idx/.json; nothing appears under these names before `finish`, and .idx comes last.

    Used as a context manager it finishes at the end of the block, or removes its temporary files when the block
    raises. Token ids are checked: 0 <= id < `vocab_size` when that is given, and always the range of `dtype`.

    Raises FileExistsError when the pair exists (unless `overwrite`), ValueError for an id out of range (naming
    document and id) and for lengths that do not add up.
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
        self._lengths, self._documents = array.array("i"), array.array("q", [0])
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

    def add_document(self, tokens: ArrayLike, lengths: Sequence[int] | None = None) -> None:
        """Appends one document; `lengths` cuts it into sequences (default: one, or none when it has no tokens)."""
        ids = np.asarray(tokens)
        if lengths is None:
            lengths = [ids.size] if ids.size else []
        self.add_documents(ids, lengths, [len(lengths)])

    def add_documents(self, tokens: ArrayLike, lengths: Sequence[int], sequences: Sequence[int]) -> None:
        """Appends many documents at once: flat `tokens`, the length of each sequence, sequences of each document."""
        assert self._file is not None, "the writer is finished"
        ids = np.asarray(tokens).reshape(-1)
        if sum(lengths) != ids.size or sum(sequences) != len(lengths) or min(lengths, default=0) < 0:
            raise ValueError(
                f"{ids.size} tokens do not fill sequences of {sum(lengths)} tokens"
                f" ({len(lengths)} lengths for {sum(sequences)} sequences)"
            )
        if max(lengths, default=0) > MAX_SEQUENCE:
            raise ValueError(f"document {self.num_documents} has more than {MAX_SEQUENCE} tokens: split it")
        if ids.size:
            if self.dtype.kind != "f":
                self._check_ids(ids, lengths, sequences)
            data = np.ascontiguousarray(ids, dtype=self.dtype).data.cast("B")
            self._file.write(data)
            self._sha256.update(data)
        self.num_tokens += ids.size
        self._lengths.extend(lengths)
        base = len(self._lengths) - len(lengths)
        for count in sequences:
            base += count
            self._documents.append(base)

    def _check_ids(self, ids: NDArray[Any], lengths: Sequence[int], sequences: Sequence[int]) -> None:
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
        """Appends all documents of another pair of the same dtype."""
        other = IndexedDataset(prefix)
        if other.dtype != self.dtype:
            raise ValueError(f"{other.prefix} holds {other.dtype.name}, {self.prefix} {self.dtype.name}")
        self.add_documents(other.tokens, other.lengths.tolist(), np.diff(other.document_index).tolist())

    def finish(self, **extra: Any) -> None:
        """Puts the files in place; `extra` goes into the side file."""
        assert self._file is not None, "the writer is finished"
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
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
        return b"".join((header, lengths.tobytes(), offsets.tobytes(), documents.tobytes()))

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
            self._file.close()
            self._file = None
        Path(self._scratch).unlink(missing_ok=True)


def _open_exclusive(path: str) -> BinaryIO:
    """Opens a temporary file that only one living process can write; one left by a killed process is reused."""
    file = open(path, "ab")  # noqa: SIM115 (the writer keeps it)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.close()
        raise FileExistsError(f"{path} is being written by another process") from error
    except OSError:
        pass  # this file system has no locks
    file.truncate(0)
    return file
