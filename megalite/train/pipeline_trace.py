"""What each action of the pipeline really took: `pipeline_trace.jsonl` in the run folder."""

from __future__ import annotations

import json
import time
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

    A row is {"step", "rank", "action", "begin", "end"}: rank is the pipeline rank, the action prints as `F2.0`, and
    times are seconds since the first action of the step began anywhere in the pipeline. An action begins when its
    input is there, so that waiting shows as a gap. Ranks share the wall clock: exact on one host, as good as NTP
    across hosts. Every rank has this callback; the first rank writes.
    """

    def __init__(self, executor: Executor, mpu: ParallelState, path: Path):
        self._executor, self._mpu, self._path = executor, mpu, path
        self._steps = range(0)
        self._events: list[tuple[str, float, float]] = []
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
        start = min(begin for events in by_rank for _, begin, _ in events)
        with self._path.open("a") as file:
            for rank, events in enumerate(by_rank):
                for action, begin, end in events:
                    row = {"step": metrics.step, "rank": rank, "action": action}
                    file.write(json.dumps(row | {"begin": begin - start, "end": end - start}) + "\n")

    def _record(self, action: Action, begin: float, end: float) -> None:
        if action.kind in COMPUTE:
            self._events.append((str(action), begin + self._to_wall_clock, end + self._to_wall_clock))


def _wall_clock_offset() -> float:
    """Seconds from `time.perf_counter` to `time.time`: the best of a few readings, as one may be interrupted."""
    readings = []
    for _ in range(5):
        before, wall, after = time.perf_counter(), time.time(), time.perf_counter()
        readings.append((after - before, wall - (before + after) / 2))
    return min(readings)[1]
