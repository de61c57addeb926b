"""Every schedule against known values, and against the bubbles that the zero-bubble paper prints."""

import json
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from megalite.pipeline.lower import lower
from megalite.pipeline.schedule import Plan, PlanError, make_plan
from megalite.pipeline.simulate import Costs, simulate

ORACLES = Path(__file__).parent / "oracles"
COSTS = {"A": Costs(), "B": Costs(weight_grad=Fraction(4, 5)), "C": Costs(latency=Fraction(1, 4))}


def _load() -> dict[str, list[dict[str, Any]]]:
    """Records by schedule; what is refused has no values."""
    data = json.loads((ORACLES / "schedules.json").read_text())
    records = [dict(zip(data["fields"], row, strict=True)) for row in data["valid"]]
    by_schedule: dict[str, list[dict[str, Any]]] = {}
    for record in records:
        by_schedule.setdefault(record["schedule"], []).append(record)
    by_schedule["refused"] = [dict(zip(("schedule", "p", "v", "m"), row, strict=True)) for row in data["refused"]]
    return by_schedule


RECORDS = _load()
VALID = [name for name in RECORDS if name != "refused"]


@cache
def _proved(schedule: str, p: int, v: int, m: int, costs: str | None) -> Plan:
    plan = make_plan(schedule, p, m, v, costs=COSTS[costs] if costs else None)
    lower(plan)
    return plan


@pytest.mark.parametrize("schedule", VALID)
def test_times_bubbles_and_peaks(schedule: str) -> None:
    for record in RECORDS[schedule]:
        costs = record["costs"] if schedule.startswith("zb_h") else None  # others do not depend on them
        plan = _proved(schedule, record["p"], record["v"], record["m"], costs)
        figures: dict[str, Any] = simulate(plan, COSTS[record["costs"]]).summary()
        for name, value in figures.items():
            known = record[name]
            if record["bound"] == "exact" or name in ("ideal", "busy"):
                assert value == pytest.approx(known, abs=1e-9), (name, record)
            elif isinstance(value, list):
                assert max(value) <= max(known) + 1e-9, (name, record)
            else:
                assert value <= known + 1e-9, (name, record)


def test_all_schedules_have_known_values() -> None:
    assert sorted(VALID) == sorted(
        ["1f1b", "gpipe", "interleaved", "looped_bfs", "zb_h1", "zb_h2", "interleaved_zb", "zb_v", "v_half", "v_min",
         "dualpipe", "dualpipe_v"]
    )  # fmt: skip
    assert sum(map(len, RECORDS.values())) == 598 + 24


def test_what_is_not_defined_is_refused_with_its_numbers() -> None:
    for record in RECORDS["refused"]:
        with pytest.raises(PlanError, match=rf"^{record['schedule']}: .*\b{record['m']} microbatches"):
            make_plan(record["schedule"], record["p"], record["m"], record["v"])


@pytest.mark.parametrize("record", json.loads((ORACLES / "zero_bubble_paper.json").read_text())["rows"])
def test_bubble_rates_of_the_zero_bubble_paper(record: dict[str, Any]) -> None:
    exact = {name: Fraction(str(record[name])) for name in ("F", "I", "W", "latency")}
    costs = Costs(forward=exact["F"], input_grad=exact["I"], weight_grad=exact["W"], latency=exact["latency"])
    for schedule in ("1f1b", "zb_h1", "zb_h2"):
        timed = simulate(make_plan(schedule, record["p"], record["m"], costs=costs), costs)
        assert round(float(timed.bubble_span), 4) == record[schedule], schedule
