"""RMSNorm (Zhang and Sennrich, 2019, arXiv:1910.07467) and LayerNorm, with statistics in float32 or wider."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .cpu import row_chunks


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dim: x [..., h], weight [h]; rounded to x's dtype once."""
    return _RMSNorm.apply(x, weight, eps)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """(x - mean) / sqrt(var + eps) * weight + bias over the last dim: x [..., h], weight and bias [h]."""
    return _LayerNorm.apply(x, weight, bias, eps)


class _RMSNorm(torch.autograd.Function):
    """Saves its input and one number a row; float32 copies exist for a cacheful of rows at a time."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        rstd = x.new_empty(*x.shape[:-1], 1, dtype=wide)
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        for x_part, rstd_part, out_part in row_chunks(x, rstd, out):
            rows = x_part.to(wide)
            torch.linalg.vector_norm(rows, dim=-1, keepdim=True, out=rstd_part)
            rstd_part.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
            out_part.copy_((rows * rstd_part).mul_(weight))
        ctx.save_for_backward(x, weight, rstd)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, rstd = ctx.saved_tensors
        wide_weight = weight.to(rstd.dtype)
        dx, dweight = torch.empty_like(x, memory_format=torch.contiguous_format), torch.zeros_like(wide_weight)
        for dy, x_part, rstd_part, dx_part in row_chunks(grads[0], x, rstd, dx):
            normed = x_part.to(rstd.dtype) * rstd_part
            rows, dweight_part = _centred_grads(dy.to(rstd.dtype), normed, wide_weight)
            dx_part.copy_(rows.mul_(rstd_part))
            dweight += dweight_part
        return dx, dweight.to(weight.dtype), None


class _LayerNorm(torch.autograd.Function):
    """Saves its input and two numbers a row.

    Its own backward, because torch's CPU one sums bfloat16 weight gradients in bfloat16: several per cent off.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        out, mean, rstd = torch.native_layer_norm(x, x.shape[-1:], weight.to(wide), bias.to(wide), eps)
        ctx.save_for_backward(x, weight, mean, rstd)
        ctx.bias_dtype = bias.dtype
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, rstd = ctx.saved_tensors
        dy, wide_weight = grads[0].to(rstd.dtype), weight.to(rstd.dtype)
        normed = (x.to(rstd.dtype) - mean).mul_(rstd)
        dx, dweight = _centred_grads(dy, normed, wide_weight)
        dx.sub_((dy @ wide_weight).div_(x.shape[-1]).unsqueeze(-1))
        dbias = dy.flatten(0, -2).sum(0)
        return dx.mul_(rstd).to(x.dtype), dweight.to(weight.dtype), dbias.to(ctx.bias_dtype), None


def _centred_grads(dy: Tensor, normed: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """(dy * weight less its part along normed, gradient of weight), all of one dtype; overwrites normed."""
    product = dy * normed
    along = (product @ weight).div_(weight.shape[0]).unsqueeze(-1)
    return (dy * weight).sub_(normed.mul_(along)), product.flatten(0, -2).sum(0)
