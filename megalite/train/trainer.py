"""The training loop: steps, evaluations and checkpoints in order, until the last step or a request to stop.

The trainer knows no model. It drives a `Training` through `train_step`, keeps checkpoints and tells its callbacks what
happened; everything that prints or writes is a callback.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from megalite.checkpoint.background import Saved
from megalite.optim.optimizer import NonFiniteGradient
from megalite.train.callbacks import Callback
from megalite.train.checkpoints import RunCheckpoints
from megalite.train.failure import StopRequest
from megalite.train.flops import workload_of
from megalite.train.metrics import Meter, StepMetrics
from megalite.train.run_folder import RunFolder
from megalite.train.sections import ResumeSections
from megalite.train.step import StepResult, Training, evaluate, train_step

logger = logging.getLogger("megalite")


class RunError(ValueError):
    """The run cannot do what it was asked to; the message says what to change."""


class NonFiniteError(ArithmeticError):
    """The loss or the gradient norm of a step that was not skipped is nan or infinite."""


class Checkpoints(Protocol):
    """Where the loop saves to and resumes from; every rank calls each method at the same time."""

    def save(self, step: int) -> Path | str:
        """Saves the state after `step` steps and makes it the latest; returns its folder once it is complete."""
        ...

    def start_save(self, step: int) -> None:
        """Begins to save the state after `step` steps, as it is now; `finished` tells when that is complete."""
        ...

    def finished(self, *, wait: bool) -> Saved | None:
        """The save that was started, if it is complete by now (wait: once it is); raises if it failed."""
        ...

    def find(self) -> Path | str | None:
        """The checkpoint that `train.resume` means; None when the run begins at step 0."""
        ...

    def load(self, path: Path | str) -> int:
        """Restores the state in folder `path`; returns the number of steps that it holds."""
        ...

    def load_start(self) -> Path | str | None:
        """Takes over the state that a run at step 0 starts from, if it was told of one."""
        ...


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    step: int
    """Optimizer steps done, over all sessions."""
    stopped_by: str | None = None
    """The request that ended it early."""
    validation_loss: float | None = None
    """The last validation loss of this session."""


class Trainer:
    """Runs a training from step 0, or from the checkpoint that `train.resume` means, to `train.num_steps`.

    folder: the run folder, opened (RunFolder.open). Every rank makes a Trainer and calls `run`. What it calls once a
    step (`step_fn`) and at evaluations (`evaluate_fn`) can be exchanged for an experiment's own.
    """

    def __init__(
        self,
        config: ResumeSections,
        training: Training,
        callbacks: Sequence[Callback] = (),
        *,
        folder: RunFolder,
        checkpoints: Checkpoints | None = None,
        stop: StopRequest | None = None,
        meter: Meter | None = None,
        step_fn: Callable[[Training, int], StepResult] = train_step,
        evaluate_fn: Callable[[Training, int], float] = evaluate,
    ):
        self.config, self.training, self.callbacks = config, training, callbacks
        self._folder = folder
        self._checkpoints: Checkpoints = checkpoints or RunCheckpoints(config, training, folder.path)
        self._stop = stop if stop is not None else StopRequest()
        self._step_fn, self._evaluate_fn = step_fn, evaluate_fn
        self._workload = workload_of(
            config.train,
            seq_len=config.data.seq_len,
            num_ranks=training.mpu.world.size,
            device=training.device,
        )
        self._meter = meter if meter is not None else Meter()
        self._num_skipped = 0
        self._saved_step: int | None = None
        self._started_from: Path | str | None = None
        self._validation_loss: float | None = None
        self.step = 0

    def run(self) -> Outcome:
        """Trains; returns how it ended. An error leaves through here after the callbacks have closed their files."""
        self._restore()
        if self.config.train.eval_only:
            self._evaluate_only()
            return Outcome(self.step, validation_loss=self._validation_loss)
        self._folder.begin(self.step)
        try:
            self._tell(lambda callback: callback.before_run(self.step))
            with self._stop:
                stopped_by = self._loop()
        except (NonFiniteError, NonFiniteGradient):  # on all ranks: what is being saved is from before
            self._complete_save(wait=True)
            raise
        finally:
            self._tell(lambda callback: callback.after_run(self.step))
        self._report_end(stopped_by)
        return Outcome(self.step, stopped_by, self._validation_loss)

    def _restore(self) -> None:
        """Brings the state to where the run begins or goes on."""
        path, num_steps = self._checkpoints.find(), self.config.train.num_steps
        if path is None:
            self._started_from = self._checkpoints.load_start()
            if self._started_from is not None:
                logger.info("starting from %s", self._started_from)
            return
        self.step = self._saved_step = self._checkpoints.load(path)
        logger.info("resumed from %s after step %d", path, self.step)
        if self.step > num_steps and not self.config.train.eval_only:
            raise RunError(
                f"checkpoint {path} is at step {self.step}, beyond train.num_steps={num_steps};"
                " num_steps counts all steps of a run, also those before a resume"
            )

    def _evaluate_only(self) -> None:
        if self._saved_step is None and self._started_from is None:
            raise RunError(
                "train.eval_only found no weights: give --train.resume auto, or a checkpoint with --checkpoint.load"
            )
        if self.training.validation is None:
            raise RunError(
                "train.eval_only found no validation data: data.split leaves none, or the corpus is too small"
            )
        loss = self._validation_loss = self._evaluate_fn(self.training, self.config.train.eval_steps)
        logger.info("step %d | validation loss %.6f", self.step, loss)

    def _loop(self) -> str | None:
        """Steps until the end or a stop request, which is returned."""
        self._meter.start()
        stopped_by: str | None = None
        while self.step < self.config.train.num_steps and stopped_by is None:
            self._one_step()
            self._complete_save(wait=False)
            stopped_by = self._stop.agreed(self.training.mpu.world)
            if self.training.validation is not None and _is_due(self.step, self.config.train.eval_every):
                self._evaluate()
            if stopped_by or _is_due(self.step, self.config.checkpoint.every):
                self._save(at_once=stopped_by is not None or not self.config.checkpoint.async_save)
        if self._saved_step != self.step:
            self._save(at_once=True)
        self._complete_save(wait=True)
        return stopped_by

    def _one_step(self) -> None:
        self._tell(lambda callback: callback.before_step(self.step + 1))
        result = self._step_fn(self.training, self.step)
        self.step += 1
        last = self._meter.step(self._workload.tokens_of(self.step - 1))
        metrics = StepMetrics.of(result, self.step, self._workload, last, self.training.device)
        self._tell(lambda callback: callback.after_step(metrics, self._meter.recent or last))
        self._check_finite(metrics)

    def _check_finite(self, metrics: StepMetrics) -> None:
        """Never lets a non-finite step pass in silence: a skipped one is logged, any other ends the run unsaved."""
        what = f"step {metrics.step}: loss {metrics.loss}, gradient norm {metrics.grad_norm}"
        if metrics.skipped:
            self._num_skipped += 1
            logger.warning("%s; the update was skipped (%d so far)", what, self._num_skipped)
        elif not (math.isfinite(metrics.loss) and math.isfinite(metrics.grad_norm)):
            kept = f"the state after step {self._saved_step} is kept" if self._saved_step else "nothing was saved"
            raise NonFiniteError(
                f"{what}; {kept}. Lower optim.lr, raise optim.warmup_steps, or look at the data of this step"
            )

    def _evaluate(self) -> None:
        with self._meter.paused():
            loss = self._validation_loss = self._evaluate_fn(self.training, self.config.train.eval_steps)
            self._tell(lambda callback: callback.after_evaluation(self.step, loss))
            for name, batches in self.training.each_validation.items():
                alone = dataclasses.replace(self.training, validation=batches)
                loss = self._evaluate_fn(alone, self.config.train.eval_steps)
                self._tell(partial(_tell_dataset, step=self.step, dataset=name, loss=loss))

    def _save(self, *, at_once: bool) -> None:
        self._complete_save(wait=True)  # one at a time
        with self._meter.paused():
            if at_once:
                self._report_save(Saved(self.step, self._checkpoints.save(self.step)))
            else:
                self._checkpoints.start_save(self.step)
            self._saved_step = self.step

    def _complete_save(self, *, wait: bool) -> None:
        """Completes a save in the background, if it has come so far (wait: once it has)."""
        with self._meter.paused():
            if (saved := self._checkpoints.finished(wait=wait)) is not None:
                self._report_save(saved)

    def _report_save(self, saved: Saved) -> None:
        self._tell(lambda callback: callback.after_checkpoint(saved.step, saved.path))

    def _tell(self, moment: Callable[[Callback], None]) -> None:
        for callback in self.callbacks:
            moment(callback)

    def _report_end(self, stopped_by: str | None) -> None:
        average = self._meter.average
        if average is not None:
            logger.info("%s tokens/s on average, without the first step", f"{average.tokens_per_second:,.0f}")
        if self._num_skipped:
            logger.warning("%d steps were skipped because their gradients were not finite", self._num_skipped)
        if stopped_by and self.step < self.config.train.num_steps:
            logger.warning(
                "stopped by %s after step %d of %d; the state is saved, go on with --train.resume auto",
                stopped_by, self.step, self.config.train.num_steps,
            )  # fmt: skip
        else:
            logger.info("run complete: %d steps, files in %s", self.step, self._folder.path)


def _tell_dataset(callback: Callback, *, step: int, dataset: str, loss: float) -> None:
    callback.after_dataset_evaluation(step, dataset, loss)


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
