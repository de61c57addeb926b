"""The gated short convolution in one pass over memory each way: the few rows that taps share come from the caches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megalite.kernels.short_conv import Reach, far_grad, taps_of

from .launch import launch, launch_row
from .rows import accumulator, accumulator_dtype, rows_of

_NOBODY, _NEAR = tl.constexpr(-1), tl.constexpr(-2)
"""Instead of the number of a fetched row: no input, or the one in memory."""


def gated_short_conv(bcx: Tensor, weight: Tensor, reach: Reach | None = None) -> Tensor:
    """c * conv(b * x), conv causal and by channel: z[t] = sum_j weight[:, j] * u[t - (k - 1) + j], u = 0 before t = 0.

    bcx [s, b, 3h] holds b, c and x side by side, weight [h, k]; returns [s, b, h]. Computed in float32 or wider.
    `reach` says which inputs an output sees where these are not just the ones above it.
    """
    return _GatedShortConv.apply(bcx, weight, reach)


class _GatedShortConv(torch.autograd.Function):
    """Communication, if rows are on several ranks, around one kernel each way."""

    @staticmethod
    def forward(ctx: Any, bcx: Tensor, weight: Tensor, reach: Reach | None) -> Tensor:
        b, _, x = rows_of(bcx).chunk(3, -1)
        wide = accumulator_dtype(bcx.dtype)
        fetched = reach.fetch(lambda rows: b[rows].to(wide) * x[rows])() if reach is not None else None
        ctx.reach = reach
        ctx.save_for_backward(bcx, weight, fetched)
        return convolve(bcx, weight, _sources(reach, bcx), fetched)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        bcx, weight, fetched = ctx.saved_tensors
        reach: Reach | None = ctx.reach
        slot = home = None
        if reach is not None:
            dy, c, wide = rows_of(grads[0]), rows_of(bcx).chunk(3, -1)[1], accumulator_dtype(bcx.dtype)
            taps = taps_of(weight, wide)
            dfetched = far_grad(lambda rows: dy[rows].to(wide) * c[rows], taps, reach, fetched)
            slot, home = _gathered(reach.send_home(dfetched)(), len(dy), dfetched)
        dbcx, dweight = convolve_backward(grads[0], bcx, weight, _sources(reach, bcx), fetched, slot, home)
        return dbcx, dweight, None


def _sources(reach: Reach | None, bcx: Tensor) -> Tensor | None:
    """int32 [k - 1, s x b]: what each output has `back` places before it, a fetched row, `_NEAR` or `_NOBODY`."""
    if reach is None:
        return None
    count, width = bcx.shape[:2].numel(), bcx.shape[1]
    table = torch.full((len(reach.near), count), _NOBODY.value, dtype=torch.int32, device=bcx.device)
    for back, (near, (outputs, fetched)) in enumerate(zip(reach.near, reach.far, strict=True), start=1):
        table[back - 1, back * width :] = torch.where(near.flatten(), _NEAR.value, _NOBODY.value)
        table[back - 1, outputs] = fetched.to(torch.int32)
    return table


def _gathered(
    pairs: Sequence[tuple[Tensor, Tensor]], count: int, like: Tensor
) -> tuple[Tensor, Tensor] | tuple[None, None]:
    """(int32 [count], each row's place in the sums or -1; the sums) of gradients that came home, if any did."""
    total = sum(len(rows) for rows, _ in pairs)
    if not total:
        return None, None
    slot = torch.full((count,), -1, dtype=torch.int32, device=like.device)
    every = torch.cat([rows for rows, _ in pairs])
    found = every.unique()
    slot[found] = torch.arange(len(found), dtype=torch.int32, device=like.device)
    sums = like.new_zeros(len(found), like.shape[1])
    for rows, grads in pairs:
        sums[slot[rows]] += grads
    return slot, sums


@torch.library.custom_op("megalite::short_conv", mutates_args=())
def convolve(bcx: Tensor, weight: Tensor, sources: Tensor | None, fetched: Tensor | None) -> Tensor:
    """`gated_short_conv` of inputs that lie as `sources` says, int32 [k - 1, s x b]; fetched [n, h]."""
    out = torch.empty(*bcx.shape[:2], bcx.shape[2] // 3, dtype=bcx.dtype, device=bcx.device)
    (count, hidden), rows = out.flatten(0, 1).shape, rows_of(bcx)
    row = launch_row("short_conv", bcx.dtype, hidden)
    grid = triton.cdiv(count, row["ROWS"]), triton.cdiv(hidden, row["BLOCK"])
    launch(
        _conv_rows, grid, row, rows, taps_of(weight, weight.dtype), sources, fetched, out, count, bcx.shape[1], hidden,
        rows.stride(0), K=weight.shape[1], ACC=accumulator(bcx.dtype),
    )  # fmt: skip
    return out


@torch.library.custom_op("megalite::short_conv_backward", mutates_args=())
def convolve_backward(
    dout: Tensor,
    bcx: Tensor,
    weight: Tensor,
    sources: Tensor | None,
    fetched: Tensor | None,
    slot: Tensor | None,
    home: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """(dbcx, dweight); home[slot[r]] is added to the gradient of input r where slot[r] is not negative."""
    dbcx = torch.empty(bcx.shape, dtype=bcx.dtype, device=bcx.device)
    rows, dy, taps = rows_of(bcx), rows_of(dout), taps_of(weight, weight.dtype)
    count, hidden = dy.shape
    row = launch_row("short_conv_backward", bcx.dtype, hidden)
    grid = triton.cdiv(count, row["ROWS"]), triton.cdiv(hidden, row["BLOCK"])
    dtaps = torch.empty(grid[0], *taps.shape, dtype=accumulator_dtype(bcx.dtype), device=bcx.device)
    launch(
        _conv_rows_grad, grid, row, dy, rows, taps, sources, fetched, slot, home, dbcx, dtaps, count, bcx.shape[1],
        hidden, dy.stride(0), rows.stride(0), K=weight.shape[1], ACC=accumulator(bcx.dtype),
    )  # fmt: skip
    return dbcx, dtaps.sum(0).t().to(weight.dtype).contiguous()


@convolve.register_fake
def _(bcx: Tensor, weight: Tensor, sources: Tensor | None, fetched: Tensor | None) -> Tensor:
    return bcx.new_empty(*bcx.shape[:2], bcx.shape[2] // 3)


@convolve_backward.register_fake
def _(
    dout: Tensor,
    bcx: Tensor,
    weight: Tensor,
    sources: Tensor | None,
    fetched: Tensor | None,
    slot: Tensor | None,
    home: Tensor | None,
) -> tuple[Tensor, Tensor]:
    return bcx.new_empty(bcx.shape), weight.new_empty(weight.shape)


@triton.jit
def _source(sources, row, back: tl.constexpr, count, batch):
    """What each row sees `back` places before it: see `_sources`, or else what lies there in memory."""
    if sources is not None:
        at = sources + (back - 1) * count.to(tl.int64) + row
        source = tl.load(at, mask=row < count, other=_NOBODY).to(tl.int64)
    else:
        source = tl.where((row < count) & (row >= back * batch), _NEAR, _NOBODY).to(tl.int64)
    return source


@triton.jit
def _conv_rows(
    bcx, taps, sources, fetched, out, count, batch, hidden, stride,
    K: tl.constexpr, ACC: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = (row < count) & (column < hidden)
    at = bcx + row * stride + column
    tap = tl.load(taps + (K - 1) * hidden + column, mask=column < hidden, other=0.0).to(ACC)
    gated = tl.load(at, mask=inside, other=0.0).to(ACC) * tl.load(at + 2 * hidden, mask=inside, other=0.0).to(ACC)
    z = gated * tap
    for back in tl.static_range(1, K):  # pyright: ignore[reportGeneralTypeIssues]
        tap = tl.load(taps + (K - 1 - back) * hidden + column, mask=column < hidden, other=0.0).to(ACC)
        z += _input_before(bcx, sources, fetched, row, column, inside, back, count, batch, hidden, stride, ACC) * tap
    z *= tl.load(at + hidden, mask=inside, other=0.0).to(ACC)
    tl.store(out + row * hidden + column, z.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _conv_rows_grad(
    dout, bcx, taps, sources, fetched, slot, home, dbcx, dtaps, count, batch, hidden, dout_stride, stride,
    K: tl.constexpr, ACC: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    present = column < hidden
    inside = (row < count) & present
    at = bcx + row * stride + column
    b = tl.load(at, mask=inside, other=0.0).to(ACC)
    x = tl.load(at + 2 * hidden, mask=inside, other=0.0).to(ACC)
    dy = tl.load(dout + row * dout_stride + column, mask=inside, other=0.0).to(ACC)
    dz = dy * tl.load(at + hidden, mask=inside, other=0.0).to(ACC)
    tap = tl.load(taps + (K - 1) * hidden + column, mask=present, other=0.0).to(ACC)
    z, du = b * x * tap, dz * tap
    partial = dtaps + tl.program_id(0).to(tl.int64) * K * hidden + column
    tl.store(partial + (K - 1) * hidden, tl.sum(dz * b * x, 0, keep_dims=True), mask=present)
    for back in tl.static_range(1, K):  # pyright: ignore[reportGeneralTypeIssues]
        tap = tl.load(taps + (K - 1 - back) * hidden + column, mask=present, other=0.0).to(ACC)
        before = _input_before(bcx, sources, fetched, row, column, inside, back, count, batch, hidden, stride, ACC)
        z += before * tap
        tl.store(partial + (K - 1 - back) * hidden, tl.sum(dz * before, 0, keep_dims=True), mask=present)
        later = row + back * batch
        sees = inside & (_source(sources, later, back, count, batch) == _NEAR)
        ahead = tl.load(dout + later * dout_stride + column, mask=sees, other=0.0).to(ACC)
        du += ahead * tl.load(bcx + later * stride + hidden + column, mask=sees, other=0.0).to(ACC) * tap
    if slot is not None:
        place = tl.load(slot + row, mask=row < count, other=-1).to(tl.int64)
        du += tl.load(home + place * hidden + column, mask=inside & (place >= 0), other=0.0).to(ACC)
    at = dbcx + row * 3 * hidden + column
    kind = dbcx.dtype.element_ty
    tl.store(at, (du * x).to(kind), mask=inside)
    tl.store(at + hidden, (dy * z).to(kind), mask=inside)
    tl.store(at + 2 * hidden, (du * b).to(kind), mask=inside)


@triton.jit
def _input_before(
    bcx, sources, fetched, row, column, inside, back: tl.constexpr, count, batch, hidden, stride, ACC: tl.constexpr
):
    """b * x as each row sees it `back` places before itself; 0 where there is nothing."""
    source = _source(sources, row, back, count, batch)
    near = inside & (source == _NEAR)
    at = bcx + (row - back * batch) * stride + column
    value = tl.load(at, mask=near, other=0.0).to(ACC) * tl.load(at + 2 * hidden, mask=near, other=0.0).to(ACC)
    if sources is not None:
        value += tl.load(fetched + source * hidden + column, mask=inside & (source >= 0), other=0.0).to(ACC)
    return value
