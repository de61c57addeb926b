"""Softmax of scaled scores under a mask, for attention that needs its probabilities; saves nothing else."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def masked_softmax(scores: Tensor, mask: Tensor | None, scale: float, *, causal: bool = False) -> Tensor:
    """softmax(scale * scores) over the last dim of scores [b, heads, sq, sk], in float32 or wider, in scores' dtype.

    mask: bool, broadcastable to the scores, True where a query sees a key. causal: query i sees keys up to
    i + sk - sq. A query that sees nothing has probabilities 0.
    """
    return _MaskedSoftmax.apply(scores, mask, scale, causal)


class _MaskedSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor, mask: Tensor | None, scale: float, causal: bool) -> Tensor:
        hidden = _hidden(scores, mask, causal)
        x = scores.to(torch.promote_types(scores.dtype, torch.float32)) * scale
        if hidden is not None:
            x = x.masked_fill(hidden, float("-inf"))
        probs = x.softmax(-1)
        if hidden is not None:
            probs = probs.masked_fill(hidden, 0.0)  # a row of -inf has become NaN
        probs = probs.to(scores.dtype)
        ctx.scale = scale
        ctx.save_for_backward(probs)
        return probs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (probs,) = ctx.saved_tensors
        wide = torch.promote_types(probs.dtype, torch.float32)
        p, dp = probs.to(wide), grads[0].to(wide)
        dscores = (dp - (p * dp).sum(-1, keepdim=True)).mul_(p).mul_(ctx.scale)
        return dscores.to(probs.dtype), None, None, None


def _hidden(scores: Tensor, mask: Tensor | None, causal: bool) -> Tensor | None:
    """True where a query must not look."""
    hidden = None if mask is None else ~mask
    if causal:
        sq, sk = scores.shape[-2:]
        future = torch.ones(sq, sk, dtype=torch.bool, device=scores.device).triu(sk - sq + 1)
        hidden = future if hidden is None else hidden | future
    return hidden
