"""RMSNorm and LayerNorm, with or without the residual addition before them, in one pass over memory each way.

Rows up to `_WIDEST` lie in registers; longer ones are read twice, the second time from the cache as a rule.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import launch, launch_row
from .rows import accumulator, accumulator_dtype, rows_of

_WIDEST = 8192


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dim: x [..., h], weight [h]; rounded to x's dtype once."""
    return _norm(x, weight, None, eps)[0]


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """(x - mean) / sqrt(var + eps) * weight + bias over the last dim: x [..., h], weight and bias [h]."""
    return _norm(x, weight, bias, eps)[0]


def rms_norm_add(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(rms_norm of the sum, the sum x + residual), the sum rounded before it is normalised; all of one shape."""
    out, total, *_ = _add_norm(x, residual, weight, None, eps)
    return out, total


def layer_norm_add(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(layer_norm of the sum, the sum x + residual), the sum rounded before it is normalised; all of one shape."""
    out, total, *_ = _add_norm(x, residual, weight, bias, eps)
    return out, total


@torch.library.custom_op("megalite::norm", mutates_args=())
def _norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """(normed, mean [rows], 1 / standard deviation [rows]); RMSNorm without a bias, its mean empty."""
    out, mean, rstd = _outputs(x, bias)
    _launch_forward(x, None, weight, bias, (out, None, mean, rstd), eps)
    return out, mean, rstd


@torch.library.custom_op("megalite::add_norm", mutates_args=())
def _add_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(normed, sum, mean, 1 / standard deviation)."""
    out, mean, rstd = _outputs(x, bias)
    total = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch_forward(x, residual, weight, bias, (out, total, mean, rstd), eps)
    return out, total, mean, rstd


@torch.library.custom_op("megalite::norm_backward", mutates_args=())
def _norm_backward(
    dout: Tensor, dtotal: Tensor | None, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """(dx, dweight, dbias), dtotal added to dx before it is rounded; RMSNorm where mean is empty, its dbias empty."""
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    is_layer = mean.numel() > 0 or rstd.numel() == 0
    tensors = rows_of(dout), None if dtotal is None else rows_of(dtotal), rows_of(x)
    backward = _backward_rows if x.shape[-1] <= _WIDEST else _backward_wide
    dweight, dbias = backward(*tensors, weight, mean, rstd, dx, is_layer)
    return dx, dweight.sum(0).to(weight.dtype), dbias.sum(0).to(weight.dtype)


def _outputs(x: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    count, wide = x.shape[:-1].numel(), accumulator_dtype(x.dtype)
    mean = torch.empty(count if bias is not None else 0, dtype=wide, device=x.device)
    return (
        torch.empty(x.shape, dtype=x.dtype, device=x.device),
        mean,
        torch.empty(count, dtype=wide, device=x.device),
    )


def _launch_forward(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, outputs: tuple[Any, ...], eps: float
) -> None:
    rows, added = rows_of(x), None if residual is None else rows_of(residual)
    count, width = rows.shape
    strides = rows.stride(0), 0 if added is None else added.stride(0)
    arguments = rows, added, weight, bias, *outputs, count, width, *strides, eps
    constants = dict(LAYER=bias is not None, ACC=accumulator(x.dtype))
    if width > _WIDEST:
        launch(_norm_wide, (count,), launch_row("norm_wide", x.dtype, width), *arguments, **constants)
        return
    row = launch_row("norm", x.dtype, width)
    block, tile = _tile(width, row["TILE"])
    grid = (min(row["PROGRAMS"], triton.cdiv(count, tile)),)
    launch(_norm_rows, grid, row, *arguments, **constants, ROWS=tile, BLOCK=block)


def _backward_rows(
    dout: Tensor,
    dtotal: Tensor | None,
    x: Tensor,
    weight: Tensor,
    mean: Tensor,
    rstd: Tensor,
    dx: Tensor,
    is_layer: bool,
) -> tuple[Tensor, Tensor]:
    """Writes dx; returns partial sums of dweight and dbias, [programs, h] each."""
    count, width = x.shape
    row = launch_row("norm_backward", x.dtype, width)
    block, tile = _tile(width, row["TILE"])
    programs = min(row["PROGRAMS"], triton.cdiv(count, tile))
    dweight, dbias = _partials(programs, width, rstd, is_layer)
    strides = dout.stride(0), 0 if dtotal is None else dtotal.stride(0), x.stride(0)
    sizes = count, width, *strides
    launch(
        _norm_rows_grad, (programs,), row, dout, dtotal, x, weight, mean, rstd, dx, dweight, dbias, *sizes,
        LAYER=is_layer, ACC=accumulator(x.dtype), ROWS=tile, BLOCK=block,
    )  # fmt: skip
    return dweight, dbias


def _backward_wide(
    dout: Tensor,
    dtotal: Tensor | None,
    x: Tensor,
    weight: Tensor,
    mean: Tensor,
    rstd: Tensor,
    dx: Tensor,
    is_layer: bool,
) -> tuple[Tensor, Tensor]:
    """The same for long rows: dx a row a program, the sums a block of columns a program."""
    count, width = x.shape
    row, columns = (launch_row(name, x.dtype, width) for name in ("norm_wide", "norm_columns"))
    strides = dout.stride(0), 0 if dtotal is None else dtotal.stride(0), x.stride(0)
    constants = dict(LAYER=is_layer, ACC=accumulator(x.dtype))
    launch(
        _norm_wide_grad, (count,), row, dout, dtotal, x, weight, mean, rstd, dx, width, *strides, **constants
    )  # fmt: skip
    programs = min(columns["PROGRAMS"], triton.cdiv(count, columns["ROWS"]))
    dweight, dbias = _partials(programs, width, rstd, is_layer)
    grid = triton.cdiv(width, columns["BLOCK"]), programs
    sizes = count, width, dout.stride(0), x.stride(0)
    launch(_norm_wide_sums, grid, columns, dout, x, mean, rstd, dweight, dbias, *sizes, **constants)
    return dweight, dbias


def _partials(programs: int, width: int, rstd: Tensor, is_layer: bool) -> tuple[Tensor, Tensor]:
    dweight = torch.empty(programs, width, dtype=rstd.dtype, device=rstd.device)
    return dweight, torch.empty(programs if is_layer else 0, width, dtype=rstd.dtype, device=rstd.device)


def _tile(width: int, elements: int) -> tuple[int, int]:
    """(columns, rows) of a program's tile: a whole row, and as many of them as make up `elements`."""
    block = triton.next_power_of_2(max(1, width))
    return block, max(1, elements // block)


@_norm.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    return _fake_outputs(x, bias)


@_add_norm.register_fake
def _(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    out, mean, rstd = _fake_outputs(x, bias)
    return out, x.new_empty(x.shape), mean, rstd


@_norm_backward.register_fake
def _(
    dout: Tensor, dtotal: Tensor | None, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), weight.new_empty(weight.shape), weight.new_empty(weight.shape)


def _fake_outputs(x: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    count, wide = x.numel() // x.shape[-1], accumulator_dtype(x.dtype)
    mean = x.new_empty(count if bias is not None else 0, dtype=wide)
    return x.new_empty(x.shape), mean, x.new_empty(count, dtype=wide)


def _save_norm(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, bias, _ = inputs
    _, mean, rstd = output
    ctx.save_for_backward(x, weight, mean, rstd)
    ctx.mark_non_differentiable(mean, rstd)
    ctx.bias_dtype = None if bias is None else bias.dtype


def _save_add_norm(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, _, weight, bias, _ = inputs
    _, total, mean, rstd = output
    ctx.save_for_backward(total, weight, mean, rstd)
    ctx.mark_non_differentiable(mean, rstd)
    ctx.bias_dtype = None if bias is None else bias.dtype


def _backward_norm(ctx: Any, dout: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    dx, dweight, dbias = _norm_backward(dout, None, *ctx.saved_tensors)
    return dx, dweight, dbias.to(ctx.bias_dtype) if ctx.bias_dtype is not None else None, None


def _backward_add_norm(ctx: Any, dout: Tensor, dtotal: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    dx, dweight, dbias = _norm_backward(dout, dtotal, *ctx.saved_tensors)
    return dx, dx, dweight, dbias.to(ctx.bias_dtype) if ctx.bias_dtype is not None else None, None


_norm.register_autograd(_backward_norm, setup_context=_save_norm)
_add_norm.register_autograd(_backward_add_norm, setup_context=_save_add_norm)


@triton.jit
def _norm_rows(
    x, residual, weight, bias, out, total, mean, rstd, count, width, stride, residual_stride, eps,
    LAYER: tl.constexpr, ACC: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    columns = tl.arange(0, BLOCK)[None, :]
    present = columns < width
    for start in range(tl.program_id(0) * ROWS, count, tl.num_programs(0) * ROWS):
        row = start + tl.arange(0, ROWS)[:, None].to(tl.int64)
        inside = (row < count) & present
        value = tl.load(x + row * stride + columns, mask=inside, other=0.0).to(ACC)
        if residual is not None:
            value += tl.load(residual + row * residual_stride + columns, mask=inside, other=0.0).to(ACC)
            # What is normalised, now and when backward does it again, is the rounded sum.
            rounded = value.to(total.dtype.element_ty)
            tl.store(total + row * width + columns, rounded, mask=inside)
            value = rounded.to(ACC)
        if LAYER:
            middle = tl.sum(value, 1, keep_dims=True) / width
            value = tl.where(inside, value - middle, 0.0)
            tl.store(mean + row, middle, mask=row < count)
        inverse = tl.rsqrt(tl.sum(value * value, 1, keep_dims=True) / width + eps)
        tl.store(rstd + row, inverse, mask=row < count)
        # Weights come from the L1 cache for each row: kept, they would cost more registers than the row does.
        normed = value * inverse * tl.load(weight + columns, mask=present, other=0.0).to(ACC)
        if LAYER:
            normed += tl.load(bias + columns, mask=present, other=0.0).to(ACC)
        tl.store(out + row * width + columns, normed, mask=inside)


@triton.jit
def _norm_rows_grad(
    dout, dtotal, x, weight, mean, rstd, dx, dweight, dbias, count, width, dout_stride, dtotal_stride, stride,
    LAYER: tl.constexpr, ACC: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    columns = tl.arange(0, BLOCK)[None, :]
    present = columns < width
    weight_sum = tl.zeros([ROWS, BLOCK], ACC)
    bias_sum = tl.zeros([ROWS, BLOCK], ACC)
    for start in range(tl.program_id(0) * ROWS, count, tl.num_programs(0) * ROWS):
        row = start + tl.arange(0, ROWS)[:, None].to(tl.int64)
        inside = (row < count) & present
        normed = tl.load(x + row * stride + columns, mask=inside, other=0.0).to(ACC)
        dy = tl.load(dout + row * dout_stride + columns, mask=inside, other=0.0).to(ACC)
        inverse = tl.load(rstd + row, mask=row < count, other=0.0)
        if LAYER:
            normed -= tl.load(mean + row, mask=row < count, other=0.0)
            bias_sum += dy
        normed *= inverse
        weight_sum += dy * normed
        dy *= tl.load(weight + columns, mask=present, other=0.0).to(ACC)
        along = tl.sum(dy * normed, 1, keep_dims=True) / width
        if LAYER:
            dy -= tl.sum(dy, 1, keep_dims=True) / width
        grad = (dy - normed * along) * inverse
        if dtotal is not None:
            grad += tl.load(dtotal + row * dtotal_stride + columns, mask=inside, other=0.0).to(ACC)
        tl.store(dx + row * width + columns, grad, mask=inside)
    place = tl.program_id(0) * width + columns
    tl.store(dweight + place, tl.sum(weight_sum, 0, keep_dims=True), mask=present)
    if LAYER:
        tl.store(dbias + place, tl.sum(bias_sum, 0, keep_dims=True), mask=present)


@triton.jit
def _summed(x, residual, total, columns, width, ACC: tl.constexpr):
    """x, or the rounded sum with the residual, at these columns of a row; 0 beyond the row."""
    value = tl.load(x + columns, mask=columns < width, other=0.0).to(ACC)
    if residual is not None:
        value += tl.load(residual + columns, mask=columns < width, other=0.0).to(ACC)
        value = value.to(total.dtype.element_ty).to(ACC)
    return value


@triton.jit
def _norm_wide(
    x, residual, weight, bias, out, total, mean, rstd, count, width, stride, residual_stride, eps,
    LAYER: tl.constexpr, ACC: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    x += row * stride
    if residual is not None:
        residual += row * residual_stride
        total += row * width
    middle = tl.zeros([1], ACC)
    if LAYER:
        sums = tl.zeros([BLOCK], ACC)
        for start in range(0, width, BLOCK):
            sums += _summed(x, residual, total, start + tl.arange(0, BLOCK), width, ACC)
        middle += tl.sum(sums, 0) / width
    squares = tl.zeros([BLOCK], ACC)
    for start in range(0, width, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        value = tl.where(columns < width, _summed(x, residual, total, columns, width, ACC) - middle, 0.0)
        squares += value * value
    inverse = tl.rsqrt(tl.sum(squares, 0) / width + eps)
    tl.store(rstd + row, inverse)
    if LAYER:
        tl.store(mean + row + tl.arange(0, 1), middle)
    for start in range(0, width, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        present = columns < width
        value = _summed(x, residual, total, columns, width, ACC)
        if residual is not None:
            tl.store(total + columns, value, mask=present)
        normed = (value - middle) * inverse * tl.load(weight + columns, mask=present, other=0.0).to(ACC)
        if LAYER:
            normed += tl.load(bias + columns, mask=present, other=0.0).to(ACC)
        tl.store(out + row * width + columns, normed, mask=present)


@triton.jit
def _norm_wide_grad(
    dout, dtotal, x, weight, mean, rstd, dx, width, dout_stride, dtotal_stride, stride,
    LAYER: tl.constexpr, ACC: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    x += row * stride
    dout += row * dout_stride
    inverse = tl.load(rstd + row)
    middle = tl.load(mean + row) if LAYER else 0.0
    products = tl.zeros([BLOCK], ACC)
    sums = tl.zeros([BLOCK], ACC)
    for start in range(0, width, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        present = columns < width
        dy = tl.load(dout + columns, mask=present, other=0.0).to(ACC)
        dy *= tl.load(weight + columns, mask=present, other=0.0).to(ACC)
        products += dy * (tl.load(x + columns, mask=present, other=0.0).to(ACC) - middle) * inverse
        sums += dy
    along = tl.sum(products, 0) / width
    shift = tl.sum(sums, 0) / width if LAYER else 0.0
    for start in range(0, width, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        present = columns < width
        dy = tl.load(dout + columns, mask=present, other=0.0).to(ACC)
        dy *= tl.load(weight + columns, mask=present, other=0.0).to(ACC)
        normed = (tl.load(x + columns, mask=present, other=0.0).to(ACC) - middle) * inverse
        grad = (dy - shift - normed * along) * inverse
        if dtotal is not None:
            grad += tl.load(dtotal + row * dtotal_stride + columns, mask=present, other=0.0).to(ACC)
        tl.store(dx + row * width + columns, grad, mask=present)


@triton.jit
def _norm_wide_sums(
    dout, x, mean, rstd, dweight, dbias, count, width, dout_stride, stride,
    LAYER: tl.constexpr, ACC: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[None, :]
    present = columns < width
    weight_sum = tl.zeros([ROWS, BLOCK], ACC)
    bias_sum = tl.zeros([ROWS, BLOCK], ACC)
    for start in range(tl.program_id(1) * ROWS, count, tl.num_programs(1) * ROWS):
        row = start + tl.arange(0, ROWS)[:, None].to(tl.int64)
        inside = (row < count) & present
        normed = tl.load(x + row * stride + columns, mask=inside, other=0.0).to(ACC)
        dy = tl.load(dout + row * dout_stride + columns, mask=inside, other=0.0).to(ACC)
        if LAYER:
            normed -= tl.load(mean + row, mask=row < count, other=0.0)
            bias_sum += dy
        weight_sum += dy * normed * tl.load(rstd + row, mask=row < count, other=0.0)
    place = tl.program_id(1) * width + columns
    tl.store(dweight + place, tl.sum(weight_sum, 0, keep_dims=True), mask=present)
    if LAYER:
        tl.store(dbias + place, tl.sum(bias_sum, 0, keep_dims=True), mask=present)
