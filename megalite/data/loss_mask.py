"""Masks that come with token files: which tokens of a conversation are to be learnt."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from megalite.data.indexed import FormatError, IndexedDataset

MASK_SUFFIX = "_loss_mask"
"""PREFIX_loss_mask.bin/.idx goes with PREFIX.bin/.idx: uint8, as many documents of the same lengths."""


def loss_mask_of(source: IndexedDataset) -> IndexedDataset | None:
    """The mask of token files, or None when they have none.

    Raises FileNotFoundError for one that their side file names and FormatError for one of other lengths.
    """
    named = (source.side_file() or {}).get("loss_mask") is not None
    if not named and not Path(f"{source.prefix}{MASK_SUFFIX}.idx").exists():
        return None
    mask = IndexedDataset(source.prefix + MASK_SUFFIX)
    if mask.dtype != np.uint8 or not np.array_equal(mask.lengths, source.lengths):
        raise FormatError(f"{mask.prefix} is not the mask of {source.prefix}: the lengths of its documents differ")
    return mask
