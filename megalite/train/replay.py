"""Replaying steps that a run has recorded: whether they come out the same, and where they first do not."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from megalite.checkpoint import fingerprint, store
from megalite.checkpoint.agree import on_first
from megalite.checkpoint.manifest import Manifest, layout_of
from megalite.mpu import ParallelState
from megalite.train.build import build_training
from megalite.train.checkpoints import RunCheckpoints, state_tensors
from megalite.train.flops import workload_of
from megalite.train.metrics import Speed, StepMetrics
from megalite.train.resume import Origin, checkpoints_of
from megalite.train.run_folder import RunFolder, read_rows
from megalite.train.sections import RunSections
from megalite.train.step import train_step

TOLERANCE = {"fp64": 1e-9, "fp32": 1e-3, "bf16": 5e-2, "fp16": 5e-2}
"""Largest relative difference of loss and gradient norm in another layout, by train.precision: what the order of sums
makes of a few steps."""
_DATA = ("samples", "loss_tokens", "sample_fingerprint")
_LISTED = 3


class ReplayError(ValueError):
    """The run has not recorded what was to be replayed; the message says what it has."""


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """What a run has left of the steps that are to be replayed."""

    start: int
    """Steps done before them."""
    checkpoint: Path | str | None
    """Where the state after `start` steps is; None for the beginning of the run."""
    manifest: Manifest
    """Of that checkpoint; of the run's first one when `start` is 0."""
    rows: tuple[dict[str, Any], ...]
    """Of metrics.jsonl, one a step."""
    orders: tuple[int, ...]
    """Data orders that the run has begun, up to its newest checkpoint."""
    fingerprints: dict[int, dict[str, int]]
    """Those of the state after some of the steps, `start` included, by step."""


@dataclass(frozen=True, kw_only=True)
class Divergence:
    """The first thing that is not as recorded."""

    step: int
    """Counted from 1; for weights after a load, the step of the checkpoint."""
    cause: str
    """data, weights, loss, gradient or update."""
    detail: str
    """A sentence with the numbers."""

    def __str__(self) -> str:
        return f"step {self.step}, {self.cause}: {self.detail}"


@dataclass(frozen=True, kw_only=True)
class StepDifference:
    """How far one step is from its record, as relative differences; 0 is the same bits."""

    step: int
    loss: float
    grad_norm: float
    learning_rate: float


@dataclass(kw_only=True)
class Replay:
    """The outcome."""

    start: int
    """Steps done before the first one that was replayed."""
    exact: bool
    """Whether every bit had to be the same: the layout is that of the run."""
    tolerance: float
    """What loss and gradient norm may differ by where not."""
    steps: list[StepDifference] = field(default_factory=list)
    """As far as they are the same, and the one that is not."""
    notes: list[str] = field(default_factory=list)
    """What may explain a difference."""
    divergence: Divergence | None = None
    """None when all steps are as recorded."""


def find_recorded(home: Path | str, run_dir: Path, *, start: int | None, num_steps: int) -> Recorded:
    """What the run in `run_dir`, with its checkpoints in `home`, has recorded of up to `num_steps` steps after `start`.

    By default they begin at the newest checkpoint that steps follow, or where there is none at the beginning. Raises
    ReplayError, with what there is, and CheckpointError for a damaged manifest.
    """
    rows = {row["step"]: row for row in read_rows(RunFolder(run_dir).metrics_file)}
    names = {store.step_of(name): name for name in store.complete(home)}
    if not rows:
        raise ReplayError(f"{run_dir} has no metrics.jsonl with a step in it")
    if not names:
        raise ReplayError(f"{home} has no complete checkpoint; checkpoint.every writes them")
    if start is None:
        start = max((step for step in names if step + 1 in rows), default=0)
    if start and start not in names:
        raise ReplayError(f"{home} has no complete checkpoint of step {start}; there are {_list(sorted(names))}")
    if start + 1 not in rows:
        raise ReplayError(f"{run_dir}/metrics.jsonl has no step {start + 1}: it ends at step {max(rows)}")
    steps = range(start + 1, start + 1 + num_steps)
    kept = [rows[step] for step in steps if all(k in rows for k in range(start + 1, step + 1))]
    root = store.checkpoints_folder(home)
    manifests = {step: Manifest.read(root.child(name)) for step, name in names.items()}
    return Recorded(
        start=start,
        checkpoint=root.child(names[start]).address if start else None,
        manifest=manifests[start or min(names)],
        rows=tuple(kept),
        orders=Origin(None, manifests[max(names)]).orders,
        fingerprints={
            step: found
            for step, manifest in manifests.items()
            if start <= step <= kept[-1]["step"] and isinstance(found := manifest.state.get("fingerprints"), dict)
        },
    )


def same_layout(recorded: Recorded, mpu: ParallelState) -> bool:
    """Whether the ranks hold what those that saved the checkpoint did."""
    return recorded.manifest.layout == layout_of(mpu)


def replay(
    config: RunSections,
    mpu: ParallelState,
    device: torch.device,
    run_dir: Path,
    *,
    start: int | None = None,
    num_steps: int = 10,
    may_be_exact: bool = True,
    tolerance: float | None = None,
    on_step: Callable[[StepDifference], None] = lambda difference: None,
) -> Replay:
    """Trains steps that the run in `run_dir` has recorded once more, and stops at the first that is not as recorded.

    config: that of the run, in the layout of `mpu`; settings in which it may differ from the checkpoint's are in
    `checkpoint.allow`. may_be_exact: whether the micro-batches and what is not seen in the grid (schedule, sequence
    parallelism) are those of the run; then, in its layout, every bit must be the same, and elsewhere loss and gradient
    norm up to `tolerance`. Every rank calls it; the outcome is the same on all. Reads the run folder and writes
    nothing. Raises CheckpointError and ResumeError when the run cannot be loaded.
    """
    home = checkpoints_of(config, run_dir)
    what = f"cannot replay {run_dir}"
    recorded = on_first(mpu, what, lambda: find_recorded(home, run_dir, start=start, num_steps=num_steps))
    training = build_training(config, mpu, device, orders=recorded.orders)
    outcome = Replay(
        start=recorded.start,
        exact=may_be_exact and same_layout(recorded, mpu),
        tolerance=TOLERANCE[config.train.precision] if tolerance is None else tolerance,
        notes=_notes(recorded.manifest),
    )
    checkpoints = RunCheckpoints(config, training, run_dir)
    if recorded.checkpoint is not None:
        checkpoints.load(recorded.checkpoint)
    else:
        checkpoints.load_start()
    judge = _Judge(recorded, outcome)
    judge.see_state(recorded.start, lambda: fingerprint.of_tensors(state_tensors(training), mpu))
    workload = workload_of(config.train, seq_len=config.data.seq_len, num_ranks=mpu.world.size, device=device)
    for row in recorded.rows:
        if outcome.divergence is not None:
            break
        step = row["step"]
        result = train_step(training, step - 1)
        found = StepMetrics.of(result, step, workload, Speed(workload.tokens_of(step - 1), 0.0), device).row()
        judge.see_step(row, found)
        on_step(outcome.steps[-1])
        if outcome.divergence is None and outcome.exact:
            judge.see_state(step, lambda: fingerprint.of_tensors(state_tensors(training), mpu))
    return outcome


def _notes(manifest: Manifest) -> list[str]:
    there, here = manifest.state.get("threads"), torch.get_num_threads()
    if there is None or there == here:
        return []
    return [f"{here} threads here, {there} in the run: sums may round differently (OMP_NUM_THREADS={there})"]


class _Judge:
    """Compares what comes out with what was recorded, and says which difference came first, and why."""

    def __init__(self, recorded: Recorded, outcome: Replay):
        self._recorded, self._outcome = recorded, outcome
        self._proved: int | None = None
        """The last step after which the whole state was as recorded."""

    def see_state(self, step: int, found: Callable[[], dict[str, int]]) -> None:
        """The state after `step` steps, where that was recorded."""
        expected = self._recorded.fingerprints.get(step)
        if expected is None:
            return
        there = found()
        differing = sorted(key for key in expected.keys() | there.keys() if expected.get(key) != there.get(key))
        if not differing:
            self._proved = step
        elif step == self._recorded.start:
            self._differs(step, "weights", f"the checkpoint does not hold what the run had saved in {_list(differing)}")
        else:
            self._differs(step, "update", f"the state after it is another in {_list(differing)}")

    def see_step(self, expected: Mapping[str, Any], found: Mapping[str, Any]) -> None:
        """The row of a step in metrics.jsonl, and what it is now."""
        step = expected["step"]
        names = ("loss", "grad_norm", "learning_rate")
        differences = {name: _relative(expected.get(name), found.get(name)) for name in names}
        self._outcome.steps.append(StepDifference(step=step, **differences))
        limit = 0.0 if self._outcome.exact else self._outcome.tolerance
        text = {name: f"{name} {expected.get(name)} recorded, {found.get(name)} now" for name in found}
        if differing := [name for name in _DATA if expected.get(name) != found[name]]:
            self._differs(step, "data", "; ".join(text[name] for name in differing))
        elif not differences["loss"] <= limit:
            self._other_loss(step, text["loss"])
        elif self._outcome.exact and expected.get("moe") != found.get("moe"):
            self._differs(step, "loss", "the loss is the same, but the routers chose otherwise (moe)")
        elif not differences["grad_norm"] <= limit:
            self._differs(step, "gradient", f"the loss is the same, {text['grad_norm']}")
        else:
            others = [n for n in ("learning_rate", "skipped", "loss_scale") if expected.get(n) != found.get(n)]
            if others:
                self._differs(step, "update", "; ".join(text.get(name, name) for name in others))

    def _other_loss(self, step: int, text: str) -> None:
        if self._proved == step - 1:
            self._differs(step, "loss", f"{text}, from the same data and weights")
        elif step - 1 == self._recorded.start:
            self._differs(step, "loss", f"{text}, from the same data; no fingerprint of the weights was recorded")
        else:
            self._differs(step - 1, "update", f"all that was recorded of it is the same, but in step {step} {text}")

    def _differs(self, step: int, cause: str, detail: str) -> None:
        self._outcome.divergence = Divergence(step=step, cause=cause, detail=detail)


def _relative(expected: float | None, found: float | None) -> float:
    """|a - b| / |a|; infinite where only one is a finite number (JSON has null for the others)."""
    if expected == found:
        return 0.0
    if expected is None or found is None:
        return math.inf
    return abs(expected - found) / max(abs(expected), 1e-300)


def _list(items: Sequence[object]) -> str:
    rest = f" and {len(items) - _LISTED} more" if len(items) > _LISTED else ""
    return ", ".join(map(str, items[:_LISTED])) + rest
