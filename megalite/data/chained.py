"""Datasets one after another."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence

from megalite.data.rows import Sample, SampleSource


class ChainedDataset:
    """All samples of the first of `datasets`, then all of the second, and so on."""

    def __init__(self, datasets: Sequence[SampleSource]):
        self.datasets = list(datasets)
        self._ends = list(itertools.accumulate(len(dataset) for dataset in datasets))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, i: int) -> Sample:
        if not 0 <= i < len(self):
            raise IndexError(f"sample {i} of {len(self)}")
        part = bisect.bisect_right(self._ends, i)
        return self.datasets[part][i - (self._ends[part - 1] if part else 0)]
