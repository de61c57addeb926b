"""Token files, datasets and the order in which a run consumes them.

This package imports without torch, so that preprocessing workers start quickly; batches are in megalite.data.sampler.
"""

from megalite.data.blended import BlendedDataset
from megalite.data.gpt_dataset import GPTDataset, Sample
from megalite.data.indexed import FormatError, IndexedDataset, IndexedWriter

__all__ = ["BlendedDataset", "FormatError", "GPTDataset", "IndexedDataset", "IndexedWriter", "Sample"]
