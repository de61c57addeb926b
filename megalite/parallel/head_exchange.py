"""All tokens of some heads for some tokens of all heads (Ulysses: Jacobs et al., 2023, arXiv:2309.14509)."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from megalite.axis import Axis


def to_heads(x: Tensor, axis: Axis, order: Tensor) -> Tensor:
    """[n, b, ranks * features] -> [ranks * n, b, features]: all tokens of this rank's part of the features.

    order: int64 [ranks * n, b] (or [ranks * n]), which sorts the tokens of all ranks.
    """
    return cast(Tensor, _HeadExchange.apply(x, axis, order, True))


def to_sequence(x: Tensor, axis: Axis, order: Tensor) -> Tensor:
    """[ranks * n, b, features] -> [n, b, ranks * features]: the inverse of `to_heads`."""
    return cast(Tensor, _HeadExchange.apply(x, axis, order, False))


class _HeadExchange(torch.autograd.Function):
    """Either way; backward is the way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, order: Tensor, to_heads: bool) -> Tensor:
        ctx.axis, ctx.order, ctx.to_heads = axis, order, to_heads
        return _to_heads(x, axis, order) if to_heads else _to_sequence(x, axis, order)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        back = _to_sequence if ctx.to_heads else _to_heads
        return back(grads[0], ctx.axis, ctx.order), None, None, None


def _to_heads(x: Tensor, axis: Axis, order: Tensor) -> Tensor:
    n, b, width = x.shape
    parts = x.view(n, b, axis.size, width // axis.size).permute(2, 0, 1, 3).contiguous()
    whole = axis.all_to_all(parts).flatten(0, 1)
    return whole.index_select(0, order) if order.dim() == 1 else whole.gather(0, order[..., None].expand_as(whole))


def _to_sequence(x: Tensor, axis: Axis, order: Tensor) -> Tensor:
    whole = torch.empty_like(x, memory_format=torch.contiguous_format)
    if order.dim() == 1:
        whole.index_copy_(0, order, x)
    else:
        whole.scatter_(0, order[..., None].expand_as(x), x)
    n = len(whole) // axis.size
    parts = axis.all_to_all(whole.view(axis.size, n, *whole.shape[1:]))
    return parts.permute(1, 2, 0, 3).flatten(2)


def kv_repeats(num_heads: int, kv_heads: int, size: int) -> int:
    """How often each KV head must be there, so that `size` ranks get whole groups of query heads with their own."""
    return next(r for r in range(1, num_heads // kv_heads + 1) if _fits(num_heads, kv_heads * r, size))


def _fits(num_heads: int, kv_heads: int, size: int) -> bool:
    return kv_heads % size == 0 and num_heads % kv_heads == 0


def head_exchange_problems(num_heads: int, size: int) -> list[str]:
    """Why `num_heads` query heads of a tensor-parallel rank cannot be exchanged over `size` ranks."""
    if num_heads % size == 0:
        return []
    legal = ", ".join(str(n) for n in range(1, num_heads + 1) if num_heads % n == 0)
    return [f"{num_heads} query heads of a rank cannot be exchanged over {size} ranks; these can be {legal}"]
