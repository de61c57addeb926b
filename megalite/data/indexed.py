"""Token files in Megatron's format: reading (`IndexedDataset`) and writing (`IndexedWriter`) PREFIX.bin and PREFIX.idx.

`indexed_format` says what their bytes mean. PREFIX.json, which Megatron ignores, is a side file of ours: counts,
largest id, checksum and the tokenizer.
"""

from megalite.data.indexed_format import (
    DTYPES,
    HEADER,
    MAGIC,
    MAX_SEQUENCE,
    VERSION,
    FormatError,
    running_offsets,
    strip_suffix,
    token_dtype,
)
from megalite.data.indexed_reader import IndexedDataset
from megalite.data.indexed_writer import IndexedWriter

__all__ = [
    "DTYPES",
    "HEADER",
    "MAGIC",
    "MAX_SEQUENCE",
    "VERSION",
    "FormatError",
    "IndexedDataset",
    "IndexedWriter",
    "running_offsets",
    "strip_suffix",
    "token_dtype",
]
