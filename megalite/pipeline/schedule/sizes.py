"""What the generators share: checks of sizes, and short names for the actions that they write."""

from __future__ import annotations

from collections.abc import Iterable

from megalite.pipeline.plan import Action, Kind, PlanError


def check_sizes(name: str, num_ranks: int, num_microbatches: int) -> None:
    """Raises PlanError unless there is at least one rank and one microbatch."""
    if num_ranks < 1 or num_microbatches < 1:
        raise PlanError(
            f"{name}: {num_ranks} pipeline ranks and {num_microbatches} microbatches; each must be at least 1"
        )


def check_one_chunk(name: str, num_chunks: int) -> None:
    """Raises PlanError when a schedule with one stage on each rank is asked for more."""
    if num_chunks != 1:
        raise PlanError(f"{name} runs one stage on each rank; parallel.vpp={num_chunks} must be 1")


def check_two_chunks(name: str, num_chunks: int) -> None:
    """Raises PlanError unless a schedule that is a V gets its two chunks; 1, the default, implies them."""
    if num_chunks not in (1, 2):
        raise PlanError(f"{name} always has two chunks on each rank; parallel.vpp={num_chunks} must be 1 or 2")


def forward(stage: int, microbatch: int) -> Action:
    """F."""
    return Action(Kind.FORWARD, stage, microbatch)


def backward(stage: int, microbatch: int) -> Action:
    """B."""
    return Action(Kind.BACKWARD, stage, microbatch)


def input_grad(stage: int, microbatch: int) -> Action:
    """I."""
    return Action(Kind.INPUT_GRAD, stage, microbatch)


def weight_grad(stage: int, microbatch: int) -> Action:
    """W."""
    return Action(Kind.WEIGHT_GRAD, stage, microbatch)


def rows(lists: Iterable[Iterable[Action]]) -> tuple[tuple[Action, ...], ...]:
    """The ranks' lists as a plan holds them."""
    return tuple(map(tuple, lists))
