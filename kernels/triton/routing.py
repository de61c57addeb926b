"""Mixture-of-experts routing in Triton: the choice of experts, and rows on their way to them and back."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..routing import Bags
from .launch import Launch, launch, launch_row
from .rows import accumulator, rows_of


def choose_experts(
    scores: Tensor,
    k: int,
    bias: Tensor | None = None,
    *,
    num_groups: int = 1,
    top_groups: int = 1,
    group_top_k: int = 0,
) -> Tensor:
    """bool, shaped as scores [..., num_experts]: the k experts of each token with the largest scores + bias.

    Of equal ones the first; NaN counts as the largest of all. With num_groups > 1 only from the `top_groups` groups of
    neighbouring experts that have the largest sums of their `group_top_k` best, by default k / top_groups (DeepSeek-V3,
    arXiv:2412.19437).
    """
    num_experts = scores.shape[-1]
    assert k <= num_experts and num_experts % num_groups == 0
    flat = scores.reshape(-1, num_experts)
    chosen = torch.empty(flat.shape, dtype=torch.uint8, device=scores.device)
    size = num_experts // num_groups
    groups, members = triton.next_power_of_2(num_groups), triton.next_power_of_2(size)
    row = launch_row("choose_experts", scores.dtype, groups * members)
    launch(
        _choose_kernel, (triton.cdiv(flat.shape[0], row["ROWS"]),), row, flat, flat if bias is None else bias, chosen,
        flat.shape[0], num_experts, num_groups, size, k, top_groups, group_top_k or k // top_groups, flat.stride(0),
        BIAS=bias is not None, GROUPS=groups, MEMBERS=members,
    )  # fmt: skip
    return chosen.view(torch.bool).view(scores.shape)


@torch.library.custom_op("megalite::permute", mutates_args=())
def _permute(rows: Tensor, token: Tensor) -> Tensor:
    rows = rows_of(rows)
    (size, width), n = rows.shape, token.shape[0]
    out = torch.empty(n, width, dtype=rows.dtype, device=rows.device)
    row = launch_row("permute", rows.dtype, width)
    launch(_permute_kernel, _grid(row, n, width), row, rows, token, out, n, size, width, rows.stride(0))
    return out


def permute(rows: Tensor, token: Tensor, *, zeros: bool = True) -> Tensor:
    """Row token[i] of rows [size, h] in place i, or zeros for token[i] = size: [n, h]."""
    return _permute(rows, token)


@torch.library.custom_op("megalite::unpermute", mutates_args=())
def unpermute(rows: Tensor, order: Tensor, starts: Tensor) -> Tensor:
    """The sum of each token's rows, in the order of their places: rows [n, h] -> [size, h]; order, starts: `Bags`.

    It is made in float32 (for float64, in float64) and rounded once, without atomics.
    """
    rows = rows_of(rows)
    size, width = starts.shape[0] - 1, rows.shape[1]
    out = torch.empty(size, width, dtype=rows.dtype, device=rows.device)
    row = launch_row("unpermute", rows.dtype, width)
    launch(
        _unpermute_kernel, _grid(row, size, width), row, rows, order, starts, out, size, width, rows.stride(0),
        ACC=accumulator(rows.dtype),
    )  # fmt: skip
    return out


def _grid(row: Launch, n: int, width: int) -> tuple[int, int]:
    return triton.cdiv(n, row["ROWS"]), triton.cdiv(width, row["BLOCK"])


@triton.jit
def _choose_kernel(
    scores, bias, chosen, count, num_experts, num_groups, size, k, top_groups, best, scores_n,
    BIAS: tl.constexpr, GROUPS: tl.constexpr, MEMBERS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """[ROWS, GROUPS, MEMBERS] scores; k rounds of a largest one, which is then out of the game."""
    number = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    group, member = tl.arange(0, GROUPS)[None, :, None], tl.arange(0, MEMBERS)[None, None, :]
    expert = group * size + member
    real = (group < num_groups) & (member < size)
    here = (number < count)[:, None, None] & real
    x = tl.load(scores + number[:, None, None] * scores_n + expert, mask=here, other=0.0)
    if BIAS:
        x += tl.load(bias + expert, mask=real, other=0.0).to(x.dtype)
    x = tl.where(x != x, float("inf"), x)
    everyone = (tl.zeros([ROWS, GROUPS, MEMBERS], dtype=tl.int1) == 0) & real
    if GROUPS > 1:
        total = tl.zeros([ROWS, GROUPS, 1], dtype=x.dtype)
        rest = everyone
        for _ in range(best):
            top = tl.max(tl.where(rest, x, float("-inf")), 2, keep_dims=True)
            place = tl.min(tl.where(rest & (x == top), member, MEMBERS), 2, keep_dims=True)
            rest = rest & (member != place)
            total += top
        losers = (tl.zeros([ROWS, GROUPS, 1], dtype=tl.int1) == 0) & (group < num_groups)
        for _ in range(top_groups):
            top = tl.max(tl.where(losers, total, float("-inf")), 1, keep_dims=True)
            place = tl.min(tl.where(losers & (total == top), group, GROUPS), 1, keep_dims=True)
            losers = losers & (group != place)
        x = tl.where(losers, float("-inf"), x)
    rest = everyone
    for _ in range(k):
        top = tl.max(tl.where(rest, x, float("-inf")), 2, keep_dims=True)
        top = tl.max(top, 1, keep_dims=True)
        place = tl.min(tl.where(rest & (x == top), expert, GROUPS * MEMBERS), 2, keep_dims=True)
        place = tl.min(place, 1, keep_dims=True)
        rest = rest & (expert != place)
    taken = everyone & (rest == 0)
    tl.store(chosen + number[:, None, None] * num_experts + expert, taken.to(tl.uint8), mask=here)


@triton.jit
def _permute_kernel(rows, token, out, n, size, width, rows_n, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    place = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here, inside = place < n, column < width
    source = tl.load(token + place, mask=here, other=size)
    found = (source < size)[:, None] & inside[None, :]
    values = tl.load(rows + source[:, None] * rows_n + column[None, :], mask=found, other=0.0)
    tl.store(out + place[:, None].to(tl.int64) * width + column[None, :], values, mask=here[:, None] & inside[None, :])


@triton.jit
def _unpermute_kernel(
    rows, order, starts, out, size, width, rows_n, ACC: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    token = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here, inside = token < size, column < width
    begin = tl.load(starts + token, mask=here, other=0)
    length = tl.load(starts + token + 1, mask=here, other=0) - begin
    acc = tl.zeros([ROWS, BLOCK], dtype=ACC)
    for i in range(tl.max(length, 0)):  # pyright: ignore[reportArgumentType]
        more = i < length
        place = tl.load(order + begin + i, mask=more, other=0)
        found = more[:, None] & inside[None, :]
        acc += tl.load(rows + place[:, None] * rows_n + column[None, :], mask=found, other=0.0).to(ACC)
    at = out + token[:, None].to(tl.int64) * width + column[None, :]
    tl.store(at, acc.to(out.dtype.element_ty), mask=here[:, None] & inside[None, :])


@_permute.register_fake
def _(rows: Tensor, token: Tensor) -> Tensor:
    return rows.new_empty(token.shape[0], rows.shape[1])


@unpermute.register_fake
def _(rows: Tensor, order: Tensor, starts: Tensor) -> Tensor:
    return rows.new_empty(starts.shape[0] - 1, rows.shape[1])


def _save_permute(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    rows, token = inputs
    ctx.save_for_backward(token)
    ctx.size = rows.shape[0]


def _permute_backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
    return unpermute(dout, *Bags.of(ctx.saved_tensors[0], ctx.size)), None


def _save_unpermute(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[1:])


def _unpermute_backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
    order, starts = ctx.saved_tensors
    of_place = torch.searchsorted(starts, torch.arange(len(order), device=order.device), right=True) - 1
    return _permute(dout, torch.empty_like(order).index_copy_(0, order, of_place)), None, None


_permute.register_autograd(_permute_backward, setup_context=_save_permute)
unpermute.register_autograd(_unpermute_backward, setup_context=_save_unpermute)
