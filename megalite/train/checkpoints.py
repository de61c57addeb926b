"""The checkpoints of a run: which state of a `Training` is kept, and how it comes back."""

from __future__ import annotations

import fnmatch
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from megalite.checkpoint import fingerprint, store
from megalite.checkpoint.agree import on_first, together
from megalite.checkpoint.background import BackgroundSaver, Saved
from megalite.checkpoint.folder import folder_at
from megalite.checkpoint.manifest import Manifest, Tensors
from megalite.checkpoint.store import Retention
from megalite.checkpoint.stored import WEIGHTS
from megalite.mpu import ParallelState
from megalite.nn.lora import NAMES
from megalite.nn.router import FRACTIONS
from megalite.optim.optimizer import MASTER
from megalite.parallel.shard import Shard, buffer_tensors, shard_of
from megalite.train import hf
from megalite.train.resume import (
    Origin,
    ResumeError,
    checkpoints_of,
    find_origin,
    identity,
    is_allowed,
    refuse_differences,
    same_run,
)
from megalite.train.sections import ResumeSections
from megalite.train.step import Training

logger = logging.getLogger("megalite")

__all__ = ["ResumeError", "RunCheckpoints", "state_tensors"]


_SAME_VALUES = {"parameter": (MASTER,), MASTER: ("parameter",)}
"""Where another precision has the weights: float32 ones come from the masters of a bf16 run, and become masters."""

_PARTS = {"model.mtp_layers": "mtp.*"}
"""By setting, the tensors that a model has or has not; where `checkpoint.allow` names it, they are left as they are."""


class RunCheckpoints:
    """Saves and restores weights, optimizer state and counters. Data order and dropout have no state of their own.

    origin: where the run goes on from, if that has been found already. Every rank calls each method at the same time.
    """

    def __init__(self, config: ResumeSections, training: Training, run_dir: Path, origin: Origin | None = None):
        self._config, self._training, self._run_dir, self._origin = config, training, run_dir, origin
        self._home = checkpoints_of(config, run_dir)
        keep = Retention(keep_last=config.checkpoint.keep_last, keep_every=config.checkpoint.keep_every)
        self._background = BackgroundSaver(self._home, self._mpu, keep)

    def save(self, step: int) -> Path | str:
        """Saves the state after `step` steps and makes it the latest; returns its folder once it is complete."""
        keep = self._config.checkpoint
        return store.save(
            self._home, step, self._tensors(), self._state(step), self._mpu,
            keep_last=keep.keep_last, keep_every=keep.keep_every,
        )  # fmt: skip

    def start_save(self, step: int) -> None:
        """Begins to save the state after `step` steps, and returns before it is written; see `finished`."""
        self._background.start(step, self._tensors(), self._state(step))

    def finished(self, *, wait: bool) -> Saved | None:
        """The save that was started, if it is complete by now (wait: once it is); CheckpointError if it has failed."""
        return self._background.finished(wait=wait)

    def find(self) -> Path | str | None:
        """The checkpoint that `train.resume` means, None to begin at step 0; CheckpointError if `latest` is broken."""
        if self._origin is None:
            self._origin = find_origin(self._config, self._mpu, self._run_dir)
        return self._origin.path

    def load(self, path: Path | str) -> int:
        """Restores the state in folder `path` to continue its run; returns the number of steps that it holds.

        Raises ResumeError, and CheckpointError when the files cannot be used here.
        """
        if self._config.lora.separate:
            self.load_start()
        manifest = self._load(path)
        self._training.num_skipped = skipped = manifest.state.get("skipped", 0)
        batch = self._config.train.global_batch_size
        self._training.skipped_samples = manifest.state.get("skipped_samples", skipped * batch)
        told = same_run(self._config, manifest, path)
        there = {"data.fingerprint": manifest.state.get("data")}
        here = {"data.fingerprint": self._training.datasets.fingerprint}
        for text in told + refuse_differences(path, there, here, self._config.checkpoint.allow):
            logger.warning("going on from %s with another setting: %s", path, text)
        return manifest.step

    def load_start(self) -> Path | str | None:
        """Takes over weights and optimizer state from `checkpoint.load`, for a run that begins at step 0.

        Without it, the weights of `model.from_hf`, if there is one. A checkpoint of weights alone (averaged, imported)
        leaves the optimizer, and buffers that it lacks, as they are.
        """
        start = self._config.checkpoint.load
        if start is None:
            return self._load_hf()
        place = on_first(self._mpu, f"cannot load {start}", lambda: store.find_checkpoint(start))
        manifest = on_first(self._mpu, f"cannot load {start}", lambda: Manifest.read(folder_at(place)))
        on_first(self._mpu, f"cannot keep the files of {start}", lambda: hf.keep_from(folder_at(self._home), place))
        optional = [kind for kind in state_tensors(self._training) if kind != "parameter"]
        if self._config.lora.rank and not any(fnmatch.fnmatchcase(key, NAMES) for key in manifest.tensors):
            logger.info("%s holds no adapters: they, and the optimizer, begin anew", start)
            self._load(start, optional, apart=[NAMES, FRACTIONS], whole=True)
            self._training.optimizer.steps = 0
        elif manifest.kinds <= set(WEIGHTS):
            logger.info("%s holds weights alone: the optimizer begins anew", start)
            self._load(start, optional, apart=[FRACTIONS], whole=True)
        else:
            self._load(start, whole=True)
        return start

    def _load_hf(self) -> str | None:
        """Takes over the weights of `model.from_hf`; each rank reads the tensors of which it holds a part."""
        address = self._config.model.from_hf
        if address is None:
            return None

        def read() -> None:
            with hf.HFFolder(address) as source, torch.no_grad():
                found = hf.import_model(source)
                hf.load_weights(found, state_tensors(self._training))
                if self._mpu.world.is_first:
                    hf.keep(folder_at(self._home), found.files)

        together(self._mpu, f"cannot load {address}", read)
        return address

    def _tensors(self) -> Tensors:
        """What the checkpoints of this run hold."""
        tensors = state_tensors(self._training)
        if not self._config.lora.separate:
            return tensors
        mine = [(shard, value) for shard, value in tensors["parameter"] if fnmatch.fnmatchcase(shard.name, NAMES)]
        return {kind: of_kind for kind, of_kind in tensors.items() if kind != "buffer"} | {"parameter": mine}

    def _load(
        self, path: Path | str, optional: Sequence[str] = (), *, apart: Sequence[str] = (), whole: bool = False
    ) -> Manifest:
        """whole: of a checkpoint that holds the frozen weights as well, whatever those of this run do."""
        optimizer, allow = self._training.optimizer, self._config.checkpoint.allow
        tensors = state_tensors(self._training) if whole else self._tensors()
        frozen = _frozen_names(self._training)
        apart = [*apart, *(names for setting, names in _PARTS.items() if is_allowed(setting, allow))]
        if is_allowed("train.precision", allow):
            optional = [kind for kind in optional if kind != MASTER]  # weights are there, in some precision
            manifest = store.load(
                path, tensors, self._mpu, optional=optional, instead=_SAME_VALUES, apart=apart, frozen=frozen
            )
        else:
            # Masters may be new: a run without them (optim.master_weights=none) has kept the weights alone.
            manifest = store.load(path, tensors, self._mpu, optional=[MASTER, *optional], apart=apart, frozen=frozen)
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

    def _state(self, step: int) -> dict[str, Any]:
        """The counters after `step` steps, and what a run that goes on from them must agree with."""
        training = self._training
        state: dict[str, Any] = {
            "samples": self._config.train.batch_sizes.before(step),
            "updates": training.optimizer.steps,
            "skipped": training.num_skipped,
            "skipped_samples": training.skipped_samples,
            "orders": list(training.datasets.orders),
            "data": training.datasets.fingerprint,
            "fingerprints": fingerprint.of_tensors(self._tensors(), self._mpu),
            "threads": torch.get_num_threads(),
            "config": identity(self._config) | {"train.num_steps": self._config.train.num_steps},
        }
        if (scaler := training.optimizer.scaler) is not None:
            state["loss_scaler"] = scaler.state()
        return state

    @property
    def _mpu(self) -> ParallelState:
        return self._training.mpu


def _frozen_names(training: Training) -> set[str]:
    parts = training.data_parallels.values()
    shards = [shard_of(p) for part in parts for p in part.parameters if not p.requires_grad]
    return {shard.tied_to or shard.name for shard in shards}


def state_tensors(training: Training) -> Tensors:
    """All that a checkpoint keeps of a training: parameters and buffers of all stages, then what the optimizer has.

    Views of the live state: kind -> [(shard, this rank's part)].
    """
    parts = [part.state_tensors() for part in training.data_parallels.values()]
    parts += [buffer_tensors(stage) for stage in training.stages.values()]
    parts.append(training.optimizer.state_tensors())
    tensors: dict[str, list[tuple[Shard, Any]]] = {}
    for part in parts:
        for kind, of_kind in part.items():
            tensors.setdefault(kind, []).extend(of_kind)
    return tensors
