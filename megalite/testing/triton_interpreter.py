"""Repairs of triton's CPU interpreter, and a count of the bytes that kernels move in it.

The interpreter (TRITON_INTERPRET=1, triton 3.6 to 3.9) keeps bfloat16 as its bits. It truncates where a GPU rounds to
even, multiplies the bits in `tl.dot` and in arithmetic, and has no driver for an autotuner. `repair` makes conversions
and products right and arithmetic on bfloat16 an error: kernels must widen what they load first.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import triton.language as tl
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver, interpreter

_INTERPRETER: Any = interpreter
_BUILDER: Any = interpreter.InterpreterBuilder
_TORCH = {
    tl.bfloat16: torch.bfloat16,
    tl.float32: torch.float32,
    tl.float16: torch.float16,
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.float8e5: torch.float8_e5m2,
}
_BITS = {1: (np.uint8, torch.uint8), 2: (np.int16, torch.int16), 4: (np.float32, torch.float32)}
_LARGEST = {tl.float8e4nv: 448.0, tl.float8e5: 57344.0}
"""Where PTX saturates and torch overflows."""


def interpreting() -> bool:
    """Whether this process runs Triton kernels in the interpreter."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def repair() -> None:
    """Repairs the interpreter of this process, once, before kernels run; raises RuntimeError if it is not in use."""
    if not interpreting():
        raise RuntimeError("the interpreter is not in use: set TRITON_INTERPRET=1 before triton is imported")
    if getattr(_BUILDER, "repaired", False):
        return
    _BUILDER.repaired = True
    _INTERPRETER._convert_float = _rounding(_INTERPRETER._convert_float)
    _BUILDER.create_dot = _widening(_BUILDER.create_dot)
    _BUILDER.create_splat = _keeping_booleans(_BUILDER.create_splat)
    for name in ("binary_op", "unary_op", "ternary_op"):
        setattr(_BUILDER, name, _refusing_bfloat16(getattr(_BUILDER, name)))
    if driver._active is None:
        driver.set_active(_Driver())  # type: ignore[arg-type]


class Traffic:
    """Bytes that programs loaded and stored, masks respected, each access counted as often as it is made."""

    def __init__(self) -> None:
        self.loads: Counter[int] = Counter()
        self.stores: Counter[int] = Counter()

    @property
    def total(self) -> int:
        """Bytes loaded and stored."""
        return self.loads.total() + self.stores.total()

    def of(self, tensor: Tensor) -> int:
        """Bytes loaded from and stored to this tensor's storage."""
        start = tensor.untyped_storage().data_ptr()
        stop = start + tensor.untyped_storage().nbytes()
        return sum(n for counts in (self.loads, self.stores) for page, n in counts.items() if start <= page < stop)


@contextmanager
def count_traffic() -> Iterator[Traffic]:
    """Counts the bytes that all kernels move within the block."""
    traffic, load, store = Traffic(), _BUILDER.create_masked_load, _BUILDER.create_masked_store

    def counted_load(self: Any, ptrs: Any, mask: Any, *rest: Any) -> Any:
        _count(traffic.loads, ptrs, mask)
        return load(self, ptrs, mask, *rest)

    def counted_store(self: Any, ptrs: Any, value: Any, mask: Any, *rest: Any) -> Any:
        _count(traffic.stores, ptrs, mask)
        return store(self, ptrs, value, mask, *rest)

    _BUILDER.create_masked_load, _BUILDER.create_masked_store = counted_load, counted_store
    try:
        yield traffic
    finally:
        _BUILDER.create_masked_load, _BUILDER.create_masked_store = load, store


def _count(counts: Counter[int], pointers: Any, mask: Any) -> None:
    addresses = np.broadcast_to(pointers.data, mask.data.shape)[mask.data]
    if addresses.size:
        # All lanes of one access lie in one tensor: its first address stands for them.
        counts[int(addresses.min())] += addresses.size * pointers.get_element_ty().primitive_bitwidth // 8


def _rounding(convert: Callable[..., Any]) -> Callable[..., Any]:
    """`_convert_float` that rounds to nearest even, as a GPU does."""

    def rounded(x: Any, source: Any, target: Any, mode: Any) -> Any:
        truncate = _INTERPRETER._ir.ROUNDING_MODE.RTZ
        if source not in _TORCH or target not in _TORCH or mode == truncate:
            return convert(x, source, target, mode)
        wide = _as_torch(np.asarray(x), source).to(torch.float32)
        if target in _LARGEST:
            wide = torch.where(wide.isnan(), wide, wide.clamp(-_LARGEST[target], _LARGEST[target]))
        size = target.primitive_bitwidth // 8
        bits = wide.to(_TORCH[target]).view(_BITS[size][1]).numpy()
        return bits.view(f"uint{8 * size}").reshape(np.shape(x))

    return rounded


def _as_torch(x: np.ndarray, dtype: Any) -> Tensor:
    raw = np.ascontiguousarray(x).view(_BITS[dtype.primitive_bitwidth // 8][0])
    return torch.from_numpy(raw.copy()).view(_TORCH[dtype])


def _widening(dot: Callable[..., Any]) -> Callable[..., Any]:
    """`create_dot` on the values of bfloat16 operands, not on their bits."""

    def widened(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return dot(self, _wide(a), _wide(b), *rest)

    return widened


def _keeping_booleans(splat: Callable[..., Any]) -> Callable[..., Any]:
    """`create_splat` of a comparison of floats, which bears their dtype, as what it is."""

    def kept(self: Any, shape: Any, handle: Any) -> Any:
        is_truth = handle.data.dtype == np.bool_
        return splat(self, shape, _INTERPRETER.TensorHandle(handle.data, tl.int1) if is_truth else handle)

    return kept


def _wide(handle: Any) -> Any:
    if handle.dtype.scalar != tl.bfloat16:
        return handle
    data = _INTERPRETER._convert_float(handle.data, tl.bfloat16, tl.float32, None).view(np.float32)
    return _INTERPRETER.TensorHandle(data, tl.float32)


def _refusing_bfloat16(operation: Callable[..., Any]) -> Callable[..., Any]:
    def refused(self: Any, *operands: Any) -> Any:
        if any(getattr(x, "dtype", None) is not None and x.dtype.scalar == tl.bfloat16 for x in operands[:-1]):
            raise TypeError("arithmetic on bfloat16: widen it right after tl.load, .to(tl.float32)")
        return operation(self, *operands)

    return refused


class _Driver:
    """What autotuners and launch tables ask of a driver: every configuration takes equally long."""

    def get_benchmarker(self) -> Callable[..., list[float]]:
        def run_once(call: Callable[[], Any], quantiles: Any = None, **_: Any) -> list[float]:
            call()
            return [1.0] * len(quantiles or (0.5,))

        return run_once

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")
