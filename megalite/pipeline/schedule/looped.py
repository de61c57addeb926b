"""Schedules whose chunks go round all ranks v times: interleaved 1F1B and zero-bubble, and breadth-first.

A chunk is one of a rank's v stages: chunk c of rank r is stage c * p + r.
"""

from __future__ import annotations

from megalite.pipeline.plan import Action, Plan, PlanError, loop_placement
from megalite.pipeline.schedule.sizes import backward, check_sizes, forward, input_grad, rows, weight_grad
from megalite.pipeline.simulate import check_order


def interleaved(num_ranks: int, num_microbatches: int, num_chunks: int = 2, group_size: int | None = None) -> Plan:
    """1F1B over v chunks: the bubble shrinks by v, for more messages and activations (arXiv:2104.04473, section 2.2).

    A rank runs `group_size` microbatches through one chunk before the next: by default p of them, or all where that
    order cannot be executed. More give messages more slack and keep more activations (Llama 3, arXiv:2407.21783,
    section 3.3). An explicit `group_size` whose order deadlocks is refused.
    """
    check_sizes("interleaved", num_ranks, num_microbatches)
    _check_chunks("interleaved", num_chunks)
    if group_size is None:
        group_size = min(num_ranks, num_microbatches)
        try:
            return _interleaved(num_ranks, num_microbatches, num_chunks, group_size)
        except PlanError:  # a short last group can block itself
            group_size = num_microbatches
    sizes = num_ranks, num_microbatches, num_chunks
    try:
        if not 1 <= group_size <= num_microbatches:
            raise PlanError(
                f"interleaved: {group_size=} must be from 1 to the number of microbatches, {num_microbatches}"
            )
        return _interleaved(*sizes, group_size)
    except PlanError as error:
        nearest = " and ".join(map(str, _nearest_group_sizes(*sizes, group_size)))
        raise PlanError(f"{error}; the nearest sizes that will do: {nearest}") from error


def _interleaved(num_ranks: int, num_microbatches: int, num_chunks: int, group_size: int) -> Plan:
    order = _chunk_order(num_microbatches, num_chunks, group_size)

    def row(rank: int) -> list[Action]:
        forwards = [forward(chunk * num_ranks + rank, k) for chunk, k in order]
        backwards = [backward((num_chunks - 1 - chunk) * num_ranks + rank, k) for chunk, k in order]
        warmup = min(len(order), 2 * (num_ranks - 1 - rank) + (num_chunks - 1) * group_size)
        actions = forwards[:warmup]
        for i, action in enumerate(backwards):
            actions += [*forwards[warmup + i : warmup + i + 1], action]
        return actions

    plan = Plan(
        name="interleaved",
        num_microbatches=num_microbatches,
        placement=loop_placement(num_ranks, num_chunks),
        actions=rows(row(rank) for rank in range(num_ranks)),
    )
    try:
        check_order(plan)
    except PlanError as error:
        raise PlanError(
            f"interleaved: {group_size=} deadlocks with {num_ranks} ranks, {num_microbatches} microbatches and "
            f"{num_chunks} chunks"
        ) from error
    return plan


def _nearest_group_sizes(num_ranks: int, num_microbatches: int, num_chunks: int, group_size: int) -> list[int]:
    """The sizes next to `group_size`, below and above it, whose order can be executed; all together always can."""

    def works(size: int) -> bool:
        try:
            _interleaved(num_ranks, num_microbatches, num_chunks, size)
        except PlanError:
            return False
        return True

    below = range(min(group_size - 1, num_microbatches), 0, -1)
    above = range(max(group_size + 1, 1), num_microbatches + 1)
    return [size for sizes in (below, above) if (size := next(filter(works, sizes), None)) is not None]


def looped_bfs(num_ranks: int, num_microbatches: int, num_chunks: int = 2) -> Plan:
    """Breadth first: each chunk runs all microbatches before the next (Lamy-Poirier, 2022, arXiv:2211.05953).

    Interleaved 1F1B's bubble with v m activations. A chunk's parameters are needed in one stretch of each pass, which
    suits sharded parameters, and messages have the most slack.
    """
    check_sizes("looped_bfs", num_ranks, num_microbatches)
    _check_chunks("looped_bfs", num_chunks)

    def row(rank: int) -> list[Action]:
        stages = range(rank, num_ranks * num_chunks, num_ranks)
        everything = range(num_microbatches)
        forwards = [forward(stage, k) for stage in stages for k in everything]
        return forwards + [backward(stage, k) for stage in reversed(stages) for k in everything]

    return Plan(
        name="looped_bfs",
        num_microbatches=num_microbatches,
        placement=loop_placement(num_ranks, num_chunks),
        actions=rows(row(rank) for rank in range(num_ranks)),
    )


def interleaved_zb(num_ranks: int, num_microbatches: int, num_chunks: int = 2) -> Plan:
    """Interleaved 1F1B with W moved into the bubbles: ZB-H1 over v chunks, which all ranks end together.

    Every rank keeps vp chunk activations. Microbatches go in equal groups of at least p, or all together when fewer;
    PlanError when they do not divide so.
    """
    check_sizes("interleaved_zb", num_ranks, num_microbatches)
    _check_chunks("interleaved_zb", num_chunks)
    num_groups = max(1, num_microbatches // num_ranks)
    if num_microbatches % num_groups:
        raise PlanError(
            f"interleaved_zb: {num_microbatches} microbatches do not divide into the {num_groups} groups that "
            f"{num_ranks} ranks need; {num_microbatches - num_microbatches % num_ranks} or "
            f"{num_microbatches + -num_microbatches % num_ranks} would"
        )
    group_size = num_microbatches // num_groups
    order = _chunk_order(num_microbatches, num_chunks, group_size)

    def row(rank: int) -> list[Action]:
        forwards = [forward(chunk * num_ranks + rank, k) for chunk, k in order]
        backwards = [((num_chunks - 1 - chunk) * num_ranks + rank, k) for chunk, k in order]
        warmup = min(len(order), (num_chunks - 1) * group_size + num_ranks - 1 - rank)
        actions = forwards[:warmup]
        for i, (stage, k) in enumerate(backwards):
            actions += [*forwards[warmup + i : warmup + i + 1], input_grad(stage, k)]
            if i >= rank:
                actions.append(weight_grad(*backwards[i - rank]))
        return actions + [weight_grad(stage, k) for stage, k in backwards[max(0, len(order) - rank) :]]

    return Plan(
        name="interleaved_zb",
        num_microbatches=num_microbatches,
        placement=loop_placement(num_ranks, num_chunks),
        actions=rows(row(rank) for rank in range(num_ranks)),
    )


def _chunk_order(num_microbatches: int, num_chunks: int, group_size: int) -> list[tuple[int, int]]:
    """The (chunk, microbatch) in the order of a rank's forwards: groups of microbatches go through all chunks."""
    order = []
    for begin in range(0, num_microbatches, group_size):
        group = range(begin, min(begin + group_size, num_microbatches))
        order += [(chunk, k) for chunk in range(num_chunks) for k in group]
    return order


def _check_chunks(name: str, num_chunks: int) -> None:
    if num_chunks < 1:
        raise PlanError(f"{name}: parallel.vpp={num_chunks} must be at least 1")
