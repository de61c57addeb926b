"""Tensor files: the safetensors format, written one tensor at a time and read through a memory map.

Plain bytes under a JSON header: reading one executes nothing, unlike a pickle.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


_READ = 1 << 24


@dataclass(frozen=True)
class FileMark:
    """What a file must be to be the one that was written."""

    size: int
    """Bytes."""
    crc32: int
    """Of the whole content; finds damage, not malice."""


def mark_of(path: Path) -> FileMark:
    """Reads a file through."""
    size = crc = 0
    with path.open("rb") as file:
        while block := file.read(_READ):
            size, crc = size + len(block), zlib.crc32(block, crc)
    return FileMark(size, crc)


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> FileMark:
    """Writes `tensors` to `path` and waits until they are on disk; returns the mark of what was written.

    At most one tensor is copied at a time, so memory stays bounded by the largest.
    """
    header: dict[str, object] = {}
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
    with path.open("wb") as file:
        head = len(text).to_bytes(8, "little") + text
        crc = zlib.crc32(head)
        file.write(head)
        for tensor in tensors.values():
            flat = tensor.detach().to("cpu").contiguous().reshape(-1)
            data = flat.view(torch.uint8).numpy().data
            crc = zlib.crc32(data, crc)
            file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return FileMark(len(head) + offset, crc)
