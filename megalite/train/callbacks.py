"""Side jobs of a run, each called at named moments; none of them changes what is trained."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import torch
from rich.console import Console
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.tensorboard import SummaryWriter

from megalite.mpu import ParallelState
from megalite.train.config import TrainConfig
from megalite.train.failure import Watchdog
from megalite.train.metrics import RouterStats, Speed, StepMetrics
from megalite.train.progress import ProgressView, loss_curve, step_line
from megalite.train.run_folder import JsonLines, RunFolder, read_rows

logger = logging.getLogger("megalite")


_FEWEST_TO_DRAW = 20
"""Steps that make a curve; fewer are read faster as lines."""


class Callback:
    """Base of all callbacks: every moment does nothing until a subclass overrides it.

    Steps are counted from 1, so `after_step(metrics)` with `metrics.step == 1` follows `before_step(1)`. Callbacks run
    in the order given to the Trainer, on every rank (a callback that writes belongs to one rank only). An
    exception in a callback ends the run.
    """

    def before_run(self, step: int) -> None:
        """The run begins, or goes on, with `step` steps done."""

    def before_step(self, step: int) -> None:
        """Step number `step` begins."""

    def after_step(self, metrics: StepMetrics, speed: Speed) -> None:
        """A step is done; `speed` is the recent one, steadier than that of this step alone."""

    def after_evaluation(self, step: int, loss: float) -> None:
        """The validation loss after `step` steps is known."""

    def after_dataset_evaluation(self, step: int, dataset: str, loss: float) -> None:
        """So is that of one dataset alone (data.validate_each)."""

    def after_checkpoint(self, step: int, path: Path | str) -> None:
        """The state after `step` steps is complete on disk."""

    def after_run(self, step: int) -> None:
        """The run ends with `step` steps done: at its end, at a stop request or because of an error."""


class MetricsFiles(Callback):
    """Writes metrics.jsonl and validation.jsonl."""

    def __init__(self, folder: RunFolder):
        self._folder = folder
        self._files: list[JsonLines] = []

    def before_run(self, step: int) -> None:
        """Rows will be added at the ends of both files."""
        self._files = [JsonLines(self._folder.metrics_file), JsonLines(self._folder.validation_file)]

    def after_step(self, metrics: StepMetrics, speed: Speed) -> None:
        """Adds the row of the step."""
        self._files[0].append(metrics.row())

    def after_evaluation(self, step: int, loss: float) -> None:
        """Adds the row of the evaluation."""
        self._files[1].append({"step": step, "validation_loss": loss if math.isfinite(loss) else None})

    def after_dataset_evaluation(self, step: int, dataset: str, loss: float) -> None:
        """Adds a row of its own."""
        row = {"step": step, "dataset": dataset, "validation_loss": loss if math.isfinite(loss) else None}
        self._files[1].append(row)

    def after_checkpoint(self, step: int, path: Path | str) -> None:
        """Brings the rows to disk: they are what a resume from this checkpoint keeps."""
        for file in self._files:
            file.sync()

    def after_run(self, step: int) -> None:
        """Closes the files."""
        for file in self._files:
            file.close()


class TensorBoard(Callback):
    """Writes TensorBoard events; after a resume, later events of the interrupted run are hidden."""

    def __init__(self, folder: Path):
        self._path = folder
        self._writer: SummaryWriter | None = None

    def before_run(self, step: int) -> None:
        """Opens a new event file."""
        self._writer = SummaryWriter(str(self._path), purge_step=step + 1)

    def after_step(self, metrics: StepMetrics, speed: Speed) -> None:
        """Adds the scalars of the step."""
        self._add("train/loss", metrics.loss, metrics.step)
        self._add("train/grad_norm", metrics.grad_norm, metrics.step)
        self._add("train/learning_rate", metrics.learning_rate, metrics.step)
        self._add("speed/tokens_per_second", metrics.tokens_per_second, metrics.step)
        self._add("speed/tflops_per_second", metrics.tflops_per_second, metrics.step)
        if metrics.mfu is not None:
            self._add("speed/mfu", metrics.mfu, metrics.step)
        self._add("memory/peak_mb", metrics.peak_memory_mb, metrics.step)
        for depth, loss in enumerate(metrics.losses_ahead, 1):
            self._add(f"train/loss_ahead_{depth}", loss, metrics.step)
        if metrics.moe is not None:
            self._add_routers(metrics.moe, metrics.step)

    def _add_routers(self, stats: RouterStats, step: int) -> None:
        for name, value in (("aux_loss", stats.aux_loss), ("z_loss", stats.z_loss), ("drop_rate", stats.drop_rate)):
            self._add(f"moe/{name}", value, step)
        for layer, violation, entropy in zip(stats.layers, stats.max_violation, stats.entropy, strict=True):
            self._add(f"moe_max_violation/layer_{layer:03d}", violation, step)
            self._add(f"moe_entropy/layer_{layer:03d}", entropy, step)

    def after_evaluation(self, step: int, loss: float) -> None:
        """Adds the validation loss."""
        self._add("validation/loss", loss, step)

    def after_dataset_evaluation(self, step: int, dataset: str, loss: float) -> None:
        """Adds the validation loss of a dataset, under the last part of its path."""
        self._add(f"validation_loss/{Path(dataset).name}", loss, step)

    def after_run(self, step: int) -> None:
        """Writes what is buffered and closes."""
        if self._writer is not None:
            self._writer.close()

    def _add(self, name: str, value: float, step: int) -> None:
        assert self._writer is not None, "before_run opens the writer"
        self._writer.add_scalar(name, value, step)


class ProgressLines(Callback):
    """Logs a line every `log_every` steps, moves the bar, and draws the loss curve at the end."""

    def __init__(self, folder: RunFolder, view: ProgressView, *, num_steps: int, log_every: int):
        self._folder, self._view = folder, view
        self._num_steps, self._log_every = num_steps, log_every

    def before_run(self, step: int) -> None:
        """Shows the bar."""
        self._view.start(step)

    def after_step(self, metrics: StepMetrics, speed: Speed) -> None:
        """Moves the bar; logs the line if it is this step's turn."""
        self._view.show(metrics, speed)
        if metrics.step % self._log_every == 0 or metrics.step == self._num_steps:
            logger.info("%s", step_line(metrics, speed, num_steps=self._num_steps))

    def after_evaluation(self, step: int, loss: float) -> None:
        """Logs the validation loss."""
        logger.info("step %d | validation loss %.4f", step, loss)

    def after_dataset_evaluation(self, step: int, dataset: str, loss: float) -> None:
        """Logs the validation loss of a dataset."""
        logger.info("step %d | validation loss %.4f on %s", step, loss, dataset)

    def after_checkpoint(self, step: int, path: Path | str) -> None:
        """Logs where the checkpoint is."""
        logger.info("step %d | checkpoint saved in %s", step, path)

    def after_run(self, step: int) -> None:
        """Takes the bar away and draws the loss of the whole run, earlier sessions included."""
        self._view.stop()
        losses = [row["loss"] for row in read_rows(self._folder.metrics_file)]
        if len(losses) >= _FEWEST_TO_DRAW and (curve := loss_curve(losses)):
            logger.info("loss over %d steps\n%s", step, curve)


class ProfilerTrace(Callback):
    """Records steps `first` to `last` with torch.profiler into a Chrome trace, one file a rank.

    Each step is a span `ProfilerStep#N`, the name that trace viewers look for; the gaps between are what is no step.
    """

    def __init__(self, folder: Path, *, first: int, last: int, rank: int):
        self._path = folder / f"steps_{first}_to_{last}_rank{rank}.json.gz"
        self._first, self._last = first, last
        self._profile: profile | None = None
        self._span = ExitStack()

    def before_step(self, step: int) -> None:
        """Starts recording; a resume in the middle of the range records what is left of it."""
        if self._profile is None and self._first <= step <= self._last:
            kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
            self._profile = profile(activities=kinds)
            self._profile.start()
        if self._profile is not None:
            self._span.enter_context(record_function(f"ProfilerStep#{step}"))

    def after_step(self, metrics: StepMetrics, speed: Speed) -> None:
        """Ends the span; stops recording and writes the file after the last step."""
        self._span.close()
        if metrics.step == self._last:
            self._write()

    def after_run(self, step: int) -> None:
        """Writes what there is of a range that the run did not finish."""
        self._write()

    def _write(self) -> None:
        if self._profile is None:
            return
        self._span.close()  # of a step that failed
        recorded, self._profile = self._profile, None
        recorded.stop()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        recorded.export_chrome_trace(str(self._path))
        logger.info("profiler trace in %s", self._path)


class Heartbeat(Callback):
    """Tells the watchdog that this rank is alive, and has it look for hangs while the run lasts."""

    def __init__(self, watchdog: Watchdog, mpu: ParallelState, *, hang_seconds: float, folder: Path):
        self._watchdog, self._mpu, self._hang_seconds, self._folder = watchdog, mpu, hang_seconds, folder

    def before_run(self, step: int) -> None:
        """Begins to look for hangs."""
        self._watchdog.heartbeat(step)
        self._watchdog.watch(self._mpu, self._hang_seconds, self._folder)

    def before_step(self, step: int) -> None:
        """A step begins."""
        self._watchdog.heartbeat(step)

    def after_step(self, metrics: StepMetrics, speed: Speed) -> None:
        """A step is over."""
        self._watchdog.heartbeat(metrics.step)

    def after_evaluation(self, step: int, loss: float) -> None:
        """An evaluation is over."""
        self._watchdog.heartbeat(step)

    def after_checkpoint(self, step: int, path: Path | str) -> None:
        """A checkpoint is complete."""
        self._watchdog.heartbeat(step)

    def after_run(self, step: int) -> None:
        """What follows may take its time."""
        self._watchdog.watch(self._mpu, 0.0, self._folder)


def default_callbacks(
    config: TrainConfig, folder: RunFolder, mpu: ParallelState, *, watchdog: Watchdog, console: Console
) -> Sequence[Callback]:
    """What every run has: a heartbeat (and a trace, if asked for) on each rank, files and progress on rank 0."""
    callbacks: list[Callback] = [Heartbeat(watchdog, mpu, hang_seconds=config.hang_seconds, folder=folder.path)]
    if config.profile_steps is not None:
        first, last = config.profile_steps
        callbacks.append(ProfilerTrace(folder.profile, first=first, last=last, rank=mpu.rank))
    if folder.is_writer:
        callbacks.append(MetricsFiles(folder))
        if config.tensorboard:
            callbacks.append(TensorBoard(folder.tensorboard))
        steps, every = config.num_steps, config.log_every
        callbacks.append(
            ProgressLines(folder, ProgressView(console, num_steps=steps), num_steps=steps, log_every=every)
        )
    return callbacks
