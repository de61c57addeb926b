"""Operations of NVIDIA's apex (github.com/NVIDIA/apex, built with its CUDA extensions) under the signatures of ours."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from .linear import accumulate_weight_grad as torch_accumulate_weight_grad

_ADAMW, _BIAS_CORRECTION = 1, 1
_HALF = (torch.float16, torch.bfloat16)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `norm.rms_norm`; FusedRMSNorm's function, which wants the sizes of the normed dims."""
    return _norms().fused_rms_norm_affine(x, weight, (x.shape[-1],), eps)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """See `norm.layer_norm`; FusedLayerNorm's function."""
    return _norms().fused_layer_norm_affine(x, weight, bias, (x.shape[-1],), eps)


def accumulate_weight_grad(main_grad: Tensor, dy: Tensor, x: Tensor) -> None:
    """See `linear.accumulate_weight_grad`: one GEMM that adds to main_grad, with its operands the other way round."""
    dy, x = dy.reshape(-1, dy.shape[-1]).contiguous(), x.reshape(-1, x.shape[-1]).contiguous()
    if x.shape[0] == 0:
        return
    wgrad: Any = importlib.import_module("fused_weight_gradient_mlp_cuda")
    if main_grad.dtype == torch.float32:
        wgrad.wgrad_gemm_accum_fp32(x, dy, main_grad)
    elif main_grad.dtype in _HALF and main_grad.dtype == x.dtype:
        wgrad.wgrad_gemm_accum_fp16(x, dy, main_grad)
    else:
        torch_accumulate_weight_grad(main_grad, dy, x)


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
    """See `adamw.fused_adamw_`: the kernel of FusedAdam, on one flat buffer."""
    if param.numel() == 0:
        return
    if isinstance(grad_scale, Tensor) or grad_scale != 1.0:
        grad.mul_(grad_scale)
    _multi_tensor(
        "multi_tensor_adam", [[grad], [param], [exp_avg], [exp_avg_sq]],
        lr, beta1, beta2, eps, step, _ADAMW, _BIAS_CORRECTION, weight_decay,
    )  # fmt: skip
    if lowp_copy is not None:
        lowp_copy.copy_(param)


def sum_of_squares(values: Tensor) -> Tensor:
    """See `grad_norm.sum_of_squares`; squares are summed in float32, so that gradients beyond 1e19 overflow."""
    if values.numel() == 0:
        return torch.zeros((), dtype=torch.float64, device=values.device)
    norm, _ = _multi_tensor("multi_tensor_l2norm", [[values]], False)
    return norm.to(torch.float64).square().squeeze()


def _multi_tensor(name: str, lists: list[list[Tensor]], *options: Any) -> Any:
    """An operation on lists of tensors; its flag would report non-finite values, which the gradient norm does here."""
    apply: Any = importlib.import_module("apex.multi_tensor_apply").multi_tensor_applier
    flag = torch.zeros(1, dtype=torch.int32, device=lists[0][0].device)
    return apply(getattr(importlib.import_module("amp_C"), name), flag, lists, *options)


def _norms() -> Any:
    return importlib.import_module("apex.normalization.fused_layer_norm")
