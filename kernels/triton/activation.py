"""SwiGLU, GeGLU and bias-GELU in one pass over memory each way, saving nothing but their inputs."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import launch, launch_row
from .rows import accumulator, accumulator_dtype, row_and_columns, rows_of


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, [..., f] each; the two may be strided halves of one tensor."""
    return _gated(gate, up, False)


def swiglu_packed(gate_up: Tensor) -> Tensor:
    """silu(gate) * up for gate_up [..., 2f] that holds gate, then up: its gradient comes in one tensor too."""
    return _gated_packed(gate_up, False)


def geglu(gate: Tensor, up: Tensor) -> Tensor:
    """gelu(gate) * up in the tanh form, [..., f] each; the two may be strided halves of one tensor."""
    return _gated(gate, up, True)


def geglu_packed(gate_up: Tensor) -> Tensor:
    """gelu(gate) * up in the tanh form for gate_up [..., 2f] that holds gate, then up."""
    return _gated_packed(gate_up, True)


def gelu(x: Tensor, bias: Tensor | None = None) -> Tensor:
    """gelu(x + bias) in the tanh form, for x [..., f] and bias [f]."""
    return _gelu(x, bias)


def weighted_swiglu(gate_up: Tensor, probs: Tensor) -> Tensor:
    """silu(gate) * up * prob for gate_up [n, 2f] (gate first) and probs [n]: [n, f], rounded once."""
    return _weighted(gate_up, probs)


def weighted_swiglu_backward(dout: Tensor, gate_up: Tensor, probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(output again, gradient of gate_up, gradient of probs) of `weighted_swiglu` from its inputs alone."""
    return _weighted_backward(dout, gate_up, probs)


@torch.library.custom_op("megalite::gated", mutates_args=())
def _gated(gate: Tensor, up: Tensor, is_gelu: bool) -> Tensor:
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    _launch_gated(_gated_forward, (gate, up), (out,), is_gelu)
    return out


@torch.library.custom_op("megalite::gated_backward", mutates_args=())
def _gated_backward(dout: Tensor, gate: Tensor, up: Tensor, is_gelu: bool) -> tuple[Tensor, Tensor]:
    dgate, dup = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (gate, up))
    _launch_gated(_gated_grad, (dout, gate, up), (dgate, dup), is_gelu)
    return dgate, dup


@torch.library.custom_op("megalite::gated_packed", mutates_args=())
def _gated_packed(gate_up: Tensor, is_gelu: bool) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    _launch_gated(_gated_forward, (gate, up), (out,), is_gelu)
    return out


@torch.library.custom_op("megalite::gated_packed_backward", mutates_args=())
def _gated_packed_backward(dout: Tensor, gate_up: Tensor, is_gelu: bool) -> Tensor:
    dgate_up = torch.empty(gate_up.shape, dtype=gate_up.dtype, device=gate_up.device)
    _launch_gated(_gated_grad, (dout, *gate_up.chunk(2, -1)), dgate_up.chunk(2, -1), is_gelu)
    return dgate_up


@torch.library.custom_op("megalite::weighted_swiglu", mutates_args=())
def _weighted(gate_up: Tensor, probs: Tensor) -> Tensor:
    rows, row = rows_of(gate_up), launch_row("elementwise", gate_up.dtype)
    count, width = rows.shape[0], rows.shape[1] // 2
    out = torch.empty(count, width, dtype=gate_up.dtype, device=gate_up.device)
    grid = (count * triton.cdiv(width, row["BLOCK"]),)
    launch(
        _weighted_forward, grid, row, rows, probs.contiguous(), out, width, rows.stride(0), ACC=accumulator(out.dtype)
    )
    return out


@torch.library.custom_op("megalite::weighted_swiglu_backward", mutates_args=())
def _weighted_backward(dout: Tensor, gate_up: Tensor, probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    dy, rows, row = rows_of(dout), rows_of(gate_up), launch_row("weighted_swiglu_backward", gate_up.dtype)
    count, width = dy.shape
    out = torch.empty(count, width, dtype=gate_up.dtype, device=gate_up.device)
    dgate_up = torch.empty(gate_up.shape, dtype=gate_up.dtype, device=gate_up.device)
    dprobs = torch.empty(probs.shape, dtype=probs.dtype, device=probs.device)
    tensors = dy, rows, probs.contiguous(), out, dgate_up, dprobs
    strides = dy.stride(0), rows.stride(0)
    launch(_weighted_grad, (count,), row, *tensors, width, *strides, ACC=accumulator(gate_up.dtype))
    return out, dgate_up, dprobs


@torch.library.custom_op("megalite::gelu", mutates_args=())
def _gelu(x: Tensor, bias: Tensor | None) -> Tensor:
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows, row = rows_of(x), launch_row("gelu", x.dtype, x.shape[-1])
    grid = triton.cdiv(rows.shape[1], row["BLOCK"]), triton.cdiv(rows.shape[0], row["ROWS"])
    sizes = *rows.shape, rows.stride(0)
    launch(_gelu_forward, grid, row, rows, bias, out, *sizes, ACC=accumulator(x.dtype))
    return out


@torch.library.custom_op("megalite::gelu_backward", mutates_args=())
def _gelu_backward(dout: Tensor, x: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """(dx, dbias); without a bias dbias is empty."""
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    dy, rows, row = rows_of(dout), rows_of(x), launch_row("gelu_backward", x.dtype, x.shape[-1])
    count, width = rows.shape
    chunks = (
        min(row["CHUNKS"], triton.cdiv(count, row["ROWS"])) if bias is not None else triton.cdiv(count, row["ROWS"])
    )
    partial = torch.empty(chunks if bias is not None else 0, width, dtype=accumulator_dtype(x.dtype), device=x.device)
    grid = triton.cdiv(width, row["BLOCK"]), chunks
    sizes = count, width, dy.stride(0), rows.stride(0)
    launch(_gelu_grad, grid, row, dy, rows, bias, dx, partial, *sizes, ACC=accumulator(x.dtype))
    return dx, partial.sum(0).to(bias.dtype) if bias is not None else partial.sum(0)


_gated.register_fake(lambda gate, up, is_gelu: gate.new_empty(gate.shape))
_gated_backward.register_fake(lambda dout, gate, up, is_gelu: (gate.new_empty(gate.shape), up.new_empty(up.shape)))
_gated_packed.register_fake(lambda gate_up, is_gelu: gate_up.new_empty((*gate_up.shape[:-1], gate_up.shape[-1] // 2)))
_gated_packed_backward.register_fake(lambda dout, gate_up, is_gelu: gate_up.new_empty(gate_up.shape))
_weighted.register_fake(lambda gate_up, probs: gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2))
_weighted_backward.register_fake(
    lambda dout, gate_up, probs: tuple(x.new_empty(x.shape) for x in (dout, gate_up, probs))
)
_gelu.register_fake(lambda x, bias: x.new_empty(x.shape))
_gelu_backward.register_fake(
    lambda dout, x, bias: (
        x.new_empty(x.shape),
        x.new_empty(x.shape[-1:], dtype=accumulator_dtype(x.dtype) if bias is None else bias.dtype),
    )
)


def _save_gated(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.is_gelu = inputs
    ctx.save_for_backward(*tensors)


def _save_gelu(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward_gelu(ctx: Any, dout: Tensor) -> tuple[Tensor, Tensor | None]:
    x, bias = ctx.saved_tensors
    dx, dbias = _gelu_backward(dout, x, bias)
    return dx, dbias if bias is not None else None


_gated.register_autograd(
    lambda ctx, dout: (*_gated_backward(dout, *ctx.saved_tensors, ctx.is_gelu), None), setup_context=_save_gated
)
_gated_packed.register_autograd(
    lambda ctx, dout: (_gated_packed_backward(dout, *ctx.saved_tensors, ctx.is_gelu), None), setup_context=_save_gated
)
_gelu.register_autograd(_backward_gelu, setup_context=_save_gelu)


def _launch_gated(kernel: Any, inputs: tuple[Tensor, ...], outputs: tuple[Tensor, ...], is_gelu: bool) -> None:
    """Launches a kernel of [..., f] inputs and outputs, each of which may be strided (outputs only between rows)."""
    rows = [rows_of(x) for x in (*inputs, *outputs)]
    count, width = rows[0].shape
    row = launch_row("elementwise", rows[0].dtype)
    grid = (count * triton.cdiv(width, row["BLOCK"]),)
    strides = [x.stride(0) for x in rows]
    launch(kernel, grid, row, *rows, width, *strides, GELU=is_gelu, ACC=accumulator(rows[0].dtype))


@triton.jit
def sigmoid_pair(x):
    """sigmoid(x) and sigmoid(-x): neither overflows, and both are good to the last place however close to 0."""
    small = tl.exp(-tl.abs(x))
    large_share = 1.0 / (1.0 + small)
    small_share = small * large_share
    return tl.where(x >= 0, large_share, small_share), tl.where(x >= 0, small_share, large_share)


@triton.jit
def gelu_value(x):
    """gelu(x) in the tanh form, and its derivative."""
    # tanh(u) = 2 sigmoid(2u) - 1; beyond 100 the sigmoid is 0 or 1, and x^3 may overflow.
    near = tl.minimum(tl.maximum(x, -100.0), 100.0)
    share, rest = sigmoid_pair(1.5957691216057308 * near * (1.0 + 0.044715 * near * near))
    slope = share + near * share * rest * 1.5957691216057308 * (1.0 + 0.134145 * near * near)
    return x * share, slope


@triton.jit
def gate_value(x, GELU: tl.constexpr):
    """gelu(x) or silu(x), and its derivative."""
    if GELU:
        value, slope = gelu_value(x)
    else:
        share, rest = sigmoid_pair(x)
        value, slope = x * share, share * (1.0 + x * rest)
    return value, slope


@triton.jit
def _gated_forward(
    gate, up, out, width, gate_stride, up_stride, out_stride, GELU: tl.constexpr, ACC: tl.constexpr, BLOCK: tl.constexpr
):
    row, columns = row_and_columns(width, BLOCK)
    inside = columns < width
    g = tl.load(gate + row * gate_stride + columns, mask=inside).to(ACC)
    u = tl.load(up + row * up_stride + columns, mask=inside).to(ACC)
    value, _ = gate_value(g, GELU)
    tl.store(out + row * out_stride + columns, value * u, mask=inside)


@triton.jit
def _gated_grad(
    dout, gate, up, dgate, dup, width, dout_stride, gate_stride, up_stride, dgate_stride, dup_stride,
    GELU: tl.constexpr, ACC: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, columns = row_and_columns(width, BLOCK)
    inside = columns < width
    dy = tl.load(dout + row * dout_stride + columns, mask=inside).to(ACC)
    g = tl.load(gate + row * gate_stride + columns, mask=inside).to(ACC)
    u = tl.load(up + row * up_stride + columns, mask=inside).to(ACC)
    value, slope = gate_value(g, GELU)
    tl.store(dgate + row * dgate_stride + columns, dy * u * slope, mask=inside)
    tl.store(dup + row * dup_stride + columns, dy * value, mask=inside)


@triton.jit
def _weighted_forward(gate_up, probs, out, width, stride, ACC: tl.constexpr, BLOCK: tl.constexpr):
    row, columns = row_and_columns(width, BLOCK)
    inside = columns < width
    g = tl.load(gate_up + row * stride + columns, mask=inside).to(ACC)
    u = tl.load(gate_up + row * stride + width + columns, mask=inside).to(ACC)
    value, _ = gate_value(g, False)
    tl.store(out + row * width + columns, value * u * tl.load(probs + row).to(ACC), mask=inside)


@triton.jit
def _weighted_grad(
    dout, gate_up, probs, out, dgate_up, dprobs, width, dout_stride, stride, ACC: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    prob = tl.load(probs + row).to(ACC)
    total = tl.zeros([BLOCK], ACC)
    for start in range(0, width, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < width
        dy = tl.load(dout + row * dout_stride + columns, mask=inside, other=0.0).to(ACC)
        g = tl.load(gate_up + row * stride + columns, mask=inside, other=0.0).to(ACC)
        u = tl.load(gate_up + row * stride + width + columns, mask=inside, other=0.0).to(ACC)
        value, slope = gate_value(g, False)
        total += value * u * dy
        tl.store(out + row * width + columns, value * u * prob, mask=inside)
        tl.store(dgate_up + row * 2 * width + columns, dy * prob * u * slope, mask=inside)
        tl.store(dgate_up + row * 2 * width + width + columns, dy * prob * value, mask=inside)
    tl.store(dprobs + row, tl.sum(total, 0))


@triton.jit
def _gelu_forward(x, bias, out, count, width, stride, ACC: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[None, :]
    row = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    inside = (row < count) & (columns < width)
    value = tl.load(x + row * stride + columns, mask=inside).to(ACC)
    if bias is not None:
        value += tl.load(bias + columns, mask=columns < width).to(ACC)
    value, _ = gelu_value(value)
    tl.store(out + row * width + columns, value, mask=inside)


@triton.jit
def _gelu_grad(
    dout, x, bias, dx, partial, count, width, dout_stride, stride,
    ACC: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[None, :]
    present = columns < width
    first = tl.program_id(1).to(tl.int64) * ROWS
    shift = tl.zeros([1, BLOCK], ACC)
    if bias is not None:
        shift = tl.load(bias + columns, mask=present, other=0.0).to(ACC)
    total = tl.zeros([ROWS, BLOCK], ACC)
    for start in range(first, count, tl.num_programs(1) * ROWS):
        row = start + tl.arange(0, ROWS)[:, None].to(tl.int64)
        inside = (row < count) & present
        value = tl.load(x + row * stride + columns, mask=inside, other=0.0).to(ACC) + shift
        dy = tl.load(dout + row * dout_stride + columns, mask=inside, other=0.0).to(ACC)
        _, slope = gelu_value(value)
        tl.store(dx + row * width + columns, dy * slope, mask=inside)
        total += dy * slope
    if bias is not None:
        sums = tl.sum(total, 0, keep_dims=True)
        tl.store(partial + tl.program_id(1) * width + columns, sums, mask=present)
