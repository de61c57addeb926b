"""Mixture-of-experts routing: the choice of experts, and rows on their way to them and back."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


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
    if bias is not None:
        scores = scores + bias
    if num_groups > 1:
        grouped = scores.unflatten(-1, (num_groups, -1))
        best = grouped.sort(dim=-1, descending=True, stable=True).values[..., : group_top_k or k // top_groups]
        groups = _top_k(best.sum(-1), top_groups)
        scores = grouped.masked_fill(~groups[..., None], -math.inf).flatten(-2)
    return _top_k(scores, k)


def _top_k(scores: Tensor, k: int) -> Tensor:
    """bool: the k largest of the last dim; of equal ones the first (torch.topk promises no order)."""
    order = scores.sort(dim=-1, descending=True, stable=True).indices[..., :k]
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, order, True)


class Bags(NamedTuple):
    """The places of each token, in order: order[starts[t] : starts[t + 1]] for token t; int64 [n] and [size + 1]."""

    order: Tensor
    starts: Tensor

    @staticmethod
    def of(token: Tensor, size: int) -> Bags:
        """Those of `token` [n], numbers below `size`; a number of `size` belongs to no token and comes last."""
        ordered, order = token.sort(stable=True)
        return Bags(order, torch.searchsorted(ordered, torch.arange(size + 1, device=token.device)))


def permute(rows: Tensor, token: Tensor, *, zeros: bool = True) -> Tensor:
    """Row token[i] of rows [size, h] in place i, or zeros for token[i] = size (`zeros`: whether there are any)."""
    return (F.pad(rows, (0, 0, 0, 1)) if zeros else rows).index_select(0, token)


def unpermute(rows: Tensor, order: Tensor, starts: Tensor) -> Tensor:
    """The sum of each token's rows, in the order of their places: rows [n, h] -> [size, h]; order, starts: `Bags`."""
    size = starts.shape[0] - 1
    if not rows.shape[0]:
        return rows.new_zeros(size, rows.shape[1])
    # The last bag holds what belongs to no token. The sum is wider than half precision inside.
    return torch.embedding_bag(rows, order, starts, mode=0)[0][:size]
