"""Stochastic rounding to bf16 without a random stream: weights need no float32 copy, and layouts still agree.

A value between two neighbours in bf16 becomes the upper one with a probability of how far it has come, so that updates
below half a step are not lost but taken now and then (Gupta et al., 2015, arXiv:1502.02551; Zamirai et al., 2020,
arXiv:2010.06192). The choice is a hash of (seed, update, global name, global element).
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from megalite.kernels.dropout import dropout_key, row_hash
from megalite.parallel.data import Segment
from megalite.parallel.random import element_index
from megalite.parallel.shard import Shard, shard_of


def round_stochastically(values: Tensor, noise: Tensor) -> Tensor:
    """Finite float32 `values` as bf16, rounded away from zero where the low 16 bits of `noise` (int32) carry over."""
    assert values.dtype == torch.float32
    bits = (values.view(torch.int32) + (noise & 0xFFFF)) & -0x10000
    return bits.view(torch.float32).to(torch.bfloat16)


def rounding_noise(shard: Shard, start: int, stop: int, seed: int, step: int, device: torch.device) -> Tensor:
    """int32 [stop - start]: the hashes of elements `start` to `stop` of this rank's part of a parameter."""
    name = (shard.tied_to or shard.name).encode()
    site = int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little")
    return row_hash(dropout_key(seed, step, site, device), element_index(shard, start, stop, device))


def store_rounded(values: Tensor, segment: Segment, begin: int, seed: int, step: int) -> None:
    """Rounds `values` float32 [n] into elements [begin, begin + n) of the segment's parameters; padding stays zero."""
    end = begin + values.numel()
    for span in segment.spans:
        first, last = max(span.start, begin), min(span.end, end)
        if first < last:
            offset = (span.run[0] if span.run is not None else 0) - span.start  # to elements of the parameter
            shard = shard_of(span.parameter)
            noise = rounding_noise(shard, first + offset, last + offset, seed, step, values.device)
            segment.param[first:last].copy_(round_stochastically(values[first - begin : last - begin], noise))
