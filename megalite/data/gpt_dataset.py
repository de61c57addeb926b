"""Fixed-length samples for language modelling, cut from the documents of an indexed file."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from megalite.data.cache import cached_arrays, key_of
from megalite.data.gpt_index import IndexPlan, build_index, plan_index
from megalite.data.indexed import IndexedDataset
from megalite.data.rows import DocumentRows, DocumentRules, Piece, Sample, SampleSource

__all__ = ["GPTDataset", "Sample", "SampleSource"]

INDEX_VERSION = 1
log = logging.getLogger(__name__)


class GPTDataset(DocumentRows):
    """Samples of `seq_len` tokens with their shifted labels, in Megatron-core's order for the same settings.

    The sequences `sequences[0]` to `sequences[1] - 1` of `source` (default: all) are shuffled, laid end to end for as
    many epochs as `num_samples` needs (None: one), cut every `seq_len` tokens, and the samples shuffled again;
    all from RandomState(seed). `len(dataset)` counts whole epochs, so it can exceed `num_samples`.

    Only a partial last sample has padding (see `keep_partial`), masked by place, never by value. `eod_mask_loss`
    leaves out the predictions across the end of a document. `reset_attention` and `reset_positions` keep the documents
    of a sample apart (see DocumentRules); where they end is known from the index, or by `boundaries="eod"` from ids,
    and a document that goes on from the sample before begins at place 0. `extra_token=False` is Megatron's
    add_extra_token_to_sequence off: labels come from inside the sample and its last one is masked. `float32_counts`
    counts kept partial samples as Megatron does. With `vocab_size` each row read is checked (FormatError).

    The index is cached in `cache_dir` (None: not at all) under a hash of everything it depends on: the lengths of
    the sequences and these settings, not paths or times. Any rank may compute it; files are renamed into place
    and a damaged one is rebuilt, so ranks neither wait for each other nor read half a file.

    Raises ValueError for a split without tokens, and for one shorter than a sample when `num_samples` is None;
    with a number asked for, such a corpus is repeated and a warning names the number of epochs.
    """

    def __init__(
        self,
        source: IndexedDataset,
        *,
        seq_len: int,
        seed: int,
        num_samples: int | None = None,
        sequences: tuple[int, int] | None = None,
        split_name: str = "train",
        extra_token: bool = True,
        keep_partial: bool = False,
        float32_counts: bool = False,
        boundaries: Literal["index", "eod"] = "index",
        eod: int | None = None,
        eod_mask_loss: bool = False,
        reset_attention: bool = False,
        reset_positions: bool = False,
        vocab_size: int | None = None,
        cache_dir: Path | None = None,
    ):
        if seq_len < 1:
            raise ValueError(f"data.seq_len={seq_len} must be at least 1")
        if not 0 <= seed < 2**32:
            raise ValueError(f"seed {seed} must be between 0 and {2**32 - 1}")
        rules = DocumentRules(
            boundaries=boundaries,
            eod=eod,
            eod_mask_loss=eod_mask_loss,
            reset_attention=reset_attention,
            reset_positions=reset_positions,
        )
        super().__init__(source, seq_len=seq_len, rules=rules, extra=int(extra_token), vocab_size=vocab_size)
        self.split_name = split_name
        self.first, self.last = sequences if sequences is not None else (0, len(source))
        lengths = source.lengths[self.first : self.last]
        tokens = int(lengths.sum(dtype=np.int64))
        if tokens == 0:
            raise ValueError(
                f"the {split_name} split of {source.prefix} has {len(lengths)} of {len(source)} sequences and"
                f" no tokens, but {'one epoch' if num_samples is None else f'{num_samples} samples'} of {seq_len}"
                " tokens are asked of it; change data.split"
            )
        self.plan = plan_index(
            tokens,
            seq_len=seq_len,
            num_samples=num_samples,
            extra=int(extra_token),
            keep_partial=keep_partial,
            float32_counts=float32_counts,
        )
        self._check_size(num_samples)
        self.documents, self.samples, self.shuffle = self._index(lengths, seed, cache_dir)

    @property
    def tokens_per_epoch(self) -> int:
        """Tokens of the split."""
        return self.plan.tokens_per_epoch

    @property
    def num_epochs(self) -> int:
        """How often the split is read."""
        return self.plan.num_epochs

    def _check_size(self, num_samples: int | None) -> None:
        need = self.seq_len + self.plan.extra
        have = self.plan.tokens_per_epoch
        if have >= need or self.plan.num_samples == 0 == num_samples:
            return
        name = f"the {self.split_name} split of {self.source.prefix}"
        if num_samples is None and self.plan.num_samples == 0:
            raise ValueError(
                f"{name} has {have} tokens, a sample needs {need}; use more text, a shorter data.seq_len,"
                " or ask for a number of samples to repeat it"
            )
        if num_samples:
            log.warning(
                "%s has %d tokens, less than one sample of %d: it is repeated for %d epochs",
                name, have, need, self.plan.num_epochs,
            )  # fmt: skip

    def _index(
        self, lengths: NDArray[np.int32], seed: int, cache_dir: Path | None
    ) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
        plan: IndexPlan = self.plan
        shapes: dict[str, tuple[int, ...]] = {
            "documents": (plan.num_epochs * len(lengths),),
            "samples": (plan.num_samples + 1, 2),
            "shuffle": (plan.num_samples,),
        }
        key = ""
        if cache_dir is not None:
            settings = {"version": INDEX_VERSION, "seq_len": self.seq_len, "seed": seed, "first": self.first}
            key = "gpt-" + key_of(settings | vars(plan), lengths)
        arrays = cached_arrays(
            cache_dir, key, shapes, lambda: build_index(plan, lengths, self.first, seq_len=self.seq_len, seed=seed),
            what=f"the order of {plan.num_samples} samples of {self.source.prefix}",
            seconds=1.5e-7 * (plan.num_epochs * len(lengths) + plan.num_samples),
        )  # fmt: skip
        return arrays["documents"], arrays["samples"], arrays["shuffle"]

    def __len__(self) -> int:
        return self.plan.num_samples

    def pieces(self, i: int) -> Iterator[Piece]:
        """The run of sequences that sample i reads; IndexError beyond the last sample."""
        if not 0 <= i < self.plan.num_samples:
            raise IndexError(f"sample {i} of {self.plan.num_samples} in the {self.split_name} split")
        j = int(self.shuffle[i])
        (first, begin), (last, end) = self.samples[j : j + 2].tolist()
        for place, sequence in enumerate(self.documents[first : last + 1].tolist(), start=first):
            stop = int(self.source.lengths[sequence]) if place < last else end + self.extra
            yield Piece(sequence, begin, stop - begin)
            begin = 0

    @property
    def report(self) -> str:
        """How documents fill the samples, for people."""
        spans = self.samples[1:, 0].astype(np.int64) - self.samples[:-1, 0] + 1
        each = float(spans.mean()) if len(spans) else 0.0
        return f"{len(self)} rows of {self.seq_len} tokens, end to end: {each:.1f} documents a row, no padding"
