"""What the interpreter's tests share: guarded memory, errors in units of the last place, comparison with eager."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

PAD = 64
"""Elements of canary on each side of a guarded tensor, all NaN (the least number of integers)."""
DTYPES = (torch.float32, torch.bfloat16)


def guarded(x: Tensor, gap: int = 0) -> Tensor:
    """A copy of x between canaries, with a gap of as many canaries behind each row of the last dim."""
    wide = _canaries(x.shape[:-1].numel() * (x.shape[-1] + gap) + 2 * PAD, x.dtype)
    rows = wide[PAD : len(wide) - PAD].view(*x.shape[:-1], x.shape[-1] + gap)
    return rows[..., : x.shape[-1]].copy_(x.detach()).requires_grad_(x.requires_grad)


@contextmanager
def canaries() -> Iterator[None]:
    """What `torch.empty` and `torch.empty_like` give in the block is canary, between canaries that must live.

    So an output element that no program writes is NaN, and a write past the end of an output is an error at the end.
    """
    buffers: list[Tensor] = []

    def empty(*shape: Any, dtype: torch.dtype | None = None, device: Any = None) -> Tensor:
        sizes = shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape
        buffer = _canaries(math.prod(sizes) + 2 * PAD, dtype or torch.get_default_dtype())
        buffers.append(buffer)
        return buffer[PAD : len(buffer) - PAD].view(sizes)

    def empty_like(
        x: Tensor, *, dtype: torch.dtype | None = None, device: Any = None, memory_format: Any = None
    ) -> Tensor:
        return empty(x.shape, dtype=dtype or x.dtype)

    with patch.object(torch, "empty", empty), patch.object(torch, "empty_like", empty_like):
        yield
    for buffer in buffers:
        assert_canaries_live(buffer)


def assert_canaries_live(buffer: Tensor) -> None:
    """The first and last PAD elements of a buffer have not been written."""
    for edge in (buffer[:PAD], buffer[len(buffer) - PAD :]):
        untouched = edge.isnan() if edge.is_floating_point() else edge == torch.iinfo(edge.dtype).min
        assert bool(untouched.all()), "a kernel wrote outside its output"


def ulps(ours: Tensor, exact: Tensor) -> float:
    """The largest error against float64 `exact`, in units of the last place of `ours`' dtype."""
    exact = exact.double()
    if not ours.numel():
        return 0.0
    same = (ours.double() == exact) | (ours.isnan() & exact.isnan())
    info = torch.finfo(ours.dtype)
    exponent = exact.abs().clamp(min=info.tiny).log2().floor()
    error = (ours.double() - exact).abs() / (exponent.exp2() * info.eps)
    return error.masked_fill(same, 0.0).max().item()


def assert_close(ours: Tensor, exact: Tensor, *, scale: float | None = None) -> None:
    """Elementwise results: bfloat16 within one unit of the last place, float32 within 1e-5, float64 within 1e-11.

    float32 and float64 errors are relative to the element or to `scale` (by default the largest element over 1000),
    whichever is larger; so is what bfloat16 may be off where sums cancel.
    """
    assert ours.shape == exact.shape
    if not ours.numel():
        return
    exact = exact.double()
    finite = exact[exact.isfinite()].abs()
    floor = scale if scale is not None else (finite.max().item() / 1000 if finite.numel() else 0.0)
    if ours.dtype in (torch.bfloat16, torch.float16):
        off = (ours.double() - exact).abs()
        tolerated = off <= 1e-5 * floor
        assert ulps(ours.masked_fill(tolerated, 0.0), exact.masked_fill(tolerated, 0.0)) <= 1.0
        return
    rtol = 1e-5 if ours.dtype == torch.float32 else 1e-11
    torch.testing.assert_close(ours.double(), exact, rtol=rtol, atol=rtol * floor, equal_nan=True)


def assert_no_worse(ours: Tensor, eager: Tensor, exact: Tensor, factor: float = 1.1) -> None:
    """The error of 16-bit `ours` (root mean square, against float64) is at most `factor` times that of eager."""
    if ours.dtype.itemsize > 2:
        return
    # What is left of a difference of numbers of size 1 is exact to float32 only.
    bound = factor * _error(eager, exact) + torch.finfo(torch.float32).eps
    assert _error(ours, exact) <= bound, f"error {_error(ours, exact):.3e}, eager {_error(eager, exact):.3e}"


def forward_backward(
    function: Callable[..., Tensor | tuple[Tensor, ...]], inputs: Sequence[Tensor], grads: Sequence[Tensor]
) -> list[Tensor]:
    """Outputs of `function(*inputs)`, then gradients of all floating-point inputs for given ones of the outputs."""
    leaves = [x.detach().requires_grad_(x.is_floating_point()) for x in inputs]
    out = function(*leaves)
    outputs = list(out) if isinstance(out, tuple) else [out]
    wanted = [x for x in leaves if x.requires_grad]
    return [*(y.detach() for y in outputs), *torch.autograd.grad(outputs, wanted, list(grads))]


def double(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Floating-point tensors in float64, others as they are."""
    return [x.double() if x.is_floating_point() else x for x in tensors]


def _error(x: Tensor, exact: Tensor) -> float:
    return (x.double() - exact.double()).square().mean().sqrt().item() if x.numel() else 0.0


def _canaries(size: int, dtype: torch.dtype) -> Tensor:
    if dtype.is_floating_point:
        return torch.full((size,), math.nan, dtype=dtype)
    return torch.full((size,), torch.iinfo(dtype).min, dtype=dtype)
