"""DualPipe and DualPipeV: forwards of one half of a rank's work overlap with backwards of the other half.

In both, a rank serves two streams of microbatches that come from its two sides. DualPipe has two copies of the model,
one in each direction; DualPipeV folds one model into a V, whose way down and way up are the two streams.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from megalite.pipeline.plan import Action, Plan, PlanError, v_placement
from megalite.pipeline.schedule.sizes import (
    backward,
    check_one_chunk,
    check_sizes,
    check_two_chunks,
    forward,
    input_grad,
    weight_grad,
)


def dualpipe(num_ranks: int, num_microbatches: int, num_chunks: int = 1) -> Plan:
    """Bidirectional pipeline with FB pairs (DeepSeek-AI, 2024, arXiv:2412.19437, figure 5).

    Chain A runs from the first rank to the last, chain B from the last to the first: two copies of each stage, half
    of the microbatches through each. p + 1 activations on every rank. p and m must be even and m at least 2p.
    """
    check_sizes("dualpipe", num_ranks, num_microbatches)
    check_one_chunk("dualpipe", num_chunks)
    if num_ranks % 2 or num_microbatches % 2 or num_microbatches < 2 * num_ranks:
        raise PlanError(
            f"dualpipe: {num_ranks} pipeline ranks and {num_microbatches} microbatches; both must be even and the "
            f"microbatches at least twice the ranks, {2 * num_ranks}"
        )
    half = num_microbatches // 2
    ranks = []
    for rank in range(num_ranks):
        a = _Stream(rank, range(half))
        b = _Stream(2 * num_ranks - 1 - rank, range(half, num_microbatches))
        near, far = (a, b) if rank < num_ranks // 2 else (b, a)
        ranks.append(_Rank(near, far, num_ranks // 2, min(rank, num_ranks - 1 - rank)))
    return _plan("dualpipe", num_microbatches, ranks, num_chains=2)


def dualpipe_v(num_ranks: int, num_microbatches: int, num_chunks: int = 2) -> Plan:
    """DualPipe folded into a V, with one copy of the model (Qi et al., 2025, "Cut-in-half").

    2p + 1 chunk activations on every rank. At least 2p microbatches.
    """
    check_sizes("dualpipe_v", num_ranks, num_microbatches)
    check_two_chunks("dualpipe_v", num_chunks)
    if num_microbatches < 2 * num_ranks:
        raise PlanError(
            f"dualpipe_v: {num_microbatches} microbatches must be at least twice the {num_ranks} pipeline ranks"
        )
    everything = range(num_microbatches)
    ranks = [
        _Rank(_Stream(rank, everything), _Stream(2 * num_ranks - 1 - rank, everything), num_ranks, rank)
        for rank in range(num_ranks)
    ]
    return _plan("dualpipe_v", num_microbatches, ranks, num_chains=1)


def _plan(name: str, num_microbatches: int, ranks: Iterable[_Rank], num_chains: int) -> Plan:
    lists = [rank.row() for rank in ranks]
    return Plan(
        name=name,
        num_microbatches=num_microbatches,
        placement=v_placement(len(lists)),
        actions=tuple(tuple(actions) for actions, _ in lists),
        num_chains=num_chains,
        pairs=frozenset(pair for _, pairs in lists for pair in pairs),
    )


class _Stream:
    """The microbatches that pass one of the rank's two stages, in order."""

    def __init__(self, stage: int, microbatches: range):
        self.stage = stage
        self.num_microbatches = len(microbatches)
        self.forwards, self.backwards = iter(microbatches), iter(microbatches)


class _Rank:
    """One rank's list as it grows: `near` is the stream whose input comes from the nearer end of the pipeline.

    `distance` counts the ranks between this one and that end, of `depth` ranks on each side.
    """

    def __init__(self, near: _Stream, far: _Stream, depth: int, distance: int):
        self.near, self.far, self.depth, self.distance = near, far, depth, distance
        self.pending: deque[Action] = deque()
        self.actions: list[Action] = []
        self.pairs: list[Action] = []

    def f(self, stream: _Stream) -> None:
        """The stream's next forward."""
        self.actions.append(forward(stream.stage, next(stream.forwards)))

    def b(self, stream: _Stream) -> None:
        """The stream's next backward."""
        self.actions.append(backward(stream.stage, next(stream.backwards)))

    def i(self, stream: _Stream) -> None:
        """The stream's next input gradient."""
        microbatch = next(stream.backwards)
        self.actions.append(input_grad(stream.stage, microbatch))
        self.pending.append(weight_grad(stream.stage, microbatch))

    def w(self) -> None:
        """The oldest weight gradient of both streams."""
        self.actions.append(self.pending.popleft())

    def fb(self, ahead: _Stream, back: _Stream) -> None:
        """A forward and a backward that overlap."""
        self.f(ahead)
        self.pairs.append(self.actions[-1])
        self.b(back)

    def row(self) -> tuple[list[Action], list[Action]]:
        """The eight steps of DeepSeek's reference, and which forwards are paired."""
        near, far, outer, inner = self.near, self.far, self.distance, self.depth - 1 - self.distance
        for _ in range(2 * inner):
            self.f(near)
        for _ in range(outer + 1):
            self.f(near)
            self.f(far)
        for _ in range(inner):
            self.i(far)
            self.w()
            self.f(far)
        self.steady(near.num_microbatches - 2 * self.depth + outer + 1)
        for _ in range(inner):
            self.b(far)
            self.fb(far, near)
        self.drain(outer + 1)
        for _ in range(inner):
            self.w()
            self.i(near)
        for _ in range(outer + 1):
            self.w()
        return self.actions, self.pairs

    def steady(self, times: int) -> None:
        """Step 4: pairs in both directions. The innermost ranks turn their first around, so it cannot overlap."""
        for k in range(times):
            if k == 0 and self.distance == self.depth - 1:
                self.f(self.near)
                self.b(self.far)
            else:
                self.fb(self.near, self.far)
            self.fb(self.far, self.near)

    def drain(self, times: int) -> None:
        """Step 6: backwards, from the middle on without their weight gradients."""
        for k in range(2 * times):
            stream = self.near if k % 2 else self.far
            if k < times:
                self.b(stream)
            else:
                self.i(stream)
