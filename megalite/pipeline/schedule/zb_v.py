"""ZB-V: zero bubble in 1F1B's memory, with two chunks on each rank placed as a V."""

from __future__ import annotations

from collections import deque

from megalite.pipeline.plan import Action, Plan, v_placement
from megalite.pipeline.schedule.sizes import (
    check_sizes,
    check_two_chunks,
    forward,
    input_grad,
    rows,
    weight_grad,
)


def zb_v(num_ranks: int, num_microbatches: int, num_chunks: int = 2) -> Plan:
    """Zero bubble in every rank's own span with 2p chunk activations (Qi et al., 2023, arXiv:2401.10241, section 6).

    The handmade plan for equal costs. Ranks end one after another, so a step that waits for all still pays
    (p - 1) F / 2. Fewer microbatches than 2p - 1 run the plan of 2p - 1 with the rest left out.
    """
    check_sizes("zb_v", num_ranks, num_microbatches)
    check_two_chunks("zb_v", num_chunks)
    full = max(num_microbatches, 2 * num_ranks - 1)
    lists = (_Rank(rank, num_ranks, full).row() for rank in range(num_ranks))
    return Plan(
        name="zb_v",
        num_microbatches=num_microbatches,
        placement=v_placement(num_ranks),
        actions=rows([action for action in row if action.microbatch < num_microbatches] for row in lists),
    )


class _Rank:
    """One rank's list as it grows; chunk 0 is on the way down the V, chunk 1 on the way up."""

    def __init__(self, rank: int, num_ranks: int, num_microbatches: int):
        self.rank, self.num_ranks, self.num_microbatches = rank, num_ranks, num_microbatches
        self.stages = (rank, 2 * num_ranks - 1 - rank)
        self.forwards, self.backwards = [0, 0], [0, 0]
        self.pending: tuple[deque[int], deque[int]] = (deque(), deque())
        self.actions: list[Action] = []

    def f(self, chunk: int) -> None:
        """The chunk's next forward."""
        self.actions.append(forward(self.stages[chunk], self.forwards[chunk]))
        self.forwards[chunk] += 1

    def i(self, chunk: int) -> None:
        """The chunk's next input gradient."""
        self.actions.append(input_grad(self.stages[chunk], self.backwards[chunk]))
        self.pending[chunk].append(self.backwards[chunk])
        self.backwards[chunk] += 1

    def w(self, chunk: int) -> None:
        """The chunk's oldest weight gradient."""
        self.actions.append(weight_grad(self.stages[chunk], self.pending[chunk].popleft()))

    def row(self) -> list[Action]:
        """The phases of the paper's figure, from left to right."""
        for _ in range(2 * (self.num_ranks - self.rank) - 1):
            self.f(0)
        for _ in range(self.rank):
            self.f(1)
            self.f(0)
        for _ in range(self.num_ranks - self.rank):
            self.f(1)
            self.i(1)
            self.w(1)
        while self.forwards[1] < self.num_microbatches:
            if self.forwards[0] < self.num_microbatches:
                self.f(0)
            self.i(0)
            self.w(0)
            self.f(1)
            self.i(1)
            self.w(1)
        for _ in range(self.rank):
            self.i(0)
            self.i(1)
        for _ in range(self.num_ranks - self.rank):
            self.i(0)
            self.w(0)
        for chunk in (1, 0):
            while self.pending[chunk]:
                self.w(chunk)
        return self.actions
