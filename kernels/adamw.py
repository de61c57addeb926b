"""AdamW (Loshchilov and Hutter, 2017, arXiv:1711.05101) on flat buffers, in one pass over memory."""

from __future__ import annotations

import torch
from torch import Tensor


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
) -> None:
    """One step in place on tensors of one shape and dtype (float32 or float64); `step` counts from 1.

    grad_scale multiplies the gradient first (the clipping coefficient; a 0-d tensor costs no synchronisation) and must
    not be 0; the scaled gradient is written back. lowp_copy, of the same shape, receives the new parameters rounded.
    """
    if param.numel() == 0:
        return
    scale = None
    if param.dtype == torch.float64:
        grad.mul_(grad_scale)  # the fused step would round its scale to float32
    elif isinstance(grad_scale, Tensor):
        scale = grad_scale.to(device=param.device, dtype=torch.float32).reciprocal()  # it divides by its scale
    elif grad_scale != 1.0:
        scale = torch.tensor(1.0 / grad_scale, device=param.device)
    torch.ops.aten._fused_adamw_(
        [param],
        [grad],
        [exp_avg],
        [exp_avg_sq],
        [],
        [torch.tensor(float(step), device=param.device)],
        lr=lr,
        beta1=beta1,
        beta2=beta2,
        weight_decay=weight_decay,
        eps=eps,
        amsgrad=False,
        maximize=False,
        grad_scale=scale,
    )
    if lowp_copy is not None:
        lowp_copy.copy_(param)
