"""The loop: order of moments, saving, stopping, resuming, and steps that are not finite."""

import gzip
import json
import logging
import math
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megalite.train.callbacks import Callback, MetricsFiles, ProfilerTrace, TensorBoard
from megalite.train.metrics import DETERMINISTIC_FIELDS, Meter, Speed, StepMetrics
from megalite.train.run_folder import read_rows
from megalite.train.trainer import NonFiniteError, RunError
from tests.train.fakes import FakeTraining, Recorder, make_trainer


class SignalAt(Callback):
    """Sends this process a signal in the middle of a step."""

    def __init__(self, step: int, number: signal.Signals):
        self.step, self.number = step, number

    def before_step(self, step: int) -> None:
        if step == self.step:
            os.kill(os.getpid(), self.number)


class FailAt(Callback):
    def __init__(self, step: int):
        self.step = step

    def before_step(self, step: int) -> None:
        if step == self.step:
            raise RuntimeError("killed")


def deterministic(path: Path) -> list[dict[str, Any]]:
    return [{name: row[name] for name in DETERMINISTIC_FIELDS} for row in read_rows(path / "metrics.jsonl")]


def run(path: Path, training: FakeTraining, *extra: Callback, **options: Any):
    """Runs with metrics.jsonl; returns the outcome and the checkpoints."""
    trainer, folder, checkpoints = make_trainer(path, training, list(extra), **options)
    trainer.callbacks = [*extra, MetricsFiles(folder)]
    try:
        return trainer.run(), checkpoints
    finally:
        folder.close()


def test_moments_come_in_order(tmp_path: Path) -> None:
    recorder = Recorder()
    outcome, checkpoints = run(tmp_path / "run", FakeTraining(), recorder, num_steps=3, eval_every=2, every=2)
    assert recorder.moments == [
        "before_run 0",
        "before_step 1", "after_step 1",
        "before_step 2", "after_step 2", "after_evaluation 2", "after_checkpoint 2",
        "before_step 3", "after_step 3", "after_checkpoint 3",
        "after_run 3",
    ]  # fmt: skip
    assert (outcome.step, outcome.stopped_by, outcome.validation_loss) == (3, None, 3 / 10)
    assert checkpoints.saved == [2, 3]


def test_saves_in_the_background_are_told_when_they_are_complete(tmp_path: Path) -> None:
    recorder = Recorder()
    _, checkpoints = run(tmp_path / "run", FakeTraining(), recorder, num_steps=7, every=2, async_save=True)
    saves = [moment for moment in recorder.moments if not moment.startswith("before_step")]
    assert saves == [
        "before_run 0",
        "after_step 1", "after_step 2",
        "after_step 3", "after_step 4", "after_checkpoint 2",  # it took two steps, and the next one waited for it
        "after_step 5", "after_step 6", "after_checkpoint 4",
        "after_step 7", "after_checkpoint 6", "after_checkpoint 7",  # the last one at once
        "after_run 7",
    ]  # fmt: skip
    assert checkpoints.saved == [2, 4, 6, 7]


def test_a_save_that_is_under_way_is_completed_before_a_run_fails(tmp_path: Path) -> None:
    recorder, training = Recorder(), FakeTraining(results={2: {"loss": math.nan}})
    with pytest.raises(NonFiniteError, match=r"step 3: loss nan.*the state after step 2 is kept"):
        run(tmp_path / "run", training, recorder, num_steps=7, every=2, async_save=True)
    assert recorder.moments[-2:] == ["after_checkpoint 2", "after_run 3"]


def test_a_request_to_stop_is_answered_with_a_save_at_once(tmp_path: Path) -> None:
    recorder = Recorder()
    outcome, checkpoints = run(
        tmp_path / "run", FakeTraining(), recorder, SignalAt(3, signal.SIGTERM), num_steps=7, every=2, async_save=True
    )
    assert outcome.step == 3 and checkpoints.saved == [2, 3]


def test_the_last_step_is_saved_once(tmp_path: Path) -> None:
    _, checkpoints = run(tmp_path / "run", FakeTraining(), num_steps=4, every=2)
    assert checkpoints.saved == [2, 4]


def test_rows_count_tokens_and_samples_of_the_global_batch(tmp_path: Path) -> None:
    run(tmp_path, FakeTraining(), num_steps=3, global_batch_size=4)
    rows = read_rows(tmp_path / "metrics.jsonl")
    seq_len = rows[0]["tokens"] // 4
    assert [row["samples"] for row in rows] == [4, 8, 12]
    assert [row["tokens"] for row in rows] == [4 * seq_len, 8 * seq_len, 12 * seq_len]
    assert [row["sample_fingerprint"] for row in rows] == [0, 1, 2]
    assert all(row["loss_tokens"] == 7 for row in rows)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_request_ends_the_step_saves_and_exits(
    tmp_path: Path, number: signal.Signals, caplog: pytest.LogCaptureFixture
) -> None:
    training, before = FakeTraining(), signal.getsignal(number)
    with caplog.at_level(logging.INFO, "megalite"):
        outcome, checkpoints = run(tmp_path / "run", training, SignalAt(3, number), num_steps=9)
    assert (outcome.step, outcome.stopped_by, checkpoints.saved) == (3, number.name, [3])
    assert len(training.steps) == 3
    assert f"stopped by {number.name} after step 3 of 9" in caplog.text
    assert signal.getsignal(number) == before


def test_resume_after_a_kill_gives_the_rows_of_a_run_that_was_never_interrupted(tmp_path: Path) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    run(whole, FakeTraining(), num_steps=9, every=3)
    with pytest.raises(RuntimeError, match="killed"):
        run(broken, FakeTraining(), FailAt(6), num_steps=9, every=3)
    assert [row["step"] for row in deterministic(broken)] == [1, 2, 3, 4, 5]
    resumed = FakeTraining()
    outcome, checkpoints = run(broken, resumed, num_steps=9, every=3, resume="auto")
    assert resumed.steps == [3, 4, 5, 6, 7, 8] and outcome.step == 9 and checkpoints.saved == [6, 9]
    assert deterministic(broken) == deterministic(whole)


def test_resume_from_an_earlier_checkpoint_drops_what_came_later(tmp_path: Path) -> None:
    run(tmp_path / "run", FakeTraining(), num_steps=6, every=2)
    resumed = FakeTraining()
    run(tmp_path / "run", resumed, num_steps=4, resume=str(tmp_path / "run/checkpoints/step_00000002"))
    assert resumed.steps == [2, 3]
    assert [row["step"] for row in deterministic(tmp_path / "run")] == [1, 2, 3, 4]


def test_resume_of_a_complete_run_trains_nothing(tmp_path: Path) -> None:
    run(tmp_path / "run", FakeTraining(), num_steps=2)
    resumed = FakeTraining()
    outcome, checkpoints = run(tmp_path / "run", resumed, num_steps=2, resume="auto")
    assert (outcome.step, resumed.steps, checkpoints.saved) == (2, [], [])
    assert len(deterministic(tmp_path / "run")) == 2


def test_a_checkpoint_beyond_the_last_step_is_refused(tmp_path: Path) -> None:
    run(tmp_path / "run", FakeTraining(), num_steps=5)
    with pytest.raises(RunError, match=r"at step 5, beyond train.num_steps=3"):
        run(tmp_path / "run", FakeTraining(), num_steps=3, resume="auto")
    assert len(deterministic(tmp_path / "run")) == 5


def test_evaluation_only_needs_weights_and_writes_nothing(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="eval_only found no weights"):
        run(tmp_path / "run", FakeTraining(), eval_only=True)
    assert not (tmp_path / "run").exists()
    run(tmp_path / "run", FakeTraining(), num_steps=4)
    before = {file: file.read_bytes() for file in (tmp_path / "run").rglob("*") if file.is_file()}
    outcome, _ = run(tmp_path / "run", FakeTraining(), eval_only=True, resume="auto", num_steps=2, eval_steps=5)
    assert (outcome.step, outcome.validation_loss) == (4, 10 / 5)
    assert {file: file.read_bytes() for file in (tmp_path / "run").rglob("*") if file.is_file()} == before


def test_no_validation_data_is_no_evaluation(tmp_path: Path) -> None:
    outcome, _ = run(tmp_path / "run", FakeTraining(validation=None), num_steps=2, every=1, eval_every=1)
    assert outcome.validation_loss is None
    assert (tmp_path / "run/metrics.jsonl").exists() and not (tmp_path / "run/validation.jsonl").exists()
    with pytest.raises(RunError, match="eval_only found no validation data"):
        run(tmp_path / "run", FakeTraining(validation=None), eval_only=True, resume="auto")


def test_a_new_run_may_start_from_another_runs_weights(tmp_path: Path) -> None:
    run(tmp_path / "old", FakeTraining(), num_steps=4)
    training, start = FakeTraining(), tmp_path / "old/checkpoints/step_00000004"
    outcome, checkpoints = run(tmp_path / "new", training, num_steps=2, start=start)
    assert (training.steps, training.weight, outcome.step, checkpoints.saved) == ([0, 1], 10 + 1 + 2, 2, [2])
    outcome, _ = run(tmp_path / "look", FakeTraining(), eval_only=True, start=start, eval_steps=10)
    assert outcome.validation_loss == 1.0


def test_evaluation_leaves_the_training_rows_alone(tmp_path: Path) -> None:
    run(tmp_path / "with", FakeTraining(), num_steps=5, eval_every=1)
    run(tmp_path / "without", FakeTraining(), num_steps=5)
    assert deterministic(tmp_path / "with") == deterministic(tmp_path / "without")
    rows = read_rows(tmp_path / "with/validation.jsonl")
    assert rows[-1] == {"step": 5, "validation_loss": 1.5} and len(rows) == 5


@pytest.mark.parametrize("bad", [{"loss": math.nan}, {"grad_norm": math.inf}])
def test_a_step_that_is_not_finite_ends_the_run_unsaved(tmp_path: Path, bad: dict[str, float]) -> None:
    training = FakeTraining(results={4: bad})
    with pytest.raises(NonFiniteError, match=r"step 5: .*the state after step 4 is kept"):
        run(tmp_path / "run", training, num_steps=9, every=2)
    rows = read_rows(tmp_path / "run/metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    assert rows[-1][next(iter(bad))] is None
    assert not (tmp_path / "run/checkpoints/step_00000005").exists()


def test_a_skipped_step_is_told_and_the_run_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    training = FakeTraining(results={1: {"grad_norm": math.nan, "skipped": True}})
    outcome, _ = run(tmp_path / "run", training, num_steps=3)
    assert outcome.step == 3
    assert "step 2: loss" in caplog.text and "skipped (1 so far)" in caplog.text
    assert [row["skipped"] for row in deterministic(tmp_path / "run")] == [False, True, False]


def test_callbacks_are_closed_after_an_error(tmp_path: Path) -> None:
    recorder = Recorder()
    with pytest.raises(RuntimeError):
        run(tmp_path / "run", FakeTraining(), recorder, FailAt(2), num_steps=3)
    assert recorder.moments[-2:] == ["before_step 2", "after_run 1"]


class SlowMoments(Callback):
    """Evaluations and checkpoints that take their time, by a clock that only they and the steps move."""

    def __init__(self) -> None:
        self.now = 0.0

    def clock(self) -> float:
        return self.now

    def before_step(self, step: int) -> None:
        self.now += 2.0

    def after_evaluation(self, step: int, loss: float) -> None:
        self.now += 100.0

    def after_checkpoint(self, step: int, path: Path | str) -> None:
        self.now += 1000.0


def test_step_seconds_leave_out_evaluation_and_saving(tmp_path: Path) -> None:
    slow = SlowMoments()
    meter = Meter(clock=slow.clock)
    run(tmp_path, FakeTraining(), slow, num_steps=4, eval_every=1, every=1, trainer_options={"meter": meter})
    rows = read_rows(tmp_path / "metrics.jsonl")
    assert [row["step_seconds"] for row in rows] == [2.0] * 4
    assert [row["tokens_per_second"] for row in rows] == [row["tokens"] / row["step"] / 2.0 for row in rows]


def test_each_dataset_is_evaluated_alone(tmp_path: Path) -> None:
    training = FakeTraining(each_validation={"data/a": "part"})
    run(tmp_path / "run", training, TensorBoard(tmp_path / "events"), num_steps=2, eval_every=2)
    whole, part = read_rows(tmp_path / "run/validation.jsonl")
    assert part == {"step": 2, "dataset": "data/a", "validation_loss": whole["validation_loss"] / 2}
    assert b"validation_loss/a" in b"".join(file.read_bytes() for file in (tmp_path / "events").iterdir())


def test_rates_are_per_rank_and_against_the_peak(tmp_path: Path) -> None:
    slow = SlowMoments()
    run(
        tmp_path, FakeTraining(), slow, num_steps=1, peak_tflops=0.5,
        trainer_options={"meter": Meter(clock=slow.clock)},
    )  # fmt: skip
    row = read_rows(tmp_path / "metrics.jsonl")[0]
    assert row["mfu"] == row["tflops_per_second"] / 0.5 > 0


def steps_in(trace: Path) -> list[str]:
    """The spans of steps in a profiler trace, in their order."""
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    spans = [e for e in events if e.get("cat") == "user_annotation" and str(e["name"]).startswith("ProfilerStep#")]
    return [span["name"] for span in sorted(spans, key=lambda span: span["ts"])]


def test_profiler_trace_of_the_chosen_steps(tmp_path: Path) -> None:
    run(tmp_path / "run", FakeTraining(), ProfilerTrace(tmp_path / "profile", first=2, last=3, rank=0), num_steps=4)
    (trace,) = (tmp_path / "profile").iterdir()
    assert trace.name == "steps_2_to_3_rank0.json.gz"
    assert steps_in(trace) == ["ProfilerStep#2", "ProfilerStep#3"]


def test_profiler_trace_of_a_run_that_ends_within_the_range(tmp_path: Path) -> None:
    run(tmp_path / "run", FakeTraining(), ProfilerTrace(tmp_path / "profile", first=2, last=9, rank=1), num_steps=3)
    assert [file.name for file in (tmp_path / "profile").iterdir()] == ["steps_2_to_9_rank1.json.gz"]


def test_profiler_trace_of_a_step_that_fails(tmp_path: Path) -> None:
    trace = ProfilerTrace(tmp_path / "profile", first=1, last=9, rank=0)
    with pytest.raises(RuntimeError, match="killed"):
        run(tmp_path / "run", FakeTraining(), trace, FailAt(2), num_steps=3)
    assert steps_in(next((tmp_path / "profile").iterdir())) == ["ProfilerStep#1", "ProfilerStep#2"]


def test_tensorboard_events_are_written(tmp_path: Path) -> None:
    run(tmp_path / "run", FakeTraining(), TensorBoard(tmp_path / "events"), num_steps=2, eval_every=1)
    data = b"".join(file.read_bytes() for file in (tmp_path / "events").iterdir())
    assert b"train/loss" in data and b"validation/loss" in data


def test_tensorboard_forgets_what_a_resume_takes_back(tmp_path: Path) -> None:
    path, events = tmp_path / "run", tmp_path / "events"
    run(path, FakeTraining(), TensorBoard(events), num_steps=4, every=2)
    time.sleep(1.1)  # event files are ordered by the second in which they were made
    run(path, FakeTraining(), TensorBoard(events), num_steps=3, resume=str(path / "checkpoints/step_00000002"))
    shown = EventAccumulator(str(events))
    shown.Reload()
    assert [event.step for event in shown.Scalars("train/loss")] == [1, 2, 3]


def test_every_row_is_valid_json_of_one_line(tmp_path: Path) -> None:
    run(tmp_path, FakeTraining(results={0: {"loss": math.nan, "skipped": True}}), num_steps=2)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2] and "NaN" not in "".join(lines)


def test_the_metrics_of_a_step_are_those_that_callbacks_see(tmp_path: Path) -> None:
    seen: list[tuple[StepMetrics, Speed]] = []

    class Watch(Callback):
        def after_step(self, metrics: StepMetrics, speed: Speed) -> None:
            seen.append((metrics, speed))

    run(tmp_path, FakeTraining(), Watch(), num_steps=2)
    assert [metrics.row() for metrics, _ in seen] == read_rows(tmp_path / "metrics.jsonl")
