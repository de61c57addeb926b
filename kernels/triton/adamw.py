"""AdamW (Loshchilov and Hutter, 2017, arXiv:1711.05101) on flat buffers, in one pass over memory."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .dropout import row_hash
from .launch import launch, launch_row


def fused_adamw_(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
    grad_scale: float | Tensor = 1.0,
    lowp_copy: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    """One step in place on flat contiguous float32 tensors of one size (gradients may be bf16); `step` counts from 1.

    grad_scale multiplies the gradient first (the clipping coefficient; a 0-d tensor costs no synchronisation); the
    gradient itself is left as it is. lowp_copy receives the new parameters rounded. Where found_inf (a scalar tensor on
    the device) is not 0, nothing changes. ValueError for parameters that are not float32.
    """
    if param.dtype != torch.float32:
        raise ValueError(f"the Triton AdamW updates float32 parameters, not {param.dtype}; kernels.backend=torch can")
    if isinstance(grad_scale, Tensor):
        factor, scale = 1.0, grad_scale
    else:
        factor, scale = float(grad_scale), None
    size, correction = 1.0 - beta1**step, (1.0 - beta2**step) ** 0.5
    _adamw_(
        param, grad, exp_avg, exp_avg_sq, lowp_copy, scale, found_inf,
        [factor, beta1, beta2, eps, 1.0 - lr * weight_decay, lr / size, 1.0 / correction],
    )  # fmt: skip


@torch.library.custom_op("megalite::adamw_", mutates_args=("param", "exp_avg", "exp_avg_sq", "lowp_copy"))
def _adamw_(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    lowp_copy: Tensor | None,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
    numbers: list[float],
) -> None:
    row = launch_row("adamw", param.dtype)
    tensors = param, grad, exp_avg, exp_avg_sq, lowp_copy, grad_scale, found_inf
    assert all(x is None or x.is_contiguous() for x in tensors)
    grid = (triton.cdiv(param.numel(), row["BLOCK"]),)
    launch(_adamw, grid, row, *tensors, *numbers, param.numel())


@_adamw_.register_fake
def _(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    lowp_copy: Tensor | None,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
    numbers: list[float],
) -> None:
    pass


@torch.library.custom_op("megalite::round_stochastically", mutates_args=())
def round_stochastically(values: Tensor, key: Tensor, elements: Tensor) -> Tensor:
    """Finite float32 `values` as bf16, rounded away from zero where the low half of their element's hash carries over.

    key: int32 [2] of the parameter and step; elements: int64, the number of each value in the uncut parameter. The
    bits are those of `megalite.optim.rounding`.
    """
    out = torch.empty(values.shape, dtype=torch.bfloat16, device=values.device)
    row = launch_row("round", values.dtype)
    grid = (triton.cdiv(values.numel(), row["BLOCK"]),)
    launch(_round, grid, row, values.contiguous(), key, elements.contiguous(), out, values.numel())
    return out


@round_stochastically.register_fake
def _(values: Tensor, key: Tensor, elements: Tensor) -> Tensor:
    return values.new_empty(values.shape, dtype=torch.bfloat16)


@triton.jit(do_not_specialize=["factor", "beta1", "beta2", "eps", "kept", "step_size", "root_scale"])
def _adamw(
    param, grad, exp_avg, exp_avg_sq, lowp_copy, grad_scale, found_inf,
    factor, beta1, beta2, eps, kept, step_size, root_scale, count, BLOCK: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    if found_inf is not None:
        inside = inside & (tl.load(found_inf) == 0)
    if grad_scale is not None:
        factor *= tl.load(grad_scale).to(tl.float32)
    g = tl.load(grad + place, mask=inside).to(tl.float32) * factor
    m = tl.load(exp_avg + place, mask=inside)
    v = tl.load(exp_avg_sq + place, mask=inside)
    p = tl.load(param + place, mask=inside)
    m += (1.0 - beta1) * (g - m)
    v += (1.0 - beta2) * (g * g - v)
    p = p * kept - step_size * m / (tl.sqrt(v) * root_scale + eps)
    tl.store(exp_avg + place, m, mask=inside)
    tl.store(exp_avg_sq + place, v, mask=inside)
    tl.store(param + place, p, mask=inside)
    if lowp_copy is not None:
        tl.store(lowp_copy + place, p, mask=inside)


@triton.jit
def _round(values, key, elements, out, count, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    noise = row_hash(key, tl.load(elements + place, mask=inside, other=0)) & 0xFFFF
    bits = tl.load(values + place, mask=inside).to(tl.uint32, bitcast=True) + noise
    tl.store(out + place, (bits & 0xFFFF0000).to(tl.float32, bitcast=True), mask=inside)
