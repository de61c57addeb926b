"""ZB-H1 and ZB-H2: 1F1B with the weight gradients W moved into what were its bubbles.

Both follow the same rules within a limit of activations. A rank runs forwards until its first input gradient I arrives;
then F and I take turns (an I that is here does not wait for an F that is not); W waits as long as memory allows, and
takes the turn of F once no forward is left. With equal costs and enough microbatches these rules give the figures of
the paper: a warmup of k (p - 1 - r) forwards and W late by k r microbatches on rank r, k = 1 and 2.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

from megalite.pipeline.plan import Action, Kind, Plan, loop_placement
from megalite.pipeline.schedule.sizes import check_one_chunk, check_sizes, rows
from megalite.pipeline.simulate import Costs, Time


def zb_h1(num_ranks: int, num_microbatches: int, num_chunks: int = 1, costs: Costs | None = None) -> Plan:
    """A third of 1F1B's bubble in 1F1B's memory (Qi et al., 2023, arXiv:2401.10241, figure 2).

    Every rank keeps p activations until their W, where in 1F1B only the first does.
    """
    return _zb_h("zb_h1", num_ranks, num_microbatches, num_chunks, num_ranks, costs)


def zb_h2(num_ranks: int, num_microbatches: int, num_chunks: int = 1, costs: Costs | None = None) -> Plan:
    """No bubble in any rank's own span, with up to 2p - 1 activations (same paper, figure 3).

    Ranks end one after another; the gain over ZB-H1 is real only if the optimizer step does not wait for all.
    """
    return _zb_h("zb_h2", num_ranks, num_microbatches, num_chunks, 2 * num_ranks - 1, costs)


def _zb_h(name: str, num_ranks: int, num_microbatches: int, num_chunks: int, limit: int, costs: Costs | None) -> Plan:
    check_sizes(name, num_ranks, num_microbatches)
    check_one_chunk(name, num_chunks)
    return Plan(
        name=name,
        num_microbatches=num_microbatches,
        placement=loop_placement(num_ranks, 1),
        actions=rows(_Pipeline(num_ranks, num_microbatches, limit, costs or Costs()).lists()),
    )


@dataclass
class _Rank:
    """How far a rank has come."""

    warmup: int
    """Forwards before the first input gradient."""
    forwards: int = 0
    input_grads: int = 0
    weight_grads: int = 0
    turn_of_forward: bool = False
    free: Time = 0
    """When its last action ends."""
    inputs: dict[int, Time] = field(default_factory=dict)
    """Arrival by microbatch."""
    output_grads: dict[int, Time] = field(default_factory=dict)
    """Arrival by microbatch."""
    actions: list[Action] = field(default_factory=list)


class _Pipeline:
    """Ranks that decide what to do next whenever they are free and something has arrived."""

    def __init__(self, num_ranks: int, num_microbatches: int, limit: int, costs: Costs):
        self.num_microbatches, self.limit, self.latency = num_microbatches, limit, costs.latency
        self.passes = [costs.passes(stage, num_ranks, num_ranks) for stage in range(num_ranks)]
        self.ranks = [_Rank(warmup) for warmup in self.warmups()]
        self.ranks[0].inputs = dict.fromkeys(range(num_microbatches), 0)

    def warmups(self) -> list[int]:
        """How many forwards each rank can end before its first input gradient arrives, within memory.

        When all microbatches do not fit at once, rank r keeps r of its `limit` activations free: if it held as many
        as the rank before, that one could not send it another.
        """
        counts = [1]
        until_grad: Time = 0  # from the end of the rank's first forward to the arrival of its first input gradient
        for rank, (forward, input_grad, _) in reversed([*enumerate(self.passes)]):
            in_time = 1 + int(until_grad // forward) if forward else self.num_microbatches
            in_memory = self.num_microbatches if self.num_microbatches <= self.limit else self.limit - rank
            counts.append(max(counts[-1], min(self.num_microbatches, in_time, in_memory)))
            until_grad += forward + input_grad + 2 * self.latency
        return counts[:0:-1]

    def lists(self) -> list[list[Action]]:
        """Runs all microbatches through the ranks; returns what each rank did."""
        events: list[tuple[Time, int]] = [(0, rank) for rank in range(len(self.ranks))]
        while events:
            now, rank = heapq.heappop(events)
            if now >= self.ranks[rank].free and (kind := self.choose(self.ranks[rank], now)) is not None:
                for event in self.start(kind, rank, now):
                    heapq.heappush(events, event)
        return [rank.actions for rank in self.ranks]

    def choose(self, rank: _Rank, now: Time) -> Kind | None:
        """What the rank does next; None when it waits."""
        may_forward = rank.inputs.get(rank.forwards, now + 1) <= now
        may_input_grad = rank.output_grads.get(rank.input_grads, now + 1) <= now
        if rank.forwards < rank.warmup:
            return Kind.FORWARD if may_forward else None
        pending = rank.weight_grads < rank.input_grads
        if rank.forwards == self.num_microbatches:
            ended = rank.input_grads == self.num_microbatches
            if pending and (rank.turn_of_forward or ended):
                return Kind.WEIGHT_GRAD
        elif rank.turn_of_forward and (may_forward or not may_input_grad):
            if rank.forwards - rank.weight_grads >= self.limit and pending:
                return Kind.WEIGHT_GRAD
            if may_forward:
                return Kind.FORWARD
        return Kind.INPUT_GRAD if may_input_grad else None

    def start(self, kind: Kind, number: int, now: Time) -> list[tuple[Time, int]]:
        """Lets a rank act; returns when which ranks have something to decide."""
        rank = self.ranks[number]
        forward, input_grad, weight_grad = self.passes[number]
        if kind is Kind.FORWARD:
            microbatch, rank.free = rank.forwards, now + forward
            rank.forwards += 1
            rank.turn_of_forward = False
            last = number == len(self.ranks) - 1
            target, arrivals = (number, rank.output_grads) if last else (number + 1, self.ranks[number + 1].inputs)
        elif kind is Kind.INPUT_GRAD:
            microbatch, rank.free = rank.input_grads, now + input_grad
            rank.input_grads += 1
            rank.turn_of_forward = True
            target, arrivals = (number - 1, self.ranks[number - 1].output_grads) if number else (number, {})
        else:
            microbatch, rank.free = rank.weight_grads, now + weight_grad
            rank.weight_grads += 1
            rank.turn_of_forward = rank.forwards < self.num_microbatches
            target, arrivals = number, {}
        rank.actions.append(Action(kind, number, microbatch))
        arrivals[microbatch] = rank.free if target == number else rank.free + self.latency
        return [(rank.free, number), (arrivals[microbatch], target)]
