"""The unit of work that travels with the activations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
    num_labels: int = 1
    """Labels that count."""
    ahead: Sequence[tuple[int, int]] = ()
    """Of each depth of multi-token prediction: labels that count, and tokens (megalite.nn.multi_token)."""


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """One micro-batch, sequence first; every stage of a pipeline loads its own copy of it.

    tokens, labels: int64 [s, b]. loss_mask: float32 [s, b], 1 where the label counts. positions: int64 [s, b], for
    position embeddings. samples: int64 [b], absolute sample numbers in the run (step * global batch + place), which
    make dropout independent of the layout. step: the optimizer step. token_mask: bool [s, b], False on padding (None:
    there is none). index: number among the micro-batches of this rank's step. totals: of the global batch.

    documents: int64 [s, b], the place in its row at which the document of each token begins (None: attention does not
    stop at documents). A batch that is cut over context-parallel ranks, or padded, says where its tokens come from:
    places: int64 [s, b], place in the row (None: 0 .. s - 1); row_length: that of the rows as they were loaded.
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
    documents: Tensor | None = None
    places: Tensor | None = None
    row_length: int = 0

    def __post_init__(self) -> None:
        if not self.row_length:
            object.__setattr__(self, "row_length", self.tokens.shape[0])

    @property
    def seq_len(self) -> int:
        """Tokens of a row that are here."""
        return self.tokens.shape[0]

    @property
    def size(self) -> int:
        """Rows (b)."""
        return self.tokens.shape[1]

    @property
    def token_index(self) -> Tensor:
        """int64 [s, b]: the number of each token in the run, absolute sample number x row length + place in the row."""
        return self.samples[None, :] * self.row_length + self.row_places

    @property
    def row_places(self) -> Tensor:
        """int64 [s, b] (or [s, 1]): the place of each token in its row."""
        if self.places is not None:
            return self.places
        return torch.arange(self.seq_len, device=self.tokens.device)[:, None]

    def map(self, function: Callable[[Tensor], Tensor]) -> MicroBatch:
        """The batch with `function` applied to everything that has a value for each token."""
        per_token = ("tokens", "labels", "loss_mask", "positions", "token_mask", "documents", "places")
        return replace(
            self, **{name: function(value) for name in per_token if (value := getattr(self, name)) is not None}
        )

    def to(self, device: torch.device) -> MicroBatch:
        """The same micro-batch on `device`."""
        moved = self.map(lambda value: value.to(device, non_blocking=True))
        return replace(moved, samples=self.samples.to(device, non_blocking=True))
