"""Who computes which part of the attention matrix, and what each rank sends: drawn from the plan that ranks follow."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megalite.grid import ParallelConfig
from megalite.parallel.context_balance import imbalance
from megalite.parallel.context_plan import Block, GatherPlan, Needs, RingPlan, Sight, gather_plan, ring_plan
from megalite.parallel.head_exchange import kv_repeats

COLOURS = ("#4878cf", "#e07b39", "#59a14f", "#b65fbf", "#d8b13a", "#3fb0b0", "#c44e52", "#8c6d4f")


@dataclass(frozen=True, kw_only=True)
class Heads:
    """Sizes of the attention of one tensor-parallel rank."""

    num_heads: int
    kv_heads: int
    head_size: int
    bytes_per_element: int = 2
    """Of activations; gradients of keys and values travel in at least 4."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ContextPicture:
    """The attention matrix of one row in cells: row i, column j holds queries and keys of the i-th and j-th run.

    rank, step: int64 [cells, cells], which block of ranks (see `ranks_together`) computes most of the cell, -1 where
    nobody does, and in which step of its plan. share: [cells, cells], how much of the cell is allowed. work: int64
    [cp], (query, key) pairs times heads. forward_bytes, backward_bytes: int64 [cp], what each rank sends.
    """

    title: str
    ranks_together: int
    rank: Tensor
    step: Tensor
    share: Tensor
    work: Tensor
    forward_bytes: Tensor
    backward_bytes: Tensor

    @property
    def imbalance(self) -> float:
        """(most - least) / mean of the work."""
        return imbalance(self.work)

    def name_of(self, block: int) -> str:
        """The ranks whose colour a block has."""
        first, size = block * self.ranks_together, self.ranks_together
        return f"rank {first}" if size == 1 else f"ranks {first}-{first + size - 1}: 1/{size} of heads each"


def context_picture(
    sight: Sight, parallel: ParallelConfig, heads: Heads, *, layer: int = 0, cells: int = 32
) -> ContextPicture:
    """The picture of one row ([cp, n, 1] in `sight`) in a layer."""
    mode, cp = parallel.cp_mode_of(layer), sight.num_ranks
    size = parallel.head_exchange_size(mode)
    joined, _ = sight.joined(size)
    needs = Needs(joined)
    make = gather_plan if mode == "all_gather" else ring_plan
    plans = [make(joined, rank, needs) for rank in range(joined.num_ranks)]
    s = sight.places.numel()
    cells = min(cells, s)
    counts = torch.zeros(joined.num_ranks, 1 + cp, cells, cells, dtype=torch.int64)
    for rank, plan in enumerate(plans):
        for step, block in _blocks(plan):
            counts[rank, step] += _cells(joined, rank, block, cells)
    total = counts.sum((0, 1))
    computed = total > 0
    borders = torch.arange(cells + 1) * s // cells
    area = (borders[1:] - borders[:-1])[:, None] * (borders[1:] - borders[:-1])
    forward, backward = _bytes(plans, size, s // cp, heads)
    return ContextPicture(
        title=_title(parallel, mode),
        ranks_together=size,
        rank=torch.where(computed, counts.sum(1).argmax(0), -1),
        step=torch.where(computed, counts.sum(0).argmax(0), -1),
        share=total / area,
        work=joined.num_pairs.repeat_interleave(size) * (heads.num_heads // size),
        forward_bytes=forward,
        backward_bytes=backward,
    )


def _title(parallel: ParallelConfig, mode: str) -> str:
    inner = f" in blocks of {parallel.cp_ulysses}" if mode == "ulysses_ring" else ""
    return f"{mode}{inner}, cp={parallel.cp}"


def _blocks(plan: RingPlan | GatherPlan) -> Iterable[tuple[int, Block]]:
    """The kernel calls of a rank, with the steps in which they run."""
    blocks = [plan.block, plan.others] if isinstance(plan, GatherPlan) else [step.block for step in plan.steps]
    return ((step, block) for step, block in enumerate(blocks) if block is not None)


def _cells(sight: Sight, rank: int, block: Block, cells: int) -> Tensor:
    """int64 [cells, cells]: the pairs of each cell that a kernel call computes."""
    s = sight.places.numel()
    query = sight.places[rank, block.queries, 0]
    first, last = sight.first[rank, block.queries, 0], sight.last[rank, block.queries, 0]
    here = torch.zeros(s + 1, dtype=torch.int64)
    here[1 + block.key[block.key < s]] = 1
    before = here.cumsum(0)
    borders = torch.arange(cells + 1) * s // cells
    low = torch.maximum(first[:, None], borders[:-1])
    high = torch.minimum(last[:, None] + 1, borders[1:])
    pairs = (before[high] - before[torch.minimum(low, high)]).clamp(min=0)
    row = torch.searchsorted(borders, query, right=True) - 1
    return torch.zeros(cells, cells, dtype=torch.int64).index_add_(0, row, pairs)


def _bytes(plans: Sequence[RingPlan | GatherPlan], size: int, tokens: int, heads: Heads) -> tuple[Tensor, Tensor]:
    """(forward, backward) bytes that each rank sends, int64 [cp]."""
    kv_heads = heads.kv_heads * kv_repeats(heads.num_heads, heads.kv_heads, size)
    token = 2 * kv_heads // size * heads.head_size
    wide = max(4, heads.bytes_per_element)
    all_heads = 2 * (heads.num_heads + kv_heads) * heads.head_size * heads.bytes_per_element
    exchange = tokens * all_heads * (size - 1) // size
    forward = [plan.tokens_sent * token * heads.bytes_per_element for plan in plans]
    backward = [sent + plan.grad_tokens_sent * token * wide for sent, plan in zip(forward, plans, strict=True)]
    found = (torch.tensor(part).repeat_interleave(size) + exchange for part in (forward, backward))
    return next(found), next(found)


def legend(picture: ContextPicture) -> list[tuple[str, str, str]]:
    """(colour, who it stands for, what each of these sends forward and backward) of each block of ranks."""
    found, size = [], picture.ranks_together
    for block in range(len(picture.work) // size):
        sends = [bytes_text(part[block * size]) for part in (picture.forward_bytes, picture.backward_bytes)]
        found.append((COLOURS[block % len(COLOURS)], picture.name_of(block), " + ".join(sends)))
    return found


def bytes_text(count: Tensor | int) -> str:
    """`12.5 MB` for 12500000."""
    size, unit = float(count), 0
    while size >= 1000 and unit < 4:
        size, unit = size / 1000, unit + 1
    return f"{size:.3g} {('B', 'kB', 'MB', 'GB', 'TB')[unit]}"
