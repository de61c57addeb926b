"""The unit of work that travels with the activations."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class BatchTotals:
    """The global batch that a micro-batch is part of: denominators of losses that are means over all of it."""

    num_rows: int = 1
    """Rows (samples)."""
    num_tokens: int = 1
    """Tokens that are not padding, labels or not."""
    loss_scale: float = 1.0
    """What gradients are multiplied by (fp16)."""


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """One micro-batch, sequence first; every stage of a pipeline loads its own copy of it.

    tokens, labels: int64 [s, b]. loss_mask: float32 [s, b], 1 where the label counts. positions: int64 [s, b], for
    position embeddings. samples: int64 [b], absolute sample numbers in the run (step * global batch + place), which
    make dropout independent of the layout. step: the optimizer step. token_mask: bool [s, b], False on padding (None:
    there is none). index: number among the micro-batches of this rank's step. totals: of the global batch.
    """

    tokens: Tensor
    labels: Tensor
    loss_mask: Tensor
    positions: Tensor
    samples: Tensor
    step: int
    token_mask: Tensor | None = None
    index: int = 0
    totals: BatchTotals = field(default_factory=BatchTotals)

    @property
    def seq_len(self) -> int:
        """Positions in a row, before any cut."""
        return self.tokens.shape[0]

    @property
    def size(self) -> int:
        """Rows (b)."""
        return self.tokens.shape[1]

    @property
    def token_index(self) -> Tensor:
        """int64 [s, b]: the number of each token in the run, absolute sample number x seq_len + position in row."""
        place = torch.arange(self.seq_len, device=self.samples.device)
        return self.samples[None, :] * self.seq_len + place[:, None]

    def to(self, device: torch.device) -> MicroBatch:
        """The same micro-batch on `device`."""
        moved = {
            name: getattr(self, name).to(device, non_blocking=True)
            for name in ("tokens", "labels", "loss_mask", "positions", "samples", "token_mask")
            if getattr(self, name) is not None
        }
        return replace(self, **moved)
