"""RMSNorm (Zhang and Sennrich, 2019, arXiv:1910.07467) and LayerNorm, with statistics in float32 or wider."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .saved import Saved, size_of, wide


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dim: x [..., h], weight [h]; rounded to x's dtype once."""
    return _RMSNorm.apply(x, weight, eps)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """(x - mean) / sqrt(var + eps) * weight + bias over the last dim: x [..., h], weight and bias [h]."""
    if x.dtype == weight.dtype and x.dtype in (torch.float32, torch.float64):
        return F.layer_norm(x, x.shape[-1:], weight, bias, eps)
    return _LayerNorm.apply(x, weight, bias, eps)


def rms_norm_add(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(rms_norm of the sum, the sum x + residual), the sum rounded before it is normalised; all of one shape."""
    total = x + residual
    return rms_norm(total, weight, eps), total


def layer_norm_add(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(layer_norm of the sum, the sum x + residual), the sum rounded before it is normalised; all of one shape."""
    total = x + residual
    return layer_norm(total, weight, bias, eps), total


def rms_norm_saved(shape: Sequence[int], dtype: torch.dtype) -> Saved:
    """What `rms_norm` keeps of x: x itself and one number a row."""
    return Saved(input=size_of(shape, dtype), own=size_of(shape[:-1], wide(dtype)))


def layer_norm_saved(shape: Sequence[int], dtype: torch.dtype) -> Saved:
    """What `layer_norm` keeps of x: x itself and two numbers a row."""
    return Saved(input=size_of(shape, dtype), own=2 * size_of(shape[:-1], wide(dtype)))


class _RMSNorm(torch.autograd.Function):
    """Saves its input and one number a row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        rstd = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        rstd.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, rstd)
        return (wide * rstd).mul_(weight).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, rstd = ctx.saved_tensors
        normed = x.to(rstd.dtype) * rstd
        dx, dweight = _centred_grads(grads[0].to(rstd.dtype), normed, weight.to(rstd.dtype))
        return dx.mul_(rstd).to(x.dtype), dweight.to(weight.dtype), None


class _LayerNorm(torch.autograd.Function):
    """For what is narrower than its statistics. Saves its input and two numbers a row.

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
