"""Tensors as matrices of rows, and the tiles of them that programs work on."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


def rows_of(x: Tensor) -> Tensor:
    """x [..., n] as [rows, n] with contiguous rows: a view where its strides allow one."""
    rows = x.flatten(0, -2) if x.ndim > 1 else x.unsqueeze(0)
    return rows if rows.stride(1) == 1 or rows.shape[1] <= 1 else rows.contiguous()


def accumulator(dtype: torch.dtype) -> tl.dtype:
    """What kernels compute in for tensors of `dtype`: float32, or float64 for float64."""
    return tl.float64 if dtype == torch.float64 else tl.float32


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """The same as a torch dtype."""
    return torch.promote_types(dtype, torch.float32)


@triton.jit
def row_and_columns(width, BLOCK: tl.constexpr):
    """This program's row (int64) and its BLOCK columns, programs being numbered along rows of `width`."""
    blocks = tl.cdiv(width, BLOCK)
    program = tl.program_id(0)
    return (program // blocks).to(tl.int64), (program % blocks) * BLOCK + tl.arange(0, BLOCK)
