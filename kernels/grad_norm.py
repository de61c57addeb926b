"""The sum of squares of a flat gradient, in float64."""

from __future__ import annotations

import torch
from torch import Tensor

_CHUNK = 1 << 18
"""Elements squared at a time on the CPU, so that their float64 copy stays in the cache."""
_CUDA_CHUNK = 1 << 24


def sum_of_squares(values: Tensor) -> Tensor:
    """float64 scalar: the sum of the squares of flat `values`, finite if and only if they all are (float32 or less).

    It is summed in one order, so that it has the same bits each time; it stays on the device.
    """
    total = torch.zeros((), dtype=torch.float64, device=values.device)
    for part in values.split(_CUDA_CHUNK if values.is_cuda else _CHUNK):
        wide = part.to(torch.float64)
        total += torch.dot(wide, wide)
    return total
