"""The sections of a configuration; each is a frozen dataclass beside the code that it configures."""

from __future__ import annotations

import dataclasses
import difflib
import typing
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from megalite.checkpoint.config import CheckpointConfig
from megalite.data.config import DataConfig
from megalite.kernels.config import KernelConfig
from megalite.mpu import ParallelConfig
from megalite.nn.config import ModelConfig
from megalite.nn.lora import LoRAConfig
from megalite.optim.config import OptimConfig
from megalite.train.config import TrainConfig


class ConfigError(ValueError):
    """A configuration that cannot run; `problems` holds every reason, one a line in the message."""

    def __init__(self, problems: Sequence[str]):
        self.problems = tuple(problems)
        count = f"{len(problems)} problems" if len(problems) > 1 else "a problem"
        super().__init__(f"the configuration has {count}:\n" + "\n".join(f"  - {problem}" for problem in problems))


@dataclass(frozen=True, kw_only=True)
class Config:
    """Everything that determines a run."""

    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    kernels: KernelConfig = field(default_factory=KernelConfig)
    lora: LoRAConfig = field(default_factory=LoRAConfig)


SECTIONS: dict[str, type] = typing.get_type_hints(Config)
"""Section name -> its dataclass, in the order of the help."""


def field_types(section: str) -> dict[str, typing.Any]:
    """The fields of a section and their resolved types."""
    hints = typing.get_type_hints(SECTIONS[section])
    return {f.name: hints[f.name] for f in dataclasses.fields(SECTIONS[section])}


def nearest_section(name: str) -> str:
    """What an unknown section may have meant, as the end of a sentence."""
    close = _closest(name, SECTIONS, 0.6)
    return f"did you mean {close}?" if close else f"sections are {', '.join(SECTIONS)}"


def nearest_field(section: str, name: str) -> str:
    """What an unknown field may have meant: a neighbour with nearly its name, or its name in another section."""
    fields = field_types(section)
    if close := _closest(name, fields, 0.75):
        return f"did you mean {section}.{close}?"
    for other in SECTIONS:
        if name in field_types(other):
            return f"did you mean {other}.{name}?"
    close = _closest(name, fields, 0.5)
    return f"did you mean {section}.{close}?" if close else f"{section} has {', '.join(fields)}"


def nearest_anywhere(name: str) -> str:
    """What an option without a section may have meant."""
    full = {name: f"--{section}.{name}" for section in SECTIONS for name in field_types(section)}
    close = _closest(name, full, 0.6)
    return f"did you mean {full[close].replace('_', '-')}?" if close else "options are --section.field, see --help"


def _closest(name: str, known: Iterable[str], cutoff: float) -> str | None:
    return next(iter(difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)), None)
