"""Which tiles of the scores an attention kernel computes: lists in tensors, made without a word from the host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..attention_mask import AttentionMask

_LEAST, _MOST = -(2**31), 2**31 - 1  # places are int32 in kernels


class TileLists(NamedTuple):
    """For each tile of one side, the tiles of the other that it meets: first those that need no mask.

    full, seen: int32 [b, n], how many need none, and how many there are. tiles: int32 [b, n, m], their numbers. The
    batch is 1 where all rows share a mask.
    """

    full: Tensor
    seen: Tensor
    tiles: Tensor


@dataclass(frozen=True, kw_only=True)
class Places:
    """The three tensors of an `AttentionMask` as int32 [b, s]; b is 1 where all rows of the batch share the mask."""

    query: Tensor
    """The last place that each query sees."""
    start: Tensor
    """The first."""
    key: Tensor
    """The place of each key."""

    @staticmethod
    def of(mask: AttentionMask) -> Places:
        """Those of `mask`, made once for all kernels and layers."""
        if "places" not in mask.kept:
            tensors = (mask.query, mask.start, mask.key)
            alike = all(x.stride(1) == 0 for x in tensors if x.shape[1] > 1)
            query, start, key = (_int32(x[:, :1] if alike else x) for x in tensors)
            mask.kept["places"] = Places(query=query, start=start, key=key)
        return mask.kept["places"]

    def lists(self, block_q: int, block_k: int, *, by_keys: bool) -> TileLists:
        """Lists of key tiles by query tile, or (by_keys) the other way round, for tiles of these sizes.

        A tile at the end that is not whole always counts as one that needs a mask.
        """
        start, query = _tiles(self.start, block_q, _MOST), _tiles(self.query, block_q, _LEAST)
        first, last = _tiles(self.key, block_k, _MOST).amin(-1), _tiles(self.key, block_k, _LEAST).amax(-1)
        whole = torch.arange(first.shape[1], device=first.device) < self.key.shape[1] // block_k
        first, last = first[:, None], last[:, None]
        seen = (first <= query.amax(-1)[..., None]) & (last >= start.amin(-1)[..., None])
        full = (first >= start.amax(-1)[..., None]) & (last <= query.amin(-1)[..., None]) & whole
        if by_keys:
            seen, full = seen.mT, full.mT
        rank = 2 - seen.to(torch.int8) - full.to(torch.int8)
        tiles = rank.argsort(dim=-1, stable=True).to(torch.int32)
        full, seen = (x.sum(-1, dtype=torch.int32) for x in (full, seen))
        return TileLists(full.contiguous(), seen.contiguous(), tiles.contiguous())


def kept_lists(mask: AttentionMask, block_q: int, block_k: int, *, by_keys: bool) -> TileLists:
    """`Places.lists` of the mask, made once for all layers that share it."""
    name = ("lists", block_q, block_k, by_keys)
    if name not in mask.kept:
        mask.kept[name] = Places.of(mask).lists(block_q, block_k, by_keys=by_keys)
    return mask.kept[name]


def _int32(x: Tensor) -> Tensor:
    return x.t().clamp(_LEAST, _MOST).to(torch.int32).contiguous()


def _tiles(x: Tensor, block: int, filling: int) -> Tensor:
    """[b, s] -> [b, tiles, block]."""
    return F.pad(x, (0, -x.shape[1] % block), value=filling).unflatten(1, (-1, block))
