"""What every block of a stage needs beside the activations, made once per micro-batch."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from torch import Tensor

from megalite.batch import MicroBatch


class Site(IntEnum):
    """Where noise enters a layer; the hash of a mask takes layer * len(Site) + site."""

    ATTENTION_PROBS = 0
    ATTENTION_OUTPUT = 1
    MLP_OUTPUT = 2
    ROUTER_JITTER = 3


EMBEDDING_SITE = 0
"""Dropout site of the embedding; layer n's sites begin at 1 + n * len(Site)."""


def layer_site(layer: int, site: Site) -> int:
    """The model-wide number of a dropout site, by global layer number."""
    return 1 + layer * len(Site) + site


@dataclass(frozen=True, kw_only=True)
class Context:
    """One micro-batch seen from inside a stage.

    token_index: int64 [s_local, b], the global token numbers of the rows this rank's residual stream holds.
    rope: (cos, sin), each [s, b, head_dim / 2], or None without rotary positions. training switches dropout on.
    """

    batch: MicroBatch
    token_index: Tensor
    rope: tuple[Tensor, Tensor] | None
    seed: int
    training: bool
