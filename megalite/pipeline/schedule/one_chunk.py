"""Schedules with one stage on each rank: GPipe, 1F1B, ZB-H1 and ZB-H2."""

from __future__ import annotations

from megalite.pipeline.plan import Action, Plan, loop_placement
from megalite.pipeline.schedule.sizes import (
    backward,
    check_one_chunk,
    check_sizes,
    forward,
    input_grad,
    rows,
    weight_grad,
)


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


def zb_h1(num_ranks: int, num_microbatches: int, num_chunks: int = 1) -> Plan:
    """1F1B with W moved into the bubbles, in 1F1B's memory (Qi et al., 2023, arXiv:2401.10241, figure 2).

    Every rank keeps p activations until their W, where in 1F1B only the first does.
    """
    return _zb_h("zb_h1", num_ranks, num_microbatches, num_chunks, depth=1)


def zb_h2(num_ranks: int, num_microbatches: int, num_chunks: int = 1) -> Plan:
    """ZB-H1 with twice the warmup: 2p - 1 activations, and no bubble in any rank's own span (same paper, figure 3).

    Ranks end one after another; the gain over ZB-H1 is real only if the optimizer step does not wait for all.
    """
    return _zb_h("zb_h2", num_ranks, num_microbatches, num_chunks, depth=2)


def _zb_h(name: str, num_ranks: int, num_microbatches: int, num_chunks: int, depth: int) -> Plan:
    """Both: W of a microbatch runs as late as lets every rank keep the same depth * (p - 1) + 1 activations."""
    check_sizes(name, num_ranks, num_microbatches)
    check_one_chunk(name, num_chunks)
    kept = min(num_microbatches, depth * (num_ranks - 1) + 1)

    def row(rank: int) -> list[Action]:
        warmup = min(num_microbatches, depth * (num_ranks - 1 - rank))
        lag = max(0, kept - 1 - warmup)
        actions = [forward(rank, k) for k in range(warmup)]
        for k in range(num_microbatches):
            if warmup + k < num_microbatches:
                actions.append(forward(rank, warmup + k))
            actions.append(input_grad(rank, k))
            if k >= lag:
                actions.append(weight_grad(rank, k - lag))
        return [*actions, *(weight_grad(rank, k) for k in range(max(0, num_microbatches - lag), num_microbatches))]

    return Plan(
        name=name,
        num_microbatches=num_microbatches,
        placement=loop_placement(num_ranks, 1),
        actions=rows(row(rank) for rank in range(num_ranks)),
    )
