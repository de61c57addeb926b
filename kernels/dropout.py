"""Stateless dropout: a mask is a hash of (seed, step, site, token, feature), so no layout and no recompute changes it.

There is no generator to seed, fork or save. A token is numbered in the whole run, a feature in the uncut tensor; every
rank, every recompute and every backend gets the same bit for the same pair.

    row     = mix(mix(token_low ^ key[0]) ^ token_high ^ key[1])
    element = mix(row + feature * 0x9E3779B1)
    keep    = element >= round(p * 2^32) - 2^31          (signed)

All of it is 32-bit arithmetic that wraps around; `mix` is a bijection on 32 bits (shift right 16, multiply, shift 15,
multiply, shift 15, each shift folded in by xor). Shifts are logical.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .saved import Saved

_MASK_64 = (1 << 64) - 1
_GOLDEN = 0x9E3779B1 - (1 << 32)  # as a signed 32-bit number
_CHUNK = 1 << 18  # elements hashed at once: small enough that the hash stays in cache


def dropout_key(seed: int, step: int, site: int, device: torch.device | str = "cpu") -> Tensor:
    """The two 32-bit words that make one dropout site of one step: int32 [2].

    `site` numbers the places of the model that drop (layer and place in the layer), the same in every layout. The key
    is a tensor, so that a compiled step is not compiled again when `step` moves.
    """
    state = 0
    for word in (seed, step, site):
        state = _splitmix64(state ^ (word & _MASK_64))
    words = [_signed32(state & 0xFFFFFFFF), _signed32(state >> 32)]
    return torch.tensor(words, dtype=torch.int32, device=device)


def dropout(x: Tensor, p: float, key: Tensor, token_index: Tensor, feature_offset: int = 0) -> Tensor:
    """Zeroes each element of x [..., h] with probability p and scales the others by 1 / (1 - p).

    token_index: int64 [...], the number of each token in the run. feature_offset: the number of x's first feature in
    the uncut tensor. With p = 0 it returns x itself.
    """
    if p == 0.0:
        return x
    return _Dropout.apply(x, p, key, token_index, feature_offset)


def bias_dropout_add(
    x: Tensor, bias: Tensor | None, residual: Tensor, p: float, key: Tensor | None, token_index: Tensor | None
) -> Tensor:
    """residual + dropout(x + bias) for x, residual [..., h] and bias [h], all of one dtype; keeps no activation.

    key and token_index [...] as in `dropout`; they may be None when p = 0.
    """
    if p == 0.0:
        return residual + x if bias is None else residual + (x + bias)
    assert key is not None and token_index is not None
    return _BiasDropoutAdd.apply(x, bias, residual, p, key, token_index)


def dropout_saved(p: float) -> Saved:
    """What `dropout` and `bias_dropout_add` keep: the two words of the key; token numbers are those of all layers."""
    return Saved(own=8 if p > 0.0 else 0)


def row_hash(key: Tensor, token_index: Tensor) -> Tensor:
    """int32 hash of each token number of `token_index` (int64, any shape) under `key`."""
    low, high = token_index.to(torch.int32), (token_index >> 32).to(torch.int32)
    return mix_(mix_(low ^ key[0]).bitwise_xor_(high).bitwise_xor_(key[1]))


def mix_(x: Tensor) -> Tensor:
    """Scrambles the int32 numbers of x in place, one to one."""
    _xor_shift_(x, 16).mul_(0x21F0AAAD)
    _xor_shift_(x, 15).mul_(0x735A2D97)
    return _xor_shift_(x, 15)


def feature_hash(start: int, stop: int, device: torch.device) -> Tensor:
    """int32 [stop - start]: what each feature number adds to a row hash before the last mix."""
    return hash_features(torch.arange(start, stop, device=device))


def hash_features(features: Tensor) -> Tensor:
    """int32: the same for feature numbers int64 [n] in any order."""
    return (features * _GOLDEN).to(torch.int32)


def keep_threshold(p: float) -> int:
    """The least hash that survives dropout with probability p < 1; it fits in int32."""
    return min(round(p * 2**32), 2**32 - 1) - 2**31


def keep_mask(key: Tensor, p: float, token_index: Tensor, num_features: int, feature_offset: int = 0) -> Tensor:
    """bool [*token_index.shape, num_features]: True where dropout with probability p keeps the element."""
    if p >= 1.0:
        return torch.zeros(*token_index.shape, num_features, dtype=torch.bool, device=token_index.device)
    feature = feature_hash(feature_offset, feature_offset + num_features, token_index.device)
    return mix_(row_hash(key, token_index).unsqueeze(-1) + feature) >= keep_threshold(p)


def uniform(key: Tensor, token_index: Tensor, num_features: int, dtype: torch.dtype) -> Tensor:
    """[*token_index.shape, num_features] in (0, 1), from the same hash as `keep_mask`."""
    feature = feature_hash(0, num_features, token_index.device)
    return mix_(row_hash(key, token_index).unsqueeze(-1) + feature).to(dtype).add_(2.0**31 + 0.5).mul_(2.0**-32)


def _xor_shift_(x: Tensor, bits: int) -> Tensor:
    # Torch shifts int32 arithmetically; the mask drops the copies of the sign bit.
    return x.bitwise_xor_((x >> bits).bitwise_and_((1 << (32 - bits)) - 1))


def _splitmix64(state: int) -> int:
    z = (state + 0x9E3779B97F4A7C15) & _MASK_64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return z ^ (z >> 31)


def _signed32(word: int) -> int:
    return word - (1 << 32) if word >= 1 << 31 else word


def _drop_(out: Tensor, p: float, key: Tensor, token_index: Tensor, feature_offset: int) -> Tensor:
    """Drops and scales the rows of out [n, h] in place, a cacheful of rows at a time."""
    num_features = out.shape[-1]
    scale = 1.0 / (1.0 - p) if p < 1.0 else 0.0
    rows = token_index.reshape(-1)
    step = max(1, _CHUNK // max(1, num_features)) if out.device.type == "cpu" else max(1, len(rows))
    for start in range(0, len(rows), step):
        part = slice(start, start + step)
        keep = keep_mask(key, p, rows[part], num_features, feature_offset)
        # where, not a product with 0: a dropped infinity is 0.
        out[part] = torch.where(keep, out[part] * scale, 0.0)
    return out


class _Dropout(torch.autograd.Function):
    """y = x * mask / (1 - p); backward makes the mask again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float, key: Tensor, token_index: Tensor, feature_offset: int) -> Tensor:
        ctx.save_for_backward(key, token_index)
        ctx.p, ctx.feature_offset = p, feature_offset
        out = x.clone(memory_format=torch.contiguous_format)
        _drop_(out.view(-1, x.shape[-1]), p, key, token_index, feature_offset)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        key, token_index = ctx.saved_tensors
        dx = grads[0].clone(memory_format=torch.contiguous_format)
        _drop_(dx.view(-1, dx.shape[-1]), ctx.p, key, token_index, ctx.feature_offset)
        return dx, None, None, None, None


class _BiasDropoutAdd(torch.autograd.Function):
    """residual + (x + bias) * mask / (1 - p); saves no activation."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, bias: Tensor | None, residual: Tensor, p: float, key: Tensor, token_index: Tensor
    ) -> Tensor:
        ctx.save_for_backward(key, token_index)
        ctx.p, ctx.bias_dtype = p, None if bias is None else bias.dtype
        branch = x.clone(memory_format=torch.contiguous_format) if bias is None else x + bias
        _drop_(branch.view(-1, x.shape[-1]), p, key, token_index, 0)
        return branch.add_(residual)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        key, token_index = ctx.saved_tensors
        dy = grads[0]
        dx = dy.clone(memory_format=torch.contiguous_format)
        rows = _drop_(dx.view(-1, dx.shape[-1]), ctx.p, key, token_index, 0)
        dbias = None
        if ctx.bias_dtype is not None:
            dbias = rows.sum(0, dtype=torch.promote_types(dy.dtype, torch.float32)).to(ctx.bias_dtype)
        return dx, dbias, dy, None, None, None
