"""The gated short convolution against torch: whole rows, documents inside them, and rows in pieces."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.kernels import short_conv as reference
from megalite.kernels.short_conv import Reach
from megalite.kernels.triton.short_conv import gated_short_conv
from megalite.mpu import ParallelState
from megalite.parallel.context import RowCut
from megalite.parallel.halo import find_halo
from megalite.testing.triton_interpreter import count_traffic
from tests.kernels.interpreter.checks import (
    DTYPES,
    assert_close,
    assert_no_worse,
    canaries,
    double,
    forward_backward,
    guarded,
)  # fmt: skip

SIZES = [(9, 2, 5, 3), (1, 3, 4, 3), (2, 1, 7, 4), (6, 2, 3, 1), (0, 2, 4, 3), (37, 1, 130, 3)]


def eager(bcx: Tensor, weight: Tensor) -> Tensor:
    """The definition, in the inputs' dtype."""
    b, c, x = bcx.chunk(3, -1)
    (hidden, taps), u = weight.shape, b * x
    if not len(u):
        return u * weight[:, 0]
    z = F.conv1d(F.pad(u.permute(1, 2, 0), (taps - 1, 0)), weight[:, None], groups=hidden)
    return c * z.permute(2, 0, 1)


def inputs(sizes: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    s, b, h, k = sizes
    torch.manual_seed(0)
    bcx, weight, dy = (torch.randn(shape) for shape in ((s, b, 3 * h), (h, k), (s, b, h)))
    return guarded(bcx.to(dtype), gap=3), guarded(weight.to(dtype)), guarded(dy.to(dtype), gap=2)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_whole_rows(sizes: tuple[int, ...], dtype: torch.dtype) -> None:
    bcx, weight, dy = inputs(sizes, dtype)
    exact = forward_backward(eager, double([bcx, weight]), [dy.double()])
    theirs = forward_backward(eager, [bcx, weight], [dy])
    with canaries():
        ours = forward_backward(gated_short_conv, [bcx, weight], [dy])
    for mine, other, want in zip(ours, theirs, exact, strict=True):
        assert mine.dtype == dtype
        assert_close(mine, want, scale=10.0)
        assert_no_worse(mine, other, want)


def pieces(length: int, depth: int) -> Reach:
    """Two rows that lie in memory in pieces, in any order, with a document that begins inside the first."""
    generator = torch.Generator().manual_seed(1)
    starts = torch.zeros(length, 2, dtype=torch.int64)
    starts[4:, 0] = 4
    runs = [torch.arange(length).split(5) for _ in range(2)]
    orders = [torch.cat([run[i] for i in torch.randperm(len(run), generator=generator)]) for run in runs]
    halo = find_halo(RowCut(ParallelState.single().cp, torch.stack(orders, -1)[None], starts), depth)
    assert halo is not None and sum(halo.send_rows) > 0
    return halo


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
@pytest.mark.parametrize("taps", [2, 3, 7])
def test_rows_in_pieces(taps: int, dtype: torch.dtype) -> None:
    """What is not in memory above a place is fetched, and its gradient comes home; others' documents are not seen."""
    bcx, weight, dy = inputs((22, 2, 33, taps), dtype)
    reach = pieces(22, taps - 1)

    def run(function: Any, *tensors: Tensor) -> list[Tensor]:
        return forward_backward(lambda bcx, weight: function(bcx, weight, reach), tensors[:2], tensors[2:])

    exact = run(reference.gated_short_conv, *double([bcx, weight, dy]))
    whole = forward_backward(gated_short_conv, [bcx, weight], [dy])
    with canaries():
        ours = run(gated_short_conv, bcx, weight, dy)
    for mine, want, other in zip(ours, exact, whole, strict=True):
        assert_close(mine, want, scale=10.0)
        assert not torch.equal(mine, other)


def test_what_is_not_seen_may_be_anything() -> None:
    """NaN in another document stays there."""
    bcx, weight, dy = inputs((9, 2, 5, 3), torch.float32)
    starts = torch.tensor([0, 0, 0, 3, 3, 3, 3, 3, 3])[:, None].expand(9, 2).contiguous()
    places = torch.arange(9)[:, None].expand(9, 2).contiguous()
    reach = find_halo(RowCut(ParallelState.single().cp, places[None], starts), 2)
    bcx[:3] = float("nan")
    out, dbcx, _ = forward_backward(lambda bcx, weight: gated_short_conv(bcx, weight, reach), [bcx, weight], [dy])
    assert out[:3].isnan().all() and out[3:].isfinite().all() and dbcx[3:].isfinite().all()


def test_gradcheck_and_opcheck() -> None:
    torch.manual_seed(0)
    bcx, weight = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((5, 2, 9), (3, 3)))
    assert torch.autograd.gradcheck(gated_short_conv, (bcx, weight))
    ops: Any = torch.ops.megalite
    whole = bcx.detach(), weight.detach(), None, None
    torch.library.opcheck(ops.short_conv.default, whole)
    torch.library.opcheck(ops.short_conv_backward.default, (torch.randn(5, 2, 3).double(), *whole, None, None))


def test_traffic_is_the_minimum() -> None:
    """Each tap reads both of its inputs, the first time from memory; else every tensor moves once."""
    bcx, weight = torch.randn(64, 1, 3 * 256).bfloat16(), torch.randn(256, 3).bfloat16()
    n = 64 * 256 * 2
    with count_traffic() as forward:
        out = gated_short_conv(bcx.requires_grad_(), weight.requires_grad_())
    with count_traffic() as backward:
        out.backward(torch.ones_like(out))
    assert forward.total - forward.of(bcx) <= 1.2 * n and forward.of(bcx) <= (1 + 2 * 3) * n
    assert backward.of(bcx) <= (3 + 2 * 2 + 2) * n
