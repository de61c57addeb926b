"""What the commands that use a trained model share: how it is named, cut and loaded, and how errors are told."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import tyro

from megalite.checkpoint.errors import CheckpointError
from megalite.generate.load import LoadError, Precision, Source
from megalite.layout import parse_layout
from megalite.models import MODELS
from megalite.mpu import ParallelConfig, ParallelState
from megalite.remote import is_remote
from megalite.train.distributed import start
from megalite.train.run import world_size


@dataclass(frozen=True, kw_only=True)
class ModelArguments:
    """A trained model, and where it runs."""

    src: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="SRC")]
    """Run folder, checkpoint, or folder of Hugging Face."""
    layout: str | None = None
    """How the model is cut over the ranks of torchrun: tp2+pp2, ep2, ...; by default tp over all."""
    dtype: Precision = "auto"
    """Precision of the weights: auto is the run's on a GPU, fp32 on a CPU."""
    tokenizer: str | None = None
    """Tokenizer, if not that of the run: `byte`, a sentencepiece model, or a tokenizer.json."""
    device: str = "auto"
    """Where to run: cpu, cuda, or auto."""
    context: int | None = None
    """Most tokens that the model sees; by default the row length that it was trained on."""

    def model_problems(self) -> list[str]:
        """What is wrong with these arguments, found before any work."""
        found = []
        if not Path(self.src).exists() and not is_remote(self.src):
            found.append(
                f"{self.src} does not exist; it should be a run folder, a checkpoint, or a folder of Hugging Face"
            )
        if self.device not in ("auto", "cpu", "cuda"):
            found.append(f"--device={self.device} must be cpu, cuda or auto")
        return found + too_small(self, "context")


def too_small(arguments: object, *names: str) -> list[str]:
    """Of counts among the arguments, those that are given and below 1."""
    values = {name: getattr(arguments, name) for name in names}
    return [
        f"--{name.replace('_', '-')}={value} must be at least 1"
        for name, value in values.items()
        if value is not None and value < 1
    ]


def asked_layout(text: str | None, num_ranks: int, command: str) -> ParallelConfig:
    """The layout that is asked for; LoadError or ValueError where it is none, or not for so many ranks."""
    if text is None:
        return ParallelConfig(tp=num_ranks)
    layout = parse_layout(text)
    if layout.num_ranks != num_ranks:
        raise LoadError(
            f"--layout {text} has {layout.num_ranks} ranks, and there are {num_ranks}:"
            f" torchrun --nproc-per-node {layout.num_ranks} {command} ..."
        )
    return layout.parallel


def context_of(arguments: ModelArguments, source: Source) -> int:
    """The most tokens that the model sees; LoadError beyond what its learned positions cover."""
    model = source.config.model
    most = model.max_positions if MODELS[model.name].learned_positions else None
    if arguments.context is not None and most is not None and arguments.context > most:
        raise LoadError(f"--context={arguments.context}: {source.path} has learned positions for {most} tokens")
    return arguments.context or (source.context if most is None else min(source.context, most))


def run_command(
    name: str,
    arguments: ModelArguments,
    problems: list[str],
    layout: Callable[[int], ParallelConfig],
    run: Callable[[ParallelState, torch.device], None],
) -> int:
    """Joins the job and runs the command on this rank; returns the exit status, 1 after lines that say what was wrong.

    layout: that of so many ranks.
    """
    try:
        if problems:
            raise SystemExit("\n".join(problems))
        with start(arguments.device) as launch, _told_plainly():
            run(ParallelState.build(layout(world_size())), launch.device)
    except SystemExit as error:
        for line in str(error).splitlines():
            print(f"{name}: {line}", file=sys.stderr)
        return 1
    return 0


@contextmanager
def _told_plainly() -> Iterator[None]:
    """Ends the job with the message alone, where an error says what the user can mend."""
    try:
        yield
    except (CheckpointError, ValueError, OSError, ImportError) as error:
        raise SystemExit(str(error)) from error
