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
"""Imbalance of packed rows up to which a cut that sends less is preferred."""
TOLERANCE_OF_ONE = 0.02
"""The same for a row of one document and padding."""
FINE = 0.01
"""Imbalance at which blocks are small enough."""
BLOCKS = (2, 4, 8, 16, 32, 64)
"""Blocks of a rank to try: kernels and messages want long runs of tokens."""


def imbalance(work: Tensor) -> float:
    """(most - least) / mean of the ranks' work."""
    return float((work.max() - work.min()) / work.double().mean()) if work.sum() else 0.0


def zigzag(seq_len: int, cp: int, device: torch.device | None = None) -> Tensor:
    """int64 [cp, seq_len / cp]: chunks r and 2 cp - 1 - r of 2 cp equal ones for rank r."""
    chunks = torch.arange(seq_len, device=device).chunk(2 * cp)
    return torch.stack([torch.cat((chunks[rank], chunks[2 * cp - 1 - rank])) for rank in range(cp)])


def zigzag_then_runs(seq_len: int, cp: int, window: int) -> Tensor:
    """int64 [cp, seq_len / cp]: a zigzag of the first `window` tokens, which see fewer, and a run of the others."""
    first = min(-(-window // (2 * cp)) * 2 * cp, seq_len)
    runs = torch.arange(first, seq_len).view(cp, -1)
    return torch.cat((zigzag(first, cp), runs), 1)


def deal_row(starts: Tensor, cp: int, window: int = 0, tolerance: float = TOLERANCE) -> Tensor:
    """int64 [cp, s / cp]: the places of each rank in a row whose documents begin at `starts`, int64 [s].

    Of the cuts that are even to `tolerance`, the one that sends the fewest keys; else the most even one.
    """
    best, best_score = None, (True, 0.0)
    for places in _cuts(starts, cp, window):
        sight = Sight.causal(places[..., None], starts[:, None], window)
        uneven = imbalance(sight.num_pairs)
        score = (False, float(_keys_sent(sight))) if uneven <= tolerance else (True, uneven)
        if best is None or score < best_score:
            best, best_score = places, score
    assert best is not None
    return best


def _cuts(starts: Tensor, cp: int, window: int) -> Iterator[Tensor]:
    """Cuts worth a look: contiguous, zigzag, both in turn, and dealt in ever smaller blocks until these are even."""
    s = len(starts)
    n = s // cp
    yield torch.arange(s).view(cp, n)
    yield zigzag(s, cp)
    if 0 < window < s:
        yield zigzag_then_runs(s, cp, window)
    places = torch.arange(s)
    seen = places - starts + 1 if not window else (places - starts + 1).clamp(max=window)
    so_far = torch.cat((seen.new_zeros(1), seen.cumsum(0)))
    for num_blocks in BLOCKS:
        if num_blocks > n:
            return
        sizes = _block_sizes(n, cp, num_blocks)
        ends = sizes.cumsum(0)
        work = so_far[ends] - so_far[ends - sizes]
        ranks = _deal(work.tolist(), sizes.tolist(), cp, num_blocks)
        blocks = places.split(sizes.tolist())
        yield torch.stack([torch.cat([blocks[block] for block in mine]) for mine in ranks])
        if imbalance(torch.stack([work[mine].sum() for mine in ranks])) <= FINE:
            return


def _block_sizes(n: int, cp: int, num_blocks: int) -> Tensor:
    """int64 [cp * num_blocks]: n // num_blocks tokens or one more, the longer ones spread over the row."""
    borders = torch.arange(num_blocks + 1) * n // num_blocks
    return (borders[1:] - borders[:-1]).repeat(cp)


def _deal(work: list[int], sizes: list[int], cp: int, num_blocks: int) -> list[list[int]]:
    """The numbers of the blocks of each rank, ascending: as many of each size for every rank."""
    ranks: list[list[int]] = [[] for _ in range(cp)]
    heaps = {size: [(0, rank) for rank in range(cp)] for size in set(sizes)}
    room = {size: [sizes.count(size) // cp] * cp for size in heaps}
    loads = [0] * cp
    for block in sorted(range(len(work)), key=lambda number: (-work[number], number)):
        size = sizes[block]
        heap, left = heaps[size], room[size]
        while True:  # loads that have grown since they were put into this heap go back
            load, rank = heapq.heappop(heap)
            if load == loads[rank]:
                break
            heapq.heappush(heap, (loads[rank], rank))
        ranks[rank].append(block)
        loads[rank] += work[block]
        left[rank] -= 1
        if left[rank]:
            heapq.heappush(heap, (loads[rank], rank))
    assert all(len(mine) == num_blocks for mine in ranks)
    return [sorted(mine) for mine in ranks]


def _keys_sent(sight: Sight) -> int:
    """Keys that ranks need of one another."""
    needs, ranks = Needs(sight), range(sight.num_ranks)
    return sum(len(needs.of(rank, owner)) for rank in ranks for owner in ranks if rank != owner)
