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
from megalite.pipeline.simulate import Costs, Time


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


def zb_h1(num_ranks: int, num_microbatches: int, num_chunks: int = 1, costs: Costs | None = None) -> Plan:
    """1F1B with W moved into the bubbles, in 1F1B's memory (Qi et al., 2023, arXiv:2401.10241, figure 2).

    Every rank keeps p activations until their W, where in 1F1B only the first does.
    """
    return _zb_h("zb_h1", num_ranks, num_microbatches, num_chunks, num_ranks, costs)


def zb_h2(num_ranks: int, num_microbatches: int, num_chunks: int = 1, costs: Costs | None = None) -> Plan:
    """ZB-H1 with up to 2p - 1 activations, and no bubble in any rank's own span (same paper, figure 3).

    Ranks end one after another; the gain over ZB-H1 is real only if the optimizer step does not wait for all.
    """
    return _zb_h("zb_h2", num_ranks, num_microbatches, num_chunks, 2 * num_ranks - 1, costs)


def _zb_h(name: str, num_ranks: int, num_microbatches: int, num_chunks: int, limit: int, costs: Costs | None) -> Plan:
    """Forwards until the first input gradient is there, then in turns; W as late as `limit` activations allow."""
    check_sizes(name, num_ranks, num_microbatches)
    check_one_chunk(name, num_chunks)
    kept = min(num_microbatches, limit)
    before_first_grad = _forwards_before_first_grad(num_ranks, num_microbatches, limit, costs or Costs())

    def row(rank: int) -> list[Action]:
        warmup = before_first_grad[rank] - 1
        lag = kept - 1 - warmup
        actions = [forward(rank, k) for k in range(warmup)]
        for k in range(num_microbatches):
            if warmup + k < num_microbatches:
                actions.append(forward(rank, warmup + k))
            actions.append(input_grad(rank, k))
            if k >= lag:
                actions.append(weight_grad(rank, k - lag))
        return actions + [weight_grad(rank, k) for k in range(num_microbatches - lag, num_microbatches)]

    return Plan(
        name=name,
        num_microbatches=num_microbatches,
        placement=loop_placement(num_ranks, 1),
        actions=rows(row(rank) for rank in range(num_ranks)),
    )


def _forwards_before_first_grad(num_ranks: int, num_microbatches: int, limit: int, costs: Costs) -> list[int]:
    """How many forwards each rank can end before its first input gradient arrives, within memory.

    When all microbatches do not fit at once, rank r keeps r of its `limit` activations free: if it held as many as
    the rank before, that one could not send it another. With tF = tI and no latency the time allows 2 (p - 1 - r) + 1.
    """
    stages = [costs.passes(stage, num_ranks, num_ranks) for stage in range(num_ranks)]
    counts: list[int] = []
    grad_after: Time = 0  # from the end of this rank's first forward to the arrival of its first input gradient
    for rank in reversed(range(num_ranks)):
        forward_time = stages[rank][0]
        in_time = int((forward_time + grad_after) // forward_time) if forward_time else num_microbatches
        in_memory = num_microbatches if num_microbatches <= limit else limit - rank
        counts.append(max(min(num_microbatches, in_time, in_memory), *counts[-1:], 1))
        grad_after += forward_time + stages[rank][1] + 2 * costs.latency
    return counts[::-1]
