"""Pipeline schedules as data: for each rank, the list of actions it performs in a step.

A generator is a pure function from sizes to a `Plan`; nothing here knows of tensors or processes. `simulate` proves a
plan, `lower` adds its communication, and one executor runs any of them. A model is cut into stages 0 .. S-1; a rank
holds one stage or several. Gradient accumulation is the plan of a single stage: F0.0 B0.0 F0.1 B0.1 ...
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, Protocol


class Kind(StrEnum):
    """What an action does with its (stage, microbatch); the value is how it prints."""

    FORWARD = "F"
    BACKWARD = "B"
    """Input gradient and weight gradient in one."""
    INPUT_GRAD = "I"
    WEIGHT_GRAD = "W"
    SEND_ACT = "SEND_ACT"
    """The stage's output goes to the next stage."""
    RECV_ACT = "RECV_ACT"
    """The stage's input comes from the previous stage."""
    SEND_GRAD = "SEND_GRAD"
    """The gradient of the stage's input goes to the previous stage."""
    RECV_GRAD = "RECV_GRAD"
    """The gradient of the stage's output comes from the next stage."""
    REDUCE = "REDUCE"
    """The weight gradients of the stage are complete after its next B or W: their reduction may start."""
    UNSHARD = "UNSHARD"
    """The stage's parameters are gathered."""
    RESHARD = "RESHARD"
    """The gathered parameters are dropped."""


COMPUTE = frozenset({Kind.FORWARD, Kind.BACKWARD, Kind.INPUT_GRAD, Kind.WEIGHT_GRAD})
"""What a generator emits; `lower` adds the rest."""


class Action(NamedTuple):
    """One step of a rank's work, on a stage that it holds; prints as `F2.0`."""

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.stage}.{self.microbatch}"


class PlanError(ValueError):
    """A plan that cannot be run; the message says why."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What every rank does in one step, in order."""

    name: str
    """The schedule's name."""
    num_microbatches: int
    """Micro-batches of the step, on every stage."""
    placement: tuple[int, ...]
    """The rank that holds each stage."""
    actions: tuple[tuple[Action, ...], ...]
    """Each rank's actions."""
    forward_only: bool = False
    """Whether the plan evaluates, without any backward."""

    def __str__(self) -> str:
        rows = (f"rank {rank}: {' '.join(map(str, row))}" for rank, row in enumerate(self.actions))
        return "\n".join((f"{self.name}, {self.num_microbatches} microbatches, placement {self.placement}", *rows))

    @property
    def num_ranks(self) -> int:
        """Ranks of the pipeline."""
        return len(self.actions)

    @property
    def num_stages(self) -> int:
        """Stages of the model."""
        return len(self.placement)

    @property
    def digest(self) -> str:
        """A hash of everything in the plan, equal on all ranks that run the same."""
        return hashlib.sha256(str(self).encode()).hexdigest()

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that `rank` holds, in model order."""
        return tuple(stage for stage, holder in enumerate(self.placement) if holder == rank)

    def previous_stage(self, stage: int) -> int | None:
        """Where the stage's input comes from; None for the first."""
        return stage - 1 if stage > 0 else None

    def next_stage(self, stage: int) -> int | None:
        """Where the stage's output goes; None for the last."""
        return stage + 1 if stage + 1 < self.num_stages else None

    def compute(self, rank: int) -> tuple[Action, ...]:
        """The rank's actions without communication."""
        return tuple(action for action in self.actions[rank] if action.kind in COMPUTE)

    def needs(self, action: Action) -> Iterator[Action]:
        """The results that must exist before a compute action, as F, I and W actions (a B yields I and W)."""
        kind, stage, microbatch = action
        if kind is Kind.FORWARD:
            if (previous := self.previous_stage(stage)) is not None:
                yield Action(Kind.FORWARD, previous, microbatch)
        elif kind is Kind.WEIGHT_GRAD:
            yield Action(Kind.INPUT_GRAD, stage, microbatch)
        elif kind in COMPUTE:
            yield Action(Kind.FORWARD, stage, microbatch)
            if (following := self.next_stage(stage)) is not None:
                yield Action(Kind.INPUT_GRAD, following, microbatch)


def results(action: Action) -> tuple[Action, ...]:
    """What a compute action produces, in the terms of `Plan.needs`."""
    if action.kind is Kind.BACKWARD:
        return action._replace(kind=Kind.INPUT_GRAD), action._replace(kind=Kind.WEIGHT_GRAD)
    return (action,)


def check_complete(plan: Plan) -> None:
    """Raises PlanError unless every rank runs its own stages' work exactly once: F, then B or I and W.

    That the order can be executed is `simulate`'s to say.
    """
    for stage, rank in enumerate(plan.placement):
        if not 0 <= rank < plan.num_ranks:
            raise PlanError(f"{plan.name}: stage {stage} is placed on rank {rank} of {plan.num_ranks}")
    if idle := [rank for rank in range(plan.num_ranks) if rank not in plan.placement]:
        raise PlanError(f"{plan.name}: {plan.num_stages} stages leave ranks {idle} without any")
    kinds = (Kind.FORWARD,) if plan.forward_only else (Kind.FORWARD, Kind.INPUT_GRAD, Kind.WEIGHT_GRAD)
    missing = {
        Action(kind, stage, microbatch)
        for kind in kinds
        for stage in range(plan.num_stages)
        for microbatch in range(plan.num_microbatches)
    }
    expected = frozenset(missing)
    for rank in range(plan.num_ranks):
        for action in plan.compute(rank):
            for result in results(action):
                if result not in expected:
                    what = "forward-only plan" if plan.forward_only else "plan"
                    raise PlanError(
                        f"{plan.name}: {action} on rank {rank} is not in a {what} of {plan.num_stages} stages and "
                        f"{plan.num_microbatches} microbatches"
                    )
                if plan.placement[action.stage] != rank:
                    raise PlanError(
                        f"{plan.name}: {action} is on rank {rank}, its stage on {plan.placement[action.stage]}"
                    )
                if result not in missing:
                    raise PlanError(f"{plan.name}: rank {rank} does {result} twice (the second time in {action})")
                missing.remove(result)
    if missing:
        first = min(missing, key=lambda action: (action.stage, action.microbatch))
        raise PlanError(f"{plan.name}: {len(missing)} results are never produced, the first is {first}")


class Generator(Protocol):
    """A schedule: a function from sizes to a plan; it raises PlanError for sizes that it is not defined for."""

    def __call__(self, num_ranks: int, num_microbatches: int, num_chunks: int = 1) -> Plan:
        """The plan of `num_chunks` stages on each of `num_ranks` ranks."""
        ...


def loop_placement(num_ranks: int, num_chunks: int) -> tuple[int, ...]:
    """Stage s on rank s mod p: each chunk goes once round all ranks."""
    return tuple(stage % num_ranks for stage in range(num_ranks * num_chunks))


def _check_sizes(name: str, num_ranks: int, num_microbatches: int) -> None:
    if num_ranks < 1 or num_microbatches < 1:
        raise PlanError(
            f"{name}: {num_ranks} pipeline ranks and {num_microbatches} microbatches; each must be at least 1"
        )


def _check_one_chunk(name: str, num_chunks: int) -> None:
    if num_chunks != 1:
        raise PlanError(f"{name} runs one stage on each rank; parallel.vpp={num_chunks} must be 1")


def _forward(stage: int, microbatches: range) -> list[Action]:
    return [Action(Kind.FORWARD, stage, microbatch) for microbatch in microbatches]


def _backward(stage: int, microbatches: range) -> list[Action]:
    return [Action(Kind.BACKWARD, stage, microbatch) for microbatch in microbatches]


def gpipe(num_ranks: int, num_microbatches: int, num_chunks: int = 1) -> Plan:
    """All forwards, then all backwards; every rank keeps all activations (Huang et al., 2019, arXiv:1811.06965)."""
    _check_sizes("gpipe", num_ranks, num_microbatches)
    _check_one_chunk("gpipe", num_chunks)
    everything = range(num_microbatches)
    rows = (_forward(stage, everything) + _backward(stage, everything) for stage in range(num_ranks))
    return Plan(
        name="gpipe",
        num_microbatches=num_microbatches,
        placement=loop_placement(num_ranks, 1),
        actions=tuple(map(tuple, rows)),
    )


def one_f_one_b(num_ranks: int, num_microbatches: int, num_chunks: int = 1) -> Plan:
    """One forward, one backward: rank r keeps at most p - r activations (Narayanan et al., 2021, arXiv:2104.04473).

    The bubble is GPipe's. Any number of microbatches will do, also fewer than ranks.
    """
    _check_sizes("1f1b", num_ranks, num_microbatches)
    _check_one_chunk("1f1b", num_chunks)

    def row(rank: int) -> tuple[Action, ...]:
        warmup = min(num_microbatches, num_ranks - 1 - rank)
        actions = _forward(rank, range(warmup))
        for i in range(num_microbatches - warmup):
            actions += [Action(Kind.FORWARD, rank, warmup + i), Action(Kind.BACKWARD, rank, i)]
        return (*actions, *_backward(rank, range(num_microbatches - warmup, num_microbatches)))

    return Plan(
        name="1f1b",
        num_microbatches=num_microbatches,
        placement=loop_placement(num_ranks, 1),
        actions=tuple(row(rank) for rank in range(num_ranks)),
    )


SCHEDULES: dict[str, Generator] = {"1f1b": one_f_one_b, "gpipe": gpipe}
"""Schedules by the name that `parallel.schedule` takes."""


def make_plan(schedule: str, num_ranks: int, num_microbatches: int, num_chunks: int = 1) -> Plan:
    """The plan of the named schedule; raises PlanError for an unknown name or sizes it is not defined for."""
    if schedule not in SCHEDULES:
        raise PlanError(f"unknown parallel.schedule={schedule!r}; it can be {', '.join(SCHEDULES)}")
    return SCHEDULES[schedule](num_ranks, num_microbatches, num_chunks)


def forward_only(placement: tuple[int, ...], num_microbatches: int) -> Plan:
    """The plan of an evaluation, for any placement: groups of p microbatches pass through the stages together."""
    num_ranks = max(placement) + 1
    _check_sizes("forward_only", num_ranks, num_microbatches)

    def row(rank: int) -> tuple[Action, ...]:
        stages = [stage for stage, holder in enumerate(placement) if holder == rank]
        actions = [action for stage in stages for action in _forward(stage, range(num_microbatches))]
        # (group, stage, microbatch) is an order that every rank can follow: inputs always come first in it.
        return tuple(sorted(actions, key=lambda a: (a.microbatch // num_ranks, a.stage, a.microbatch)))

    return Plan(
        name="forward_only",
        num_microbatches=num_microbatches,
        placement=placement,
        actions=tuple(row(rank) for rank in range(num_ranks)),
        forward_only=True,
    )
