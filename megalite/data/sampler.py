"""Global batches: which samples a step consumes, and this rank's share of them as micro-batches."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megalite.batch import MicroBatch
from megalite.data.batch_sizes import BatchSizes, Ramp
from megalite.data.rows import Sample, SampleSource

FINGERPRINT_MODULUS = 1 << 48
"""Fingerprints are added modulo this, so that int64 sums over 32768 ranks and JSON readers stay exact."""


class LoaderError(RuntimeError):
    """A batch cannot be read, or does not come."""


@dataclass(frozen=True, kw_only=True)
class LocalBatch:
    """This data-parallel rank's part of one global batch."""

    microbatches: list[MicroBatch]
    """In the order in which they run."""
    num_valid_tokens: int
    """Labels that count, over these micro-batches."""
    num_tokens: int
    """Tokens that are not padding, over these micro-batches."""
    fingerprint: int
    """Sum of the hashes of these samples (content and absolute number) modulo FINGERPRINT_MODULUS."""

    def totals(self) -> Tensor:
        """int64 [3]: valid tokens, tokens and fingerprint, to be summed over the data-parallel ranks."""
        return torch.tensor([self.num_valid_tokens, self.num_tokens, self.fingerprint], dtype=torch.int64)


def fold_fingerprint(total: int) -> int:
    """The fingerprint of the global batch from the sum over data-parallel ranks; equal in every layout."""
    return total % FINGERPRINT_MODULUS


@dataclass(frozen=True, kw_only=True)
class GlobalBatches:
    """Cuts a dataset into global batches and takes one data-parallel rank's share of each.

    Step k consumes the samples from `consumed` on, by default those that follow on the ones of the steps before it:
    `global_batch_size` of them, or fewer while the `ramp` (BatchSizes) lasts. Micro-batch j of rank r holds the
    `micro_batch_size` samples at j x micro_batch_size x dp_size + r x micro_batch_size, so the global batch is the same
    whatever dp_size and micro_batch_size are. A pure function of the sample number: there is no state to save. Raises
    ValueError when the sizes do not divide.
    """

    dataset: SampleSource
    global_batch_size: int
    micro_batch_size: int
    dp_rank: int = 0
    dp_size: int = 1
    ramp: Ramp | None = None

    def __post_init__(self) -> None:
        if min(self.global_batch_size, self.micro_batch_size) < 1:
            raise ValueError(
                f"global_batch_size={self.global_batch_size} and micro_batch_size={self.micro_batch_size}"
                " must be at least 1"
            )
        assert 0 <= self.dp_rank < self.dp_size, f"rank {self.dp_rank} of {self.dp_size}"
        if problems := self.sizes.problems():
            raise ValueError(f"batch ramp {self.ramp}: {problems[0]}")
        for size in self.sizes.all:
            if size % self.rows_at_once:
                raise ValueError(self._does_not_divide(size))

    def _does_not_divide(self, size: int) -> str:
        good = [m for m in range(1, size + 1) if not any(n % (m * self.dp_size) for n in self.sizes.all)]
        fix = f"micro_batch_size can be {', '.join(map(str, good))}" if good else "no micro_batch_size fits this dp"
        name = "global_batch_size" if size == self.global_batch_size else "a batch of the ramp"
        return (
            f"{name}={size} is not divisible by micro_batch_size * dp ="
            f" {self.micro_batch_size} * {self.dp_size} = {self.rows_at_once}; {fix}"
        )

    @cached_property
    def sizes(self) -> BatchSizes:
        """Samples of every global batch."""
        return BatchSizes(final=self.global_batch_size, ramp=self.ramp)

    @property
    def rows_at_once(self) -> int:
        """Samples in micro-batch j of all data-parallel ranks together."""
        return self.micro_batch_size * self.dp_size

    @property
    def num_microbatches(self) -> int:
        """Micro-batches of one rank in a step, after the ramp if there is one."""
        return self.global_batch_size // self.rows_at_once

    def sample_numbers(self, step: int, consumed: int | None = None) -> NDArray[np.int64]:
        """int64 [micro-batches, micro_batch_size]: the absolute numbers of this rank's samples."""
        first = self.sizes.before(step) if consumed is None else consumed
        starts = np.arange(self.sizes.of(step) // self.rows_at_once, dtype=np.int64) * self.rows_at_once
        mine = self.dp_rank * self.micro_batch_size + np.arange(self.micro_batch_size, dtype=np.int64)
        return first + starts[:, None] + mine[None, :]

    def load(self, step: int, consumed: int | None = None) -> LocalBatch:
        """The micro-batches of a step, with what the ranks must add up before it.

        IndexError beyond the data, LoaderError when they cannot be read, FormatError for what is no data.
        """
        numbers = self.sample_numbers(step, consumed)
        end = int(numbers[0, 0]) - self.dp_rank * self.micro_batch_size + self.sizes.of(step)
        if end > len(self.dataset):
            raise IndexError(
                f"step {step} needs samples up to {end}, the dataset has {len(self.dataset)}; ask for more samples"
            )
        try:
            loaded = [self._microbatch(row, step, index) for index, row in enumerate(numbers)]
        except OSError as error:
            raise LoaderError(f"the batch of step {step + 1} could not be read: {error}") from error
        return LocalBatch(
            microbatches=[batch for batch, _ in loaded],
            num_valid_tokens=sum(_count(batch.loss_mask) for batch, _ in loaded),
            num_tokens=sum(_num_tokens(batch) for batch, _ in loaded),
            fingerprint=fold_fingerprint(sum(fingerprint for _, fingerprint in loaded)),
        )

    def microbatches(self, step: int, consumed: int | None = None) -> list[MicroBatch]:
        """The micro-batches of a step in the order in which they run."""
        return self.load(step, consumed).microbatches

    def _microbatch(self, numbers: NDArray[np.int64], step: int, index: int) -> tuple[MicroBatch, int]:
        samples = [self.dataset[i] for i in numbers.tolist()]
        batch = MicroBatch(
            tokens=_columns([s.tokens for s in samples]),
            labels=_columns([s.labels for s in samples]),
            loss_mask=_columns([s.loss_mask for s in samples]),
            positions=_columns([s.positions for s in samples]),
            samples=torch.from_numpy(numbers.copy()),
            step=step,
            token_mask=_token_mask(samples),
            documents=_documents(samples),
            index=index,
        )
        hashes = (sample_hash(number, sample) for number, sample in zip(numbers.tolist(), samples, strict=True))
        return batch, sum(hashes)


def _token_mask(samples: list[Sample]) -> Tensor | None:
    """[s, b], or None where no sample has padding."""
    masks = [s.token_mask for s in samples]
    if all(mask is None for mask in masks):
        return None
    whole = np.ones(len(samples[0].tokens), dtype=np.bool_)
    return _columns([whole if mask is None else mask for mask in masks])


def _documents(samples: list[Sample]) -> Tensor | None:
    """[s, b], or None where every row is one document."""
    starts = [s.documents for s in samples]
    if all(start is None for start in starts):
        return None
    one = np.zeros(len(samples[0].tokens), dtype=np.int64)
    return _columns([one if start is None else start for start in starts])


def _num_tokens(batch: MicroBatch) -> int:
    return batch.tokens.numel() if batch.token_mask is None else _count(batch.token_mask)


def _count(mask: Tensor) -> int:
    """Places that are not zero, counted by numpy: a thread that loads must not start a team of its own in torch."""
    return int(np.count_nonzero(mask.numpy()))


def _columns(rows: list[NDArray[np.int64]] | list[NDArray[np.float32]] | list[NDArray[np.bool_]]) -> Tensor:
    """Rows of s as a contiguous [s, b] tensor."""
    return torch.from_numpy(np.stack(rows, axis=1))


def sample_hash(number: int, sample: Sample) -> int:
    """A 48-bit hash of a sample's tokens and labels and of its absolute number in the run."""
    digest = hashlib.blake2b(number.to_bytes(8, "little"), digest_size=6)
    digest.update(np.ascontiguousarray(sample.tokens).data)
    digest.update(np.ascontiguousarray(sample.labels).data)
    return int.from_bytes(digest.digest(), "little")


class RaggedMasks:
    """A dataset with ragged masks: a tool for proofs that nothing depends on how valid tokens are spread.

    Each sample keeps the labels of a random run of random length, and one in eight keeps none at all; one in four ends
    in padding (which attention still sees, and routers do not). What is kept is a function of (seed, sample) alone.
    """

    def __init__(self, dataset: SampleSource, seed: int):
        self.dataset, self.seed = dataset, seed

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, i: int) -> Sample:
        sample = self.dataset[i]
        size = len(sample.loss_mask)
        digest = hashlib.blake2b(f"{self.seed} {i}".encode(), digest_size=32).digest()
        empty, begin, length, padding = (int.from_bytes(digest[k : k + 8], "little") for k in (0, 8, 16, 24))
        mask = np.zeros_like(sample.loss_mask)
        if empty % 8:
            kept = slice(begin := begin % size, begin + 1 + length % size)
            mask[kept] = sample.loss_mask[kept]
        tokens = None
        if padding % 4 == 0:
            tokens = np.arange(size) < size - padding // 4 % size
            mask[~tokens] = 0.0
        return sample._replace(loss_mask=mask, token_mask=tokens)


class PackedDocuments:
    """A dataset whose rows are cut into documents of odd lengths: a tool for proofs that attention stays inside them.

    The lengths of a row are drawn from `lengths` by (seed, sample) alone; the last document is cut where the row ends,
    and one row in eight is a single document. Positions restart, and the last label of a document, which is
    the next one's first token, does not count. Goes inside RaggedMasks.
    """

    def __init__(self, dataset: SampleSource, seed: int, lengths: Sequence[int] = (1, 2, 3, 7, 13, 64)):
        assert lengths and min(lengths) >= 1, f"lengths of documents: {lengths}"
        self.dataset, self.seed, self.lengths = dataset, seed, tuple(lengths)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, i: int) -> Sample:
        sample = self.dataset[i]
        starts = self._starts(i, len(sample.tokens))
        lengths = np.diff(starts, append=len(sample.tokens))
        documents = np.repeat(starts, lengths)
        mask = sample.loss_mask.copy()
        mask[starts[1:] - 1] = 0.0
        return sample._replace(
            documents=documents, positions=np.arange(len(documents), dtype=np.int64) - documents, loss_mask=mask
        )

    def _starts(self, i: int, size: int) -> NDArray[np.int64]:
        """Where the documents of row i begin."""
        digest = hashlib.blake2b(f"{self.seed} documents {i}".encode(), digest_size=8).digest()
        random = np.random.RandomState(np.frombuffer(digest, dtype=np.uint32))
        if random.randint(8) == 0:
            return np.zeros(1, dtype=np.int64)
        ends = np.cumsum(random.choice(self.lengths, size=size))
        return np.concatenate(([0], ends[ends < size])).astype(np.int64)
