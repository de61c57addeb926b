"""Pictures of timed plans: a Gantt chart for the terminal and as SVG, simulated or as measured in a run."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from pathlib import Path
from statistics import median

from rich.text import Text

from megalite.pipeline.plan import COMPUTE, Action, Kind, Plan, PlanError
from megalite.pipeline.simulate import Costs, Simulation, Slot, live_activations

_COLOURS = {
    Kind.FORWARD: ("#5b8fd9", "#b5cdf1"),
    Kind.BACKWARD: ("#3f9c78", "#a5d8c2"),
    Kind.INPUT_GRAD: ("#5fb8b0", "#bfe6e2"),
    Kind.WEIGHT_GRAD: ("#e0a13c", "#f5d9a8"),
}
"""Of a kind on a rank's first stage, and on its further ones."""

_NAMES = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.INPUT_GRAD: "input gradient",
    Kind.WEIGHT_GRAD: "weight gradient",
}


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """A plan and when its actions ran, or would run."""

    title: str
    """What stands above it."""
    plan: Plan
    """What was run."""
    slots: tuple[Slot, ...]
    """Compute actions in time."""

    @property
    def end(self) -> float:
        """When the last action ends, in the timeline's unit."""
        return float(max(slot.end for slot in self.slots))

    def rows(self) -> list[list[Slot]]:
        """Each rank's slots in order."""
        rows: list[list[Slot]] = [[] for _ in range(self.plan.num_ranks)]
        for slot in sorted(self.slots, key=lambda slot: (slot.start, slot.end)):
            rows[slot.rank].append(slot)
        return rows


def simulated(timed: Simulation, unit: str = "") -> Timeline:
    """A simulation as a timeline, its figures in the title."""
    figures = timed.summary()
    title = (
        f"{timed.plan.name}: {timed.plan.num_ranks} ranks, {timed.plan.num_microbatches} microbatches. "
        f"Makespan {figures['makespan']:.4g}{unit}, bubble {figures['bubble_global']:.1%} of it, "
        f"{figures['bubble_span']:.1%} of the longest rank's own span"
    )
    return Timeline(title=title, plan=timed.plan, slots=timed.slots)


# ---- what a run measured


def measured(plan: Plan, path: Path) -> Timeline:
    """The last step in a run's `pipeline_trace.jsonl`, whose actions must be the plan's; times in seconds."""
    steps: defaultdict[int, list[Slot]] = defaultdict(list)
    names = {str(action): action for row in plan.actions for action in row if action.kind in COMPUTE}
    with path.open() as file:
        for line in file:
            row = json.loads(line)
            if row["action"] not in names:
                raise PlanError(f"{path}: action {row['action']} is not in {plan.name} as asked for")
            steps[row["step"]].append(Slot(row["rank"], names[row["action"]], row["begin"], row["end"]))
    if not steps:
        raise PlanError(f"{path} has no rows: was the run long enough?")
    step = max(steps)
    if len(steps[step]) != len(names):
        raise PlanError(f"{path}: step {step} has {len(steps[step])} of the {len(names)} actions of {plan.name}")
    seconds = max(float(slot.end) for slot in steps[step])
    title = f"Measured in step {step}: {seconds:.4g} s"
    return Timeline(title=title, plan=plan, slots=tuple(steps[step]))


def measured_costs(timeline: Timeline) -> Costs:
    """The median duration of each model stage's passes in a measured timeline.

    Where only whole backwards ran, half of one counts as input gradient.
    """
    plan = timeline.plan
    durations: defaultdict[tuple[Kind, int], list[float]] = defaultdict(list)
    for _, action, begin, end in timeline.slots:
        durations[action.kind, plan.model_stage(action.stage)].append(float(end - begin))

    def passes(stage: int) -> tuple[float, float, float]:
        typical = {kind: median(times) for (kind, of), times in durations.items() if of == stage}
        half = typical.get(Kind.BACKWARD, 0.0) / 2
        return typical[Kind.FORWARD], typical.get(Kind.INPUT_GRAD, half), typical.get(Kind.WEIGHT_GRAD, half)

    return Costs(stages=tuple(passes(stage) for stage in range(plan.num_stages)))


# ---- in the terminal


def gantt(timeline: Timeline, width: int) -> Text:
    """A line for each rank: the microbatch on the colour of what is done with it; further stages of a rank paler."""
    shortest = min((float(slot.end - slot.start) for slot in timeline.slots if slot.end > slot.start), default=1.0)
    label = len(f"rank {timeline.plan.num_ranks - 1} ")
    # Three columns hold a two-digit microbatch; more would not be clearer, and fewer must do for a long plan.
    scale = min(3 / shortest, (width - label) / timeline.end)
    text = Text(timeline.title + "\n", no_wrap=True, overflow="crop")
    for rank, row in enumerate(timeline.rows()):
        text.append(f"rank {rank} ".rjust(label))
        column = 0
        for slot in row:
            begin, end = round(float(slot.start) * scale), round(float(slot.end) * scale)
            text.append(" " * (begin - column))
            name = str(slot.action.microbatch)
            mark = name.ljust(end - begin) if len(name) < end - begin or len(name) == 1 else " " * (end - begin)
            text.append(mark[: end - begin], style=f"black on {_colour(timeline.plan, slot.action)}")
            column = max(column, end)
        text.append("\n")
    text.append(" " * label)
    for kind in _kinds([timeline]):
        text.append(f" {_NAMES[kind]} ", style=f"black on {_COLOURS[kind][0]}")
        text.append(" ")
    if _is_several(timeline.plan):
        text.append("paler: the rank's other stages")
    text.append("\n")
    return text


def _variant(plan: Plan, action: Action) -> int:
    """0 for a rank's first stage, 1 for its others."""
    return int(plan.stages_of(plan.placement[action.stage])[0] != action.stage)


def _colour(plan: Plan, action: Action) -> str:
    return _COLOURS[action.kind][_variant(plan, action)]


def _kinds(timelines: Sequence[Timeline]) -> list[Kind]:
    present = {slot.action.kind for timeline in timelines for slot in timeline.slots}
    return [kind for kind in _COLOURS if kind in present]


def _is_several(plan: Plan) -> bool:
    return len(plan.placement) > plan.num_ranks


# ---- as SVG

_LEFT, _RIGHT, _TOP, _BAR, _MEMORY, _GAP = 62, 66, 34, 20, 18, 6
_STYLE = (
    "text{font:11px system-ui,sans-serif;fill:#222}"
    ".t{font-weight:600;font-size:13px}.m{text-anchor:middle;font-size:10px}.e{text-anchor:end}"
    ".n{fill:#777;font-size:10px}"
)


def svg(timelines: Sequence[Timeline], unit: str = "", width: int = 1200) -> str:
    """One panel for each timeline, all on the same axis of time.

    A row of boxes for each rank, the microbatch in each box, further stages of a rank paler and hatched, FB pairs
    framed. Under it the number of activations alive, until their W or B (filled) and until their I or B (line).
    """
    end = max(timeline.end for timeline in timelines)
    scale = (width - _LEFT - _RIGHT) / end
    parts: list[str] = []
    top = 26.0
    for timeline in timelines:
        height = _TOP + timeline.plan.num_ranks * (_BAR + _MEMORY + _GAP) + 18
        parts += [f'<g transform="translate(0 {top:g})">', *_panel(timeline, scale, end, unit), "</g>"]
        top += height
    hatch = (
        '<defs><pattern id="h" width="5" height="5" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
        '<path d="M0 0V5" stroke="#000" stroke-opacity=".22"/></pattern></defs>'
    )
    return "\n".join(
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {top + 4:g}" width="{width}">',
            f"<style>{_STYLE}{''.join(_box_styles(timelines))}</style>{hatch}",
            '<rect width="100%" height="100%" fill="#fff"/>',
            *_legend(timelines),
            *parts,
            "</svg>\n",
        )
    )


def _box_styles(timelines: Sequence[Timeline]) -> Iterable[str]:
    for kind in _kinds(timelines):
        for variant, colour in enumerate(_COLOURS[kind]):
            yield f".{kind}{variant}{{fill:{colour}}}"


def _legend(timelines: Sequence[Timeline]) -> Iterable[str]:
    x = _LEFT
    entries = [(f"{kind}0", _NAMES[kind]) for kind in _kinds(timelines)]
    if any(_is_several(timeline.plan) for timeline in timelines):
        entries.append(("", "hatched: the rank's other stages"))
    for css, name in entries:
        if css:
            yield f'<rect x="{x}" y="8" width="12" height="12" class="{css}"/>'
        else:
            yield f'<rect x="{x}" y="8" width="12" height="12" fill="#ddd"/>'
            yield f'<rect x="{x}" y="8" width="12" height="12" fill="url(#h)"/>'
        yield f'<text x="{x + 17}" y="18">{escape(name)}</text>'
        x += 30 + 6 * len(name)
    yield f'<rect x="{x}" y="8" width="12" height="12" fill="#c9ced6"/>'
    yield f'<text x="{x + 17}" y="18">activations until W (until I: line), and their peak</text>'


def _panel(timeline: Timeline, scale: float, end: float, unit: str) -> Iterable[str]:
    yield f'<text x="{_LEFT}" y="20" class="t">{escape(timeline.title)}</text>'
    rows = timeline.rows()
    highest = max(1, max(peak for row in rows for peak in _curve(row, Kind.WEIGHT_GRAD)[1]))
    for rank, row in enumerate(rows):
        y = _TOP + rank * (_BAR + _MEMORY + _GAP)
        yield f'<text x="{_LEFT - 8}" y="{y + 14}" class="e">rank {rank}</text>'
        for slot in row:
            yield from _box(timeline.plan, slot, scale, y)
        yield from _pair_frames(timeline.plan, row, scale, y)
        yield from _memory(row, scale, y + _BAR + _MEMORY, highest)
    bottom = _TOP + len(rows) * (_BAR + _MEMORY + _GAP)
    yield f'<path d="M{_LEFT} {bottom}H{_LEFT + end * scale:.1f}" stroke="#999"/>'
    for tick in _ticks(end):
        x = _LEFT + tick * scale
        yield f'<path d="M{x:.1f} {bottom}v4" stroke="#999"/>'
        yield f'<text x="{x:.1f}" y="{bottom + 15}" class="m n">{tick:g}{unit}</text>'


def _box(plan: Plan, slot: Slot, scale: float, y: float) -> Iterable[str]:
    x, width = _LEFT + float(slot.start) * scale, float(slot.end - slot.start) * scale
    variant = _variant(plan, slot.action)
    place = f'x="{x:.1f}" y="{y:g}" width="{max(width - 0.6, 0.4):.1f}" height="{_BAR}"'
    yield f'<rect {place} class="{slot.action.kind}{variant}"><title>{plan.text_of(slot.action)}</title></rect>'
    if variant:
        yield f'<rect {place} fill="url(#h)" pointer-events="none"/>'
    if width >= 7 * len(str(slot.action.microbatch)):
        yield f'<text x="{x + width / 2:.1f}" y="{y + 14:g}" class="m">{slot.action.microbatch}</text>'


def _pair_frames(plan: Plan, row: list[Slot], scale: float, y: float) -> Iterable[str]:
    for first, second in pairwise(row):
        if first.action in plan.pairs:
            x, width = _LEFT + float(first.start) * scale, float(second.end - first.start) * scale
            yield (
                f'<rect x="{x:.1f}" y="{y - 1:g}" width="{max(width - 0.6, 1):.1f}" height="{_BAR + 2}" fill="none" '
                'stroke="#333"/>'
            )


def _curve(row: list[Slot], released_by: Kind) -> tuple[list[float], list[int]]:
    """When the number of activations alive on a rank changes, and to what."""
    times, numbers = [0.0], [0]
    counts = live_activations(tuple(slot.action for slot in row), released_by)
    for slot, (action, live) in zip(row, counts, strict=True):
        # An activation grows during its forward and is there in full at its end; it is freed at the end of a pass.
        times.append(float(slot.start if action.kind is Kind.FORWARD else slot.end))
        numbers.append(live)
    return times, numbers


def _memory(row: list[Slot], scale: float, bottom: float, highest: int) -> Iterable[str]:
    for released_by, style in ((Kind.WEIGHT_GRAD, 'fill="#c9ced6"'), (Kind.INPUT_GRAD, 'fill="none" stroke="#556"')):
        times, numbers = _curve(row, released_by)
        path = f"M{_LEFT} {bottom:g}"
        for time, number in zip(times, numbers, strict=True):
            path += f"H{_LEFT + time * scale:.1f}V{bottom - (_MEMORY - 3) * number / highest:.1f}"
        yield f'<path d="{path}" {style}/>'
        if released_by is Kind.WEIGHT_GRAD:
            x = _LEFT + float(row[-1].end) * scale
            yield f'<text x="{x + 5:.1f}" y="{bottom:g}" class="n">peak {max(numbers)}</text>'


def _ticks(end: float) -> list[float]:
    """About ten round times from 0 on."""
    step = 10.0 ** len(str(int(end))) if end >= 1 else 1.0
    while True:
        for divisor in (1, 2, 5):
            if end / (step / divisor) >= 8:
                step /= divisor
                return [step * i for i in range(int(end / step + 1e-9) + 1)]
        step /= 10
