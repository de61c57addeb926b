"""A pipeline plan as data: for each rank, the list of actions that it performs in a step.

Nothing here knows of tensors or processes. Generators (`schedule`) make plans, `simulate` proves and times them,
`lower` adds their communication, and one executor runs any of them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple


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

    __hash__ = str.__hash__  # Enum's own is a Python function; plans hash their actions by the thousand


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
    """What every rank does in one step, in order.

    Most plans are one chain: stage s of the model is stage s of the plan. A bidirectional plan has two, each with a
    copy of the whole model, and the microbatches are divided among them in consecutive parts: chain c has the stages
    c * num_stages .. (c + 1) * num_stages - 1, of which stage c * num_stages + s is a copy of the model's stage s.
    Actions, `placement` and `stages_of` use the plan's numbers; `model_stage` and `chain_of` translate.
    """

    name: str
    """The schedule's name."""
    num_microbatches: int
    """Microbatches of the step: on every stage of a single chain, divided among several."""
    placement: tuple[int, ...]
    """The rank that holds each of the plan's stages."""
    actions: tuple[tuple[Action, ...], ...]
    """Each rank's actions."""
    num_chains: int = 1
    """Copies of the model, through each of which a part of the microbatches passes."""
    pairs: frozenset[Action] = frozenset()
    """Forwards that are meant to overlap with the rank's next backward (FB pairs); they print with a + behind."""
    forward_only: bool = False
    """Whether the plan evaluates, without any backward."""

    def __str__(self) -> str:
        chains = f", {self.num_chains} chains" if self.num_chains > 1 else ""
        title = f"{self.name}, {self.num_microbatches} microbatches, placement {self.placement}{chains}"
        rows = (f"rank {rank}: {' '.join(map(self.text_of, row))}" for rank, row in enumerate(self.actions))
        return "\n".join((title, *rows))

    def text_of(self, action: Action) -> str:
        """How the plan prints an action."""
        return f"{action}+" if action in self.pairs else str(action)

    @property
    def num_ranks(self) -> int:
        """Ranks of the pipeline."""
        return len(self.actions)

    @property
    def num_stages(self) -> int:
        """Stages of the model, which is the length of each chain."""
        return len(self.placement) // self.num_chains

    @property
    def digest(self) -> str:
        """A hash of everything in the plan, equal on all ranks that run the same."""
        return hashlib.sha256(str(self).encode()).hexdigest()

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The plan's stages that `rank` holds, in ascending order."""
        return tuple(stage for stage, holder in enumerate(self.placement) if holder == rank)

    def model_stage(self, stage: int) -> int:
        """The stage of the model of which the plan's `stage` is a copy."""
        return stage % self.num_stages

    def copies_of(self, model_stage: int) -> tuple[int, ...]:
        """The plan's stages that hold the parameters of a stage of the model, one in each chain."""
        return tuple(range(model_stage, len(self.placement), self.num_stages))

    def chain_of(self, microbatch: int) -> int:
        """The chain through which a microbatch passes."""
        return microbatch * self.num_chains // self.num_microbatches

    def microbatches_of(self, stage: int) -> range:
        """The microbatches that pass through the plan's `stage`."""
        each = self.num_microbatches // self.num_chains
        chain = stage // self.num_stages
        return range(chain * each, (chain + 1) * each)

    def previous_stage(self, stage: int) -> int | None:
        """Where the stage's input comes from; None for the first of a chain."""
        return stage - 1 if stage % self.num_stages else None

    def next_stage(self, stage: int) -> int | None:
        """Where the stage's output goes; None for the last of a chain."""
        return stage + 1 if (stage + 1) % self.num_stages else None

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


def loop_placement(num_ranks: int, num_chunks: int) -> tuple[int, ...]:
    """Stage s on rank s mod p: each chunk goes once round all ranks."""
    return tuple(stage % num_ranks for stage in range(num_ranks * num_chunks))


def v_placement(num_ranks: int) -> tuple[int, ...]:
    """Stages r and 2p-1-r on rank r: down to the last rank, where the turn is local, and back to the first."""
    return (*range(num_ranks), *reversed(range(num_ranks)))


def check_complete(plan: Plan) -> None:
    """Raises PlanError unless every rank runs its own stages' work exactly once: F, then B or I and W.

    That the order can be executed is `simulate`'s to say.
    """
    _check_placement(plan)
    kinds = (Kind.FORWARD,) if plan.forward_only else (Kind.FORWARD, Kind.INPUT_GRAD, Kind.WEIGHT_GRAD)
    missing = {
        Action(kind, stage, microbatch)
        for kind in kinds
        for stage in range(len(plan.placement))
        for microbatch in plan.microbatches_of(stage)
    }
    expected = frozenset(missing)
    for rank in range(plan.num_ranks):
        for action in plan.compute(rank):
            for result in results(action):
                if result in missing and plan.placement[action.stage] == rank:
                    missing.remove(result)
                else:
                    raise PlanError(f"{plan.name}: {_fault(plan, rank, action, result, expected)}")
    if missing:
        first = min(missing, key=lambda action: (action.stage, action.microbatch))
        raise PlanError(f"{plan.name}: {len(missing)} results are never produced, the first is {first}")


def check_copies(plan: Plan) -> None:
    """Raises PlanError unless a stage and its copy, if any, are on ranks r and p - 1 - r, which sum its gradients."""
    if plan.num_chains > 2:
        raise PlanError(f"{plan.name} has {plan.num_chains} chains; a run can have 1, or 2 in opposite directions")
    for stage in range(plan.num_stages if plan.num_chains == 2 else 0):
        one, other = (plan.placement[copy] for copy in plan.copies_of(stage))
        if one == other or one + other != plan.num_ranks - 1:
            raise PlanError(
                f"{plan.name} has stage {stage} and its copy, stage {stage + plan.num_stages}, on ranks {one} and "
                f"{other}; they must be on ranks r and {plan.num_ranks - 1} - r, two of {plan.num_ranks}"
            )


def _check_placement(plan: Plan) -> None:
    if len(plan.placement) % plan.num_chains or plan.num_microbatches % plan.num_chains:
        raise PlanError(
            f"{plan.name}: {len(plan.placement)} stages and {plan.num_microbatches} microbatches do not divide among "
            f"{plan.num_chains} chains"
        )
    for stage, rank in enumerate(plan.placement):
        if not 0 <= rank < plan.num_ranks:
            raise PlanError(f"{plan.name}: stage {stage} is placed on rank {rank} of {plan.num_ranks}")
    if idle := [rank for rank in range(plan.num_ranks) if rank not in plan.placement]:
        raise PlanError(f"{plan.name}: {len(plan.placement)} stages leave ranks {idle} without any")


def _fault(plan: Plan, rank: int, action: Action, result: Action, expected: frozenset[Action]) -> str:
    """What is wrong with an action that is not among what is still missing on its rank."""
    if result not in expected:
        what = "forward-only plan" if plan.forward_only else "plan"
        sizes = f"{len(plan.placement)} stages and {plan.num_microbatches} microbatches"
        chains = f" in {plan.num_chains} chains" if plan.num_chains > 1 else ""
        return f"{action} on rank {rank} is not in a {what} of {sizes}{chains}"
    if plan.placement[action.stage] != rank:
        return f"{action} is on rank {rank}, its stage on {plan.placement[action.stage]}"
    return f"rank {rank} does {result} twice (the second time in {action})"
