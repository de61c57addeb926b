"""The gated short convolution of LFM2 (Liquid AI, 2025, arXiv:2511.23404), saving nothing but its inputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def gated_short_conv(bcx: Tensor, weight: Tensor) -> Tensor:
    """c * conv(b * x), conv causal and by channel: z[t] = sum_j weight[:, j] * u[t - (k - 1) + j], u = 0 before t = 0.

    bcx [s, b, 3h] holds b, c and x side by side, weight [h, k]; returns [s, b, h]. Computed in float32 or wider.
    """
    return _GatedShortConv.apply(bcx, weight)


class _GatedShortConv(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, bcx: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(bcx, weight)
        b, c, x = _wide(bcx).chunk(3, -1)
        return _conv(b * x, _taps(weight, c.dtype)).mul_(c).to(bcx.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        bcx, weight = ctx.saved_tensors
        b, c, x = _wide(bcx).chunk(3, -1)
        dy, u, taps = grads[0].to(c.dtype), b * x, _taps(weight, c.dtype)
        dbcx = torch.empty_like(bcx)
        db, dc, dx = dbcx.chunk(3, -1)
        dc.copy_(_conv(u, taps).mul_(dy))
        dz = dy * c
        # The transpose of a causal convolution looks ahead as far as that looks back.
        du = _conv(dz.flip(0), taps).flip(0)
        dx.copy_(du * b)
        db.copy_(du.mul_(x))
        dtaps = torch.zeros_like(taps)
        for back in range(min(len(taps), len(u))):
            dtaps[-1 - back] = (dz[back:] * u[: len(u) - back]).sum((0, 1))
        return dbcx, dtaps.t().to(weight.dtype)


def _conv(u: Tensor, taps: Tensor) -> Tensor:
    """The causal convolution of u [s, b, h] with taps [k, h], a tensor of its own."""
    z = u * taps[-1]
    for back in range(1, min(len(taps), len(u))):
        z[back:].addcmul_(u[:-back], taps[-1 - back])
    return z


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _taps(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """[k, h], so that a tap is a contiguous row."""
    return weight.to(dtype).t().contiguous()
