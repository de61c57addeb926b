"""Masks that come with token files: which tokens of a conversation are to be learnt."""

from __future__ import annotations

import numpy as np

from megalite.data.indexed import FormatError, IndexedDataset
from megalite.data.remote_blocks import is_there

MASK_SUFFIX = "_loss_mask"
"""PREFIX_loss_mask.bin/.idx goes with PREFIX.bin/.idx: uint8, as many documents of the same lengths."""


def loss_mask_of(source: IndexedDataset) -> IndexedDataset | None:
    """The mask of token files, or None when they have none.

    Raises FileNotFoundError for one that their side file names and FormatError for one of other lengths.
    """
    named = (source.side_file() or {}).get("loss_mask") is not None
    if not named and not is_there(f"{source.prefix}{MASK_SUFFIX}.idx"):
        return None
    mask = IndexedDataset(source.prefix + MASK_SUFFIX, cache=source.cache)
    if mask.dtype != np.uint8 or not np.array_equal(mask.lengths, source.lengths):
        raise FormatError(f"{mask.prefix} is not the mask of {source.prefix}: the lengths of its documents differ")
    return mask
