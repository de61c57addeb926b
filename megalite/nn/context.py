"""What every block of a stage needs beside the activations, made once per micro-batch."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from torch import Tensor

from megalite.axis import Axis
from megalite.batch import MicroBatch
from megalite.kernels.attention_mask import AttentionMask, first_seen
from megalite.nn.cache import Cache
from megalite.parallel.context import RowCut, cut_rows


class Site(IntEnum):
    """Where noise enters a layer; the hash of a mask takes layer * len(Site) + site."""

    ATTENTION_PROBS = 0
    ATTENTION_OUTPUT = 1
    MLP_OUTPUT = 2
    ROUTER_JITTER = 3


EMBEDDING_SITE = 0
"""Dropout site of the embedding; layer n's sites begin at 1 + n * len(Site)."""


def embedding_site(depth: int) -> int:
    """The dropout site of the embedding that depth 1, 2, .. of multi-token prediction takes."""
    return EMBEDDING_SITE - depth


def layer_site(layer: int, site: Site) -> int:
    """The model-wide number of a dropout site, by global layer number."""
    return 1 + layer * len(Site) + site


@dataclass(frozen=True, kw_only=True)
class Context:
    """One micro-batch seen from inside a stage.

    batch: this context-parallel rank's part of the rows; rows: the rows before that cut, and cut: how it was made.
    token_index: int64 [s_local, b], the global token numbers of the rows this rank's residual stream holds.
    rope: (cos, sin), each [s, b, head_dim / 2], or None without rotary positions; local_rope: those of layers with a
    window, where they have their own. training switches dropout on.
    cache: what the layers keep of the tokens before these, when a text is generated (None: these are all).
    """

    batch: MicroBatch
    rows: MicroBatch
    cut: RowCut
    token_index: Tensor
    rope: tuple[Tensor, Tensor] | None
    seed: int
    training: bool
    cache: Cache | None = None
    local_rope: tuple[Tensor, Tensor] | None = None
    masks: dict[int, AttentionMask] = field(default_factory=dict, repr=False, compare=False)
    shared: dict[str, Any] = field(default_factory=dict, compare=False)

    def mask(self, window: int = 0) -> AttentionMask:
        """What this rank's tokens see of one another within `window` places (0: no limit); made once for all layers."""
        if window not in self.masks:
            places = self.batch.row_places.expand_as(self.batch.tokens)
            start = first_seen(places, self.batch.documents, window)
            self.masks[window] = AttentionMask(query=places, start=start, key=places)
        return self.masks[window]

    @staticmethod
    def uncut(
        batch: MicroBatch, *, rope: tuple[Tensor, Tensor] | None = None, seed: int = 0, training: bool = True
    ) -> Context:
        """The context of a rank that holds all of `batch`."""
        _, cut = cut_rows(batch, Axis("cp"))
        return Context(
            batch=batch, rows=batch, cut=cut, token_index=batch.token_index, rope=rope, seed=seed, training=training
        )
