"""The fused operations as torch.compile makes them for a CPU: the signatures, and up to rounding the values, of torch.

Forward and backward are plain functions of matrices, compiled apart: what is saved, and what is computed again, is
decided here and not by a partitioner.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import cross_entropy as torch_cross_entropy
from . import dropout as torch_dropout
from . import short_conv as torch_short_conv
from .compile_rows import run
from .cross_entropy import CrossEntropyConfig
from .dropout import hash_features, keep_threshold, row_hash
from .short_conv import Reach

_LANES = 16
_LOG2_E = 1.4426950408889634  # powers of 2 are faster than powers of e
_GELU, _CUBIC = 2.0 * math.sqrt(2.0 / math.pi), 0.044715  # (1 + tanh(u)) / 2 is the logistic function of 2 u


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `norm.rms_norm`."""
    return _RMSNorm.apply(x, weight, eps)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """See `norm.layer_norm`."""
    return _LayerNorm.apply(x, weight, bias, eps)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor, num_turned: int | None = None) -> Tensor:
    """See `rope.apply_rope`."""
    return _Rope.apply(x, cos, sin, x.shape[2] if num_turned is None else num_turned)


def swiglu_packed(gate_up: Tensor) -> Tensor:
    """See `activation.swiglu_packed`."""
    return _SwiGLU.apply(gate_up)


def gelu(x: Tensor, bias: Tensor | None = None) -> Tensor:
    """See `activation.gelu`."""
    return _Gelu.apply(x, bias)


def dropout(x: Tensor, p: float, key: Tensor, token_index: Tensor, feature_offset: int = 0) -> Tensor:
    """See `dropout.dropout`."""
    if p == 0.0 or not _is_safe(x):
        return torch_dropout.dropout(x, p, key, token_index, feature_offset)
    return _BiasDropoutAdd.apply(x, None, None, p, key, token_index, feature_offset)


def bias_dropout_add(
    x: Tensor, bias: Tensor | None, residual: Tensor, p: float, key: Tensor | None, token_index: Tensor | None
) -> Tensor:
    """See `dropout.bias_dropout_add`."""
    if p == 0.0 or not _is_safe(x):
        return torch_dropout.bias_dropout_add(x, bias, residual, p, key, token_index)
    return _BiasDropoutAdd.apply(x, bias, residual, p, key, token_index, 0)


def ce_stats(logits: Tensor, targets: Tensor, config: CrossEntropyConfig) -> Tensor:
    """See `cross_entropy.ce_stats`."""
    if logits.numel() == 0 or not _is_safe(logits):
        return torch_cross_entropy.ce_stats(logits, targets, config)
    return run(_ce_stats, logits, targets, config.smoothing > 0.0)


def ce_grad_(logits: Tensor, targets: Tensor, lse: Tensor, grad: Tensor, config: CrossEntropyConfig) -> Tensor:
    """See `cross_entropy.ce_grad_`."""
    if logits.numel() == 0 or not _is_safe(logits):
        return torch_cross_entropy.ce_grad_(logits, targets, lse, grad, config)
    grad = grad.to(lse.dtype)
    run(_ce_grad, logits, targets, lse, grad, config.smoothing, config.smoothing / config.vocab_size, config.z_loss)
    return logits


def gated_short_conv(bcx: Tensor, weight: Tensor, reach: Reach | None = None) -> Tensor:
    """See `short_conv.gated_short_conv`; rows of several documents, or on several ranks, are computed by it."""
    if reach is not None or bcx.shape[0] < weight.shape[1]:
        return torch_short_conv.gated_short_conv(bcx, weight, reach)
    return _ShortConv.apply(bcx, weight)


def weighted_swiglu(gate_up: Tensor, probs: Tensor) -> Tensor:
    """See `grouped.weighted_swiglu`."""
    return run(_weighted_swiglu, gate_up, probs)


def weighted_swiglu_backward(dout: Tensor, gate_up: Tensor, probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """See `grouped.weighted_swiglu_backward`."""
    return run(_weighted_swiglu_backward, dout, gate_up, probs)


def _is_safe(x: Tensor) -> bool:
    """Whether code that joins integers with features is right: torch 2.13 gets the last columns of a row wrong, in
    float64 and in bfloat16, where they do not fill a vector. The torch form takes those."""
    return x.dtype != torch.float64 and x.shape[-1] % _LANES == 0


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def _sum_of_rows(x: Tensor, dtype: torch.dtype) -> Tensor:
    """By torch, in float32 or wider, rounded once: loops of inductor take twice as long, and are less exact."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return x.sum(0) if dtype == x.dtype else x.sum(0, dtype=wide).to(dtype)


def _side_by_side(parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Rounded first: inductor writes parts straight to their places, but computes a cast of all of them twice."""
    return torch.cat([part.to(dtype) for part in parts], -1)


def _rms_forward(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    wide = _wide(x)
    rstd = torch.rsqrt(wide.square().sum(-1, keepdim=True) * (1.0 / x.shape[-1]) + eps)
    return (wide * rstd * weight).to(x.dtype), rstd


def _rms_backward(dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient of x, and what adds up to that of the weight."""
    dy, wide = dy.to(rstd.dtype), x.to(rstd.dtype)
    weighted = dy * weight
    along = (weighted * wide).sum(-1, keepdim=True) * (rstd * rstd * rstd * (1.0 / x.shape[-1]))
    dx = weighted * rstd - wide * along
    return dx.to(x.dtype), dy * wide * rstd


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        y, rstd = run(_rms_forward, _rows(x), weight, eps)
        ctx.save_for_backward(x, weight, rstd)
        return y.view(x.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, rstd = ctx.saved_tensors
        dx, product = run(_rms_backward, _rows(grads[0]), _rows(x), weight, rstd)
        return dx.view(x.shape), _sum_of_rows(product, weight.dtype), None


def _layer_forward(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    wide = _wide(x)
    mean = wide.mean(-1, keepdim=True)
    centred = wide - mean
    rstd = torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    return (centred * rstd * weight + bias).to(x.dtype), mean, rstd


def _layer_backward(dy: Tensor, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient of x, and what adds up to that of the weight."""
    dy, normed = dy.to(rstd.dtype), (x.to(rstd.dtype) - mean) * rstd
    product, weighted = dy * normed, dy * weight
    along = (product * weight).mean(-1, keepdim=True)
    dx = (weighted - normed * along - weighted.mean(-1, keepdim=True)) * rstd
    return dx.to(x.dtype), product


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        y, mean, rstd = run(_layer_forward, _rows(x), weight, bias, eps)
        ctx.save_for_backward(x, weight, mean, rstd)
        ctx.bias_dtype = bias.dtype
        return y.view(x.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, rstd = ctx.saved_tensors
        dy = _rows(grads[0])
        dx, product = run(_layer_backward, dy, _rows(x), weight, mean, rstd)
        return dx.view(x.shape), _sum_of_rows(product, weight.dtype), _sum_of_rows(dy, ctx.bias_dtype), None


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, num_turned: int, direction: int) -> Tensor:
    """x [n, heads, d], tables [n, r / 2]."""
    half, whole = cos.shape[-1], x
    x, cos, sin = x[:, :num_turned], cos[:, None], sin[:, None] * direction
    first, second = x[..., :half].to(cos.dtype), x[..., half : 2 * half].to(cos.dtype)
    turned = (first * cos - second * sin, second * cos + first * sin)
    out = _side_by_side(turned if 2 * half == x.shape[-1] else (*turned, x[..., 2 * half :]), x.dtype)
    return out if num_turned == whole.shape[1] else torch.cat((out, whole[:, num_turned:]), 1)


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, num_turned: int) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.num_turned = num_turned
        return run(_rotate, x.flatten(0, 1), _rows(cos), _rows(sin), num_turned, 1).view(x.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        dy = grads[0]
        dx = run(_rotate, dy.flatten(0, 1), _rows(cos), _rows(sin), ctx.num_turned, -1)
        return dx.view(dy.shape), None, None, None


def _sigmoid(x: Tensor) -> Tensor:
    return 1.0 / (1.0 + (x * -_LOG2_E).exp2())


def _swiglu(gate_up: Tensor) -> Tensor:
    gate, up = _wide(gate_up).chunk(2, -1)
    return (gate * _sigmoid(gate) * up).to(gate_up.dtype)


def _swiglu_backward(dy: Tensor, gate_up: Tensor) -> Tensor:
    dy, (gate, up) = _wide(dy), _wide(gate_up).chunk(2, -1)
    share = _sigmoid(gate)
    silu = gate * share
    return _side_by_side((dy * up * (share + silu * (1.0 - share)), dy * silu), gate_up.dtype)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        return run(_swiglu, _rows(gate_up)).view(*gate_up.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        return run(_swiglu_backward, _rows(grads[0]), _rows(gate_up)).view(gate_up.shape)


def _gelu(x: Tensor, bias: Tensor | None) -> Tensor:
    wide = _wide(x) if bias is None else _wide(x) + bias
    return (wide * _sigmoid(_GELU * (wide + _CUBIC * wide * wide * wide))).to(x.dtype)


def _gelu_backward(dy: Tensor, x: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The gradient of x, and what adds up to that of the bias."""
    wide = _wide(x) if bias is None else _wide(x) + bias
    share = _sigmoid(_GELU * (wide + _CUBIC * wide * wide * wide))
    slope = _GELU * (1.0 + 3.0 * _CUBIC * wide * wide)
    dx = _wide(dy) * share * (1.0 + wide * (1.0 - share) * slope)
    return dx.to(x.dtype), None if bias is None else dx


class _Gelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, bias)
        return run(_gelu, _rows(x), bias).view(x.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, bias = ctx.saved_tensors
        dx, wide = run(_gelu_backward, _rows(grads[0]), _rows(x), bias)
        return dx.view(x.shape), None if bias is None else _sum_of_rows(wide, bias.dtype)


def _hash_rows(token_index: Tensor, key: Tensor) -> Tensor:
    """Code of its own: inside `_drop`, it would be computed anew for each vector of a row."""
    return row_hash(key, token_index)


def _drop(x: Tensor, p: float, hashes: Tensor, feature_offset: int) -> Tensor:
    """x [n, h] in float32 or wider, dropped and scaled; hashes [n] of its rows."""
    if p >= 1.0:
        return torch.zeros_like(x)
    feature = hash_features(torch.arange(feature_offset, feature_offset + x.shape[-1]))
    keep = _mix(hashes[:, None] + feature) >= keep_threshold(p)
    return torch.where(keep, x * (1.0 / (1.0 - p)), 0.0)


def _mix(x: Tensor) -> Tensor:
    """`dropout.mix_`, not in place."""
    x = (x ^ ((x >> 16) & 0xFFFF)) * 0x21F0AAAD
    x = (x ^ ((x >> 15) & 0x1FFFF)) * 0x735A2D97
    return x ^ ((x >> 15) & 0x1FFFF)


def _drop_add(
    x: Tensor, bias: Tensor | None, residual: Tensor | None, p: float, hashes: Tensor, feature_offset: int
) -> Tensor:
    branch = _drop(_wide(x) if bias is None else _wide(x) + bias, p, hashes, feature_offset)
    return (branch if residual is None else residual + branch).to(x.dtype)


def _drop_backward(dy: Tensor, p: float, hashes: Tensor, feature_offset: int) -> Tensor:
    return _drop(_wide(dy), p, hashes, feature_offset).to(dy.dtype)


class _BiasDropoutAdd(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        bias: Tensor | None,
        residual: Tensor | None,
        p: float,
        key: Tensor,
        token_index: Tensor,
        feature_offset: int,
    ) -> Tensor:
        ctx.save_for_backward(bias, key, token_index)
        ctx.p, ctx.feature_offset, ctx.adds = p, feature_offset, residual is not None
        rows = None if residual is None else _rows(residual)
        hashes = run(_hash_rows, token_index.reshape(-1), key)
        y = run(_drop_add, _rows(x), bias, rows, p, hashes, feature_offset)
        return y.view(x.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        bias, key, index = ctx.saved_tensors
        dy = grads[0]
        hashes = run(_hash_rows, index.reshape(-1), key)
        dx = run(_drop_backward, _rows(dy), ctx.p, hashes, ctx.feature_offset)
        dbias = None if bias is None else _sum_of_rows(dx, bias.dtype)
        return dx.view(dy.shape), dbias, dy if ctx.adds else None, None, None, None, None


def _ce_stats(logits: Tensor, targets: Tensor, with_sum: bool) -> Tensor:
    x = _wide(logits)
    top = x.amax(-1)
    # A row of -inf has no finite maximum to subtract.
    shift = torch.where(top == float("-inf"), 0.0, top)
    total = ((x - shift[:, None]) * _LOG2_E).exp2().sum(-1)
    picked = logits.gather(1, targets.clamp(min=0)[:, None])[:, 0].to(x.dtype)
    picked = torch.where(targets >= 0, picked, 0.0)
    return torch.stack((top, total, picked, x.sum(-1) if with_sum else torch.zeros_like(top)))


def _ce_grad(
    logits: Tensor, targets: Tensor, lse: Tensor, grad: Tensor, smoothing: float, everywhere: float, z_loss: float
) -> None:
    probs = ((logits.to(lse.dtype) - lse[:, None]) * _LOG2_E).exp2()
    weight = grad if z_loss == 0.0 else grad * (2.0 * z_loss * lse + 1.0)
    found = probs * weight[:, None] - (grad * everywhere)[:, None]
    columns = torch.arange(logits.shape[1])
    found = found - torch.where(columns == targets[:, None], grad[:, None] * (1.0 - smoothing), 0.0)
    logits.copy_(torch.where(grad[:, None] == 0.0, 0.0, found))


def _between_zeros(before: int, x: Tensor, after: int) -> Tensor:
    """x [s, b, h] with zeros around it, written once. F.pad would be a condition in each loop, or make no vectors."""
    return torch.cat((x.new_zeros(before, *x.shape[1:]), x, x.new_zeros(after, *x.shape[1:])))


def _convolve(u: Tensor, taps: Tensor) -> Tensor:
    """[s, b, h] of u [s + k - 1, b, h], which has k - 1 rows of zeros at one end."""
    size = len(u) - taps.shape[1] + 1
    z = u[:size] * taps[:, 0]
    for place in range(1, taps.shape[1]):
        z = z + u[place : place + size] * taps[:, place]
    return z


def _conv_forward(bcx: Tensor, weight: Tensor) -> Tensor:
    b, c, x = _wide(bcx).chunk(3, -1)
    return (c * _convolve(_between_zeros(weight.shape[1] - 1, b * x, 0), _wide(weight))).to(bcx.dtype)


def _conv_backward(dy: Tensor, bcx: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The gradient of bcx; u and dz, zeros before and behind, for that of the taps."""
    b, c, x = _wide(bcx).chunk(3, -1)
    taps, dy, others = _wide(weight), _wide(dy), weight.shape[1] - 1
    u, dz = _between_zeros(others, b * x, 0), _between_zeros(0, dy * c, others)
    du = _convolve(dz, taps.flip(-1))
    return _side_by_side((du * x, dy * _convolve(u, taps), du * b), bcx.dtype), u, dz


def _tap_products(u: Tensor, dz: Tensor, count: int) -> Tensor:
    """[s, k, h]: what adds up to the gradient of each tap, summed over the batch."""
    size = len(u) - count + 1
    return torch.stack([(dz[:size] * u[place : place + size]).sum(1) for place in range(count)], 1)


class _ShortConv(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, bcx: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(bcx, weight)
        return run(_conv_forward, bcx, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        bcx, weight = ctx.saved_tensors
        dbcx, u, dz = run(_conv_backward, grads[0], bcx, weight)
        products = run(_tap_products, u, dz, weight.shape[1])
        return dbcx, _sum_of_rows(products, weight.dtype).t().contiguous()


def _weighted_swiglu(gate_up: Tensor, probs: Tensor) -> Tensor:
    gate, up = _wide(gate_up).chunk(2, -1)
    return (gate * _sigmoid(gate) * up * probs[:, None]).to(gate_up.dtype)


def _weighted_swiglu_backward(dout: Tensor, gate_up: Tensor, probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    dy, (gate, up) = _wide(dout), _wide(gate_up).chunk(2, -1)
    share = _sigmoid(gate)
    silu = gate * share
    product = silu * up
    dprobs = (product * dy).sum(-1).to(probs.dtype)
    dy = dy * probs[:, None]
    dgate_up = _side_by_side((dy * up * (share + silu * (1.0 - share)), dy * silu), gate_up.dtype)
    return (product * probs[:, None]).to(gate_up.dtype), dgate_up, dprobs
