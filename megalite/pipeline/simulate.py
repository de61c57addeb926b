"""Event simulation of a plan: when each action would run, what the bubble costs, and whether it can finish at all.

Only compute takes time; a result reaches another rank `latency` after it was produced. Times have no unit. With
integer or Fraction costs everything is exact.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

from megalite.pipeline.schedule import Action, Kind, Plan, PlanError, check_complete, results

Time = float | Fraction


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
    """Each stage's part of a rank's share; by default all stages are alike."""

    def duration(self, action: Action, plan: Plan) -> Time:
        """How long a compute action runs."""
        cost = {
            Kind.FORWARD: self.forward,
            Kind.BACKWARD: self.input_grad + self.weight_grad,
            Kind.INPUT_GRAD: self.input_grad,
            Kind.WEIGHT_GRAD: self.weight_grad,
        }[action.kind]
        if self.stage_share is not None:
            return cost * self.stage_share[action.stage]
        if plan.num_stages == plan.num_ranks:
            return cost
        return cost * Fraction(plan.num_ranks, plan.num_stages)


class Slot(NamedTuple):
    """An action in time."""

    rank: int
    action: Action
    start: Time
    end: Time


@dataclass(frozen=True)
class Simulation:
    """The timed plan: `slots` in the order of completion (ties by rank), which is an order that respects every
    dependency and is the same wherever it is computed."""

    num_ranks: int
    slots: tuple[Slot, ...]

    @property
    def makespan(self) -> Time:
        """From the first start to the last end over all ranks: what a step costs when all ranks wait at its end."""
        return max(slot.end for slot in self.slots) - min(slot.start for slot in self.slots)

    @property
    def busy(self) -> list[Time]:
        """Computing time of each rank."""
        busy: list[Time] = [0] * self.num_ranks
        for slot in self.slots:
            busy[slot.rank] += slot.end - slot.start
        return busy

    @property
    def idle(self) -> list[Time]:
        """The part of the makespan that each rank does not compute."""
        makespan = self.makespan
        return [makespan - busy for busy in self.busy]

    @property
    def bubble(self) -> Time:
        """Idle part of all ranks' time within the makespan, 0 to 1."""
        total = self.makespan * self.num_ranks
        return sum(self.idle) / (Fraction(total) if isinstance(total, int) else total)


class _Clock:
    """The state of a running simulation: each rank performs its list, waiting for what an action needs."""

    def __init__(self, plan: Plan, costs: Costs):
        self.plan, self.costs = plan, costs
        self.rows = [plan.compute(rank) for rank in range(plan.num_ranks)]
        self.position = [0] * plan.num_ranks
        self.produced: dict[Action, tuple[int, Time]] = {}
        self.waiting: defaultdict[Action, list[int]] = defaultdict(list)
        self.running: list[tuple[Time, int, Time]] = []

    def start_next(self, rank: int, now: Time) -> None:
        """Starts the rank's next action, or leaves the rank with the first result that it waits for."""
        if self.position[rank] == len(self.rows[rank]):
            return
        action, start = self.rows[rank][self.position[rank]], now
        for need in self.plan.needs(action):
            if need not in self.produced:
                self.waiting[need].append(rank)
                return
            producer, end = self.produced[need]
            start = max(start, end if producer == rank else end + self.costs.latency)
        heapq.heappush(self.running, (start + self.costs.duration(action, self.plan), rank, start))

    def run(self) -> list[Slot]:
        """Runs until no rank can go on."""
        slots: list[Slot] = []
        for rank in range(self.plan.num_ranks):
            self.start_next(rank, 0)
        while self.running:
            end, rank, start = heapq.heappop(self.running)
            action = self.rows[rank][self.position[rank]]
            slots.append(Slot(rank, action, start, end))
            self.position[rank] += 1
            self.start_next_after(rank, action, end)
        return slots

    def start_next_after(self, rank: int, action: Action, end: Time) -> None:
        """Wakes everyone whom the completion of `action` concerns."""
        wake: list[int] = []
        for result in results(action):
            self.produced[result] = (rank, end)
            wake += self.waiting.pop(result, [])
        for other in wake:
            self.start_next(other, self.rank_free(other))
        self.start_next(rank, end)

    def rank_free(self, rank: int) -> Time:
        """When the waiting `rank` finished its last action."""
        done = self.position[rank]
        return self.produced[results(self.rows[rank][done - 1])[0]][1] if done else 0

    def stuck(self) -> list[str]:
        """What each unfinished rank waits for."""
        lines = []
        for rank, row in enumerate(self.rows):
            if self.position[rank] < len(row):
                action = row[self.position[rank]]
                need = next(need for need in self.plan.needs(action) if need not in self.produced)
                lines.append(f"rank {rank} waits before {action} for {need} of rank {self.plan.placement[need.stage]}")
        return lines


def simulate(plan: Plan, costs: Costs | None = None) -> Simulation:
    """The times of a plan's compute actions; raises PlanError when an action is missing or its order deadlocks."""
    check_complete(plan)
    clock = _Clock(plan, costs if costs is not None else Costs())
    slots = clock.run()
    if stuck := clock.stuck():
        raise PlanError(f"{plan.name} deadlocks: " + "; ".join(stuck))
    return Simulation(plan.num_ranks, tuple(slots))


def peak_activations(plan: Plan, released_by: Kind = Kind.INPUT_GRAD) -> list[int]:
    """Most (stage, microbatch) activations that each rank holds at a time; a matter of order, not of time.

    `released_by` says when an activation dies: with its input gradient (I or B), or with its weight gradient (W or B).
    """
    peaks = []
    for rank in range(plan.num_ranks):
        live = peak = 0
        for action in plan.compute(rank):
            if action.kind is Kind.FORWARD:
                live += 1
                peak = max(peak, live)
            elif action.kind in (Kind.BACKWARD, released_by):
                live -= 1
        peaks.append(peak)
    return peaks
