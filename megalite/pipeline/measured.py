"""What the parts of a model take, from the trace of a run (`train.trace_pipeline`)."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from statistics import median

from megalite.pipeline.partition import PartCosts
from megalite.pipeline.plan import PlanError

TRACE = "pipeline_trace.jsonl"
"""The trace's name in a run folder."""

_ACTION = re.compile(r"([FBIW])([0-9]{1,9})\.([0-9]{1,9})")


@dataclass(frozen=True, kw_only=True)
class StageTimes:
    """What each model stage of a traced run takes for one microbatch, forward and backward, and its layers."""

    seconds: tuple[float, ...]
    layers: tuple[int, ...]


def part_costs(trace: Path, nominal: PartCosts) -> PartCosts:
    """The seconds of each layer, of the embedding and of the head, as far as stages tell them apart.

    A stage's time is divided evenly among its layers. The first and the last stage have layers like those between them,
    and what remains of their times is the embedding's and the head's; without layers between, `nominal` costs, of any
    unit, divide the end of the model that has less besides its layers. Raises PlanError for a trace that is missing,
    damaged or of a model with another number of layers.
    """
    times = read_stage_times(trace, len(nominal.layers))
    seconds, counts = times.seconds, times.layers
    typical = _typical_layer(times, nominal)
    first = max(seconds[0] - counts[0] * typical, 0.0)
    last = max(seconds[-1] - counts[-1] * typical, 0.0)
    if len(seconds) == 1:
        share = _ratio(nominal.embedding, nominal.embedding + nominal.head)
        first, last = first * share, first * (1 - share)
    extra = [0.0] * len(seconds)
    extra[0] += first
    extra[-1] += last
    layers = (
        each
        for time, count, more in zip(seconds, counts, extra, strict=True)
        for each in [max(time - more, 0.0) / max(count, 1)] * count
    )
    return PartCosts(layers=tuple(layers), embedding=first, head=last)


def _typical_layer(times: StageTimes, nominal: PartCosts) -> float:
    """What a layer takes, by the stages that have nothing else, or by the end that has least else."""
    count, ends = len(times.layers), list(accumulate(times.layers))
    inner = [i for i in range(1, count - 1) if times.layers[i]]
    if inner:
        return sum(times.seconds[i] for i in inner) / sum(times.layers[i] for i in inner)
    shares: list[tuple[float, float]] = []
    for i in sorted({0, count - 1}):
        if times.layers[i]:
            of_layers = sum(nominal.layers[ends[i] - times.layers[i] : ends[i]])
            whole = of_layers + nominal.embedding * (i == 0) + nominal.head * (i == count - 1)
            share = _ratio(of_layers, whole)
            shares.append((share, share * times.seconds[i] / times.layers[i]))
    return max(shares)[1]


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 1.0


def read_stage_times(trace: Path, num_layers: int) -> StageTimes:
    """The median times of each stage's passes over the traced steps, added; raises PlanError like `part_costs`."""
    durations: defaultdict[tuple[int, str], list[float]] = defaultdict(list)
    layers: dict[int, int] = {}
    for kind, stage, count, seconds in _rows(trace):
        durations[stage, kind].append(seconds)
        if layers.setdefault(stage, count) != count:
            raise PlanError(f"{trace}: stage {stage} has {layers[stage]} layers in one row, {count} in another")
    if not layers:
        raise PlanError(f"{trace} has no rows: was the run long enough?")
    num_stages = _num_model_stages(trace, layers, num_layers)
    copies = [range(stage, len(layers), num_stages) for stage in range(num_stages)]

    def seconds_of(stage: int) -> float:
        typical = {
            kind: median(all_of)
            for kind in "FBIW"
            if (all_of := [second for copy in copies[stage] for second in durations.get((copy, kind), ())])
        }
        if "F" not in typical or not ("B" in typical or {"I", "W"} <= typical.keys()):
            raise PlanError(f"{trace} lacks a forward or a backward of stage {stage}: was the run cut short?")
        return typical["F"] + (typical["B"] if "B" in typical else typical["I"] + typical["W"])

    return StageTimes(
        seconds=tuple(seconds_of(stage) for stage in range(num_stages)),
        layers=tuple(layers[stage] for stage in range(num_stages)),
    )


def _rows(trace: Path) -> Sequence[tuple[str, int, int, float]]:
    """(kind, stage, layers of the stage, seconds) of each row."""
    try:
        lines = trace.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        raise PlanError(f"{trace} does not exist: was the run made with train.trace_pipeline=true?") from None
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(f"{trace} cannot be read: {error}") from error
    rows: list[tuple[str, int, int, float]] = []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
            action = _ACTION.fullmatch(row["action"])
            count, seconds = int(row["layers"]), float(row["end"]) - float(row["begin"])
            if action is None or count < 0 or not 0 <= seconds < float("inf"):
                raise ValueError("not an action with its layers and its times")
        except (ValueError, KeyError, TypeError) as error:
            raise PlanError(f"{trace}, line {number} is not a row of a trace: {error!r}") from error
        rows.append((action[1], int(action[2]), count, seconds))
    return rows


def _num_model_stages(trace: Path, layers: dict[int, int], num_layers: int) -> int:
    """The stages of the model: a bidirectional plan has each of them twice."""
    if sorted(layers) != list(range(len(layers))):
        raise PlanError(f"{trace} has rows of the stages {sorted(layers)} only: was the run cut short?")
    counts = [layers[stage] for stage in range(len(layers))]
    for num_chains in (1, 2):
        num_stages, rest = divmod(len(counts), num_chains)
        if not rest and counts == counts[:num_stages] * num_chains and sum(counts[:num_stages]) == num_layers:
            return num_stages
    raise PlanError(f"{trace} is of a model with {sum(counts)} layers, not of one with num_layers={num_layers}")
