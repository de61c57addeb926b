"""A training that only counts, for tests of the loop around it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from rich.console import Console

from megalite.checkpoint.background import Saved
from megalite.checkpoint.config import CheckpointConfig
from megalite.data.config import DataConfig
from megalite.mpu import ParallelState
from megalite.nn.config import ModelConfig
from megalite.nn.lora import LoRAConfig
from megalite.optim.config import OptimConfig
from megalite.train.callbacks import Callback
from megalite.train.config import TrainConfig
from megalite.train.metrics import Speed, StepMetrics
from megalite.train.run_folder import RunFolder
from megalite.train.step import StepResult, Training
from megalite.train.trainer import Trainer


@dataclass(frozen=True)
class FakeConfig:
    """The sections that a Trainer reads."""

    train: TrainConfig
    checkpoint: CheckpointConfig
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    lora: LoRAConfig = field(default_factory=LoRAConfig)


@dataclass
class FakeTraining:
    """A weight that each step adds to, so that a resume that restores nothing shows."""

    mpu: ParallelState = field(default_factory=ParallelState.single)
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    weight: int = 0
    validation: object = "some data"
    each_validation: dict[str, Any] = field(default_factory=dict)
    steps: list[int] = field(default_factory=list)
    results: dict[int, dict[str, Any]] = field(default_factory=dict)
    """What to report instead, by step."""


def fake_step(training: Training, step: int) -> StepResult:
    fake = cast(FakeTraining, training)
    fake.steps.append(step)
    fake.weight += step + 1
    values: dict[str, Any] = dict(
        loss=1.0 / fake.weight,
        grad_norm=0.5,
        learning_rate=0.1,
        num_tokens=7,
        skipped=False,
        sample_fingerprint=step,
        model_flops=10**9,
    )
    return StepResult(**{**values, **fake.results.get(step, {})})


def fake_evaluate(training: Training, num_steps: int) -> float:
    fake = cast(FakeTraining, training)
    return fake.weight / num_steps / {"some data": 1, "part": 2}[str(fake.validation)]


@dataclass
class FakeCheckpoints:
    """Keeps the weight in files."""

    training: FakeTraining
    folder: Path
    resume: str = "none"
    start: Path | None = None
    saved: list[int] = field(default_factory=list)
    started: int | None = None
    looked: bool = False

    def save(self, step: int) -> Path:
        path = self.folder / f"step_{step:08d}"
        path.mkdir(parents=True, exist_ok=True)
        (path / "state").write_text(f"{step} {self.training.weight}")
        self.saved.append(step)
        return path

    def start_save(self, step: int) -> None:
        self.started = step

    def finished(self, *, wait: bool) -> Saved | None:
        """A save that was started takes until the second look at it."""
        if self.started is None or not (wait or self.looked):
            self.looked = self.started is not None
            return None
        step, self.started, self.looked = self.started, None, False
        return Saved(step, self.save(step))

    def find(self) -> Path | None:
        if self.resume == "auto":
            return max(self.folder.glob("step_*"), default=None)
        return None if self.resume == "none" else Path(self.resume)

    def load_start(self) -> Path | None:
        if self.start is not None:
            self.load(self.start)
        return self.start

    def load(self, path: Path | str) -> int:
        step, self.training.weight = map(int, (Path(path) / "state").read_text().split())
        return step


@dataclass
class Recorder(Callback):
    """Writes down each moment."""

    moments: list[str] = field(default_factory=list)

    def before_run(self, step: int) -> None:
        self.moments.append(f"before_run {step}")

    def before_step(self, step: int) -> None:
        self.moments.append(f"before_step {step}")

    def after_step(self, metrics: StepMetrics, speed: Speed) -> None:
        self.moments.append(f"after_step {metrics.step}")

    def after_evaluation(self, step: int, loss: float) -> None:
        self.moments.append(f"after_evaluation {step}")

    def after_checkpoint(self, step: int, path: Path | str) -> None:
        self.moments.append(f"after_checkpoint {step}")

    def after_run(self, step: int) -> None:
        self.moments.append(f"after_run {step}")


def make_trainer(
    path: Path,
    training: FakeTraining,
    callbacks: list[Callback] | None = None,
    *,
    every: int = 0,
    async_save: bool = False,
    start: Path | None = None,
    trainer_options: dict[str, Any] | None = None,
    console: Console | None = None,
    **train: Any,
) -> tuple[Trainer, RunFolder, FakeCheckpoints]:
    """A Trainer over fakes, in an opened run folder."""
    config = FakeConfig(TrainConfig(run_dir=str(path), **train), CheckpointConfig(every=every, async_save=async_save))
    folder = RunFolder.open(
        path,
        training.mpu,
        resume=config.train.resume,
        read_only=config.train.eval_only,
        console=console or Console(quiet=True),
        write_config=lambda file: None,
    )
    checkpoints = FakeCheckpoints(training, folder.checkpoints, config.train.resume, start)
    trainer = Trainer(
        config,
        cast(Training, training),
        callbacks or [],
        folder=folder,
        checkpoints=checkpoints,
        step_fn=fake_step,
        evaluate_fn=fake_evaluate,
        **(trainer_options or {}),
    )
    return trainer, folder, checkpoints
