"""What differs between two checkpoints: names, shapes, dtypes, values, state."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megalite.checkpoint.manifest import Entry
from megalite.checkpoint.stored import StoredCheckpoint, dtype_of

_BLOCK = 1 << 18
"""Elements that are compared at a time."""


@dataclass(frozen=True, kw_only=True)
class TensorDifference:
    """How a tensor of two checkpoints differs."""

    key: str
    what: str = ""
    """Shape or dtype, where they differ."""
    largest: float = 0.0
    """max |a - b|; infinite where only one is a nan."""
    relative: float = 0.0
    """That over max |a|; infinite where a is all zero, or of another shape."""
    count: int = 0
    """Elements that differ."""
    size: int = 0
    """Elements of the tensor."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Two checkpoints, a and b."""

    only_a: list[str]
    """Tensors that b has not."""
    only_b: list[str]
    """Tensors that a has not."""
    tensors: list[TensorDifference]
    """Those that differ, the largest relative difference first."""
    num_equal: int
    """Tensors that do not."""
    state: dict[str, tuple[Any, Any]]
    """Counters and settings that differ, by name with dots: a's and b's (None where there is none)."""

    @property
    def is_equal(self) -> bool:
        """Whether nothing differs."""
        return not (self.only_a or self.only_b or self.tensors or self.state)


def compare(
    a: StoredCheckpoint,
    b: StoredCheckpoint,
    *,
    pattern: str = "*",
    tolerance: float = 0.0,
    progress: Callable[[int], None] = lambda count: None,
) -> Comparison:
    """Compares all tensors whose key is like `pattern`, one by one, and the state.

    tolerance: relative differences up to it are none. `progress` is told the bytes of a's tensors. Memory: two tensors,
    and a small buffer.
    """
    in_a, in_b = a.select(pattern=pattern), b.select(pattern=pattern)
    common = [key for key in in_a if key in b.tensors]
    found = []
    for key in common:
        difference = _compare(key, a, b, tolerance)
        progress(nbytes_of(a.tensors[key]))
        if difference is not None:
            found.append(difference)
    return Comparison(
        only_a=[key for key in in_a if key not in b.tensors],
        only_b=[key for key in in_b if key not in a.tensors],
        tensors=sorted(found, key=lambda tensor: (-tensor.relative, tensor.key)),
        num_equal=len(common) - len(found),
        state=_differing(_state(a), _state(b)),
    )


def _state(of: StoredCheckpoint) -> dict[str, Any]:
    """What a run has kept besides tensors; fingerprints say no more than these, and threads are not part of it."""
    kept = {name: value for name, value in of.manifest.state.items() if name not in ("fingerprints", "threads")}
    return {"step": of.manifest.step} | kept


def nbytes_of(entry: Entry) -> int:
    """Bytes of a whole stored tensor."""
    return math.prod(entry.shape) * dtype_of(entry).itemsize


def _compare(key: str, a: StoredCheckpoint, b: StoredCheckpoint, tolerance: float) -> TensorDifference | None:
    in_a, in_b = a.tensors[key], b.tensors[key]
    size = math.prod(in_a.shape)
    if in_a.shape != in_b.shape:
        what = f"{list(in_a.shape)} and {list(in_b.shape)}"
        return TensorDifference(key=key, what=what, largest=math.inf, relative=math.inf, count=size, size=size)
    what = "" if in_a.dtype == in_b.dtype else f"{in_a.dtype} and {in_b.dtype}"
    largest, relative, count = _distance(a.read(key).flatten(), b.read(key).flatten())
    if not what and relative <= tolerance:
        return None
    return TensorDifference(key=key, what=what, largest=largest, relative=relative, count=count, size=size)


def _distance(a: Tensor, b: Tensor) -> tuple[float, float, int]:
    """(max |a - b|, that over max |a|, how many differ); two nans are the same."""
    largest, scale, count = 0.0, 0.0, 0
    for x, y in zip(a.split(_BLOCK), b.split(_BLOCK), strict=True):
        differ = (x != y) & ~((x != x) & (y != y))
        x, y = x.to(torch.float64), y.to(torch.float64)
        count += int(differ.sum())
        distance = torch.where(differ, (x - y).abs(), 0.0).nan_to_num(nan=math.inf, posinf=math.inf)
        largest = max(largest, float(distance.max())) if distance.numel() else largest
        scale = max(scale, _largest(x))
    if not count:
        return 0.0, 0.0, 0
    return largest, largest / scale if scale else math.inf, count


def _largest(x: Tensor) -> float:
    """max |x| of what is finite."""
    finite = x[x.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0


def _differing(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    left, right = flat(a), flat(b)
    names = [*left, *(name for name in right if name not in left)]
    return {name: (left.get(name), right.get(name)) for name in names if left.get(name) != right.get(name)}


def flat(state: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one, names joined by dots."""
    found: dict[str, Any] = {}
    for name, value in state.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{name}.")
        else:
            found[prefix + name] = value
    return found
