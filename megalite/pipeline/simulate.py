"""Event simulation of a plan: when each action would run, what the bubble costs, and whether it can finish at all.

Only compute takes time; a result reaches another rank `latency` after it was produced. Times have no unit. With
integer or Fraction costs everything is exact.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal, NamedTuple

from megalite.pipeline.plan import Action, Kind, Plan, PlanError, check_complete

Time = float | Fraction

FB = Literal["atomic", "seq"]
"""How a pair of a forward and a backward is priced: as one slot with one end, or as what the executor runs, the
forward and then the backward with messages of their own."""


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What the passes cost on a rank's share of the model (num_stages / num_ranks stages)."""

    forward: Time = 1
    """Forward pass of a microbatch."""
    input_grad: Time = 1
    """Its backward pass as far as the gradient of the activations."""
    weight_grad: Time = 1
    """The gradient of the weights."""
    latency: Time = 0
    """From a result on one rank to its use on another."""
    stage_share: tuple[Time, ...] | None = None
    """Each model stage's part of a rank's share; by default all stages are alike."""
    stages: tuple[tuple[Time, Time, Time], ...] | None = None
    """Each model stage's own forward, input_grad and weight_grad, as measured, instead of all of the above."""

    def passes(self, model_stage: int, num_stages: int, num_ranks: int) -> tuple[Time, Time, Time]:
        """A model stage's own forward, input_grad and weight_grad."""
        if self.stages is not None:
            return self.stages[model_stage]
        share: Time = 1
        if self.stage_share is not None:
            share = self.stage_share[model_stage]
        elif num_stages != num_ranks:
            share = Fraction(num_ranks, num_stages)
        return self.forward * share, self.input_grad * share, self.weight_grad * share

    def duration(self, action: Action, plan: Plan) -> Time:
        """How long a compute action runs."""
        forward, input_grad, weight_grad = self.passes(plan.model_stage(action.stage), plan.num_stages, plan.num_ranks)
        return {
            Kind.FORWARD: forward,
            Kind.BACKWARD: input_grad + weight_grad,
            Kind.INPUT_GRAD: input_grad,
            Kind.WEIGHT_GRAD: weight_grad,
        }[action.kind]


class Slot(NamedTuple):
    """An action in time."""

    rank: int
    action: Action
    start: Time
    end: Time


@dataclass(frozen=True)
class Simulation:
    """The timed plan: `slots` in the order of completion (ties by rank), which is an order that respects every
    dependency and is the same wherever it is computed. Both actions of an atomic pair complete at its end."""

    plan: Plan
    slots: tuple[Slot, ...]

    @property
    def makespan(self) -> Time:
        """From the first start to the last end over all ranks: what a step costs when all ranks wait at its end."""
        return max(slot.end for slot in self.slots) - min(slot.start for slot in self.slots)

    @property
    def span(self) -> Time:
        """The longest time from a rank's own first start to its own last end."""
        begins: dict[int, Time] = {}
        ends: dict[int, Time] = {}
        for rank, _, start, end in self.slots:
            begins[rank] = min(begins.get(rank, start), start)
            ends[rank] = max(ends.get(rank, end), end)
        return max(ends[rank] - begins[rank] for rank in ends)

    @property
    def busy(self) -> list[Time]:
        """Computing time of each rank."""
        busy: list[Time] = [0] * self.plan.num_ranks
        for rank, _, start, end in self.slots:
            busy[rank] += end - start
        return busy

    @property
    def idle(self) -> list[Time]:
        """The part of the makespan that each rank does not compute."""
        makespan = self.makespan
        return [makespan - busy for busy in self.busy]

    @property
    def ideal(self) -> Time:
        """The least that any schedule with this placement could take: the busiest rank's computing time."""
        return max(self.busy)

    @property
    def bubble_global(self) -> Time:
        """Idle part of all ranks' time within the makespan, 0 to 1: the bubble when all ranks wait at the end."""
        return _ratio(sum(self.idle), self.makespan * self.plan.num_ranks)

    @property
    def bubble_span(self) -> Time:
        """The part of the span beyond `ideal`, 0 to 1: the bubble when no rank waits for another at either end."""
        return 1 - _ratio(self.ideal, self.span)

    def summary(self) -> dict[str, float | list[float] | list[int]]:
        """The figures by name, in floats; per-rank lists for busy, idle and the peaks of activations."""
        return {
            "makespan": float(self.makespan),
            "span": float(self.span),
            "ideal": float(self.ideal),
            "bubble_global": float(self.bubble_global),
            "bubble_span": float(self.bubble_span),
            "busy": [float(time) for time in self.busy],
            "idle": [float(time) for time in self.idle],
            "peak_until_I": peak_activations(self.plan),
            "peak_until_W": peak_activations(self.plan, Kind.WEIGHT_GRAD),
        }


def _ratio(part: Time, whole: Time) -> Time:
    if not whole:
        return 0
    return part / (Fraction(whole) if isinstance(whole, int) else whole)


def simulate(plan: Plan, costs: Costs | None = None, fb: FB = "atomic") -> Simulation:
    """The times of a plan's compute actions; raises PlanError when an action is missing or its order deadlocks."""
    check_complete(plan)
    costs = costs if costs is not None else Costs()
    durations, latency, scale = _in_ticks(plan, costs)
    machine = _Machine(plan, durations, latency, fb)
    slots = []
    for rank, action, start, end in machine.run():
        slots.append(Slot(rank, action, start, end) if scale == 1 else _scaled(rank, action, start, end, scale))
    machine.raise_if_stuck()
    return Simulation(plan, tuple(slots))


def completion_order(plan: Plan) -> list[tuple[int, Action]]:
    """All compute actions, each with its rank, in the order in which they complete when all passes cost the same.

    An order that respects every dependency, with the actions of a pair apart. Raises PlanError like `simulate`.
    """
    check_complete(plan)
    machine = _Machine(plan, {}, 0, "seq")
    order = [(rank, action) for rank, action, _, _ in machine.run()]
    machine.raise_if_stuck()
    return order


def check_order(plan: Plan) -> None:
    """Raises PlanError when the ranks' orders make them wait for each other; cheaper than `simulate`."""
    completion_order(plan)


def peak_activations(plan: Plan, released_by: Kind = Kind.INPUT_GRAD) -> list[int]:
    """Most (stage, microbatch) activations that each rank holds at a time; a matter of order, not of time.

    `released_by` says when an activation dies: with its input gradient (I or B), or with its weight gradient (W or B).
    """
    return [max(live for _, live in live_activations(row, released_by)) for row in plan.actions]


def live_activations(row: tuple[Action, ...], released_by: Kind = Kind.INPUT_GRAD) -> Iterator[tuple[Action, int]]:
    """Each compute action of a rank's list with the number of activations alive after it."""
    live = 0
    for action in row:
        if action.kind is Kind.FORWARD:
            live += 1
        elif action.kind in (Kind.BACKWARD, released_by):
            live -= 1
        elif action.kind not in (Kind.INPUT_GRAD, Kind.WEIGHT_GRAD):
            continue
        yield action, live


def _in_ticks(plan: Plan, costs: Costs) -> tuple[dict[tuple[Kind, int], Time], Time, int]:
    """Durations by (kind, stage), and the latency; as integers, with the number to divide times by, if exact."""
    durations = {
        (kind, stage): costs.duration(Action(kind, stage, 0), plan)
        for kind in (Kind.FORWARD, Kind.BACKWARD, Kind.INPUT_GRAD, Kind.WEIGHT_GRAD)
        for stage in range(len(plan.placement))
    }
    exact = [time for time in (*durations.values(), costs.latency) if isinstance(time, int | Fraction)]
    if len(exact) <= len(durations):
        return durations, costs.latency, 1
    scale = math.lcm(*(Fraction(time).denominator for time in exact))
    return {key: int(time * scale) for key, time in durations.items()}, int(costs.latency * scale), scale


def _scaled(rank: int, action: Action, start: Time, end: Time, scale: int) -> Slot:
    assert isinstance(start, int) and isinstance(end, int)
    return Slot(rank, action, Fraction(start, scale), Fraction(end, scale))


class _Piece(NamedTuple):
    """What a rank does without a pause: one action, or both of an atomic pair."""

    actions: tuple[Action, ...]
    durations: tuple[Time, ...]
    needs: tuple[tuple[int, Time], ...]
    """Results, by number, and how long after their completion they are here."""
    results: tuple[int, ...]

    def joined(self, other: _Piece) -> _Piece:
        """This piece and `other` without a pause between them."""
        return _Piece(
            self.actions + other.actions,
            self.durations + other.durations,
            self.needs + other.needs,
            self.results + other.results,
        )


class _Machine:
    """Ranks that perform their lists, each waiting for what an action needs.

    A result is a number: F, I and W of (stage, microbatch) number n are n, n + t and n + 2t, of t in all.
    """

    def __init__(self, plan: Plan, durations: dict[tuple[Kind, int], Time], latency: Time, fb: FB):
        self.plan, self.durations, self.latency = plan, durations, latency
        self.total = len(plan.placement) * plan.num_microbatches
        self.pieces = [self.cut(rank, fb) for rank in range(plan.num_ranks)]
        self.position = [0] * plan.num_ranks
        self.free: list[Time] = [0] * plan.num_ranks
        self.produced: list[Time | None] = [None] * (3 * self.total)
        self.waiting: dict[int, list[int]] = {}
        self.running: list[tuple[Time, int, Time]] = []

    def cut(self, rank: int, fb: FB) -> list[_Piece]:
        """The rank's list in pieces."""
        pieces: list[_Piece] = []
        for action in self.plan.compute(rank):
            piece = self.piece(rank, action)
            if fb == "atomic" and pieces and pieces[-1].actions[-1] in self.plan.pairs:
                piece = pieces.pop().joined(piece)
            pieces.append(piece)
        return pieces

    def piece(self, rank: int, action: Action) -> _Piece:
        """One action as a piece."""
        kind, stage, microbatch = action
        number, total = stage * self.plan.num_microbatches + microbatch, self.total
        needs: list[tuple[int, Time]] = []
        if kind is Kind.FORWARD:
            if (other := self.plan.previous_stage(stage)) is not None:
                needs.append((number - self.plan.num_microbatches, self.delay(other, rank)))
            made = (number,)
        elif kind is Kind.WEIGHT_GRAD:
            needs.append((number + total, 0))
            made = (number + 2 * total,)
        else:
            needs.append((number, 0))
            if (other := self.plan.next_stage(stage)) is not None:
                needs.append((number + total + self.plan.num_microbatches, self.delay(other, rank)))
            made = (number + total, number + 2 * total) if kind is Kind.BACKWARD else (number + total,)
        return _Piece((action,), (self.durations.get((kind, stage), 1),), tuple(needs), made)

    def delay(self, stage: int, rank: int) -> Time:
        """How long a result of `stage` takes to `rank`."""
        return 0 if self.plan.placement[stage] == rank else self.latency

    def run(self) -> Iterator[tuple[int, Action, Time, Time]]:
        """Runs until no rank can go on; yields actions with their times in the order of completion."""
        for rank in range(self.plan.num_ranks):
            self.start_next(rank)
        while self.running:
            end, rank, start = heapq.heappop(self.running)
            piece = self.pieces[rank][self.position[rank]]
            for action, duration in zip(piece.actions, piece.durations, strict=True):
                yield rank, action, start, start + duration
                start += duration
            self.position[rank] += 1
            self.free[rank] = end
            for result in piece.results:
                self.produced[result] = end
                for other in self.waiting.pop(result, ()):
                    self.start_next(other)
            self.start_next(rank)

    def start_next(self, rank: int) -> None:
        """Starts the rank's next piece, or leaves the rank with the first result that it waits for."""
        position = self.position[rank]
        if position == len(self.pieces[rank]):
            return
        _, durations, needs, _ = self.pieces[rank][position]
        start = self.free[rank]
        for need, delay in needs:
            produced = self.produced[need]
            if produced is None:
                self.waiting.setdefault(need, []).append(rank)
                return
            if produced + delay > start:
                start = produced + delay
        heapq.heappush(self.running, (start + sum(durations), rank, start))

    def raise_if_stuck(self) -> None:
        """Raises PlanError with what each unfinished rank waits for."""
        lines = []
        for rank, pieces in enumerate(self.pieces):
            if self.position[rank] < len(pieces):
                actions = pieces[self.position[rank]].actions
                need = self.first_missing(actions)
                holder = self.plan.placement[need.stage]
                lines.append(f"rank {rank} waits before {actions[0]} for {need} of rank {holder}")
        if lines:
            raise PlanError(f"{self.plan.name} deadlocks: " + "; ".join(lines))

    def first_missing(self, actions: tuple[Action, ...]) -> Action:
        """The first result that a waiting rank lacks."""
        for need in (need for action in actions for need in self.plan.needs(action)):
            offset = {Kind.FORWARD: 0, Kind.INPUT_GRAD: 1, Kind.WEIGHT_GRAD: 2}[need.kind]
            number = offset * self.total + need.stage * self.plan.num_microbatches + need.microbatch
            if self.produced[number] is None:
                return need
        raise AssertionError(f"nothing is missing for {actions}")
