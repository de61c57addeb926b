"""Fingerprints of global tensors, equal on every layout: whether two states are the same bits, from a few numbers."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megalite.checkpoint.manifest import Held, Tensors, held
from megalite.mpu import ParallelState

MODULUS = 1 << 48
"""Fingerprints are sums modulo this, which every JSON reader holds exactly."""
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32}
_CHUNK = 1 << 17
"""Elements at a time on the CPU, so that their int64 temporaries stay in the cache."""
_CUDA_CHUNK = 1 << 24


def of_tensors(tensors: Tensors, mpu: ParallelState) -> dict[str, int]:
    """The fingerprint of each global tensor, by `kind/global name`, on every rank; every rank calls it.

    The sum over all words (of 32 bits, or an element where that is smaller) of bit pattern x (2 x flat global index
    + 1): integers, so that neither the cut nor the order matters. A changed word always shows; so do two that changed
    places, unless by chance. It finds differences, not malice.
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
    """The sum over a rectangle; as weights are sums of one of the row and one of the column, so is the total."""
    view = _words(piece.view.detach() if piece.view.dim() else piece.view.detach().reshape(1))
    if not view.numel():
        return 0
    wide = view.shape[-1] // (piece.sizes or (1,))[-1]  # words of an element
    shape = (*piece.shard.shape[:-1], (piece.shard.shape or (1,))[-1] * wide)
    *before, first = (*piece.offset[:-1], (piece.offset or (0,))[-1] * wide)
    columns = 2 * (torch.arange(view.shape[-1], device=view.device) + first) + 1
    leading = view.shape[1:-1]
    rows = max(1, (_CUDA_CHUNK if view.is_cuda else _CHUNK) // math.prod(view.shape[1:])) if before else 1
    total = torch.zeros((), dtype=torch.int64, device=view.device)
    for begin in range(0, len(view) if before else 1, rows):
        part = view[begin : begin + rows] if before else view
        bits = part.to(torch.int64).reshape(-1, view.shape[-1])
        total += (bits.sum(0) * columns).sum()
        if before:
            at = (before[0] + begin, *before[1:])
            total += (bits.sum(1) * _row_weights(at, (len(part), *leading), shape, view.device)).sum()
    return int(total) % MODULUS


def _row_weights(
    offset: tuple[int, ...], sizes: tuple[int, ...], shape: tuple[int, ...], device: torch.device
) -> Tensor:
    """2 x flat index of the first word of each row of a rectangle; `shape` has the last dim, too."""
    weights, stride = torch.zeros((), dtype=torch.int64, device=device), 2 * shape[-1]
    for dim in reversed(range(len(sizes))):
        along = (torch.arange(sizes[dim], device=device) + offset[dim]) * stride
        weights = weights + along.view(-1, *[1] * (len(sizes) - 1 - dim))
        stride *= shape[dim]
    return weights.flatten()


def _words(values: Tensor) -> Tensor:
    """The bit patterns as integers; an element of 64 bits is two of them."""
    if values.element_size() == 8 and values.stride(-1) != 1:
        values = values.contiguous()
    return values.view(_INTEGERS[min(values.element_size(), 4)])
