"""What the bytes of a token file mean: PREFIX.bin holds token ids, PREFIX.idx says where each sequence lies.

All integers are little-endian. PREFIX.idx is a 34-byte header (magic, version, dtype code, number of sequences N,
length of the document index M), int32 lengths [N], int64 byte offsets [N], an int64 document index [M] (document k
is sequences D[k] .. D[k+1]-1) and, in multimodal files, int8 modes [N].
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
DTYPES: dict[int, np.dtype[Any]] = {
    1: np.dtype("<u1"), 2: np.dtype("<i1"), 3: np.dtype("<i2"), 4: np.dtype("<i4"),
    5: np.dtype("<i8"), 6: np.dtype("<f8"), 7: np.dtype("<f4"), 8: np.dtype("<u2"),
}  # fmt: skip
MAX_SEQUENCE = 2**31 - 1
"""Longest sequence that the int32 lengths can hold."""


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


def read_header(path: str | Path, index: NDArray[np.uint8]) -> tuple[np.dtype[Any], int, int]:
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
