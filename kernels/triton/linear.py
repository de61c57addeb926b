"""Accumulation of weight gradients into main gradients, inside the product's kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from .grouped import add_weight_grads


def accumulate_weight_grad(main_grad: Tensor, dy: Tensor, x: Tensor) -> None:
    """main_grad += dy^T x for main_grad [out, in], dy [..., out] and x [..., in].

    main_grad may be wider than dy and x: the product is neither rounded nor written before it is added.
    """
    dy, x = dy.reshape(-1, dy.shape[-1]), x.reshape(-1, x.shape[-1])
    ends = torch.full((1,), x.shape[0], dtype=torch.int32, device=x.device)
    add_weight_grads(main_grad[None], dy, x, ends)
