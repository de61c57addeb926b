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
        ("", r"stages \[\] have forwards"),
        ("\ufeff", r"stages \[\] have forwards"),
        ("F0.0,F0.2,B0.0,B0.2", r"microbatches \[0, 2\] have forwards; they must be numbered from 0"),
        ("F0.0,F0.999999999,B0.0,B0.999999999", r"microbatches \[0, 999999999\] have forwards"),
        ("F0.99999999999,B0.0", "'F0.99999999999' is not an action"),
        ("F0.0,F0.0,B0.0", "rank 0 does F0.0 twice"),
        ("F0.0,B0.0,W0.0", "rank 0 does W0.0 twice"),
        ("F0.0,B0.0,B1.0\nF1.0", "B1.0 is on rank 0, its stage on 1"),
        ("F0.0,B0.0\nF0.0,B0.0", "stage 0 has forwards on ranks 0 and 1"),
        ("F0.0,B0.0,B0.1", "B0.1 on rank 0 is not in a plan of 1 stages and 1 microbatches"),
        ("F0.0,I0.0", "1 results are never produced, the first is W0.0"),
        ("F0.0+,B0.0", r"line 1: F0.0\+ must be followed by a B or I of another stage or microbatch"),
        ("F0.0+,F0.1,B0.0,B0.1", r"line 1: F0.0\+ must be followed"),
        ("F0.0,B0.0,F0.1+", r"line 1: F0.1\+ must be followed"),
        ("chains,3\n" + "F0.0,B0.0\nF1.1,B1.1\nF2.2,B2.2", "has 3 chains; a run can have 1, or 2 in opposite"),
        ("chains,2\nF0.0,B0.0,F1.1,B1.1", "stage 0 and its copy, stage 1, on ranks 0 and 0; they must be on ranks r"),
        (
            "chains,2\nF0.0,F2.1,B0.0,B2.1\nF1.0,F3.1,B1.0,B3.1",
            "stage 0 and its copy, stage 2, on ranks 0 and 0; they must be on ranks r and 1 - r, two of 2",
        ),
        ("chains," + "9" * 5000, "line 1: the line must be `chains` and a number"),
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


def test_files_as_spreadsheets_write_them(tmp_path: Path) -> None:
    """A mark of the encoding in front, quoted cells, empty cells at the end, and lines that end in CR LF."""
    plan, path = make_plan("dualpipe", 2, 4), tmp_path / "plan.csv"
    write_csv(plan, path)
    plain = path.read_text()
    text = "\n".join(line + ",," for line in plain.replace("F0.0", '"F0.0"').splitlines())
    path.write_bytes(b"\xef\xbb\xbf" + text.replace("\n", "\r\n").encode())
    read = make_plan(f"csv:{path}", 2, 4)
    assert (read.actions, read.num_chains, read.pairs) == (plan.actions, 2, plan.pairs)


def test_a_file_that_is_no_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "own.csv").write_bytes(b"\xff\xfe\x00F")
    with pytest.raises(PlanError, match=r"own.csv cannot be read: it is not text"):
        make_plan(f"csv:{tmp_path / 'own.csv'}", 1, 1)
    with pytest.raises(PlanError, match="cannot be read: Is a directory"):
        make_plan(f"csv:{tmp_path}", 1, 1)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("F0.0,B0.0,F0.1,B0.1\nF1.1,B1.1,F1.0,B1.0", "deadlocks: rank 0 waits before B0.0 for I1.0 of rank 1"),
        ("B0.0,F0.0", "deadlocks: rank 0 waits before B0.0 for F0.0 of rank 0"),
        ("F0.0,W0.0,I0.0", "deadlocks: rank 0 waits before W0.0 for I0.0 of rank 0"),
    ],
)
def test_orders_that_cannot_be_followed_are_refused(text: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "own.csv").write_text(text)
    plan = read_csv(tmp_path / "own.csv")
    with pytest.raises(PlanError, match=reason):
        lower(make_plan(f"csv:{tmp_path / 'own.csv'}", plan.num_ranks, plan.num_microbatches))
