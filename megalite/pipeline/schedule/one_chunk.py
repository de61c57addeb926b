"""Schedules with one stage on each rank and whole backwards: GPipe and 1F1B."""

from __future__ import annotations

from megalite.pipeline.plan import Action, Plan, loop_placement
from megalite.pipeline.schedule.sizes import backward, check_one_chunk, check_sizes, forward, rows


def gpipe(num_ranks: int, num_microbatches: int, num_chunks: int = 1) -> Plan:
    """All forwards, then all backwards; every rank keeps all activations (Huang et al., 2019, arXiv:1811.06965)."""
    check_sizes("gpipe", num_ranks, num_microbatches)
    check_one_chunk("gpipe", num_chunks)

    def row(rank: int) -> list[Action]:
        everything = range(num_microbatches)
        return [*(forward(rank, k) for k in everything), *(backward(rank, k) for k in everything)]

    return Plan(
        name="gpipe",
        num_microbatches=num_microbatches,
        placement=loop_placement(num_ranks, 1),
        actions=rows(row(rank) for rank in range(num_ranks)),
    )


def one_f_one_b(num_ranks: int, num_microbatches: int, num_chunks: int = 1) -> Plan:
    """One forward, one backward: rank r keeps at most p - r activations (Narayanan et al., 2021, arXiv:2104.04473).

    The bubble is GPipe's. Any number of microbatches will do, also fewer than ranks.
    """
    check_sizes("1f1b", num_ranks, num_microbatches)
    check_one_chunk("1f1b", num_chunks)

    def row(rank: int) -> list[Action]:
        warmup = min(num_microbatches, num_ranks - 1 - rank)
        actions = [forward(rank, k) for k in range(warmup)]
        for k in range(num_microbatches):
            if warmup + k < num_microbatches:
                actions.append(forward(rank, warmup + k))
            actions.append(backward(rank, k))
        return actions

    return Plan(
        name="1f1b",
        num_microbatches=num_microbatches,
        placement=loop_placement(num_ranks, 1),
        actions=rows(row(rank) for rank in range(num_ranks)),
    )
