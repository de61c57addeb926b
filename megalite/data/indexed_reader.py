"""Reading token files: the sequences of PREFIX.bin/.idx."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path, PurePath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megalite.data.indexed_format import HEADER, FormatError, read_header, running_offsets, strip_suffix
from megalite.data.remote_blocks import BlockCache, RemoteFile, text_if_there, token_file

_CHECK_CHUNK = 1 << 22
_CHECK_LIMIT = 100_000_000


class IndexedDataset:
    """The sequences of PREFIX.bin/.idx; `dataset[i]` is a read-only view of sequence i.

    PREFIX is a path, whose files are memory-mapped, or a URL (s3://...): what is read of .bin is fetched by blocks that
    stay in `cache` (default: the user's), and .idx is copied there.

    lengths: int32 [N]. offsets: int64 [N], in bytes. document_index: int64 [M]. modes: int8 [N] or None. The
    header, both file sizes, the document index and the offsets are checked on opening (offsets only up to 1e8
    sequences unless `check_offsets` says so). Views stay valid when the dataset is gone. A dataset without
    sequences opens with length 0.

    Raises FileNotFoundError when a file is missing and FormatError when the pair is damaged; `allow_longer`
    accepts a .bin with bytes beyond the last sequence.
    """

    def __init__(
        self,
        prefix: str | Path,
        *,
        check_offsets: bool | None = None,
        allow_longer: bool = False,
        cache: BlockCache | None = None,
    ):
        self.prefix, self.cache = strip_suffix(prefix), cache or BlockCache.default()
        self.bin_path, self.idx_path = self.prefix + ".bin", self.prefix + ".idx"
        try:
            index_file = token_file(self.idx_path, self.cache)
            index = index_file.whole()
            self._bin = token_file(self.bin_path, self.cache)
        except FileNotFoundError as error:
            raise FileNotFoundError(f"{error} (the data prefix is {self.prefix!r})") from error
        # Damage is of the copy that was read, and one far away may have been copied badly.
        read_from = index_file.copy if isinstance(index_file, RemoteFile) else self.idx_path
        self.dtype, count, marks = read_header(read_from, index)
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

    def __len__(self) -> int:
        return len(self.lengths)

    def __repr__(self) -> str:
        return f"IndexedDataset({self.prefix}, {len(self)} sequences, {self.num_tokens} tokens, {self.dtype.name})"

    def __getitem__(self, i: int) -> NDArray[Any]:
        return self.get(i)

    @property
    def tokens(self) -> NDArray[Any]:
        """All of them: a view of a file that is mapped, a copy of one far away."""
        return self.read(0, self.num_tokens)

    @property
    def num_bytes(self) -> int:
        """Bytes of the tokens."""
        return self.num_tokens * self.dtype.itemsize

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
        return self.read(self.position(i) + offset, want)

    def position(self, i: int) -> int:
        """Where sequence i begins, in tokens from the start of .bin; the end of all for i = len(self)."""
        return self.num_tokens if i == len(self.lengths) else int(self.offsets[i]) // self.dtype.itemsize

    def read(self, start: int, count: int) -> NDArray[Any]:
        """`count` tokens from `start` on, across sequences."""
        size = self.dtype.itemsize
        return self._bin.read(start * size, count * size).view(self.dtype)

    def largest_id(self) -> int:
        """The largest token id, by reading everything; -1 without tokens."""
        return max((int(part.max()) for part in self.parts()), default=-1)

    def parts(self, size: int = _CHECK_CHUNK) -> Iterator[NDArray[Any]]:
        """All tokens, `size` at a time."""
        for start in range(0, self.num_tokens, size):
            yield self.read(start, min(size, self.num_tokens - start))

    def side_file(self) -> dict[str, Any] | None:
        """What PREFIX.json says, or None without one; FormatError when it belongs to other data."""
        path = self.prefix + ".json"
        text = text_if_there(path)
        if text is None:
            return None
        try:
            side = json.loads(text)
            tokens = side["tokens"]
            tokenizer = side.get("tokenizer") or {}
            counts = (tokens, side.get("largest_id"), tokenizer.get("vocab_size"), tokenizer.get("eod"))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise FormatError(f"{path} is not a side file of token data ({error!r}); remove it") from error
        if wrong := [value for value in counts if value is not None and type(value) is not int]:
            raise FormatError(f"{path} has {wrong[0]!r} where a whole number should be; remove it, or mend it")
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
        need, have = self.num_bytes, self._bin.size
        if have < need or (have > need and not allow_longer):
            raise FormatError(
                f"{self.bin_path} has {have} bytes but {PurePath(self.idx_path).name} describes {need}"
                f" ({self.num_tokens} {self.dtype.name} tokens); was it written to the end?"
            )
