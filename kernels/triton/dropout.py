"""Stateless dropout, alone and between bias and residual addition, with the bits of the torch version.

Programs make the mask where they need it, forward and backward, from the same hash of (key, token, feature).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megalite.kernels.dropout import keep_threshold

from .launch import launch, launch_row
from .rows import accumulator, accumulator_dtype, rows_of


def dropout(x: Tensor, p: float, key: Tensor, token_index: Tensor, feature_offset: int = 0) -> Tensor:
    """Zeroes each element of x [..., h] with probability p and scales the others by 1 / (1 - p).

    token_index: int64 [...], the number of each token in the run. feature_offset: the number of x's first feature in
    the uncut tensor. With p = 0 it returns x itself.
    """
    if p == 0.0:
        return x
    return _dropout(x, p, key, token_index, feature_offset)


def bias_dropout_add(
    x: Tensor, bias: Tensor | None, residual: Tensor, p: float, key: Tensor | None, token_index: Tensor | None
) -> Tensor:
    """residual + dropout(x + bias) for x, residual [..., h] and bias [h], all of one dtype; keeps no activation.

    key and token_index [...] as in `dropout`; they may be None when p = 0.
    """
    if p == 0.0 and bias is None:
        return residual + x
    assert p == 0.0 or (key is not None and token_index is not None)
    return _bias_dropout_add(x, bias, residual, p, key, token_index)


@torch.library.custom_op("megalite::dropout", mutates_args=())
def _dropout(x: Tensor, p: float, key: Tensor, token_index: Tensor, feature_offset: int) -> Tensor:
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch_forward(x, None, None, out, p, key, token_index, feature_offset)
    return out


@torch.library.custom_op("megalite::bias_dropout_add", mutates_args=())
def _bias_dropout_add(
    x: Tensor, bias: Tensor | None, residual: Tensor, p: float, key: Tensor | None, token_index: Tensor | None
) -> Tensor:
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch_forward(x, bias, residual, out, p, key, token_index, 0)
    return out


@torch.library.custom_op("megalite::bias_dropout_backward", mutates_args=())
def _bias_dropout_backward(
    dout: Tensor, p: float, key: Tensor | None, token_index: Tensor | None
) -> tuple[Tensor, Tensor]:
    """(dx, dbias in float32 or wider)."""
    dx, dy = torch.empty(dout.shape, dtype=dout.dtype, device=dout.device), rows_of(dout)
    row = launch_row("bias_dropout_backward", dout.dtype, dout.shape[-1])
    count, width = dy.shape
    programs = min(row["CHUNKS"], triton.cdiv(count, row["ROWS"]))
    partial = torch.empty(programs, width, dtype=accumulator_dtype(dout.dtype), device=dout.device)
    grid = triton.cdiv(width, row["BLOCK"]), programs
    tokens = None if token_index is None else token_index.reshape(-1)
    sizes = count, width, dy.stride(0)
    launch(_drop_grad, grid, row, dy, key, tokens, dx, partial, *sizes, **_constants(dout.dtype, p))
    return dx, partial.sum(0)


def _launch_forward(
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    out: Tensor,
    p: float,
    key: Tensor | None,
    token_index: Tensor | None,
    feature_offset: int,
) -> None:
    rows, added = rows_of(x), None if residual is None else rows_of(residual)
    count, width = rows.shape
    row = launch_row("bias_dropout_add", x.dtype, width)
    grid = triton.cdiv(width, row["BLOCK"]), triton.cdiv(count, row["ROWS"])
    tokens = None if token_index is None else token_index.reshape(-1)
    sizes = count, width, rows.stride(0), 0 if added is None else added.stride(0), feature_offset
    launch(_drop_add, grid, row, rows, bias, added, key, tokens, out, *sizes, **_constants(x.dtype, p))


def _constants(dtype: torch.dtype, p: float) -> dict[str, Any]:
    """Constants rather than arguments: a float argument is rounded to float32."""
    scale = 1.0 / (1.0 - p) if p < 1.0 else 0.0
    return dict(SCALE=scale, THRESHOLD=keep_threshold(p) if p < 1.0 else 0, ACC=accumulator(dtype))


_dropout.register_fake(lambda x, p, key, token_index, feature_offset: x.new_empty(x.shape))
_bias_dropout_add.register_fake(lambda x, bias, residual, p, key, token_index: x.new_empty(x.shape))


@_bias_dropout_backward.register_fake
def _(dout: Tensor, p: float, key: Tensor | None, token_index: Tensor | None) -> tuple[Tensor, Tensor]:
    return dout.new_empty(dout.shape), dout.new_empty(dout.shape[-1:], dtype=accumulator_dtype(dout.dtype))


def _save_dropout(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, ctx.p, key, token_index, ctx.feature_offset = inputs
    ctx.save_for_backward(key, token_index)


def _save_bias_dropout_add(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, bias, _, ctx.p, key, token_index = inputs
    ctx.save_for_backward(key, token_index)
    ctx.bias_dtype = None if bias is None else bias.dtype


def _backward_dropout(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
    return _dropout(dout, ctx.p, *ctx.saved_tensors, ctx.feature_offset), None, None, None, None


def _backward_bias_dropout_add(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
    key, token_index = ctx.saved_tensors
    if ctx.bias_dtype is None:
        return _dropout(dout, ctx.p, key, token_index, 0), None, dout, None, None, None
    dx, dbias = _bias_dropout_backward(dout, ctx.p, key, token_index)
    return dx, dbias.to(ctx.bias_dtype), dout, None, None, None


_dropout.register_autograd(_backward_dropout, setup_context=_save_dropout)
_bias_dropout_add.register_autograd(_backward_bias_dropout_add, setup_context=_save_bias_dropout_add)


@triton.jit
def mix(x):
    """Scrambles uint32 numbers, one to one."""
    x ^= x >> 16
    x *= 0x21F0AAAD
    x ^= x >> 15
    x *= 0x735A2D97
    return x ^ (x >> 15)


@triton.jit
def row_hash(key, tokens):
    """uint32 hash of each token number (int64) under the key at this address."""
    low, high = tokens.to(tl.uint32), (tokens >> 32).to(tl.uint32)
    first, second = tl.load(key).to(tl.uint32, bitcast=True), tl.load(key + 1).to(tl.uint32, bitcast=True)
    return mix(mix(low ^ first) ^ high ^ second)


@triton.jit
def hash_elements(rows, features):
    """int32 hash of elements: row hashes and feature numbers that broadcast against each other."""
    return mix(rows + features.to(tl.uint32) * 0x9E3779B1).to(tl.int32, bitcast=True)


@triton.jit
def _dropped(value, key, tokens, row, features, count, SCALE: tl.constexpr, THRESHOLD: tl.constexpr):
    """value, dropped and scaled; dropped infinities are 0."""
    if SCALE == 0.0:
        return tl.zeros_like(value)
    hashes = row_hash(key, tl.load(tokens + row, mask=row < count, other=0))
    return tl.where(hash_elements(hashes, features) >= THRESHOLD, value * SCALE, 0.0)


@triton.jit
def _drop_add(
    x, bias, residual, key, tokens, out, count, width, stride, residual_stride, feature_offset,
    SCALE: tl.constexpr, THRESHOLD: tl.constexpr, ACC: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[None, :]
    row = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    inside = (row < count) & (columns < width)
    value = tl.load(x + row * stride + columns, mask=inside, other=0.0).to(ACC)
    if bias is not None:
        value += tl.load(bias + columns, mask=columns < width, other=0.0).to(ACC)
    if SCALE != 1.0:
        value = _dropped(value, key, tokens, row, columns + feature_offset, count, SCALE, THRESHOLD)
    if residual is not None:
        value += tl.load(residual + row * residual_stride + columns, mask=inside, other=0.0).to(ACC)
    tl.store(out + row * width + columns, value, mask=inside)


@triton.jit
def _drop_grad(
    dout, key, tokens, dx, partial, count, width, stride,
    SCALE: tl.constexpr, THRESHOLD: tl.constexpr, ACC: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[None, :]
    total = tl.zeros([ROWS, BLOCK], ACC)
    for start in range(tl.program_id(1) * ROWS, count, tl.num_programs(1) * ROWS):
        row = start + tl.arange(0, ROWS)[:, None].to(tl.int64)
        inside = (row < count) & (columns < width)
        value = tl.load(dout + row * stride + columns, mask=inside, other=0.0).to(ACC)
        if SCALE != 1.0:
            value = _dropped(value, key, tokens, row, columns, count, SCALE, THRESHOLD)
        tl.store(dx + row * width + columns, value, mask=inside)
        total += value
    sums = tl.sum(total, 0, keep_dims=True)
    tl.store(partial + tl.program_id(1) * width + columns, sums, mask=columns < width)
