"""The checkpoints of a run: which state of a `Training` is kept, and what must agree when it comes back."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, Protocol

from megalite.checkpoint import store
from megalite.checkpoint.agree import on_first
from megalite.checkpoint.config import CheckpointConfig
from megalite.checkpoint.manifest import Manifest, Tensors
from megalite.data.config import DataConfig
from megalite.mpu import ParallelState
from megalite.optim.optimizer import MASTER
from megalite.parallel.shard import Shard, buffer_tensors
from megalite.train.config import TrainConfig
from megalite.train.step import Training

logger = logging.getLogger("megalite")


class ResumeError(ValueError):
    """A checkpoint is from a run that this configuration cannot continue."""


class CheckpointSections(Protocol):
    """The sections that decide what a checkpoint means."""

    @property
    def data(self) -> DataConfig:
        """The data."""
        ...

    @property
    def train(self) -> TrainConfig:
        """The loop."""
        ...

    @property
    def checkpoint(self) -> CheckpointConfig:
        """When to save and what to keep."""
        ...


class RunCheckpoints:
    """Saves and restores weights, optimizer state and counters. Data order and dropout have no state of their own.

    Every rank calls each method at the same time.
    """

    def __init__(self, config: CheckpointSections, training: Training, run_dir: Path):
        self._config, self._training, self._run_dir = config, training, run_dir

    def save(self, step: int) -> Path:
        """Saves the state after `step` steps and makes it the latest; returns its folder once it is complete."""
        state: dict[str, Any] = {
            "samples": step * self._config.train.global_batch_size,
            "updates": self._training.optimizer.steps,
            "skipped": self._training.num_skipped,
            "order_of": self._num_ordered_samples,
        }
        if (scaler := self._training.optimizer.scaler) is not None:
            state["loss_scaler"] = scaler.state()
        return store.save(
            self._run_dir,
            step,
            self._tensors(),
            state | self._identity(),
            self._mpu,
            keep_last=self._config.checkpoint.keep_last,
        )

    def find(self) -> Path | None:
        """The checkpoint that `train.resume` means, None to begin at step 0; CheckpointError if `latest` is broken."""
        resume = self._config.train.resume
        if resume == "none":
            return None
        if resume != "auto":
            return Path(resume)
        found, unnamed = on_first(self._mpu, f"cannot resume {self._run_dir}", lambda: find_latest(self._run_dir))
        if found is None:
            logger.warning("%s has no checkpoint to resume from: starting at step 0", self._run_dir)
        elif unnamed:
            logger.warning("%s/checkpoints has no `latest`: taking its newest complete one", self._run_dir)
        return found

    def load(self, path: Path) -> int:
        """Restores the state in folder `path` to continue its run; returns the number of steps that it holds.

        Raises ResumeError, and CheckpointError when the files cannot be used here.
        """
        manifest = self._load(path)
        self._training.num_skipped = manifest.state.get("skipped", 0)
        problems = [
            f"{name}={manifest.state.get(name)} there, {value} here"
            for name, value in self._identity().items()
            if manifest.state.get(name) != value
        ]
        if problems:
            raise ResumeError(
                f"{path} is from another run ({'; '.join(problems)}) and its data would not go on where they stopped;"
                " use the same values, or start a new run from its weights with --checkpoint.load"
            )
        if manifest.state.get("order_of") != self._num_ordered_samples:
            logger.warning(
                "the data order was made for %s samples, and is now made for %d: some may come again or not at all."
                " Set data.num_samples where a run is to be prolonged",
                manifest.state.get("order_of"), self._num_ordered_samples,
            )  # fmt: skip
        return manifest.step

    def load_start(self) -> Path | None:
        """Takes over weights and optimizer state from `checkpoint.load`, for a run that begins at step 0."""
        start = self._config.checkpoint.load
        if start is None:
            return None
        self._load(Path(start))
        return Path(start)

    def _load(self, path: Path) -> Manifest:
        optimizer = self._training.optimizer
        # Masters may be new: a run without them (optim.master_weights=none) has kept the weights alone.
        manifest = store.load(path, self._tensors(), self._mpu, optional=[MASTER])
        if MASTER not in manifest.kinds:
            optimizer.refresh_master()
        updates = manifest.state.get("updates")
        if type(updates) is not int:
            raise ResumeError(
                f"{path} does not say how many updates the optimizer has made: it is not of a training run"
            )
        optimizer.steps = updates
        if optimizer.scaler is not None and "loss_scaler" in manifest.state:
            optimizer.scaler.restore(manifest.state["loss_scaler"])
        return manifest

    @property
    def _mpu(self) -> ParallelState:
        return self._training.mpu

    def _tensors(self) -> Tensors:
        """Parameters and buffers of all stages, then what the optimizer keeps of them; views of the live state."""
        parts = [part.state_tensors() for part in self._training.data_parallels.values()]
        parts += [buffer_tensors(stage) for stage in self._training.stages.values()]
        parts.append(self._training.optimizer.state_tensors())
        tensors: dict[str, list[tuple[Shard, Any]]] = {}
        for part in parts:
            for kind, of_kind in part.items():
                tensors.setdefault(kind, []).extend(of_kind)
        return tensors

    def _identity(self) -> dict[str, Any]:
        """What decides which samples a step consumes and which dropout masks it sees."""
        train = self._config.train
        return {
            "seed": train.seed,
            "global_batch_size": train.global_batch_size,
            "seq_len": self._config.data.seq_len,
            "data": self._training.datasets.fingerprint,
        }

    @property
    def _num_ordered_samples(self) -> int:
        """How many samples the training order is made for, which decides how epochs are mixed."""
        train = self._config.train
        return self._config.data.num_samples or train.num_steps * train.global_batch_size


def find_latest(run_dir: Path) -> tuple[Path | None, bool]:
    """A run's latest checkpoint, and whether it was found without the pointer.

    The very first save may have been cut short between the checkpoint and the pointer; it is complete all the same.
    """
    named = store.latest(run_dir)
    if named is not None:
        return named, False
    complete = store.complete(store.checkpoints_folder(run_dir))
    return (complete[-1], True) if complete else (None, False)
