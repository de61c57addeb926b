"""What the pipeline asks of a model stage and of its gradient buffers: all that it sees of either."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from megalite.batch import MicroBatch
from megalite.parallel.wgrad import WeightGradQueue


class Stage(Protocol):
    """A consecutive part of a model."""

    @property
    def queue(self) -> WeightGradQueue:
        """Where the stage's linears put their weight gradients."""
        ...

    @property
    def hidden_dtype(self) -> torch.dtype:
        """The dtype of the activations between stages."""
        ...

    def hidden_shape(self, batch: MicroBatch) -> tuple[int, ...]:
        """The local shape of the activations between stages, which may differ from micro-batch to micro-batch."""
        ...

    def __call__(self, x: Tensor | None, batch: MicroBatch) -> Tensor:
        """The stage's output for the activation `x` (None on the first stage).

        The last stage returns a scalar: the sum of this rank's token losses, equal on all its tensor-parallel ranks.
        """
        ...


class Reducer(Protocol):
    """The memory of a stage's gradients and parameters, as the plan drives it."""

    def arm(self, microbatch: int) -> None:
        """Called before a backward (or weight-gradient) pass with REDUCE: reductions may start as it completes.

        That is the stage's last pass, or each one. `microbatch`: whose pass it is.
        """
        ...

    def complete(self) -> None:
        """Called after that pass: reductions that only this stage contributes to have started when it returns."""
        ...

    def leave(self) -> None:
        """Called after each forward and each backward pass: the stage needs no parameter for now."""
        ...

    def finish(self) -> None:
        """Called at the end of the plan: returns when the stage's gradients are reduced."""
        ...
