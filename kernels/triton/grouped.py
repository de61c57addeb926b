"""Grouped products: each expert its own run of rows, in one launch.

Programs find the run that they work on by themselves, from counts on the device; a run without rows costs nothing and
leaves its gradient alone. Sums are in float32 (for float64, in float64), in one order and uncut, without atomics.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import launch, launch_row

Counts = Sequence[int] | Tensor
"""Rows of each expert: on the host, or an integer tensor [E] on the device, which nobody waits for."""


def grouped_linear(x: Tensor, weight: Tensor, counts: Counts, bias: Tensor | None = None) -> Tensor:
    """x_e weight_e^T + bias_e for x [n, in], weight [E, out, in] and bias [E, out]: [n, out]."""
    return _product(x, weight.mT, counts, bias)


def grouped_input_grad(dy: Tensor, weight: Tensor, counts: Counts) -> Tensor:
    """dy_e weight_e for dy [n, out] and weight [E, out, in]: [n, in]."""
    return _product(dy, weight, counts, None)


def accumulate_grouped_weight_grad(main_grad: Tensor, dy: Tensor, x: Tensor, counts: Counts) -> None:
    """main_grad_e += dy_e^T x_e for main_grad [E, out, in], dy [n, out] and x [n, in].

    The product is added in float32 or wider, and the sum rounded once, to main_grad's dtype.
    """
    add_weight_grads(main_grad, dy, x, _ends(counts, x.device))


def add_weight_grads(main_grad: Tensor, dy: Tensor, x: Tensor, ends: Tensor) -> None:
    """The same with int32 [E] on the device: where each run ends."""
    dy, x = _dense(dy), _dense(x)
    num_experts, num_out, num_in = main_grad.shape
    row = launch_row("grouped_weight_grad", x.dtype, min(num_out, num_in))
    tiles = triton.cdiv(num_out, row["BLOCK_M"]) * triton.cdiv(num_in, row["BLOCK_N"])
    launch(
        _weight_grad_kernel, (tiles, num_experts), row, dy, x, main_grad, ends, num_out, num_in, dy.stride(0),
        x.stride(0), *main_grad.stride(), ACC=_acc(x),
    )  # fmt: skip


def _product(x: Tensor, weight: Tensor, counts: Counts, bias: Tensor | None) -> Tensor:
    """x_e weight_e + bias_e for x [n, k] and weight [E, k, m], in any order in memory: [n, m]."""
    x = _dense(x)
    (n, k), (num_experts, _, m) = x.shape, weight.shape
    out = torch.empty(n, m, dtype=x.dtype, device=x.device)
    row = launch_row("grouped_product", x.dtype, min(k, m))
    # Each run may begin a tile that it does not fill.
    tiles_m, tiles_n = triton.cdiv(n, row["BLOCK_M"]) + num_experts, triton.cdiv(m, row["BLOCK_N"])
    added, added_e = (x, 0) if bias is None else (_dense(bias), _dense(bias).stride(0))
    launch(
        _product_kernel, (tiles_m * tiles_n if n else 0,), row, x, weight, added, out, _ends(counts, x.device),
        num_experts, m, k, tiles_m, tiles_n, x.stride(0), *weight.stride(), added_e, m,
        BIAS=bias is not None, EXPERTS=triton.next_power_of_2(num_experts), ACC=_acc(x),
    )  # fmt: skip
    return out


def _ends(counts: Counts, device: torch.device) -> Tensor:
    """int32 [E]: where each run ends."""
    host = counts if isinstance(counts, Tensor) else torch.tensor(counts, dtype=torch.int32, device="cpu")
    return host.cumsum(0, dtype=torch.int32).to(device, non_blocking=True)


def _dense(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _acc(x: Tensor) -> Any:
    return tl.float64 if x.dtype == torch.float64 else tl.float32


@triton.jit
def _product_kernel(
    x, weight, bias, out, ends, num_experts, m, k, tiles_m, tiles_n, x_n, weight_e, weight_k, weight_m, bias_e, out_n,
    BIAS: tl.constexpr, EXPERTS: tl.constexpr, ACC: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """One tile of rows of one expert, one tile of columns; GROUP tiles of rows share what they read of the weight."""
    tile_m, tile_n = _swizzled(tl.program_id(0), tiles_m, tiles_n, GROUP)
    experts = tl.arange(0, EXPERTS)
    stops = tl.load(ends + experts, mask=experts < num_experts, other=0)
    starts = tl.load(ends + experts - 1, mask=(experts > 0) & (experts < num_experts), other=0)
    tiles = (stops - starts + BLOCK_M - 1) // BLOCK_M
    last = tl.cumsum(tiles, 0)
    # The expert is the first one whose tiles end beyond this one.
    expert = tl.sum((last <= tile_m).to(tl.int32), 0)
    mine = experts == expert
    if tl.sum(mine.to(tl.int32), 0) == 0:
        return
    stop, start = tl.sum(tl.where(mine, stops, 0), 0), tl.sum(tl.where(mine, starts, 0), 0)
    first = start + (tile_m - tl.sum(tl.where(mine, last - tiles, 0), 0)) * BLOCK_M
    column = tile_n * BLOCK_N
    rows, columns, inner = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    here, inside = first + rows < stop, column + columns < m
    left = x + first.to(tl.int64) * x_n + (rows[:, None] * x_n + inner[None, :])
    weight += expert.to(tl.int64) * weight_e + column.to(tl.int64) * weight_m
    right = weight + (inner[:, None] * weight_k + columns[None, :] * weight_m)
    acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=ACC)
    for begin in range(0, k, BLOCK_K):
        going = inner < k - begin
        left_tile = tl.load(left, mask=here[:, None] & going[None, :], other=0.0)
        right_tile = tl.load(right, mask=going[:, None] & inside[None, :], other=0.0)
        acc = tl.dot(left_tile, right_tile, acc, input_precision="ieee")
        left += BLOCK_K
        right += BLOCK_K * weight_k
    if BIAS:
        added = tl.load(bias + expert.to(tl.int64) * bias_e + column + columns, mask=inside, other=0.0)
        acc += added.to(ACC)[None, :]
    at = out + first.to(tl.int64) * out_n + column + (rows[:, None] * out_n + columns[None, :])
    tl.store(at, acc.to(out.dtype.element_ty), mask=here[:, None] & inside[None, :])


@triton.jit
def _weight_grad_kernel(
    dy, x, main_grad, ends, num_out, num_in, dy_n, x_n, grad_e, grad_o, grad_i,
    ACC: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """One tile of the gradient of one expert, over all of its rows."""
    tiles_m, tiles_n = tl.cdiv(num_out, BLOCK_M), tl.cdiv(num_in, BLOCK_N)
    tile_m, tile_n = _swizzled(tl.program_id(0), tiles_m, tiles_n, GROUP)
    expert = tl.program_id(1)
    start = tl.load(ends + expert - 1, mask=expert > 0, other=0)
    count = tl.load(ends + expert) - start
    if count == 0:
        return
    row, column = tile_m * BLOCK_M, tile_n * BLOCK_N
    rows, columns, inner = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    here, inside = row + rows < num_out, column + columns < num_in
    left = dy + start.to(tl.int64) * dy_n + row + (inner[:, None] * dy_n + rows[None, :])
    right = x + start.to(tl.int64) * x_n + column + (inner[:, None] * x_n + columns[None, :])
    acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=ACC)
    for begin in range(0, count, BLOCK_K):
        going = (inner < count - begin)[:, None]
        left_tile = tl.load(left, mask=going & here[None, :], other=0.0)
        right_tile = tl.load(right, mask=going & inside[None, :], other=0.0)
        acc = tl.dot(tl.trans(left_tile), right_tile, acc, input_precision="ieee")
        left += BLOCK_K * dy_n
        right += BLOCK_K * x_n
    main_grad += expert.to(tl.int64) * grad_e + row.to(tl.int64) * grad_o + column.to(tl.int64) * grad_i
    at = main_grad + (rows[:, None] * grad_o + columns[None, :] * grad_i)
    both = here[:, None] & inside[None, :]
    before = tl.load(at, mask=both, other=0.0).to(ACC)
    tl.store(at, (before + acc).to(main_grad.dtype.element_ty), mask=both)


@triton.jit
def _swizzled(number, tiles_m, tiles_n, GROUP: tl.constexpr):
    """(row, column) of tile `number` in an order that goes down GROUP rows before it goes to the next column."""
    band = number // (GROUP * tiles_n)
    height = tl.minimum(tiles_m - band * GROUP, GROUP)
    within = number % (GROUP * tiles_n)
    return band * GROUP + within % height, within // height
