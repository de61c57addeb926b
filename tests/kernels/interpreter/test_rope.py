"""Rotary embedding against float64 and the torch version, in guarded memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megalite.kernels import rope as reference
from megalite.kernels.rope import rope_tables
from megalite.kernels.triton.rope import apply_rope
from megalite.testing.triton_interpreter import count_traffic
from tests.kernels.interpreter.checks import (
    DTYPES,
    assert_close,
    assert_no_worse,
    canaries,
    forward_backward,
    guarded,
)

SHAPES = [((5, 3, 7, 24), 24), ((1, 1, 1, 2), 2), ((9, 2, 3, 40), 16), ((0, 2, 3, 8), 8), ((33, 1, 8, 64), 64)]


def tables(shape: tuple[int, ...], r: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    return rope_tables(torch.randint(100000, shape[:2]), r, 10000.0, dtype)


def defined(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Pair by pair, as two-dimensional rotations."""
    half = cos.shape[-1]
    pairs = [(2 * i, 2 * i + 1) if interleaved else (i, half + i) for i in range(half)]
    columns = list(x.unbind(-1))
    for i, (first, second) in enumerate(pairs):
        c, s = (table[..., i, None].to(x.dtype) for table in (cos, sin))
        a, b = columns[first], columns[second]
        columns[first], columns[second] = a * c - b * s, a * s + b * c
    return torch.stack(columns, -1)


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "pairs"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("shape", "r"), SHAPES, ids=str)
def test_matches_float64(shape: tuple[int, ...], r: int, dtype: torch.dtype, interleaved: bool) -> None:
    torch.manual_seed(0)
    cos, sin = (guarded(t) for t in tables(shape, r))
    x, dout = (guarded(torch.randn(shape).to(dtype), gap=3) for _ in range(2))
    exact = forward_backward(lambda x: defined(x, cos, sin, interleaved), [x.double()], [dout.double()])
    eager = forward_backward(lambda x: reference.apply_rope(x, cos, sin, interleaved=interleaved), [x], [dout])
    with canaries():
        ours = forward_backward(lambda x: apply_rope(x, cos, sin, interleaved=interleaved), [x], [dout])
    for mine, theirs, want in zip(ours, eager, exact, strict=True):
        assert mine.is_contiguous()
        assert_close(mine, want, scale=1.0)
        assert_no_worse(mine, theirs, want)


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "pairs"])
def test_a_slice_of_fused_projections_and_float64(interleaved: bool) -> None:
    fused = torch.randn(6, 2, 10, 16, dtype=torch.float64)
    cos, sin = tables((6, 2), 12, torch.float64)
    for part in fused.split([6, 2, 2], 2):
        for x in (part, part.transpose(0, 1).contiguous().transpose(0, 1)):
            ours = apply_rope(x, cos, sin, interleaved=interleaved)
            torch.testing.assert_close(ours, defined(x, cos, sin, interleaved), rtol=1e-13, atol=1e-13)
            torch.testing.assert_close(ours.norm(dim=-1), x.norm(dim=-1))
            back = apply_rope(ours, cos, -sin, interleaved=interleaved)
            torch.testing.assert_close(back, x, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "pairs"])
@pytest.mark.parametrize("num_turned", [0, 5, 8])
def test_heads_that_pass_through(num_turned: int, interleaved: bool) -> None:
    """Bit by bit, infinities too, there and back; the others do not see it."""
    x, dout = (torch.randn(6, 2, 8, 12).bfloat16() for _ in range(2))
    x[0, 0, -1], x[1, 1, -1, 3] = torch.inf, torch.nan
    x, (cos, sin) = guarded(x), tables((6, 2), 10)
    with canaries():
        out, dx = forward_backward(lambda x: apply_rope(x, cos, sin, num_turned, interleaved=interleaved), [x], [dout])
    whole, whole_dx = forward_backward(lambda x: apply_rope(x, cos, sin, interleaved=interleaved), [x], [dout])
    for mine, turned, passed in ((out, whole, x), (dx, whole_dx, dout)):
        torch.testing.assert_close(mine[:, :, :num_turned], turned[:, :, :num_turned], rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(mine[:, :, num_turned:], passed[:, :, num_turned:], rtol=0, atol=0, equal_nan=True)


def test_gradcheck() -> None:
    x, (cos, sin) = torch.randn(1, 1, 1, 6, dtype=torch.float64, requires_grad=True), tables((1, 1), 4, torch.float64)
    for interleaved in (False, True):
        assert torch.autograd.gradcheck(lambda x, i=interleaved: apply_rope(x, cos, sin, interleaved=i), x)
        assert torch.autograd.gradcheck(lambda x, i=interleaved: reference.apply_rope(x, cos, sin, interleaved=i), x)


def test_traffic_is_the_minimum() -> None:
    """4 bytes per element of bfloat16, and the tables once for all heads."""
    x, (cos, sin) = torch.randn(8, 1, 16, 64).bfloat16().requires_grad_(), tables((8, 1), 64)
    with count_traffic() as forward:
        out = apply_rope(x, cos, sin)
    with count_traffic() as backward:
        out.backward(torch.ones_like(out))
    for traffic in (forward, backward):
        assert traffic.total == 4 * x.numel() + 4 * (cos.numel() + sin.numel())


def test_opcheck() -> None:
    ops: Any = torch.ops.megalite
    x, (cos, sin) = torch.randn(3, 2, 2, 8, requires_grad=True), tables((3, 2), 6)
    torch.library.opcheck(ops.rope.default, (x, cos, sin, 2, False, False))
    torch.library.opcheck(ops.rope.default, (x, cos, sin, 1, True, False))
