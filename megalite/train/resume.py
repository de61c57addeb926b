"""What a run goes on from: the checkpoint, what its configuration must agree with, and the data order it has begun."""

from __future__ import annotations

import dataclasses
import fnmatch
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megalite.checkpoint import store
from megalite.checkpoint.agree import on_first
from megalite.checkpoint.manifest import Manifest
from megalite.data.blend_spec import parse_blend, same_until
from megalite.data.config import DataConfig
from megalite.mpu import ParallelState
from megalite.nn.lora import LoRAConfig
from megalite.optim.config import OptimConfig
from megalite.train.sections import ResumeSections

logger = logging.getLogger("megalite")

_NO_DIFFERENCE = (
    "data.paths", "data.validation", "data.validate_each",
    "data.cache_dir", "data.num_samples", "data.tokenizer", "data.json_key", "optim.offload",
    "optim.post_validation", "optim.master_weights", "optim.stochastic_rounding", "lora.separate",
)  # fmt: skip
"""Settings that may change freely: they decide where things are, how fast they go and how precisely state is stored.
What data.paths hold is compared as data.fingerprint, and data.num_samples as the order that was begun."""
_NEVER = ("train.seed", "train.global_batch_size", "train.batch_ramp", "data.seq_len")
"""Settings that decide which samples a step consumes: with others the data would not go on where they stopped."""


class ResumeError(ValueError):
    """A checkpoint is from a run that this configuration cannot continue."""


@dataclass(frozen=True)
class Origin:
    """Where a run goes on from. path: None when it begins at step 0. manifest: that of the checkpoint there."""

    path: Path | str | None = None
    manifest: Manifest | None = None

    @property
    def orders(self) -> tuple[int, ...]:
        """For how many samples the run has put its data in order so far (Datasets.orders)."""
        found = self.manifest.state.get("orders", []) if self.manifest is not None else []
        return tuple(n for n in found if type(n) is int)


def checkpoints_of(config: ResumeSections, run_dir: Path) -> Path | str:
    """The folder with the `checkpoints` of a run."""
    return config.checkpoint.folder or run_dir


def find_origin(config: ResumeSections, mpu: ParallelState, run_dir: Path) -> Origin:
    """The checkpoint that `train.resume` means; every rank calls it.

    Raises CheckpointError when it is not there or not whole, and ResumeError when it is of another run.
    """
    path = _find(config, mpu, checkpoints_of(config, run_dir))
    if path is None:
        return Origin()
    manifest = on_first(mpu, f"cannot resume from {path}", lambda: Manifest.read(store.find_checkpoint(path)))
    same_run(config, manifest, path)
    return Origin(path, manifest)


def _find(config: ResumeSections, mpu: ParallelState, home: Path | str) -> Path | str | None:
    resume = config.train.resume
    if resume == "none":
        return None
    if resume != "auto":
        return resume
    if config.checkpoint.fallback:
        found, unnamed = store.newest_intact(home, mpu), False
    else:
        found, unnamed = on_first(mpu, f"cannot resume {home}", lambda: find_latest(home))
    if found is None:
        logger.warning("%s has no checkpoint to resume from: starting at step 0", home)
    elif unnamed:
        logger.warning("%s/checkpoints has no `latest`: taking its newest complete one", home)
    return found


def find_latest(home: Path | str) -> tuple[Path | str | None, bool]:
    """A run's latest checkpoint, and whether it was found without the pointer.

    The very first save may have been cut short between the checkpoint and the pointer; it is complete all the same.
    """
    named = store.latest(home)
    if named is not None:
        return named, False
    complete = store.complete(home)
    return (store.checkpoints_folder(home).child(complete[-1]).address, True) if complete else (None, False)


def identity(config: ResumeSections) -> dict[str, Any]:
    """All settings that decide what a run computes, by name, as JSON keeps them. The layout is none of them."""
    sections = {"model": config.model, "data": config.data, "optim": config.optim, "lora": config.lora}
    found = {f"{name}.{field}": value for name, section in sections.items() for field, value in _fields(section)}
    found = {name: value for name, value in found.items() if name not in _NO_DIFFERENCE}
    found["data.blend"] = parse_blend(config.data.blend, config.data.paths).identity  # its paths may move
    train = {
        f"train.{name}": getattr(config.train, name)
        for name in ("seed", "global_batch_size", "batch_ramp", "precision", "freeze")
    }
    return json.loads(json.dumps(train | found))


def _fields(section: Any) -> list[tuple[str, Any]]:
    return [(field.name, getattr(section, field.name)) for field in dataclasses.fields(section)]


def same_run(config: ResumeSections, manifest: Manifest, path: Path | str) -> list[str]:
    """Raises ResumeError, with every difference by name, when `config` cannot continue the run of a checkpoint.

    Returns what is worth telling about differences that are allowed.
    """
    stored = manifest.state.get("config")
    if not isinstance(stored, dict):
        raise ResumeError(f"{path} does not say what its run was configured as: it is not of a training run")
    # Of older checkpoints: their dtypes tell the precision, and everything learnt.
    unknown = {"train.precision": config.train.precision, "train.freeze": []}
    there, here = _defaults(config) | unknown | stored, identity(config)
    if same_until(there["data.blend"], here["data.blend"], manifest.step):
        there["data.blend"] = here["data.blend"]
    told = refuse_differences(path, there, here, config.checkpoint.allow)
    steps = stored.get("train.num_steps")
    optim, now = config.optim, config.train.num_steps
    if steps not in (None, now) and optim.decay_steps is None and optim.schedule not in ("constant", "inverse_sqrt"):
        told.append(
            f"the learning rate decays until step {now}, and did until step {steps}: optim.decay_steps follows"
            " num_steps unless it is set"
        )
    return told


def refuse_differences(
    path: Path | str, there: Mapping[str, Any], here: Mapping[str, Any], allow: Sequence[str]
) -> list[str]:
    """Raises ResumeError unless `there` agrees with `here`, except where `allow` has a pattern for it.

    Returns the differences that are allowed.
    """
    differing = [name for name, value in here.items() if there.get(name) != value]
    texts = {name: f"{name}={_shown(there.get(name))} there, {_shown(here[name])} here" for name in differing}
    allowed = [name for name in differing if name not in _NEVER and is_allowed(name, allow)]
    refused = [name for name in differing if name not in allowed]
    if not refused:
        return [texts[name] for name in allowed]
    message = f"{path} is from another run: {'; '.join(texts[name] for name in refused)}. Use the same values"
    if may_differ := [name for name in refused if name not in _NEVER]:
        message += f", allow them with --checkpoint.allow {' '.join(may_differ[:4])}"
    raise ResumeError(f"{message}, or start a new run from its weights with --checkpoint.load")


def is_allowed(name: str, allow: Sequence[str]) -> bool:
    """Whether `checkpoint.allow` has a pattern for a setting."""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in allow)


def _shown(value: Any) -> str:
    return str(value) if isinstance(value, int | float | str) else json.dumps(value)


def _defaults(config: ResumeSections) -> dict[str, Any]:
    """The defaults of all settings, for those that a checkpoint of an earlier version does not know of."""
    sections = {"model": type(config.model)(), "data": DataConfig(), "optim": OptimConfig(), "lora": LoRAConfig()}
    found = {f"{name}.{field}": value for name, section in sections.items() for field, value in _fields(section)}
    return json.loads(json.dumps(found))
