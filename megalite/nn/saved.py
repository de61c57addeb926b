"""A micro-batch as the layers' declarations of what they keep see it: the argument of every `saved` method.

A block that takes part in the estimate of memory has a method `saved(shape: BatchShape) -> Saved` beside its forward.
It is the sum (`chain`) of what its parts declare.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import nn

from megalite.kernels.saved import Saved, size_of


@dataclass(frozen=True, kw_only=True)
class BatchShape:
    """The sizes of one micro-batch on this rank, and what else decides about what is kept."""

    seq_len: int
    """Tokens of a row on a context-parallel rank, padding included."""
    size: int
    """Rows."""
    row_length: int
    """Tokens of a row before it was cut and padded."""
    width: int
    """Features of the residual stream."""
    parts: int
    """Ranks over which the residual stream is cut along the sequence (tp, under sequence parallelism)."""
    dtype: torch.dtype
    device: torch.device
    rotary: bool
    """Whether queries and keys are turned."""
    has_documents: bool = False
    """Whether rows hold documents that do not see each other (packing, or padding)."""
    is_padded: bool = False
    """Whether some tokens are padding."""
    expert_load: float = 1.0
    """Tokens of this rank's experts over those of an even share."""

    @property
    def tokens(self) -> int:
        """Tokens inside a tensor-parallel region."""
        return self.seq_len * self.size

    @property
    def rows(self) -> int:
        """Tokens of this rank's part of the residual stream."""
        return self.tokens // self.parts

    @property
    def stream(self) -> int:
        """Bytes of the residual stream."""
        return size_of((self.rows, self.width), self.dtype)


@runtime_checkable
class Declares(Protocol):
    """A block that says what it keeps."""

    def saved(self, shape: BatchShape) -> Saved:
        """What it keeps of a micro-batch from forward to backward."""
        ...


def saved_by(block: nn.Module, shape: BatchShape) -> Saved:
    """What `block` declares; TypeError for one that does not."""
    if not isinstance(block, Declares):
        raise TypeError(
            f"{type(block).__name__} does not say what it keeps for backward: give it a method"
            " saved(self, shape: BatchShape) -> Saved (see megalite.nn.saved)"
        )
    return block.saved(shape)
