"""Pictures of plans, and timelines from a run's trace."""

import json
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from megalite.pipeline.draw import gantt, measured, measured_costs, simulated, svg
from megalite.pipeline.plan import PlanError
from megalite.pipeline.schedule import SCHEDULES, make_plan, one_f_one_b, zb_h1
from megalite.pipeline.simulate import Costs, simulate

SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_svg_has_a_box_for_each_action_where_it_runs(schedule: str) -> None:
    plan = make_plan(schedule, 4, 8)
    timed = simulate(plan)
    root = ET.fromstring(svg([simulated(timed)]))
    boxes = {box.findtext(f"{SVG}title"): box for box in root.iter(f"{SVG}rect") if box.find(f"{SVG}title") is not None}
    assert set(boxes) == {plan.text_of(slot.action) for slot in timed.slots}
    scale = (1200 - 62 - 66) / float(timed.makespan)
    for slot in timed.slots:
        box = boxes[plan.text_of(slot.action)]
        assert float(box.attrib["x"]) == pytest.approx(62 + float(slot.start) * scale, abs=0.06)
        assert float(box.attrib["width"]) == pytest.approx(float(slot.end - slot.start) * scale - 0.6, abs=0.06)
        further = plan.stages_of(slot.rank)[0] != slot.action.stage
        assert box.attrib["class"] == f"{slot.action.kind}{int(further)}"
    frames = [box for box in root.iter(f"{SVG}rect") if box.attrib.get("stroke") == "#333"]
    assert len(frames) == len(plan.pairs)
    peaks = [text.text for text in root.iter(f"{SVG}text") if (text.text or "").startswith("peak ")]
    assert peaks == [f"peak {peak}" for peak in timed.summary()["peak_until_W"]]  # type: ignore[union-attr]


def test_gantt_shows_who_does_what_when() -> None:
    lines = gantt(simulated(simulate(one_f_one_b(2, 2))), width=80).plain.splitlines()
    assert lines[0].startswith("1f1b: 2 ranks, 2 microbatches. Makespan 9, bubble 33.3% of it")
    assert lines[1] == "rank 0 0  1  " + " " * 6 + "0     " + " " * 3 + "1     "
    assert lines[2] == "rank 1    0  0     1  1     "


def test_gantt_of_a_long_plan_fits() -> None:
    lines = gantt(simulated(simulate(one_f_one_b(4, 200))), width=80).plain.splitlines()
    assert max(map(len, lines[1:5])) <= 80


def _write_trace(path: Path, rows: list[tuple[int, int, str, float, float]]) -> Path:
    names = ("step", "rank", "action", "begin", "end")
    path.write_text("".join(json.dumps(dict(zip(names, row, strict=True))) + "\n" for row in rows))
    return path


def test_a_trace_is_read_as_the_last_step(tmp_path: Path) -> None:
    timed = simulate(zb_h1(2, 3), Costs(forward=0.25, input_grad=0.5, weight_grad=0.125))
    rows = [(7, slot.rank, str(slot.action), float(slot.start), float(slot.end)) for slot in timed.slots]
    early = [(6, rank, action, begin + 1, end + 1) for _, rank, action, begin, end in rows]
    real = measured(timed.plan, _write_trace(tmp_path / "trace.jsonl", early + rows))
    assert real.title.startswith("Measured in step 7") and set(real.slots) == set(timed.slots)
    costs = measured_costs(real)
    assert costs.stages == ((0.25, 0.5, 0.125),) * 2
    assert simulate(timed.plan, costs).makespan == pytest.approx(float(timed.makespan))
    assert svg([real, simulated(timed)], " s").count("<g ") == 2


def test_whole_backwards_are_halved(tmp_path: Path) -> None:
    timed = simulate(one_f_one_b(2, 3), Costs(stages=((0.25, 0.5, 0.25), (1.0, 1.0, 1.0))))
    rows = [(1, slot.rank, str(slot.action), float(slot.start), float(slot.end)) for slot in timed.slots]
    costs = measured_costs(measured(timed.plan, _write_trace(tmp_path / "trace.jsonl", rows)))
    assert costs.stages == ((0.25, 0.375, 0.375), (1.0, 1.0, 1.0))
    assert simulate(timed.plan, costs).makespan == timed.makespan


def test_a_trace_of_another_plan_is_refused(tmp_path: Path) -> None:
    timed = simulate(one_f_one_b(2, 3))
    rows = [(1, slot.rank, str(slot.action), float(slot.start), float(slot.end)) for slot in timed.slots]
    path = _write_trace(tmp_path / "trace.jsonl", rows)
    with pytest.raises(PlanError, match=r"action B\d\.\d is not in zb_h1 as asked for"):
        measured(zb_h1(2, 3), path)
    with pytest.raises(PlanError, match="step 1 has 11 of the 12 actions"):
        measured(timed.plan, _write_trace(path, rows[:-1]))
    with pytest.raises(PlanError, match="has no rows"):
        measured(timed.plan, _write_trace(path, []))


def test_memory_curve_ends_at_zero_and_holds_until_w() -> None:
    # One rank, one microbatch: alive from the start of F to the end of W; the line until I falls earlier.
    plan = zb_h1(1, 1)
    picture = svg([simulated(simulate(plan))])
    paths = [e.attrib["d"] for e in ET.fromstring(picture).iter(f"{SVG}path") if "V" in e.attrib["d"][1:]]
    filled, line = (path for path in paths if path.startswith("M62 72"))
    scale = (1200 - 62 - 66) / 3
    assert filled.endswith(f"H{62 + 3 * scale:.1f}V72.0")
    assert f"H{62 + 2 * scale:.1f}V72.0" in line
