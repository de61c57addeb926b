"""Rotary position embedding (Su et al., 2021, arXiv:2104.09864), halves rotated together as in Llama."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def rope_tables(
    positions: Tensor, head_dim: int, theta: float, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """cos and sin of position * theta^(-2i / head_dim): positions int64 [s, b] to two tables [s, b, head_dim / 2].

    Angles are computed in float64, so that far positions keep their phase; dtype should be float32 or wider.
    """
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float64, device=positions.device) / head_dim
    angle = positions.to(torch.float64).unsqueeze(-1) * theta**-exponent
    return angle.cos().to(dtype), angle.sin().to(dtype)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates each pair (x[i], x[i + r/2]) of x [s, b, heads, d] by its angle; tables [s, b, r/2], r <= d.

    Features from r on pass through. The result has x's dtype and is contiguous.
    """
    return _Rope.apply(x, cos, sin)


class _Rope(torch.autograd.Function):
    """A rotation; its gradient is the rotation back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate(x, cos, sin, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return _rotate(grads[0], cos, sin, -1), None, None


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, direction: int) -> Tensor:
    cos, sin = cos.unsqueeze(2), sin.unsqueeze(2)
    half = cos.shape[-1]
    first, second = x[..., :half], x[..., half : 2 * half]
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if x.dtype == cos.dtype:
        torch.mul(first, cos, out=out[..., :half]).addcmul_(second, sin, value=-direction)
        torch.mul(second, cos, out=out[..., half : 2 * half]).addcmul_(first, sin, value=direction)
    else:
        out[..., :half] = (first * cos).sub_(second * sin, alpha=direction)
        out[..., half : 2 * half] = (second * cos).add_(first * sin, alpha=direction)
    out[..., 2 * half :] = x[..., 2 * half :]
    return out
