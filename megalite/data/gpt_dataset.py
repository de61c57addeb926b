"""Fixed-length samples for language modelling, cut from the documents of an indexed file."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from megalite.data.cache import cached_arrays, key_of
from megalite.data.gpt_index import IndexPlan, build_index, plan_index
from megalite.data.indexed import FormatError, IndexedDataset

INDEX_VERSION = 1
log = logging.getLogger(__name__)


class Sample(NamedTuple):
    """One row: tokens, labels, positions int64 [seq_len], loss_mask float32 [seq_len] (1 where the label counts).

    token_mask: bool [seq_len], False on padding (None: there is none). documents: int64 [seq_len], the place at which
    the document of each token begins (None: attention does not stop at documents). `loss_mask` and `positions` may
    be shared between samples and read-only; copy them before a change.
    """

    tokens: NDArray[np.int64]
    labels: NDArray[np.int64]
    loss_mask: NDArray[np.float32]
    positions: NDArray[np.int64]
    token_mask: NDArray[np.bool_] | None = None
    documents: NDArray[np.int64] | None = None


class SampleSource(Protocol):
    """Anything that a sampler can draw rows from."""

    def __len__(self) -> int: ...

    def __getitem__(self, i: int, /) -> Sample: ...


class GPTDataset:
    """Samples of `seq_len` tokens with their shifted labels, in Megatron-core's order for the same settings.

    The sequences `sequences[0]` to `sequences[1] - 1` of `source` (default: all) are shuffled, laid end to end for as
    many epochs as `num_samples` needs (None: one), cut every `seq_len` tokens, and the samples shuffled again;
    all from RandomState(seed). `len(dataset)` counts whole epochs, so it can exceed `num_samples`.

    Padding (only in a partial last sample, see `keep_partial`) is masked by place, never by value. `eod_mask_loss`
    leaves out the prediction that follows an `eod` input. `extra_token=False` is Megatron's
    add_extra_token_to_sequence off: labels come from inside the sample and its last one is masked. With
    `vocab_size` each row read is checked (FormatError).

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
        eod: int | None = None,
        eod_mask_loss: bool = False,
        vocab_size: int | None = None,
        cache_dir: Path | None = None,
    ):
        if seq_len < 1:
            raise ValueError(f"data.seq_len={seq_len} must be at least 1")
        if not 0 <= seed < 2**32:
            raise ValueError(f"seed {seed} must be between 0 and {2**32 - 1}")
        if eod_mask_loss and eod is None:
            raise ValueError("eod_mask_loss needs the id that ends a document; name the tokenizer")
        self.source, self.seq_len, self.split_name = source, seq_len, split_name
        self.first, self.last = sequences if sequences is not None else (0, len(source))
        self._vocab_size = vocab_size
        self._masked_eod = eod if eod_mask_loss else None
        lengths = source.lengths[self.first : self.last]
        tokens = int(lengths.sum(dtype=np.int64))
        if tokens == 0:
            raise ValueError(
                f"the {split_name} split of {source.prefix} has {len(lengths)} of {len(source)} sequences and"
                f" no tokens, but {'one epoch' if num_samples is None else f'{num_samples} samples'} of {seq_len}"
                " tokens are asked of it; change data.split"
            )
        self.plan = plan_index(
            tokens, seq_len=seq_len, num_samples=num_samples, extra=int(extra_token), keep_partial=keep_partial
        )
        self._check_size(num_samples)
        self.documents, self.samples, self.shuffle = self._index(lengths, seed, cache_dir)
        self._positions = _frozen(np.arange(seq_len, dtype=np.int64))
        self._full_mask = _frozen(np.ones(seq_len, dtype=np.float32))

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
            cache_dir, key, shapes, lambda: build_index(plan, lengths, self.first, seq_len=self.seq_len, seed=seed)
        )
        return arrays["documents"], arrays["samples"], arrays["shuffle"]

    def __len__(self) -> int:
        return self.plan.num_samples

    def __getitem__(self, i: int) -> Sample:
        if not 0 <= i < self.plan.num_samples:
            raise IndexError(f"sample {i} of {self.plan.num_samples} in the {self.split_name} split")
        row, count = self.read(i)
        size = self.seq_len
        if self.plan.extra:
            tokens, labels = row[:size], row[1:]
        else:
            tokens, labels = row, np.append(row[1:], 0)
        return Sample(tokens, labels, self._mask(tokens, count), self._positions)

    def read(self, i: int) -> tuple[NDArray[np.int64], int]:
        """The int64 tokens of sample i, [seq_len + extra token], zero-padded, and how many of them are real."""
        j = int(self.shuffle[i])
        (first, begin), (last, end) = self.samples[j : j + 2].tolist()
        extra = self.plan.extra
        row = np.zeros(self.seq_len + extra, dtype=np.int64)
        count = 0
        for place, document in enumerate(self.documents[first : last + 1].tolist(), start=first):
            length = None if place < last else end + extra - begin
            part = self.source.get(document, begin, length)
            row[count : count + len(part)] = part
            count += len(part)
            begin = 0
        # Seen as unsigned, a negative id is large too.
        if self._vocab_size is not None and int(row.view(np.uint64).max()) >= self._vocab_size:
            raise FormatError(
                f"{self.source.prefix} has token id {row[row.view(np.uint64).argmax()]} in sample {i}, but the"
                f" vocabulary has {self._vocab_size} entries; is it the right tokenizer?"
            )
        return row, count

    def _mask(self, tokens: NDArray[np.int64], count: int) -> NDArray[np.float32]:
        real = count - 1  # the label of the last real token is unknown
        if real >= self.seq_len and self._masked_eod is None:
            return self._full_mask
        mask = self._full_mask.copy()
        mask[real:] = 0.0
        if self._masked_eod is not None:
            mask[tokens == self._masked_eod] = 0.0
        return mask


def _frozen(values: NDArray[Any]) -> NDArray[Any]:
    values.flags.writeable = False
    return values
