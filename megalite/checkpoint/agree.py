"""Steps that succeed on all ranks or fail on all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from megalite.checkpoint.errors import CheckpointError
from megalite.mpu import ParallelState

T = TypeVar("T")


def together(mpu: ParallelState, what: str, step: Callable[[], T]) -> list[T]:
    """Runs `step` on every rank and returns all results in rank order (they must be picklable).

    When it raises OSError, ValueError or CheckpointError anywhere, every rank raises CheckpointError with what
    happened on the ranks that failed. Other exceptions are faults of the program and pass through.
    """
    result: T | None = None
    problem: str | None = None
    cause: Exception | None = None
    try:
        result = step()
    except (OSError, ValueError, CheckpointError) as error:
        problem, cause = str(error) or repr(error), error
    answers = mpu.world.gather_objects((result, problem))
    failed: dict[str, list[int]] = {}
    for rank, (_, text) in enumerate(answers):
        if text is not None:
            failed.setdefault(text, []).append(rank)
    if not failed:
        return [value for value, _ in answers]
    if mpu.world.size == 1:
        raise CheckpointError(f"{what}: {problem}") from cause
    lines = [f"rank {', '.join(map(str, ranks))}: {text}" for text, ranks in failed.items()]
    raise CheckpointError(f"{what}: " + "\n".join(lines)) from cause


def on_first(mpu: ParallelState, what: str, step: Callable[[], T]) -> T:
    """Runs `step` on rank 0 alone, and returns its result, or raises CheckpointError, on every rank."""
    first = mpu.world.rank == 0
    results = together(mpu, what, (lambda: [step()]) if first else list)
    return results[0][0]
