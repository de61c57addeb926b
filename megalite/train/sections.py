"""What the parts of a run ask of its configuration; megalite.config.Config has all of it."""

from __future__ import annotations

from typing import Protocol

from megalite.checkpoint.config import CheckpointConfig
from megalite.data.config import DataConfig
from megalite.grid import ParallelConfig
from megalite.kernels.config import KernelConfig
from megalite.nn.config import ModelConfig
from megalite.nn.lora import LoRAConfig
from megalite.optim.config import OptimConfig
from megalite.train.config import TrainConfig


class TrainedSections(Protocol):
    """The sections that decide what is trained."""

    @property
    def model(self) -> ModelConfig:
        """The architecture."""
        ...

    @property
    def lora(self) -> LoRAConfig:
        """Its adapters."""
        ...

    @property
    def data(self) -> DataConfig:
        """The data."""
        ...

    @property
    def optim(self) -> OptimConfig:
        """The optimizer."""
        ...

    @property
    def train(self) -> TrainConfig:
        """The loop."""
        ...


class Sections(TrainedSections, Protocol):
    """Those, and where and with what it is trained: what a training is built from."""

    @property
    def parallel(self) -> ParallelConfig:
        """The layout."""
        ...

    @property
    def kernels(self) -> KernelConfig:
        """The backends."""
        ...


class ResumeSections(TrainedSections, Protocol):
    """What is trained, and what it goes on from."""

    @property
    def checkpoint(self) -> CheckpointConfig:
        """When to save and what to keep."""
        ...


class RunSections(Sections, ResumeSections, Protocol):
    """The sections of a whole run."""
