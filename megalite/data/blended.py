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
BlendPhase = tuple[int, Sequence[float]]
"""A first sample, and the weights that hold from there on."""
log = logging.getLogger(__name__)


def normalise_weights(weights: Sequence[float], name: str = "data.blend") -> list[float]:
    """Weights that sum to 1; ValueError when one is negative or not finite, or when all are zero."""
    if any(not math.isfinite(w) or w < 0 for w in weights) or sum(weights) <= 0:
        raise ValueError(f"{name} weights {list(weights)} must be finite, not negative, and not all zero")
    return (np.asarray(weights, dtype=np.float64) / np.sum(weights)).tolist()


def blend_targets(weights: Sequence[float], num_samples: int, surplus: float = 0.0) -> list[int]:
    """How many samples of each dataset a blend of `num_samples` needs, with `surplus` more to be safe."""
    targets = [math.ceil(num_samples * w) for w in normalise_weights(weights)]
    return [math.ceil(n * (1.0 + surplus)) if surplus else n for n in targets]


def blend_order(weights: Sequence[float], size: int) -> tuple[NDArray[np.int16], NDArray[np.int64]]:
    """(dataset, sample within it) for each place: the dataset furthest behind its share is next (the first of equals).

    In every prefix of the order a dataset is less than one sample ahead of its share. No random numbers are involved.
    """
    datasets = _greedy(np.asarray(weights, dtype=np.float64), size)
    return datasets, _numbered(datasets)


def exhaustive_order(sizes: Sequence[int]) -> tuple[NDArray[np.int16], NDArray[np.int64]]:
    """The order that uses up every dataset: the greedy rule with sizes as weights, among those not yet used up."""
    limits, total = np.asarray(sizes, dtype=np.int64), sum(sizes)
    datasets = _greedy(limits / total if total else limits.astype(np.float64), total, limits.tolist())
    return datasets, _numbered(datasets)


def phased_order(phases: Sequence[BlendPhase], size: int) -> tuple[NDArray[np.int16], NDArray[np.int64]]:
    """(dataset, sample within it) for each place, where weights change at the first place of each phase.

    A dataset goes on in each phase where it stopped: nothing is repeated or left out, and places before a change are
    those of the order without it. Weights are normalised, and hold within each phase; one of 0 leaves a dataset out.
    """
    parts: list[NDArray[np.int16]] = [np.empty(0, dtype=np.int16)]
    ends = [first for first, _ in phases[1:]] + [size]
    for (first, weights), end in zip(phases, ends, strict=True):
        used = np.flatnonzero(weights)  # the greedy rule itself would draw once from a dataset of weight 0
        share = np.asarray(weights, dtype=np.float64)[used]
        parts.append(used.astype(np.int16)[_greedy(share, max(0, min(end, size) - first))])
    datasets = np.concatenate(parts)
    return datasets, _numbered(datasets)


def _greedy(share: NDArray[np.float64], size: int, limits: Sequence[int] | None = None) -> NDArray[np.int16]:
    """The dataset of each place; with `limits`, among those from which fewer have been taken."""
    datasets, behind, taken = np.empty(size, dtype=np.int16), np.empty_like(share), np.zeros_like(share)
    if limits is not None:
        taken[np.asarray(limits) == 0] = np.inf
    multiply, subtract, argmax = np.multiply, np.subtract, behind.argmax  # this loop is all that a blend costs
    for k in range(size):
        multiply(share, k or 1, out=behind)
        subtract(behind, taken, out=behind)
        datasets[k] = i = int(argmax())
        taken[i] += 1
        if limits is not None and taken[i] >= limits[i]:
            taken[i] = np.inf  # behind by nothing from now on
    return datasets


def _numbered(datasets: NDArray[np.int16]) -> NDArray[np.int64]:
    """int64 [size]: how often the dataset of each place stands before it."""
    order = np.argsort(datasets, kind="stable")
    counts = np.bincount(datasets)
    numbers = np.empty(len(datasets), dtype=np.int64)
    numbers[order] = np.arange(len(datasets)) - np.repeat(np.cumsum(counts) - counts, counts)
    return numbers


class BlendedDataset:
    """`size` samples drawn from `datasets` by `weights` (a weight is a share of samples, not a number of epochs).

    Each dataset is consumed in its own order. A dataset of weight 0 is left out with a notice. `changes` are
    (first sample, weights) that hold from there on (see `phased_order`). Without weights datasets are mixed by their
    lengths: `size` None uses every sample once, else there are `size` samples, or as many as there are. Raises
    ValueError for bad weights, for more than 32767 datasets, and when a dataset has fewer samples than the order draws
    from it.
    """

    def __init__(
        self,
        datasets: Sequence[SampleSource],
        weights: Sequence[float] | None = None,
        size: int | None = None,
        *,
        changes: Sequence[BlendPhase] = (),
        cache_dir: Path | None = None,
    ):
        if weights is not None and len(weights) != len(datasets):
            raise ValueError(f"{len(weights)} blend weights for {len(datasets)} datasets")
        if weights is not None and size is None:
            raise ValueError("blend weights need a size: how many samples")
        if len(datasets) > np.iinfo(np.int16).max:
            raise ValueError(f"{len(datasets)} datasets, a blend can hold {np.iinfo(np.int16).max}")
        self.datasets = list(datasets)
        sizes = [len(d) for d in datasets]
        if size is None:
            self.weights = normalise_weights(sizes)
            self.dataset_index, self.sample_index = exhaustive_order(sizes)
            return
        if weights is None:
            weights, size = sizes, min(size, sum(sizes))
        self.weights = normalise_weights(weights)
        phases = [(0, self.weights), *((first, normalise_weights(later)) for first, later in changes)]
        for i in range(len(datasets)):
            if not any(later[i] for _, later in phases):
                log.warning("dataset %d of the blend has weight 0 and is left out", i)
        self.dataset_index, self.sample_index = cached_order(phases, size, cache_dir)
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


def cached_order(
    phases: Sequence[BlendPhase], size: int, cache_dir: Path | None
) -> tuple[NDArray[np.int16], NDArray[np.int64]]:
    """`phased_order`, kept in `cache_dir` if there is one."""

    def build() -> Arrays:
        datasets, samples = phased_order(phases, size)
        return {"datasets": datasets, "samples": samples}

    steps = np.asarray([first for first, _ in phases], dtype=np.int64)
    key = "blend-" + key_of({"version": 2, "size": size}, steps, np.asarray([weights for _, weights in phases]))
    arrays = cached_arrays(
        cache_dir, key, {"datasets": (size,), "samples": (size,)}, build,
        what=f"the order of {size} blended samples", seconds=1.5e-6 * size,
    )  # fmt: skip
    return arrays["datasets"], arrays["samples"]
