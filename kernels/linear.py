"""The matrix products of linear layers, and their accumulation into main gradients."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .products import linear_dtype, product_dtype


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x weight^T + bias for x [..., in], weight [out, in] and bias [out]."""
    dtype = linear_dtype(x)
    if dtype == x.dtype:
        return F.linear(x, weight, bias)
    assert weight.dtype == x.dtype
    return F.linear(x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)).to(x.dtype)


def linear_into(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
    """`linear` of x [n, in], written to out [n, out]."""
    if linear_dtype(x) != x.dtype:
        out.copy_(linear(x, weight, bias))
    elif bias is None:
        torch.mm(x, weight.t(), out=out)
    else:
        torch.addmm(bias, x, weight.t(), out=out)


def input_grad(dy: Tensor, weight: Tensor) -> Tensor:
    """dy weight for dy [..., out] and weight [out, in]: the gradient of `linear`'s input."""
    dtype = product_dtype(dy)
    assert weight.dtype == dy.dtype
    return dy.matmul(weight) if dtype == dy.dtype else dy.to(dtype).matmul(weight.to(dtype)).to(dy.dtype)


def input_grad_into(out: Tensor, dy: Tensor, weight: Tensor) -> None:
    """`input_grad` of dy [n, out], written to out [n, in]."""
    if product_dtype(dy) == dy.dtype:
        torch.mm(dy, weight, out=out)
    else:
        out.copy_(input_grad(dy, weight))


def accumulate_weight_grad(main_grad: Tensor, dy: Tensor, x: Tensor) -> None:
    """main_grad += dy^T x for main_grad [out, in], dy [..., out] and x [..., in].

    main_grad may be wider than dy and x. The product is then summed in float32 inside the GEMM; on a GPU it also
    leaves it in float32, as on a CPU that multiplies in float32 anyhow; on others it is rounded to x's dtype before it
    is added.
    """
    assert dy.dtype == x.dtype
    dtype = product_dtype(x)
    dy, x = (part.reshape(-1, part.shape[-1]).to(dtype) for part in (dy, x))
    if main_grad.dtype == dtype:
        main_grad.addmm_(dy.t(), x)
    elif x.is_cuda and main_grad.dtype == torch.float32:
        main_grad.add_(torch.mm(dy.t(), x, out_dtype=torch.float32))
    else:
        main_grad.add_(torch.mm(dy.t(), x))
