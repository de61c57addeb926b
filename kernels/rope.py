"""Rotary position embedding (Su et al., 2021, arXiv:2104.09864), halves rotated together as in Llama."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def rope_tables(
    positions: Tensor, head_dim: int, theta: float, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """cos and sin of position * theta^(-2i / head_dim): positions int64 [s, b] to two tables [s, b, head_dim / 2].

    Angles are computed in float64, so that far positions keep their phase; dtype should be float32 or wider.
    """
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float64, device=positions.device) / head_dim
    angle = positions.to(torch.float64).unsqueeze(-1) * theta**-exponent
    return angle.cos().to(dtype).contiguous(), angle.sin().to(dtype).contiguous()


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates each pair (x[i], x[i + r/2]) of x [s, b, heads, d] by its angle; tables [s, b, r/2], r <= d.

    Features from r on pass through. The result has x's dtype and is contiguous.
    """
    return _Rope.apply(x, cos, sin)


def rotate_rows_(rows: Tensor, cos: Tensor, sin: Tensor) -> None:
    """`apply_rope` in place, outside autograd, on rows [b, n, s * group, d] with tables [b, s, r/2] of their dtype.

    Row i has position i // group. A negated sin turns back.
    """
    group, half = rows.shape[2] // cos.shape[1], cos.shape[-1]
    # Whole tables, repeated for the group: loops over one head are too short to run fast.
    cos = torch.cat((cos, cos), -1).repeat_interleave(group, 1).unsqueeze(1)
    sin = torch.cat((-sin, sin), -1).repeat_interleave(group, 1).unsqueeze(1)
    swapped = torch.cat((rows[..., half : 2 * half], rows[..., :half]), -1)
    rows[..., : 2 * half].mul_(cos).addcmul_(swapped, sin)


class _Rope(torch.autograd.Function):
    """A rotation; its gradient is the rotation back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate(x, cos, sin, 1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return _rotate(grads[0], cos, sin, -1), None, None


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, direction: int) -> Tensor:
    # Products over whole heads: the inner loops over halves of a head are too short to run fast.
    half = cos.shape[-1]
    cos = torch.cat((cos, cos), -1).unsqueeze(2)
    sin = torch.cat((-direction * sin, direction * sin), -1).unsqueeze(2)
    wide = x[..., : 2 * half].to(cos.dtype)
    out = torch.cat((wide[..., half:], wide[..., :half]), -1).mul_(sin).add_(wide * cos).to(x.dtype)
    return out if x.shape[-1] == 2 * half else torch.cat((out, x[..., 2 * half :]), -1)
