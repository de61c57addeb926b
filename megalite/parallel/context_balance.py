"""Dealing the tokens of packed rows to context-parallel ranks, so that each has as much attention to compute.

A token at place i costs as many (query, key) pairs as it sees. A row of one document is cut in a zigzag, which is even
by construction. A row of several is cut into equal blocks, the heaviest going first to the rank with the least to do;
every rank holds the whole rows and finds the same cut.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

import torch
from torch import Tensor

from megalite.parallel.context_plan import Needs, Sight

TOLERANCE = 0.05
"""Imbalance up to which a cut that sends less is preferred."""
FINE = 0.01
"""Imbalance at which blocks are small enough."""
MAX_BLOCKS = 64
"""Blocks of a rank: kernels and messages want long runs of tokens."""


def imbalance(work: Tensor) -> float:
    """(most - least) / mean of the ranks' work."""
    return float((work.max() - work.min()) / work.double().mean()) if work.sum() else 0.0


def zigzag(seq_len: int, cp: int, device: torch.device | None = None) -> Tensor:
    """int64 [cp, seq_len / cp]: chunks r and 2 cp - 1 - r of 2 cp equal ones for rank r."""
    chunks = torch.arange(seq_len, device=device).chunk(2 * cp)
    return torch.stack([torch.cat((chunks[rank], chunks[2 * cp - 1 - rank])) for rank in range(cp)])


def deal_row(starts: Tensor, cp: int, window: int = 0) -> Tensor:
    """int64 [cp, s / cp]: the places of each rank in a row whose documents begin at `starts`, int64 [s].

    Of the cuts that are even to TOLERANCE, the one that sends the fewest keys; else the most even one.
    """
    best, best_score = None, (True, 0.0)
    for places in _cuts(starts, cp, window):
        sight = Sight.causal(places[..., None], starts[:, None], window)
        uneven = imbalance(sight.num_pairs)
        score = (False, float(_keys_sent(sight))) if uneven <= TOLERANCE else (True, uneven)
        if best is None or score < best_score:
            best, best_score = places, score
    assert best is not None
    return best


def _cuts(starts: Tensor, cp: int, window: int) -> Iterator[Tensor]:
    """Cuts worth a look: contiguous, zigzag, and dealt in ever smaller blocks until these are even."""
    s = len(starts)
    n = s // cp
    yield torch.arange(s).view(cp, n)
    yield zigzag(s, cp)
    places = torch.arange(s)
    seen = places - starts + 1 if not window else (places - starts + 1).clamp(max=window)
    for num_blocks in range(2, min(n, MAX_BLOCKS) + 1):
        if n % num_blocks:
            continue
        work = seen.view(cp * num_blocks, -1).sum(1)
        ranks = _deal(work.tolist(), cp, num_blocks)
        blocks = places.view(cp * num_blocks, -1)
        yield torch.stack([blocks[torch.tensor(mine)].flatten() for mine in ranks])
        if imbalance(torch.stack([work[torch.tensor(mine)].sum() for mine in ranks])) <= FINE:
            return


def _deal(work: list[int], cp: int, num_blocks: int) -> list[list[int]]:
    """The numbers of the blocks of each rank, `num_blocks` each, ascending."""
    ranks: list[list[int]] = [[] for _ in range(cp)]
    loads = [(0, rank) for rank in range(cp)]
    for block in sorted(range(len(work)), key=lambda number: (-work[number], number)):
        load, rank = heapq.heappop(loads)
        ranks[rank].append(block)
        if len(ranks[rank]) < num_blocks:
            heapq.heappush(loads, (load + work[block], rank))
    return [sorted(mine) for mine in ranks]


def _keys_sent(sight: Sight) -> int:
    """Keys that ranks need of one another."""
    needs, ranks = Needs(sight), range(sight.num_ranks)
    return sum(len(needs.of(rank, owner)) for rank in ranks for owner in ranks if rank != owner)
