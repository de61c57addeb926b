"""What token files hold, and whether they are what they say: for people and for checks."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from megalite.data.indexed import FormatError, IndexedDataset
from megalite.data.remote_blocks import BlockCache

PERCENTILES = (1, 10, 25, 50, 75, 90, 99)


@dataclass(frozen=True, kw_only=True)
class FileReport:
    """The facts of a token file that its index and its side file tell."""

    prefix: str
    dtype: str
    documents: int
    empty_documents: int
    """Documents without a token."""
    sequences: int
    tokens: int
    bytes: int
    longest: int
    modes: bool
    """Whether it is multimodal."""
    tokenizer: str | None
    """As the side file has it; None without one."""
    vocab_size: int | None
    eod: int | None
    sha256: str | None

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


def inspect_file(prefix: str, cache: BlockCache | None = None) -> FileReport:
    """Reads the index and the side file; raises what opening raises."""
    data = IndexedDataset(prefix, cache=cache)
    side = data.side_file() or {}
    tokenizer = side.get("tokenizer") or {}
    lengths = document_lengths(data)
    return FileReport(
        prefix=data.prefix,
        dtype=data.dtype.name,
        documents=data.num_documents,
        empty_documents=int(np.count_nonzero(lengths == 0)),
        sequences=len(data),
        tokens=data.num_tokens,
        bytes=data.num_tokens * data.dtype.itemsize,
        longest=int(lengths.max(initial=0)),
        modes=data.modes is not None,
        tokenizer=tokenizer.get("name"),
        vocab_size=tokenizer.get("vocab_size", side.get("vocab_size")),
        eod=tokenizer.get("eod"),
        sha256=side.get("sha256"),
    )


def document_lengths(data: IndexedDataset) -> np.ndarray[Any, np.dtype[np.int64]]:
    """int64 [documents]: tokens of each document, over its sequences."""
    ends = np.concatenate(([0], np.cumsum(data.lengths, dtype=np.int64)))
    return np.diff(ends[data.document_index])


def validate_file(prefix: str, vocab_size: int | None = None, cache: BlockCache | None = None) -> list[str]:
    """What has been checked of a token file, all of it read; raises FormatError with the first thing that is wrong.

    Files without documents, of any dtype and without a side file are fine.
    """
    data = IndexedDataset(prefix, check_offsets=True, cache=cache)
    checked = [
        f"format: {len(data)} sequences, {data.num_documents} documents, {data.num_tokens} {data.dtype.name} tokens"
    ]
    digest, largest, smallest = hashlib.sha256(), -1, 0
    for part in data.parts():
        digest.update(np.ascontiguousarray(part).data.cast("B"))
        if data.dtype.kind != "f":
            largest, smallest = max(largest, int(part.max())), min(smallest, int(part.min()))
    side = data.side_file()
    if side is None:
        checked.append("no side file: counts, checksum and tokenizer are not recorded")
    else:
        _compare_side_file(data, side, digest.hexdigest(), largest)
        checked.append("side file: counts and checksum agree")
        vocab_size = vocab_size or (side.get("tokenizer") or {}).get("vocab_size")
    if vocab_size is not None and (largest >= vocab_size or smallest < 0):
        bad = largest if largest >= vocab_size else smallest
        raise FormatError(f"{data.bin_path} has token id {bad}, but the vocabulary has {vocab_size} entries")
    return [*checked, f"ids: {smallest} to {largest}" if largest >= 0 else "ids: none"]


def _compare_side_file(data: IndexedDataset, side: dict[str, Any], sha256: str, largest: int) -> None:
    found = {
        "documents": data.num_documents, "sequences": len(data), "dtype": data.dtype.name, "largest_id": largest,
        "sha256": sha256,
    }  # fmt: skip
    for name, value in found.items():
        if side.get(name, value) != value:
            raise FormatError(f"{data.prefix}.json says {name} {side[name]!r}, the files have {value!r}")


def statistics(prefix: str, cache: BlockCache | None = None) -> dict[str, Any]:
    """Lengths of documents: mean, percentiles, and the share of tokens in the longest tenth."""
    data = IndexedDataset(prefix, cache=cache)
    lengths = np.sort(document_lengths(data))
    total, tenth = max(int(lengths.sum()), 1), len(lengths) - len(lengths) // 10
    found: dict[str, Any] = {"prefix": data.prefix, "documents": len(lengths), "tokens": int(lengths.sum())}
    found["mean"] = float(lengths.mean()) if len(lengths) else 0.0
    for percent in PERCENTILES:
        found[f"p{percent}"] = int(lengths[min(len(lengths) - 1, len(lengths) * percent // 100)]) if len(lengths) else 0
    return found | {
        "longest": int(lengths.max(initial=0)), "longest_tenth": float(lengths[tenth:].sum() / total),
    }  # fmt: skip
