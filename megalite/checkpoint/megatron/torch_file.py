"""Files of torch.save, read in ranges: the pickle without running it, and tensors when they are asked for."""

from __future__ import annotations

import io
import math
import zipfile
from typing import Any

import torch
from torch import Tensor

from megalite.checkpoint.errors import CheckpointError
from megalite.checkpoint.folder import Folder, Reader
from megalite.checkpoint.megatron.pickles import TensorRef, load_pickle

_LOCAL_HEADER = 30
_BLOCK = 32 << 20


class TorchFile:
    """A file of torch.save (its zip format), or one inside of a larger file; a context manager.

    begin, size: where in the file it is. Raises CheckpointError when it is none.
    """

    def __init__(self, folder: Folder, path: str, begin: int = 0, size: int | None = None):
        self._name = f"{folder}/{path}" + (f" at {begin}" if begin else "")
        try:
            self._reader = folder.reader(path)
        except OSError as error:
            raise CheckpointError(f"{folder}/{path} cannot be read: {error.strerror or error}") from error
        self._range = Range(self._reader, begin, self._reader.size - begin if size is None else size)
        try:
            self._zip = zipfile.ZipFile(io.BufferedReader(self._range, 1 << 16))
        except (zipfile.BadZipFile, OSError, ValueError) as error:
            self._reader.close()
            raise CheckpointError(
                f"{self._name} is no zip file as torch.save writes it since torch 1.6, or was cut short: {error}"
            ) from error
        self._records = {info.filename.partition("/")[2]: info for info in self._zip.infolist()}

    def __enter__(self) -> TorchFile:
        return self

    def __exit__(self, *exc: object) -> None:
        self._zip.close()
        self._reader.close()

    def content(self) -> Any:
        """What was saved, with a `TensorRef` for each tensor."""
        if self._text("byteorder", "little") != "little":
            raise CheckpointError(f"{self._name} is from a big-endian machine, which cannot be read here")
        if "data.pkl" not in self._records:
            raise CheckpointError(f"{self._name} has no data.pkl: it is not a file of torch.save")
        return load_pickle(io.BytesIO(self._zip.read(self._records["data.pkl"])), f"{self._name} (data.pkl)")

    def read(self, ref: TensorRef) -> Tensor:
        """A tensor; memory: its own, and that of its storage where it is a view that is not contiguous."""
        count = math.prod(ref.shape)
        dense = torch.empty(ref.shape, device="meta").stride() == ref.stride or count <= 1
        last = ref.offset + sum((size - 1) * step for size, step in zip(ref.shape, ref.stride, strict=True))
        is_inside = not count or (last + 1) * ref.dtype.itemsize <= self._record(ref).file_size
        if min((ref.offset, *ref.stride, *ref.shape)) < 0 or not is_inside:
            raise CheckpointError(f"{self._name}: a tensor {list(ref.shape)} is larger than its storage")
        if not count:
            return torch.empty(ref.shape, dtype=ref.dtype)
        span = torch.empty(count if dense else last + 1 - ref.offset, dtype=ref.dtype)
        buffer = span.view(torch.uint8).numpy().data
        self._range.fill(buffer, self._begin(ref) + ref.offset * ref.dtype.itemsize, self._name)
        return span.view(ref.shape) if dense else span.as_strided(ref.shape, ref.stride).contiguous()

    def _record(self, ref: TensorRef) -> zipfile.ZipInfo:
        found = self._records.get(f"data/{ref.storage.key}")
        if found is None or found.compress_type != zipfile.ZIP_STORED:
            raise CheckpointError(f"{self._name} is damaged: it has no data/{ref.storage.key}")
        return found

    def _begin(self, ref: TensorRef) -> int:
        """The first byte of a record: its local header says how long its own name and padding are."""
        at = self._record(ref).header_offset
        head = bytearray(_LOCAL_HEADER)
        self._range.fill(memoryview(head), at, self._name)
        return at + _LOCAL_HEADER + int.from_bytes(head[26:28], "little") + int.from_bytes(head[28:30], "little")

    def _text(self, record: str, default: str) -> str:
        info = self._records.get(record)
        return default if info is None else self._zip.read(info).decode("ascii", "replace")


class Range(io.RawIOBase):
    """Some bytes of a file as a file of their own, for reading."""

    def __init__(self, reader: Reader, begin: int, size: int):
        super().__init__()
        if begin < 0 or size < 0 or begin + size > reader.size:
            raise CheckpointError(f"bytes {begin} to {begin + size} of a file of {reader.size}: it was cut short")
        self._reader, self._begin, self._size, self._at = reader, begin, size, 0

    def readable(self) -> bool:
        """It is."""
        return True

    def seekable(self) -> bool:
        """It is."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        """As of any file."""
        self._at = offset + (0, self._at, self._size)[whence]
        return self._at

    def tell(self) -> int:
        """As of any file."""
        return self._at

    def readinto(self, buffer: Any, /) -> int:
        """As of any file."""
        view = memoryview(buffer)[: max(0, self._size - self._at)]
        count = self._reader.read_into(view, self._begin + self._at) if len(view) else 0
        self._at += count
        return count

    def fill(self, buffer: memoryview, begin: int, name: str) -> None:
        """All bytes from `begin` on that `buffer` has room for."""
        if begin < 0 or begin + len(buffer) > self._size:
            raise CheckpointError(f"{name} ends at byte {self._size}: it was cut short")
        done = 0
        while done < len(buffer):
            count = self._reader.read_into(buffer[done : done + _BLOCK], self._begin + begin + done)
            if not count:
                raise CheckpointError(f"{name} ends early: it was cut short")
            done += count
