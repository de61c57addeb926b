"""What the parts of a model take, from traces with known costs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import accumulate, pairwise
from pathlib import Path

import pytest

from megalite.pipeline.measured import part_costs
from megalite.pipeline.partition import PartCosts, partition
from megalite.pipeline.plan import Plan, PlanError
from megalite.pipeline.schedule import make_plan
from megalite.pipeline.simulate import Costs, simulate

NOMINAL = PartCosts(layers=(10.0,) * 8, embedding=0.0, head=20.0)


def write_trace(path: Path, plan: Plan, counts: Sequence[int], parts: PartCosts, steps: int = 3) -> Path:
    """The trace of a run whose parts take so many seconds, a third of it in each pass; the first step is slow."""
    seconds = [sum(parts.layers[a:b]) for a, b in pairwise([0, *accumulate(counts)])]
    seconds[0] += parts.embedding
    seconds[-1] += parts.head
    timed = simulate(plan, Costs(stages=tuple((s / 3, s / 3, s / 3) for s in seconds)), "seq")
    rows = [
        {
            "step": step, "rank": slot.rank, "action": str(slot.action),
            "layers": counts[plan.model_stage(slot.action.stage)],
            "begin": float(slot.start), "end": float(slot.end) + (1.0 if step == 0 else 0.0),
        }
        for step in range(steps)
        for slot in timed.slots
    ]  # fmt: skip
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def _close(found: PartCosts, want: PartCosts) -> None:
    assert found.layers == pytest.approx(want.layers)
    assert (found.embedding, found.head) == pytest.approx((want.embedding, want.head), abs=1e-9)


@pytest.mark.parametrize(
    ("schedule", "ranks", "chunks", "counts"),
    [
        ("1f1b", 4, 1, (2, 2, 2, 2)),
        ("zb_h1", 4, 1, (0, 3, 5, 0)),
        ("zb_v", 2, 1, (1, 3, 4, 0)),
        ("interleaved", 2, 2, (3, 2, 2, 1)),
        ("dualpipe", 4, 1, (1, 3, 3, 1)),
    ],
)
def test_stages_between_tell_layers_from_both_ends(
    schedule: str, ranks: int, chunks: int, counts: tuple[int, ...], tmp_path: Path
) -> None:
    parts = PartCosts(layers=(2.0,) * 8, embedding=0.5, head=7.0)
    trace = write_trace(tmp_path / "trace", make_plan(schedule, ranks, 8, chunks), counts, parts)
    _close(part_costs(trace, NOMINAL), parts)


def test_layers_that_differ_keep_their_own_times(tmp_path: Path) -> None:
    parts = PartCosts(layers=(2.0, 1.0, 1.0, 1.0, 3.0, 3.0, 3.0, 2.0), embedding=0.0, head=4.0)
    trace = write_trace(tmp_path / "trace", make_plan("1f1b", 4, 4), (1, 3, 3, 1), parts)
    _close(part_costs(trace, NOMINAL), parts)


def test_with_two_stages_the_first_tells_what_a_layer_takes(tmp_path: Path) -> None:
    parts = PartCosts(layers=(2.0,) * 8, embedding=0.0, head=5.0)
    trace = write_trace(tmp_path / "trace", make_plan("gpipe", 2, 4), (6, 2), parts)
    _close(part_costs(trace, NOMINAL), parts)
    trace = write_trace(tmp_path / "trace", make_plan("gpipe", 2, 4), (0, 8), parts)
    _close(part_costs(trace, NOMINAL), PartCosts(layers=(2.1,) * 8, embedding=0.0, head=4.2))  # 21 as 80 to 20


def test_a_single_stage_is_divided_as_the_nominal_costs(tmp_path: Path) -> None:
    parts = PartCosts(layers=(2.0,) * 8, embedding=0.0, head=4.0)
    _close(part_costs(write_trace(tmp_path / "trace", make_plan("1f1b", 1, 4), (8,), parts), NOMINAL), parts)


def test_an_end_that_is_faster_than_its_layers_has_nothing_else(tmp_path: Path) -> None:
    parts = PartCosts(layers=(1.0, 1.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0), embedding=0.0, head=0.0)
    trace = write_trace(tmp_path / "trace", make_plan("1f1b", 4, 4), (2, 2, 2, 2), parts)
    _close(part_costs(trace, NOMINAL), parts)


def test_a_measured_partition_is_balanced_in_time(tmp_path: Path) -> None:
    parts = PartCosts(layers=(1.0,) * 8, embedding=0.0, head=4.0)
    costs = part_costs(write_trace(tmp_path / "trace", make_plan("1f1b", 4, 4), (2, 2, 2, 2), parts), NOMINAL)
    split = partition(8, 3, layer_cost=costs.layers, embedding_cost=costs.embedding, head_cost=costs.head)
    assert list(map(len, split)) == [4, 4, 0]


ROW = '{"step": 2, "rank": 0, "action": "F0.0", "layers": 8, "begin": 0.0, "end": 1.0}\n'


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "has no rows: was the run long enough"),
        ("{\n", "line 1 is not a row of a trace"),
        ("3\n", "line 1 is not a row of a trace"),
        (ROW + ROW.replace('"layers": 8, ', ""), "line 2 is not a row of a trace: KeyError.*layers"),
        (ROW.replace("1.0", "NaN"), "line 1 is not a row"),
        (ROW.replace("1.0", "-1.0"), "line 1 is not a row"),
        (ROW.replace("F0.0", "SEND0.0"), "line 1 is not a row"),
        (ROW, "lacks a forward or a backward of stage 0"),
        (ROW + ROW.replace("F0", "I0"), "lacks a forward or a backward of stage 0"),
        (ROW + ROW.replace("F0", "F2"), r"rows of the stages \[0, 2\] only"),
        (ROW + ROW.replace("8", "7"), "8 layers in one row, 7 in another"),
        (ROW.replace("8", "7"), "of a model with 7 layers, not of one with num_layers=8"),
        (ROW + ROW.replace("F0", "F1") + ROW.replace("F0", "F2"), "a model with 24 layers"),
    ],
)
def test_traces_that_say_nothing_are_refused(text: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "trace").write_text(text)
    with pytest.raises(PlanError, match=reason):
        part_costs(tmp_path / "trace", NOMINAL)


def test_a_missing_trace_is_named(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"none does not exist: was the run made with train\.trace_pipeline=true"):
        part_costs(tmp_path / "none", NOMINAL)
