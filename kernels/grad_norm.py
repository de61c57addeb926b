"""The sum of squares of a flat gradient, in float64: any finite float32 gradient has a finite one."""

from __future__ import annotations

import torch
from torch import Tensor

_CHUNK = 1 << 18  # elements whose float64 copy stays in a CPU's cache
_CUDA_CHUNK = 1 << 24


def sum_of_squares(values: Tensor) -> Tensor:
    """float64 []: the sum of squares of values [n], in a fixed order; nan or infinite if some value is."""
    total = torch.zeros((), dtype=torch.float64, device=values.device)
    for part in values.split(_CUDA_CHUNK if values.is_cuda else _CHUNK):
        wide = part.to(torch.float64)
        total += torch.dot(wide, wide)
    return total
