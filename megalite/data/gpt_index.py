"""Which tokens make up sample i: the document, sample and shuffle index of Megatron's GPTDataset, in numpy.

The result equals Megatron-core's bit for bit, with two repairs: epochs are counted in integers (an empty split is
an error instead of an endless loop), and a kept partial sample is counted exactly (in float32 only when asked to).
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

SEPARATE_LAST_EPOCH = 0.80
"""An epoch of which fewer samples than this share are used is shuffled apart from the others."""
_INT32_MAX = 2**31 - 1


def split_ranges(split: str, num_sequences: int) -> list[tuple[int, int] | None]:
    """Cuts sequences, in file order, into train, validation and test ranges by weights such as "98,1,1".

    A part with no weight is None; one with weight can still be empty. ValueError when the weights are not numbers of
    which one is positive and none negative.
    """
    weights = _weights(split)
    if not 1 <= len(weights) <= 3 or not 0 < sum(weights) < math.inf or min(weights) < 0:
        raise ValueError(f"data.split={split!r} must be one to three weights such as '98,1,1', not all zero")
    weights += [0.0] * (3 - len(weights))
    total = np.sum(weights)
    edges = [0.0]
    for weight in weights:
        edges.append(float(edges[-1] + weight / total))
    return [
        (round(low * num_sequences), round(high * num_sequences)) if high > low else None
        for low, high in itertools.pairwise(edges)
    ]


def _weights(split: str) -> list[float]:
    """The numbers between commas; none at all when one of them is no number."""
    try:
        return [float(weight) for weight in split.split(",")]
    except ValueError:
        return []


@dataclass(frozen=True, kw_only=True)
class IndexPlan:
    """The sizes of an index, before any array is built."""

    tokens_per_epoch: int
    """Tokens of the split."""
    num_epochs: int
    """How often the split is read."""
    num_samples: int
    """Samples in all epochs together (at least the number asked for)."""
    samples_before_last: int
    """Samples that belong to the epochs before the last one; 0 when all epochs are shuffled together."""
    extra: int
    """Tokens that a sample reads beyond its length: 1 for the shifted labels."""

    @property
    def separate_last_epoch(self) -> bool:
        """Whether the last epoch is shuffled apart."""
        return self.samples_before_last > 0


def plan_index(
    tokens_per_epoch: int,
    *,
    seq_len: int,
    num_samples: int | None,
    extra: int = 1,
    keep_partial: bool = False,
    float32_counts: bool = False,
) -> IndexPlan:
    """How many epochs and samples `num_samples` requests (None: one epoch) lead to.

    `float32_counts`: with `keep_partial`, as many samples as Megatron counts, which is wrong above 2**24 tokens.
    """
    assert tokens_per_epoch > 0 and seq_len > 0
    epochs = 1
    if num_samples is not None:
        epochs = max(1, -(-(num_samples * seq_len + extra) // tokens_per_epoch))
    before = 0
    if epochs > 1 and num_samples is not None:
        full = ((epochs - 1) * tokens_per_epoch - extra) // seq_len
        in_one = (tokens_per_epoch - extra) // seq_len
        if num_samples - full < int(SEPARATE_LAST_EPOCH * in_one):
            before = full
    usable = epochs * tokens_per_epoch - extra
    count = usable // seq_len
    if keep_partial:
        count = math.ceil(np.float32(usable) / np.float32(seq_len)) if float32_counts else -(-usable // seq_len)
    return IndexPlan(
        tokens_per_epoch=tokens_per_epoch,
        num_epochs=epochs,
        num_samples=max(count, 0),
        samples_before_last=before,
        extra=extra,
    )


def build_index(
    plan: IndexPlan, lengths: NDArray[np.int32], first: int, *, seq_len: int, seed: int
) -> dict[str, NDArray[Any]]:
    """The three arrays of a split whose sequences are `first`, `first` + 1, ... with these `lengths`.

    documents: int32 [epochs x sequences], the order in which sequences are read. samples: [num_samples + 1, 2],
    (position in documents, token offset) where each sample begins; it shares its last token with the next one.
    shuffle: uint32 [num_samples], the order in which samples are drawn.
    """
    random = np.random.RandomState(seed)
    wide = first + len(lengths) > _INT32_MAX
    one_epoch = np.arange(first, first + len(lengths), dtype=np.int64 if wide else np.int32)
    documents = _document_order(plan, one_epoch, random)
    samples = sample_starts(plan, lengths[documents - first], seq_len)
    return {"documents": documents, "samples": samples, "shuffle": _sample_order(plan, random)}


def _document_order(plan: IndexPlan, one_epoch: NDArray[Any], random: np.random.RandomState) -> NDArray[Any]:
    together = plan.num_epochs - 1 if plan.separate_last_epoch else plan.num_epochs
    documents = np.tile(one_epoch, together)
    random.shuffle(documents)
    if not plan.separate_last_epoch:
        return documents
    last = one_epoch.copy()
    random.shuffle(last)
    return np.concatenate((documents, last))


def sample_starts(plan: IndexPlan, lengths: NDArray[np.int32], seq_len: int) -> NDArray[Any]:
    """Boundary k lies in the document that holds stream token k x seq_len + extra - 1, the last one read before it."""
    ends = np.cumsum(lengths, dtype=np.int64)
    last_read = np.arange(1, plan.num_samples + 1, dtype=np.int64) * seq_len + (plan.extra - 1)
    place = np.searchsorted(ends, last_read, side="right")
    beyond = place == len(lengths)  # at most the last boundary, of a kept partial sample
    place[beyond] = len(lengths) - 1
    offset = last_read + 1 - plan.extra - (ends[place] - lengths[place])
    if beyond.any():
        place[beyond], offset[beyond] = _stream_end(lengths, plan.extra)
    wide = max(len(lengths), int(lengths.max(initial=0))) > _INT32_MAX
    starts = np.zeros((plan.num_samples + 1, 2), dtype=np.int64 if wide else np.int32)
    starts[1:, 0], starts[1:, 1] = place, offset
    return starts


def _stream_end(lengths: NDArray[np.int32], extra: int) -> tuple[int, int]:
    """The boundary after all tokens; it cannot lie on the last token of a document that has none."""
    last = len(lengths) - 1
    if extra and lengths[last] == 0:
        last = int(np.flatnonzero(lengths)[-1])
    return last, int(lengths[last]) - extra


def _sample_order(plan: IndexPlan, random: np.random.RandomState) -> NDArray[Any]:
    dtype = np.int64 if plan.num_samples >= 2**32 - 2 else np.uint32
    cut = plan.samples_before_last if plan.separate_last_epoch else plan.num_samples
    order = np.arange(plan.num_samples, dtype=dtype)
    random.shuffle(order[:cut])
    if plan.separate_last_epoch:
        random.shuffle(order[cut:])
    return order
