"""The clamped SwiGLU of gpt-oss in one pass over memory each way, saving nothing but its inputs."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .activation import sigmoid_pair
from .launch import launch, launch_row
from .rows import accumulator, row_and_columns, rows_of


@torch.library.custom_op("megalite::weighted_clamped_swiglu", mutates_args=())
def weighted_clamped_swiglu(gate_up: Tensor, probs: Tensor, alpha: float, limit: float) -> Tensor:
    """See `clamped_swiglu.weighted_clamped_swiglu`."""
    rows, row = rows_of(gate_up), launch_row("elementwise", gate_up.dtype)
    count, width = rows.shape[0], rows.shape[1] // 2
    out = torch.empty(count, width, dtype=gate_up.dtype, device=gate_up.device)
    grid = (count * triton.cdiv(width, row["BLOCK"]),)
    sizes = width, rows.stride(0), alpha, limit
    launch(_clamped_forward, grid, row, rows, probs.contiguous(), out, *sizes, ACC=accumulator(out.dtype))
    return out


@torch.library.custom_op("megalite::weighted_clamped_swiglu_backward", mutates_args=())
def weighted_clamped_swiglu_backward(
    dout: Tensor, gate_up: Tensor, probs: Tensor, alpha: float, limit: float
) -> tuple[Tensor, Tensor, Tensor]:
    """See `clamped_swiglu.weighted_clamped_swiglu_backward`."""
    dy, rows, row = rows_of(dout), rows_of(gate_up), launch_row("weighted_swiglu_backward", gate_up.dtype)
    count, width = dy.shape
    out = torch.empty(count, width, dtype=gate_up.dtype, device=gate_up.device)
    dgate_up = torch.empty(gate_up.shape, dtype=gate_up.dtype, device=gate_up.device)
    dprobs = torch.empty(probs.shape, dtype=probs.dtype, device=probs.device)
    tensors = dy, rows, probs.contiguous(), out, dgate_up, dprobs
    sizes = width, dy.stride(0), rows.stride(0), alpha, limit
    launch(_clamped_grad, (count,), row, *tensors, *sizes, ACC=accumulator(gate_up.dtype))
    return out, dgate_up, dprobs


@weighted_clamped_swiglu.register_fake
def _(gate_up: Tensor, probs: Tensor, alpha: float, limit: float) -> Tensor:
    return gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)


@weighted_clamped_swiglu_backward.register_fake
def _(dout: Tensor, gate_up: Tensor, probs: Tensor, alpha: float, limit: float) -> tuple[Tensor, Tensor, Tensor]:
    return dout.new_empty(dout.shape), gate_up.new_empty(gate_up.shape), probs.new_empty(probs.shape)


@triton.jit
def _clamped(gate, up, alpha, limit):
    """min(gate, limit) sigmoid(alpha ..), its derivative, and up between -limit and limit, plus 1."""
    g = tl.minimum(gate, limit)
    share, rest = sigmoid_pair(g * alpha)
    slope = tl.where(gate > limit, 0.0, share * (1.0 + alpha * g * rest))
    return g * share, slope, tl.minimum(tl.maximum(up, -limit), limit) + 1.0


@triton.jit
def _clamped_forward(gate_up, probs, out, width, stride, alpha, limit, ACC: tl.constexpr, BLOCK: tl.constexpr):
    row, columns = row_and_columns(width, BLOCK)
    inside = columns < width
    g = tl.load(gate_up + row * stride + columns, mask=inside).to(ACC)
    u = tl.load(gate_up + row * stride + width + columns, mask=inside).to(ACC)
    glu, _, shifted = _clamped(g, u, alpha, limit)
    tl.store(out + row * width + columns, glu * shifted * tl.load(probs + row).to(ACC), mask=inside)


@triton.jit
def _clamped_grad(
    dout, gate_up, probs, out, dgate_up, dprobs, width, dout_stride, stride, alpha, limit,
    ACC: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    prob = tl.load(probs + row).to(ACC)
    total = tl.zeros([BLOCK], ACC)
    for start in range(0, width, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < width
        dy = tl.load(dout + row * dout_stride + columns, mask=inside, other=0.0).to(ACC)
        g = tl.load(gate_up + row * stride + columns, mask=inside, other=0.0).to(ACC)
        u = tl.load(gate_up + row * stride + width + columns, mask=inside, other=0.0).to(ACC)
        glu, slope, shifted = _clamped(g, u, alpha, limit)
        total += glu * shifted * dy
        dup = tl.where(tl.abs(u) > limit, 0.0, dy * prob * glu)
        tl.store(out + row * width + columns, glu * shifted * prob, mask=inside)
        tl.store(dgate_up + row * 2 * width + columns, dy * prob * shifted * slope, mask=inside)
        tl.store(dgate_up + row * 2 * width + width + columns, dup, mask=inside)
    tl.store(dprobs + row, tl.sum(total, 0))
