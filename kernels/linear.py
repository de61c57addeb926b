"""The matrix products of linear layers, and their accumulation into main gradients."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x weight^T for x [..., in] and weight [out, in]."""
    return F.linear(x, weight)


def input_grad(dy: Tensor, weight: Tensor) -> Tensor:
    """dy weight for dy [..., out] and weight [out, in]: the gradient of `linear`'s input."""
    return dy.matmul(weight)


def accumulate_weight_grad(main_grad: Tensor, dy: Tensor, x: Tensor) -> None:
    """main_grad += dy^T x for main_grad [out, in], dy [..., out] and x [..., in].

    main_grad may be wider than dy and x. The product is then summed in float32 inside the GEMM; on a GPU it also
    leaves it in float32, on a CPU it is rounded to x's dtype before it is added.
    """
    dy, x = dy.reshape(-1, dy.shape[-1]), x.reshape(-1, x.shape[-1])
    if main_grad.dtype == x.dtype:
        main_grad.addmm_(dy.t(), x)
    elif x.is_cuda and main_grad.dtype == torch.float32:
        main_grad.add_(torch.mm(dy.t(), x, out_dtype=torch.float32))
    else:
        main_grad.add_(torch.mm(dy.t(), x))
