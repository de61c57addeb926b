"""In which dtype matrix products are made, on CPUs without instructions for 16-bit ones.

torch multiplies bfloat16 there (and float16 on most CPUs) in plain loops, 4 to 100 times slower than float32. Operands
are brought to float32 instead, and the product is rounded once: the same sums, in another order.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

HALF = (torch.bfloat16, torch.float16)
_FEW_ROWS = 8  # torch's loops over x W^T are fast then, and to bring a matrix to float32 takes as long


def product_dtype(x: Tensor) -> torch.dtype:
    """What operands like x are to be multiplied in: x's dtype, or float32 where this CPU is faster with that."""
    slow = x.device.type == "cpu" and x.dtype in HALF and not has_instructions(x.dtype)
    return torch.float32 if slow else x.dtype


def linear_dtype(x: Tensor) -> torch.dtype:
    """`product_dtype` for x W^T of x [.., n], where W is not worth converting for a few rows; for dy W it is."""
    return product_dtype(x) if x.numel() >= _FEW_ROWS * x.shape[-1] else x.dtype


@functools.cache
def has_instructions(dtype: torch.dtype) -> bool:
    """Whether oneDNN multiplies 16-bit matrices on this CPU."""
    if not torch.backends.mkldnn.is_available():
        return False
    query = "_is_mkldnn_bf16_supported" if dtype == torch.bfloat16 else "_is_mkldnn_fp16_supported"
    return bool(getattr(torch.ops.mkldnn, query)())


def describe_products(dtype: torch.dtype) -> str | None:
    """How products of `dtype` are made on this CPU, for the log; None for wider ones."""
    if dtype not in HALF:
        return None
    return "native" if has_instructions(dtype) else "in float32, rounded (this CPU has no instructions for them)"
