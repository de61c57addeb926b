"""V-Half and V-Min: half and a third of 1F1B's activations, by repeating a building block on a V.

A block is where the four passes of one microbatch start on each rank, in slots of one chunk's pass. Repeated every six
slots, no two passes of a rank collide, and two of the six slots are left for W. A block that is passed faster keeps
fewer activations (Qi et al., 2024, arXiv:2405.15362, "Pipeline Parallelism with Controllable Memory").
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace

from megalite.pipeline.plan import Action, Kind, Plan, v_placement
from megalite.pipeline.schedule.sizes import (
    check_sizes,
    check_two_chunks,
    forward,
    input_grad,
    weight_grad,
)
from megalite.pipeline.schedule.zb_v import zb_v
from megalite.pipeline.simulate import Costs, live_activations, simulate

_PERIOD = 6
_ROUNDS = 3
_SLOT = Costs(forward=2, input_grad=2, weight_grad=2)  # of a rank's two chunks, so that a chunk's pass is one slot

Timetable = list[dict[Action, int]]
"""For each rank the slots of its F and I; W fills what is free."""


def v_half(num_ranks: int, num_microbatches: int, num_chunks: int = 2) -> Plan:
    """ZB-V's shape with 2 floor((p + 2) / 2) chunk activations: half, at p large."""
    delay = 3 if num_ranks % 2 == 0 else 0

    def block(rank: int) -> tuple[int, int, int, int]:
        return (
            2 * rank,
            3 * num_ranks - 2 - rank,
            3 * num_ranks - 1 + delay + 2 * rank,
            6 * num_ranks - 2 + delay - rank,
        )

    blocks = [block(rank) for rank in range(num_ranks)]
    return _repeated("v_half", num_ranks, num_microbatches, num_chunks, blocks)


def v_min(num_ranks: int, num_microbatches: int, num_chunks: int = 2) -> Plan:
    """ZB-V's shape with 2 floor((p + 4) / 3) chunk activations, the least that a V can do: a third, at p large.

    Where F, I and W differ in cost, the bubble grows with the number of microbatches.
    """
    delay = 2 if num_ranks % 3 == 0 else 0

    def block(rank: int) -> tuple[int, int, int, int]:
        return rank, 2 * num_ranks - 1 - rank, 2 * num_ranks + delay + rank, 4 * num_ranks - 1 + delay - rank

    blocks = [block(rank) for rank in range(num_ranks)]
    return _repeated("v_min", num_ranks, num_microbatches, num_chunks, blocks)


def _repeated(
    name: str, num_ranks: int, num_microbatches: int, num_chunks: int, blocks: list[tuple[int, int, int, int]]
) -> Plan:
    """The block of each rank (F down, F up, I up, I down), repeated, tightened, and reordered at both ends."""
    check_sizes(name, num_ranks, num_microbatches)
    check_two_chunks(name, num_chunks)
    timetable: Timetable = []
    for rank, starts in enumerate(blocks):
        down, up = rank, 2 * num_ranks - 1 - rank
        rows: dict[Action, int] = {}
        for k in range(num_microbatches):
            passes = forward(down, k), forward(up, k), input_grad(up, k), input_grad(down, k)
            rows.update((action, start + _PERIOD * k) for action, start in zip(passes, starts, strict=True))
        timetable.append(rows)
    return _Ends(name, num_ranks, num_microbatches).improve(timetable)


class _Ends:
    """Uses the slots that the repeated block leaves free while the pipeline fills and drains."""

    def __init__(self, name: str, num_ranks: int, num_microbatches: int):
        self.name, self.num_ranks, self.num_microbatches = name, num_ranks, num_microbatches

    def improve(self, timetable: Timetable) -> Plan:
        """The shortest plan of some rounds of moving passes forward, none of which keeps more activations."""
        plans = [self.plan(timetable)]
        cap = max(map(_peak, plans[0].actions))
        for _ in range(_ROUNDS):
            timetable = self.squeezed(plans[-1])
            self.move_forward(timetable, cap)
            plans.append(self.plan(timetable))
        if self.num_microbatches < 2 * self.num_ranks:  # the block is never repeated often enough to pay
            whole = zb_v(self.num_ranks, self.num_microbatches)
            plans += [replace(whole, name=self.name)] if max(map(_peak, whole.actions)) <= cap else []
        return min(plans, key=lambda plan: simulate(plan, _SLOT).makespan)

    def plan(self, timetable: Timetable) -> Plan:
        """The timetable as a plan, which keeps only its order."""
        return Plan(
            name=self.name,
            num_microbatches=self.num_microbatches,
            placement=v_placement(self.num_ranks),
            actions=tuple(tuple(_with_weight_grads(rows)) for rows in timetable),
        )

    def squeezed(self, plan: Plan) -> Timetable:
        """When the plan's F and I run if each starts as soon as it can."""
        timetable: Timetable = [{} for _ in range(self.num_ranks)]
        for rank, action, start, _ in simulate(plan, _SLOT).slots:
            if action.kind is not Kind.WEIGHT_GRAD:
                timetable[rank][action] = int(start)
        return timetable

    def move_forward(self, timetable: Timetable, cap: int) -> None:
        """Moves each pass of the filling and the draining, in order of time, to the earliest slot without F or I."""
        first = timetable[0]
        filled, drains = first[input_grad(0, 0)], first[forward(0, self.num_microbatches - 1)]
        passes = sorted((slot, rank, action) for rank, rows in enumerate(timetable) for action, slot in rows.items())
        for slot, rank, action in passes:
            if filled <= slot <= drains:
                continue
            rows = timetable[rank]
            taken = set(rows.values())
            for earlier in range(self.ready(timetable, action), slot):
                if earlier not in taken:
                    rows[action] = earlier
                    if _peak(tuple(_with_weight_grads(rows))) <= cap:
                        break
                    rows[action] = slot

    def ready(self, timetable: Timetable, action: Action) -> int:
        """The slot from which an F or I could run: after what it needs, and after the microbatch before it."""
        kind, stage, microbatch = action
        last = 2 * self.num_ranks - 1
        needs = [action._replace(microbatch=microbatch - 1)] if microbatch else []
        if kind is Kind.FORWARD:
            needs += [forward(stage - 1, microbatch)] if stage else []
        else:
            needs += [input_grad(stage + 1, microbatch) if stage < last else forward(stage, microbatch)]
        return max((timetable[min(need.stage, last - need.stage)][need] + 1 for need in needs), default=0)


def _with_weight_grads(rows: dict[Action, int]) -> list[Action]:
    """A rank's passes in order of time, each free slot between taken by the oldest W that waits."""
    actions: list[Action] = []
    pending: deque[Action] = deque()
    now = 0
    for action, slot in sorted(rows.items(), key=lambda item: item[1]):
        while pending and now < slot:
            actions.append(pending.popleft())
            now += 1
        actions.append(action)
        now = slot + 1
        if action.kind is Kind.INPUT_GRAD:
            pending.append(weight_grad(action.stage, action.microbatch))
    return [*actions, *pending]


def _peak(row: tuple[Action, ...]) -> int:
    return max(live for _, live in live_activations(row, Kind.WEIGHT_GRAD))
