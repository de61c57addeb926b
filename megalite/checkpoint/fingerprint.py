"""Fingerprints of global tensors, equal on every layout: whether two states are the same bits, from a few numbers."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megalite.checkpoint.manifest import Held, Tensors, held
from megalite.mpu import ParallelState

MODULUS = 1 << 48
"""Fingerprints are sums modulo this, which every JSON reader holds exactly."""
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_FACTOR = 0x2545F4914F6CDD1D
_CHUNK = 1 << 17
"""Elements at a time on the CPU, so that their int64 temporaries stay in the cache."""
_CUDA_CHUNK = 1 << 24


def of_tensors(tensors: Tensors, mpu: ParallelState) -> dict[str, int]:
    """The fingerprint of each global tensor, by `kind/global name`, on every rank; every rank calls it.

    The sum over all elements of (bit pattern) x (2 x flat global index + 1): integers, so that neither the cut nor the
    order matters. One changed bit always shows in elements of up to 32 bits, and exchanged elements do; it finds
    differences, not malice.
    """
    mine: dict[str, int] = {}
    for piece in held(tensors):
        if piece.shard.is_saver(mpu):
            mine[piece.key] = mine.get(piece.key, 0) + _of_piece(piece)
    total: dict[str, int] = {}
    for of_rank in mpu.world.gather_objects(mine):
        for key, value in of_rank.items():
            total[key] = (total.get(key, 0) + value) % MODULUS
    return total


@torch.no_grad()
def _of_piece(piece: Held) -> int:
    shape, offset, view = piece.shard.shape or (1,), piece.offset or (0,), piece.view
    view = view if view.dim() else view.reshape(1)
    if not view.numel():
        return 0
    chunk = _CUDA_CHUNK if view.is_cuda else _CHUNK
    rows = max(1, chunk // math.prod(view.shape[1:]))
    total = torch.zeros((), dtype=torch.int64, device=view.device)
    inner = _places(offset[1:], view.shape[1:], shape[1:], view.device)
    for begin in range(0, len(view), rows):
        part = view[begin : begin + rows]
        first = torch.arange(begin, begin + len(part), device=view.device) + offset[0]
        outer = first.view(-1, *[1] * (view.dim() - 1)) * (2 * math.prod(shape[1:]))
        total += (_words(part) * (outer + inner)).sum()
    return int(total) % MODULUS


def _places(offset: tuple[int, ...], sizes: tuple[int, ...], shape: tuple[int, ...], device: torch.device) -> Tensor:
    """2 x flat index + 1 of every element of a rectangle."""
    places, stride = torch.ones((), dtype=torch.int64, device=device), 2
    for dim in reversed(range(len(sizes))):
        along = (torch.arange(sizes[dim], device=device) + offset[dim]) * stride
        places = places + along.view(-1, *[1] * (len(sizes) - 1 - dim))
        stride *= shape[dim]
    return places


def _words(values: Tensor) -> Tensor:
    """The bit patterns as int64. Those of 64 bits are mixed, so that the upper ones count modulo 2^48."""
    bits = values.view(_INTEGERS[values.element_size()]).to(torch.int64)
    return bits if values.element_size() < 8 else bits ^ ((bits * _FACTOR) >> 32)
