"""The sum of squares of a flat gradient, in float64 and in two stages, so that it has one order."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import launch, launch_row


def sum_of_squares(values: Tensor) -> Tensor:
    """float64 scalar: the sum of the squares of flat `values`, finite if and only if they all are (float32 or less).

    It is summed in one order, so that it has the same bits each time; it stays on the device.
    """
    return _sum_of_squares(values)


@torch.library.custom_op("megalite::sum_of_squares", mutates_args=())
def _sum_of_squares(values: Tensor) -> Tensor:
    row = launch_row("sum_of_squares", values.dtype)
    programs = min(row["PROGRAMS"], triton.cdiv(values.numel(), row["BLOCK"]))
    if programs == 0:
        return torch.zeros((), dtype=torch.float64, device=values.device)
    partial = torch.empty(programs, dtype=torch.float64, device=values.device)
    total = torch.empty((), dtype=torch.float64, device=values.device)
    launch(_squares, (programs,), row, values.contiguous(), partial, values.numel())
    launch(_total, (1,), row, partial, total, programs, BLOCK=triton.next_power_of_2(programs))
    return total


@_sum_of_squares.register_fake
def _(values: Tensor) -> Tensor:
    return values.new_empty((), dtype=torch.float64)


@triton.jit
def _squares(values, partial, count, BLOCK: tl.constexpr):
    total = tl.zeros([BLOCK], tl.float64)
    first = tl.program_id(0).to(tl.int64) * BLOCK
    for start in range(first, count, tl.num_programs(0).to(tl.int64) * BLOCK):
        place = start + tl.arange(0, BLOCK)
        # Squares in float64: no finite float32 overflows there, so a sum that is not finite means an input that is not.
        value = tl.load(values + place, mask=place < count, other=0.0).to(tl.float64)
        total += value * value
    tl.store(partial + tl.program_id(0), tl.sum(total, 0))


@triton.jit
def _total(partial, total, count, BLOCK: tl.constexpr):
    place = tl.arange(0, BLOCK)
    tl.store(total, tl.sum(tl.load(partial + place, mask=place < count, other=0.0), 0))
