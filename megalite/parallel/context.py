"""Context parallelism: which tokens of each row a rank holds, and how a whole row is seen where it is needed.

Causal attention gives late tokens more to do, so that a row of one document is dealt in a zigzag: of 2c equal chunks,
rank r holds the r-th from both ends (Brandon et al., 2023, arXiv:2311.09431; Llama 3, arXiv:2407.21783). Rows of
several documents are dealt by their work (`context_balance`).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.axis import Axis
from megalite.batch import MicroBatch
from megalite.parallel.context_balance import TOLERANCE, TOLERANCE_OF_ONE, deal_row, zigzag
from megalite.parallel.context_plan import Sight


@dataclass(frozen=True)
class RowCut:
    """How the rows of one micro-batch are cut over `axis`.

    places: int64 [ranks, s / ranks, b], in ascending order. documents: int64 [s, b], the place at which the document of
    each place begins (None: there is one). plans: what attention has worked out for these rows, for all layers.
    """

    axis: Axis
    places: Tensor
    documents: Tensor | None = None
    plans: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)

    @property
    def mine(self) -> Tensor:
        """int64 [s / ranks, b]: the places of this rank's tokens."""
        return self.places[self.axis.rank]

    def sight(self, window: int = 0) -> Sight:
        """What each token sees: its document so far, at most `window` tokens."""
        return Sight.causal(self.places, self.documents, window)

    def here(self, whole: Tensor) -> Tensor:
        """This rank's part of whole rows [s, b, ...]."""
        return _take(whole, self.mine)

    def whole(self, local: Tensor) -> Tensor:
        """Whole rows [s, b, ...] from the ranks' parts, without gradient."""
        if self.axis.size == 1:
            return local
        parts = self.axis.all_gather(local.detach().contiguous())
        places = self.places.flatten(0, 1)
        index = places.view(*places.shape, *[1] * (local.dim() - 2)).expand_as(parts)
        return torch.empty_like(parts).scatter_(0, index, parts)


def _take(whole: Tensor, places: Tensor) -> Tensor:
    index = places.view(*places.shape, *[1] * (whole.dim() - 2)).expand(*places.shape, *whole.shape[2:])
    return whole.gather(0, index)


def row_multiple(cp: int, tp: int, sequence_parallel: bool) -> int:
    """What the length of a row must be a multiple of: two chunks for each cp rank, each of tp parts."""
    return (2 * cp if cp > 1 else 1) * (tp if sequence_parallel else 1)


def padded_length(seq_len: int, multiple: int) -> int:
    """The length of rows of `seq_len` tokens once they are padded."""
    return -(-seq_len // multiple) * multiple


def pad_rows(batch: MicroBatch, multiple: int) -> MicroBatch:
    """`batch` with rows of the next multiple of `multiple` tokens; padding is a document of its own, without labels."""
    missing = padded_length(batch.seq_len, multiple) - batch.seq_len
    if not missing:
        return batch
    length, real = batch.seq_len, batch.token_mask
    padded = replace(batch, token_mask=None, documents=None).map(
        lambda value: F.pad(value, (0, 0) * (value.dim() - 1) + (0, missing))
    )
    real = torch.ones_like(batch.tokens, dtype=torch.bool) if real is None else real
    starts = torch.zeros_like(batch.tokens) if batch.documents is None else batch.documents
    return replace(
        padded,
        token_mask=F.pad(real, (0, 0, 0, missing), value=False),
        documents=F.pad(starts, (0, 0, 0, missing), value=length),
    )


def cut_rows(batch: MicroBatch, axis: Axis, window: int = 0) -> tuple[MicroBatch, RowCut]:
    """This rank's part of a micro-batch of padded rows, and how it was cut.

    window: how many tokens attention sees at most, where all layers have the same (0: no limit).
    """
    assert batch.places is None, "the rows are cut already"
    cut = RowCut(axis, row_places(batch, axis.size, window).to(batch.tokens.device), batch.documents)
    if axis.size == 1:
        return batch, cut
    whole = torch.arange(batch.seq_len, device=batch.tokens.device)[:, None].expand_as(batch.tokens)
    return replace(batch, places=whole).map(cut.here), cut


def row_places(batch: MicroBatch, cp: int, window: int = 0) -> Tensor:
    """int64 [cp, s / cp, b]: the places that each rank holds, in ascending order; each row may be cut differently.

    Packed rows are looked at on the CPU.
    """
    length, rows = batch.tokens.shape
    if cp == 1:
        return torch.arange(length)[None, :, None].expand(1, length, rows)
    if length % (2 * cp):
        raise ValueError(f"rows of {length} tokens cannot be cut into 2 * cp = {2 * cp} chunks; pad_rows first")
    if batch.documents is None:
        starts = torch.zeros(length, dtype=torch.int64)
        return _cut_row(starts, length, cp, window)[..., None].expand(cp, -1, rows).contiguous()
    starts = batch.documents.cpu().expand(length, rows)
    return torch.stack([_cut_row(starts[:, row], batch.row_length, cp, window) for row in range(rows)], -1)


def _cut_row(starts: Tensor, real: int, cp: int, window: int) -> Tensor:
    """int64 [cp, s / cp] of one row, of which `real` tokens are no padding."""
    if not window and not starts.any():
        return zigzag(len(starts), cp)
    return deal_row(starts, cp, window, TOLERANCE if starts[:real].any() else TOLERANCE_OF_ONE)
