"""What each action of the pipeline really took: `pipeline_trace.jsonl` in the run folder."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path

from megalite.mpu import ParallelState
from megalite.pipeline.executor import Executor
from megalite.pipeline.plan import COMPUTE, Action
from megalite.train.callbacks import Callback
from megalite.train.metrics import Speed, StepMetrics

NUM_STEPS = 3
"""Steps that are traced: after the first one of a session, which warms up."""


class PipelineTrace(Callback):
    """Records the compute actions of a few early steps on every rank of the first pipeline.

    A row is {"step", "rank", "action", "layers", "begin", "end"}: rank is the pipeline rank, the action prints as
    `F2.0`, its stage has so many layers (`layers` gives them by stage), and times are seconds since the first action
    of the step began anywhere in the pipeline. An action begins when its input is there, so that waiting shows as a
    gap. Ranks share the wall clock: exact on one host, as good as NTP across hosts. Every rank has this callback; the
    first rank writes.
    """

    def __init__(self, executor: Executor, layers: Mapping[int, int], mpu: ParallelState, path: Path):
        self._executor, self._layers, self._mpu, self._path = executor, layers, mpu, path
        self._steps = range(0)
        self._events: list[tuple[str, int, float, float]] = []
        self._to_wall_clock = 0.0

    def before_run(self, step: int) -> None:
        """Begins a new file: a trace is of one session."""
        self._steps = range(step + 2, step + 2 + NUM_STEPS)
        if self._mpu.world.is_first:
            self._path.write_text("")

    def before_step(self, step: int) -> None:
        """Listens to the steps that are traced."""
        if step in self._steps:
            self._events = []
            self._to_wall_clock = _wall_clock_offset()
            self._executor.trace = self._record

    def after_step(self, metrics: StepMetrics, speed: Speed) -> None:
        """Collects the pipeline's events and writes them."""
        if metrics.step not in self._steps:
            return
        self._executor.trace = None
        by_rank = self._mpu.pp.gather_objects(self._events)
        if not self._mpu.world.is_first:
            return
        start = min(begin for events in by_rank for _, _, begin, _ in events)
        with self._path.open("a") as file:
            for rank, events in enumerate(by_rank):
                for action, layers, begin, end in events:
                    row = {"step": metrics.step, "rank": rank, "action": action, "layers": layers}
                    file.write(json.dumps(row | {"begin": begin - start, "end": end - start}) + "\n")

    def _record(self, action: Action, begin: float, end: float) -> None:
        if action.kind in COMPUTE:
            times = begin + self._to_wall_clock, end + self._to_wall_clock
            self._events.append((str(action), self._layers[action.stage], *times))


def _wall_clock_offset() -> float:
    """Seconds from `time.perf_counter` to `time.time`: the best of a few readings, as one may be interrupted."""
    readings = []
    for _ in range(5):
        before, wall, after = time.perf_counter(), time.time(), time.perf_counter()
        readings.append((after - before, wall - (before + after) / 2))
    return min(readings)[1]
