"""Several datasets mixed by weight, in Megatron-core's greedy order."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megalite.data.cache import Arrays, cached_arrays, key_of
from megalite.data.rows import Sample, SampleSource

SURPLUS = 0.005
"""Extra share of samples built for each dataset, so that the greedy order never overruns one."""
log = logging.getLogger(__name__)


def normalise_weights(weights: Sequence[float]) -> list[float]:
    """Weights that sum to 1; ValueError when one is negative or not finite, or when all are zero."""
    if any(not math.isfinite(w) or w < 0 for w in weights) or sum(weights) <= 0:
        raise ValueError(f"data.blend weights {list(weights)} must be finite, not negative, and not all zero")
    return (np.asarray(weights, dtype=np.float64) / np.sum(weights)).tolist()


def blend_targets(weights: Sequence[float], num_samples: int, surplus: float = 0.0) -> list[int]:
    """How many samples of each dataset a blend of `num_samples` needs, with `surplus` more to be safe."""
    targets = [math.ceil(num_samples * w) for w in normalise_weights(weights)]
    return [math.ceil(n * (1.0 + surplus)) if surplus else n for n in targets]


def blend_order(weights: Sequence[float], size: int) -> tuple[NDArray[np.int16], NDArray[np.int64]]:
    """(dataset, sample within it) for each place: the dataset furthest behind its share is next (the first of equals).

    In every prefix of the order a dataset is less than one sample ahead of its share. No random numbers are involved.
    """
    share = np.asarray(weights, dtype=np.float64)
    taken = np.zeros(len(share), dtype=np.int64)
    datasets, samples = np.empty(size, dtype=np.int16), np.empty(size, dtype=np.int64)
    for k in range(size):
        i = (share * max(k, 1) - taken).argmax()
        datasets[k], samples[k] = i, taken[i]
        taken[i] += 1
    return datasets, samples


def exhaustive_order(sizes: Sequence[int]) -> tuple[NDArray[np.int16], NDArray[np.int64]]:
    """The order that uses up every dataset: the greedy rule with sizes as weights, among those not yet used up."""
    limits, total = np.asarray(sizes, dtype=np.int64), sum(sizes)
    share = limits / total if total else limits.astype(np.float64)
    taken = np.zeros(len(limits), dtype=np.int64)
    datasets, samples = np.empty(total, dtype=np.int16), np.empty(total, dtype=np.int64)
    for k in range(total):
        behind = share * max(k, 1) - taken
        behind[taken >= limits] = -np.inf
        i = behind.argmax()
        datasets[k], samples[k] = i, taken[i]
        taken[i] += 1
    return datasets, samples


class BlendedDataset:
    """`size` samples drawn from `datasets` by `weights` (a weight is a share of samples, not a number of epochs).

    Each dataset is consumed in its own order. A dataset of weight 0 is left out with a notice. Without weights every
    sample of every dataset is used once and `size` must be None. Raises ValueError for bad weights, for more than
    32767 datasets, and when a dataset has fewer samples than the order draws from it.
    """

    def __init__(
        self,
        datasets: Sequence[SampleSource],
        weights: Sequence[float] | None = None,
        size: int | None = None,
        *,
        cache_dir: Path | None = None,
    ):
        if weights is not None and len(weights) != len(datasets):
            raise ValueError(f"{len(weights)} blend weights for {len(datasets)} datasets")
        if (weights is None) != (size is None):
            raise ValueError("give both weights and a size, or neither to use every sample once")
        if len(datasets) > np.iinfo(np.int16).max:
            raise ValueError(f"{len(datasets)} datasets, a blend can hold {np.iinfo(np.int16).max}")
        self.datasets = list(datasets)
        if weights is None or size is None:
            self.weights = normalise_weights([len(d) for d in datasets])
            self.dataset_index, self.sample_index = exhaustive_order([len(d) for d in datasets])
            return
        for i, weight in enumerate(weights):
            if weight == 0:
                log.warning("dataset %d of the blend has weight 0 and is left out", i)
        self.weights = normalise_weights(weights)
        arrays = _cached_order(self.weights, size, cache_dir)
        self.dataset_index, self.sample_index = arrays["datasets"], arrays["samples"]
        self._check_counts()

    def _check_counts(self) -> None:
        for i, (count, dataset) in enumerate(zip(self.counts(), self.datasets, strict=True)):
            if count > len(dataset):
                raise ValueError(f"the blend draws {count} samples from dataset {i}, which has {len(dataset)}")

    def counts(self) -> list[int]:
        """Samples drawn from each dataset."""
        return np.bincount(self.dataset_index, minlength=len(self.datasets)).tolist()

    def __len__(self) -> int:
        return len(self.dataset_index)

    def __getitem__(self, i: int) -> Sample:
        if not 0 <= i < len(self):
            raise IndexError(f"sample {i} of {len(self)} in the blend")
        return self.datasets[int(self.dataset_index[i])][int(self.sample_index[i])]


def _cached_order(weights: list[float], size: int, cache_dir: Path | None) -> Arrays:
    def build() -> Arrays:
        used = np.flatnonzero(weights)  # the greedy rule itself would draw once from a dataset of weight 0
        datasets, samples = blend_order([weights[i] for i in used], size)
        return {"datasets": used.astype(np.int16)[datasets], "samples": samples}

    key = "blend-" + key_of({"version": 1, "size": size}, np.asarray(weights))
    return cached_arrays(cache_dir, key, {"datasets": (size,), "samples": (size,)}, build)
