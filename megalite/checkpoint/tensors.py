"""Tensor files: the safetensors format, written one tensor at a time and read in ranges.

Plain bytes under a JSON header: reading one executes nothing, unlike a pickle. Each tensor has a checksum of its own
(kept in the manifest, not in the file), so that a rank verifies what it reads without reading the rest.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import IO, Any

import torch
from torch import Tensor

from megalite.checkpoint.errors import CheckpointError
from megalite.checkpoint.folder import Folder, Reader

_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
_BLOCK = 16 << 20
_METADATA = "__metadata__"


@dataclass(frozen=True)
class FileMark:
    """What a file must be to be the one that was written."""

    size: int
    """Bytes."""
    crc32: int
    """Of its header; tensors have their own. It finds damage, not malice."""


@dataclass(frozen=True)
class Written:
    """What `write_tensors` has written: the mark of the file, and the checksum of each tensor by name."""

    mark: FileMark
    crc32: dict[str, int]


def write_tensors(file: IO[bytes], tensors: Mapping[str, Tensor]) -> Written:
    """Writes `tensors` to `file`.

    At most one tensor is copied at a time, so memory stays bounded by the largest.
    """
    with TensorWriter(file, tensors) as writer:
        for tensor in tensors.values():
            writer.add(tensor)
    return writer.written


class TensorWriter:
    """Writes a file of tensors that need not exist at the same time; a context manager.

    like: their names, shapes and dtypes, in the order in which they are added (meta tensors will do). metadata: words
    for the header.
    """

    def __init__(self, file: IO[bytes], like: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None):
        self._file, self._like, self._crcs = file, list(like.items()), dict[str, int]()
        head, self._size = _header(like, metadata)
        self._head_crc = zlib.crc32(head)
        file.write(head)
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="megalite checksum")

    def __enter__(self) -> TensorWriter:
        return self

    def __exit__(self, *exc: object) -> None:
        self._pool.shutdown()

    def add(self, tensor: Tensor) -> None:
        """Writes the next one."""
        name, like = self._like[len(self._crcs)]
        assert tensor.shape == like.shape and tensor.dtype == like.dtype, f"{name} is not the one that was announced"
        data = _bytes_of(tensor.detach().to("cpu").contiguous())
        # Both let go of the interpreter: checksums cost no time where there is a core for them.
        crc = self._pool.submit(_crc_of, data)
        for begin in range(0, len(data), _BLOCK):
            self._file.write(data[begin : begin + _BLOCK])
        self._crcs[name] = crc.result()

    @property
    def written(self) -> Written:
        """What has been written, once it is all."""
        assert len(self._crcs) == len(self._like), f"{self._like[len(self._crcs)][0]} is missing"
        return Written(FileMark(self._size, self._head_crc), self._crcs)


def _header(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None) -> tuple[bytes, int]:
    """The first bytes of the file, and its size."""
    header: dict[str, object] = {} if metadata is None else {_METADATA: dict(metadata)}
    offset = 0
    for name, tensor in tensors.items():
        header[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + tensor.nbytes],
        }
        offset += tensor.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # data begin at a multiple of 8 bytes
    return len(text).to_bytes(8, "little") + text, 8 + len(text) + offset


def _bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU."""
    return tensor.view(-1).view(torch.uint8).numpy().data


def _crc_of(data: memoryview) -> int:
    crc = 0
    for begin in range(0, len(data), _BLOCK):
        crc = zlib.crc32(data[begin : begin + _BLOCK], crc)
    return crc


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file: dtype, shape, and its first byte."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int

    @property
    def nbytes(self) -> int:
        """Its size."""
        return math.prod(self.shape) * self.dtype.itemsize


class TensorFile:
    """A file of tensors, opened for reading; several threads may read at once.

    mark: what it must be; None for a file that was not written here, of which nothing is known.
    Raises CheckpointError when the file is not what `mark` says or not of this format. A context manager.
    """

    def __init__(self, folder: Folder, path: str, mark: FileMark | None):
        self._name, self._block = f"{folder}/{path}", folder.block
        self._reader: Reader = folder.reader(path)
        try:
            self.tensors = self._read_header(mark)
        except BaseException:
            self._reader.close()
            raise

    def __str__(self) -> str:
        return self._name

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(self, *exc: object) -> None:
        self._reader.close()

    def _read_header(self, mark: FileMark | None) -> dict[str, StoredTensor]:
        size = self._reader.size
        if mark is not None and size != mark.size:
            raise CheckpointError(f"{self._name} has {size} bytes instead of {mark.size}: it was cut short or altered")
        if size < 8:
            raise CheckpointError(f"{self._name} is damaged: it is too short for a header")
        head = bytearray(8)
        crc = self._fill(memoryview(head), 0, 0)
        length = int.from_bytes(head, "little")
        if length > size - 8:
            raise CheckpointError(f"{self._name} is damaged: its header would be {length} bytes long")
        text = bytearray(length)
        crc = self._fill(memoryview(text), 8, crc)
        if mark is not None and crc != mark.crc32:
            raise CheckpointError(f"{self._name} is damaged: its header is not what was written (checksum)")
        try:
            return {n: _stored(v, 8 + length, size) for n, v in json.loads(text).items() if n != _METADATA}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"{self._name} is damaged: {error!r}") from error

    def read(self, name: str, crc32: int | None, into: Tensor | None = None) -> Tensor:
        """The tensor `name`; raises CheckpointError when its bytes are not those that were written.

        crc32: their checksum; None where there is none. into: where to put it, a contiguous tensor on the CPU of
        its dtype and shape; memory of its own by default.
        """
        stored = self.find(name)
        if into is None:
            into = torch.empty(stored.shape, dtype=stored.dtype)
        assert into.dtype == stored.dtype and into.shape == stored.shape and into.is_contiguous()
        if self._fill(_bytes_of(into), stored.begin, 0) != crc32 is not None:
            raise CheckpointError(f"{self._name} is damaged: {name} is not what was written (checksum)")
        return into

    def find(self, name: str) -> StoredTensor:
        """Where the tensor `name` is."""
        if name not in self.tensors:
            raise CheckpointError(f"{self._name} is damaged: it has no {name}")
        return self.tensors[name]

    def _fill(self, buffer: memoryview, begin: int, crc: int) -> int:
        """Reads the bytes from `begin` on, all that `buffer` has room for; their checksum, continued from `crc`."""
        done = 0
        while done < len(buffer):
            part = buffer[done : done + self._block]
            count = self._reader.read_into(part, begin + done)
            if not count:
                raise CheckpointError(f"{self._name} ends at byte {begin + done}: it was cut short")
            crc = zlib.crc32(part[:count], crc)
            done += count
        return crc


def names_beyond_end(folder: Folder, path: str) -> list[str]:
    """The tensors of a file that was cut short whose bytes are not all there; empty when its header is not either."""
    reader = folder.reader(path)
    try:
        head = bytearray(8)
        if reader.size < 8 or reader.read_into(memoryview(head), 0) < 8:
            return []
        length = int.from_bytes(head, "little")
        if length > reader.size - 8:
            return []
        text = bytearray(length)
        done = 0
        while done < length and (count := reader.read_into(memoryview(text)[done:], 8 + done)):
            done += count
        return [
            name for name, tensor in json.loads(text).items() if 8 + length + tensor["data_offsets"][1] > reader.size
        ]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return []
    finally:
        reader.close()


def _stored(content: Any, first: int, size: int) -> StoredTensor:
    begin, end = content["data_offsets"]
    if content["dtype"] not in _DTYPES:
        raise ValueError(f"tensors of {content['dtype']} cannot be read; there are {', '.join(_DTYPES)}")
    found = StoredTensor(_DTYPES[content["dtype"]], tuple(content["shape"]), first + begin)
    if not 0 <= begin <= end <= size - first or end - begin != found.nbytes:
        raise ValueError(f"a tensor at {begin} to {end} of {size - first} bytes is not {found.nbytes} bytes long")
    return found
