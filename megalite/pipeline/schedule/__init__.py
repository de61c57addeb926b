"""Pipeline schedules: pure functions from sizes to a `Plan`, one for each figure of the literature.

A model is cut into stages 0 .. S-1; a rank holds one stage or several. Gradient accumulation is the plan of a single
stage: F0.0 B0.0 F0.1 B0.1 ...
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from megalite.pipeline.plan import (
    COMPUTE,
    Action,
    Kind,
    Plan,
    PlanError,
    check_complete,
    loop_placement,
    results,
    v_placement,
)
from megalite.pipeline.schedule.csv_file import read_csv, user_plan, write_csv
from megalite.pipeline.schedule.dualpipe import dualpipe, dualpipe_v
from megalite.pipeline.schedule.looped import interleaved, interleaved_zb, looped_bfs
from megalite.pipeline.schedule.one_chunk import gpipe, one_f_one_b
from megalite.pipeline.schedule.sizes import check_sizes, forward
from megalite.pipeline.schedule.v_blocks import v_half, v_min
from megalite.pipeline.schedule.zb_h import zb_h1, zb_h2
from megalite.pipeline.schedule.zb_v import zb_v
from megalite.pipeline.simulate import Costs

__all__ = [
    "COMPUTE", "SCHEDULES", "Action", "Generator", "Kind", "Plan", "PlanError", "check_complete", "dualpipe",
    "dualpipe_v", "forward_only", "gpipe", "interleaved", "interleaved_zb", "loop_placement", "looped_bfs",
    "make_plan", "min_chunks", "one_f_one_b", "read_csv", "results", "v_half", "v_min", "v_placement", "write_csv",
    "zb_h1", "zb_h2", "zb_v",
]  # fmt: skip


class Generator(Protocol):
    """A schedule: a function from sizes to a plan; it raises PlanError for sizes that it is not defined for."""

    def __call__(self, num_ranks: int, num_microbatches: int, num_chunks: int = ..., /) -> Plan:
        """The plan of `num_chunks` stages on each of `num_ranks` ranks."""
        ...


SCHEDULES: dict[str, Generator] = {
    "1f1b": one_f_one_b,
    "gpipe": gpipe,
    "interleaved": interleaved,
    "looped_bfs": looped_bfs,
    "zb_h1": zb_h1,
    "zb_h2": zb_h2,
    "interleaved_zb": interleaved_zb,
    "zb_v": zb_v,
    "v_half": v_half,
    "v_min": v_min,
    "dualpipe_v": dualpipe_v,
    "dualpipe": dualpipe,
}
"""Schedules by the name that `parallel.schedule` takes."""


def min_chunks(schedule: str) -> int:
    """The stages on each rank that a schedule implies: the V schedules always have two."""
    return 2 if schedule in ("zb_v", "v_half", "v_min", "dualpipe_v") else 1


def make_plan(
    schedule: str,
    num_ranks: int,
    num_microbatches: int,
    num_chunks: int = 1,
    *,
    costs: Costs | None = None,
    group_size: int | None = None,
) -> Plan:
    """The plan of the named schedule, or of `csv:FILE`; raises PlanError for what does not exist or does not fit.

    Schedules that can fit themselves to `costs` do (ZB-H); by default all passes cost the same. `group_size` is for
    `interleaved` alone.
    """
    if group_size is not None and schedule != "interleaved":
        raise PlanError(
            f"parallel.group_size={group_size} is for the interleaved schedule; leave it out under {schedule}"
        )
    sizes = num_ranks, num_microbatches, num_chunks
    if schedule.startswith("csv:"):
        return user_plan(Path(schedule.removeprefix("csv:")), *sizes)
    match schedule:
        case "zb_h1":
            return zb_h1(*sizes, costs)
        case "zb_h2":
            return zb_h2(*sizes, costs)
        case "interleaved":
            return interleaved(*sizes, group_size)
        case _ if schedule in SCHEDULES:
            return SCHEDULES[schedule](*sizes)
    raise PlanError(f"unknown parallel.schedule={schedule!r}; it can be {', '.join(SCHEDULES)} or csv:FILE")


def forward_only(placement: tuple[int, ...], num_microbatches: int) -> Plan:
    """The plan of an evaluation, for any placement of one chain: groups of p microbatches pass the stages together."""
    num_ranks = max(placement) + 1
    check_sizes("forward_only", num_ranks, num_microbatches)

    def row(rank: int) -> tuple[Action, ...]:
        stages = [stage for stage, holder in enumerate(placement) if holder == rank]
        actions = [forward(stage, k) for stage in stages for k in range(num_microbatches)]
        # (group, stage, microbatch) is an order that every rank can follow: inputs always come first in it.
        return tuple(sorted(actions, key=lambda a: (a.microbatch // num_ranks, a.stage, a.microbatch)))

    return Plan(
        name="forward_only",
        num_microbatches=num_microbatches,
        placement=placement,
        actions=tuple(row(rank) for rank in range(num_ranks)),
        forward_only=True,
    )
