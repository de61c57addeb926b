"""`tools/show_schedule.py` as users start it."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from megalite.pipeline.schedule import make_plan, read_csv
from megalite.pipeline.simulate import Costs, simulate
from tests.tools.conftest import Script

ROOT = Path(__file__).parents[2]


@pytest.fixture
def run(script: Script) -> Script:
    """Runs the tool."""
    return partial(script, "show_schedule", columns=100)


def test_one_schedule_in_all_forms(tmp_path: Path, run: Script) -> None:
    figures, picture, plan = tmp_path / "figures.json", tmp_path / "plan.svg", tmp_path / "plan.csv"
    shown = run(
        "--schedule", "zb_v", "--pp", 4, "--num-microbatches", 8, "--vpp", 2, "--costs", "1,1,0.8,0.25",
        "--svg", picture, "--json", figures, "--csv", plan,
    ).stdout  # fmt: skip
    assert "rank 3" in shown and "Makespan" in shown
    known = simulate(make_plan("zb_v", 4, 8), Costs(weight_grad=0.8, latency=0.25)).summary()
    written: dict[str, Any] = json.loads(figures.read_text())
    assert (written["schedule"], written["p"], written["v"], written["m"]) == ("zb_v", 4, 2, 8)
    for name, value in known.items():
        assert written[name] == pytest.approx(value), name
    assert picture.read_text().startswith("<svg")
    assert read_csv(plan).actions == make_plan("zb_v", 4, 8).actions


def test_pairs_are_priced_as_asked(tmp_path: Path, run: Script) -> None:
    for fb, makespan in (("atomic", 27.0), ("seq", 25.5)):
        path = tmp_path / f"{fb}.json"
        run("--schedule", "dualpipe_v", "--pp", 4, "--num-microbatches", 8, "--fb", fb, "--json", path)
        assert json.loads(path.read_text())["makespan"] == makespan


def test_comparison_says_what_fits(tmp_path: Path, run: Script) -> None:
    path = tmp_path / "all.json"
    shown = run("--compare", "--pp", 8, "--num-microbatches", 32, "--json", path).stdout
    assert "Best fit for 8 microbatches of activations on a rank: interleaved_zb v2, makespan 99.5" in shown
    makespans = {row["schedule"]: row["makespan"] for row in json.loads(path.read_text())}
    assert makespans == {
        "interleaved_zb": 99.5, "zb_v": 99.5, "dualpipe": 102, "zb_h1": 103, "zb_h2": 103, "dualpipe_v": 103,
        "v_half": 104.5, "interleaved": 106.5, "looped_bfs": 106.5, "v_min": 109.5, "1f1b": 117, "gpipe": 117,
    }  # fmt: skip
    shown = run("--compare", "--pp", 8, "--num-microbatches", 32, "--memory", 4.5).stdout
    assert "Best fit for 4.5 microbatches of activations on a rank: v_min, makespan 109.5, 4 microbatches." in shown
    shown = run("--compare", "--pp", 4, "--num-microbatches", 6, "--memory", 1).stdout
    assert "No schedule fits 1 microbatches; v_min needs least, 2." in shown
    assert "not possible: dualpipe_v: 6 microbatches must be at least twice the 4 pipeline ranks" in shown


def test_a_run_is_drawn_over_its_simulation(tmp_path: Path, run: Script) -> None:
    timed = simulate(make_plan("zb_h1", 2, 4), Costs(forward=0.25, input_grad=0.25, weight_grad=0.125))
    rows = [
        {"step": 3, "rank": slot.rank, "action": str(slot.action), "begin": slot.start, "end": 1.25 * slot.end}
        for slot in timed.slots
    ]
    (tmp_path / "pipeline_trace.jsonl").write_text("".join(json.dumps(row, default=float) + "\n" for row in rows))
    (tmp_path / "config.yaml").write_text("parallel:\n  schedule: zb_h1\n  pp: 2\n")
    picture = tmp_path / "run.svg"
    shown = run("--measured", tmp_path, "--svg", picture).stdout
    assert "Measured in step 3" in shown and "measured / simulated: " in shown
    assert picture.read_text().count("<g ") == 2


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--schedule", "zb_v"), "--pp, --num-microbatches must be given"),
        (("--schedule", "dualpipe", "--pp", 4, "--num-microbatches", 6), "both must be even and the microbatches at"),
        (("--schedule", "zbv", "--pp", 4, "--num-microbatches", 6), "unknown parallel.schedule='zbv'; it can be"),
        (("--measured", "nowhere"), "was the run made with train.trace_pipeline?"),
    ],
)
def test_what_cannot_be_shown_is_told_plainly(arguments: tuple[object, ...], reason: str, run: Script) -> None:
    error = run(*arguments, code=1).stderr
    assert error.startswith("show_schedule.py: ") and reason in error and "Traceback" not in error


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--costs", "1/0,1,1,0"), "must be four numbers"),
        (("--costs", "nan,1,1,0"), "must be four numbers"),
        (("--costs", "1,1,1"), "must be four numbers"),
        (("--costs", "1,-1,1,0"), "costs must be 0 or from 1e-100 to 1e100"),
        (("--costs", "1e400,1,1,0"), "costs must be 0 or from 1e-100 to 1e100"),
        (("--costs", "1,1e-400,1,0"), "costs must be 0 or from 1e-100 to 1e100"),
        (("--costs", "0,0,0,1"), "F, I and W must not all be 0"),
        (("--memory", "1/0"), "must be a number of microbatches"),
        (("--memory", "-1"), "must be positive"),
    ],
)
def test_absurd_options_are_refused(options: tuple[str, str], reason: str, run: Script) -> None:
    error = run("--compare", "--pp", 2, "--num-microbatches", 4, *options, code=2).stderr
    assert reason in error and "Traceback" not in error


def test_costs_at_their_limits_are_drawn(tmp_path: Path, run: Script) -> None:
    picture = tmp_path / "plan.svg"
    for costs in ("1e99,0,0,0", "1e99,1e-99,1,1e99", "0,0,1e-99,0"):
        run("--schedule", "zb_v", "--pp", 2, "--num-microbatches", 3, "--costs", costs, "--svg", picture)
        assert picture.read_text().startswith("<svg")


def test_no_plan_at_all_is_said(run: Script) -> None:
    assert "No schedule has a plan of this size." in run("--compare", "--pp", 0, "--num-microbatches", 4).stdout


def test_group_size_of_interleaved(tmp_path: Path, run: Script) -> None:
    size = ("--pp", 2, "--num-microbatches", 8, "--group-size", 4, "--json", tmp_path / "found.json")
    run("--schedule", "interleaved", *size)
    want = simulate(make_plan("interleaved", 2, 8, 2, group_size=4)).summary()
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["peak_until_W"] == want["peak_until_W"] != simulate(make_plan("interleaved", 2, 8, 2)).summary()
    run("--compare", *size)
    (found,) = [row for row in json.loads((tmp_path / "found.json").read_text()) if row["schedule"] == "interleaved"]
    assert found["peak_until_W"] == want["peak_until_W"]
    error = run("--schedule", "interleaved", "--pp", 4, "--num-microbatches", 8, "--group-size", 1, code=1).stderr
    assert "the nearest sizes that will do: 4" in error


@pytest.mark.parametrize(
    ("trace", "config"),
    [("{", "{}"), ("3", "{}"), ('{"action": "F"}', "{}"), ('{"action": "F0.0"}', "{}"), ("{}", "{}"),
     ('{"action": "F0.0"}', ""), ('{"action": "F0.0"}', "["), ('{"action": "F0.0"}', "parallel: 3")],
)  # fmt: skip
def test_a_damaged_run_is_told_plainly(trace: str, config: str, tmp_path: Path, run: Script) -> None:
    (tmp_path / "pipeline_trace.jsonl").write_text(trace)
    (tmp_path / "config.yaml").write_text(config)
    error = run("--measured", tmp_path, code=1).stderr
    assert "pipeline_trace.jsonl, or config.yaml beside it, is damaged" in error and "Traceback" not in error
