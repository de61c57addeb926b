"""Plans as files."""

from pathlib import Path

import pytest

from megalite.pipeline.lower import lower
from megalite.pipeline.schedule import SCHEDULES, PlanError, make_plan, read_csv, write_csv


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_plans_return_from_a_file(schedule: str, tmp_path: Path) -> None:
    plan, path = make_plan(schedule, 4, 8), tmp_path / "plan.csv"
    for written in (plan, lower(plan)):
        write_csv(written, path)
        read = read_csv(path)
        assert (read.actions, read.placement, read.num_chains, read.pairs) == (
            written.actions, written.placement, plan.num_chains, plan.pairs,
        )  # fmt: skip
        # Communication in a file is for the reader; a run has its own.
        assert lower(make_plan(f"csv:{path}", 4, 8)).actions == lower(plan).actions


def test_a_plan_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "own.csv"
    path.write_text("# two stages\n\nF0.0, F0.1, B0.0, B0.1\nF1.0, I1.0, F1.1, W1.0, B1.1\n")
    plan = make_plan(f"csv:{path}", 2, 2)
    assert plan.placement == (0, 1) and plan.num_microbatches == 2
    assert [" ".join(map(str, row)) for row in plan.actions] == ["F0.0 F0.1 B0.0 B0.1", "F1.0 I1.0 F1.1 W1.0 B1.1"]
    lower(plan)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("F0.0,B0.0,X0.1", r"own.csv, line 1: 'X0.1' is not an action such as F2.0"),
        ("F0.0,B0.0+", r"'B0.0\+' is not an action"),
        ("F0.0,F0.1,B0.0", "2 results are never produced, the first is I0.1|W0.1"),
        ("F0.0,B0.0\nF2.0,B2.0", r"stages \[0, 2\] have forwards; they must be numbered from 0"),
        ("# nothing", r"stages \[\] have forwards"),
        ("chains,two\nF0.0,B0.0", "line 1: the line must be `chains` and a number"),
        ("chains,2\nF0.0,B0.0", "1 stages and 1 microbatches do not divide among 2 chains"),
        ("F0.0,B0.0", "is a plan of 1 ranks, 1 microbatches and 1 stages, not of 2, 4 and 2"),
    ],
)
def test_files_that_cannot_be_run_are_refused(text: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "own.csv").write_text(text)
    with pytest.raises(PlanError, match=reason):
        make_plan(f"csv:{tmp_path / 'own.csv'}", 2, 4)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"none.csv cannot be read: No such file"):
        make_plan(f"csv:{tmp_path / 'none.csv'}", 2, 4)
