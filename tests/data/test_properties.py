"""What must hold for all data, layouts and places to resume: nothing is lost, repeated or moved."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.data.batch_sizes import BatchSizes
from megalite.data.blended import SURPLUS, blend_order, blend_targets, normalise_weights, phased_order
from megalite.data.gpt_dataset import GPTDataset
from megalite.data.gpt_index import build_index, plan_index
from megalite.data.indexed import IndexedDataset, IndexedWriter, running_offsets
from megalite.data.packed_dataset import PackedDataset
from megalite.data.rows import Sample
from megalite.data.sampler import GlobalBatches

LENGTHS = st.lists(st.integers(0, 30), min_size=1, max_size=25).filter(any)
SETTINGS = settings(max_examples=40, deadline=None, derandomize=True)


def write(folder: str, lengths: list[int]) -> IndexedDataset:
    """Documents whose tokens are all different: 100 x document + place."""
    with IndexedWriter(Path(folder) / "x", dtype="int32") as writer:
        for number, length in enumerate(lengths):
            writer.add_document(100 * number + np.arange(length), [length])
    return IndexedDataset(Path(folder) / "x")


@SETTINGS
@given(LENGTHS, st.integers(1, 12), st.integers(0, 200), st.integers(0, 5), st.sampled_from([0, 1]))
def test_each_document_stands_in_every_epoch_and_tokens_are_their_concatenation(
    lengths: list[int], seq_len: int, wanted: int, seed: int, extra: int
) -> None:
    sizes = np.array(lengths, dtype=np.int32)
    plan = plan_index(int(sizes.sum()), seq_len=seq_len, num_samples=wanted, extra=extra)
    index = build_index(plan, sizes, 0, seq_len=seq_len, seed=seed)
    documents = index["documents"].tolist()
    assert Counter(documents) == dict.fromkeys(range(len(lengths)), plan.num_epochs)
    assert sorted(index["shuffle"].tolist()) == list(range(plan.num_samples)) and plan.num_samples >= wanted
    stream = [(d, place) for d in documents for place in range(lengths[d])]
    starts = np.cumsum([0, *(lengths[d] for d in documents)])
    flat = [int(starts[place] + offset) for place, offset in index["samples"].tolist()]
    assert flat == [k * seq_len for k in range(plan.num_samples + 1)]
    assert 0 <= len(stream) - extra - plan.num_samples * seq_len < seq_len, "less than a sample is left over"


@SETTINGS
@given(LENGTHS, st.integers(1, 12), st.integers(0, 3))
def test_the_samples_of_an_epoch_are_the_text(lengths: list[int], seq_len: int, seed: int) -> None:
    with TemporaryDirectory() as folder:
        source = write(folder, lengths)
        if source.num_tokens <= seq_len:
            return
        data = GPTDataset(source, seq_len=seq_len, seed=seed)
        rows = {int(data.shuffle[i]): data[i] for i in range(len(data))}
    text = np.concatenate([source[d] for d in data.documents.tolist()]).tolist()
    tokens = [t for k in range(len(data)) for t in rows[k].tokens.tolist()]
    labels = [t for k in range(len(data)) for t in rows[k].labels.tolist()]
    assert tokens == text[: len(tokens)] and labels == text[1 : len(labels) + 1]
    assert len(text) - 1 - len(tokens) < seq_len


@SETTINGS
@given(LENGTHS, st.integers(2, 12), st.integers(0, 3))
def test_packing_keeps_every_token(lengths: list[int], seq_len: int, seed: int) -> None:
    with TemporaryDirectory() as folder:
        data = PackedDataset(write(folder, lengths), pack="best_fit", seq_len=seq_len, seed=seed)
        rows = [data[i] for i in range(len(data))]
    seen: list[int] = []
    for row in rows:
        seen += (row.tokens if row.token_mask is None else row.tokens[row.token_mask]).tolist()
    assert sorted(seen) == [100 * d + place for d, length in enumerate(lengths) for place in range(length)]


class Numbers:
    """A dataset whose sample i holds the number i."""

    def __init__(self, size: int):
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, i: int) -> Sample:
        row = np.full(1, i, dtype=np.int64)
        return Sample(row, row, np.ones(1, dtype=np.float32), row)


def samples_of(step: int, *, dp: int, micro: int, ramp: tuple[int, int, int] | None) -> list[int]:
    """The samples of a step, micro-batch by micro-batch over the ranks."""
    ranks = [
        GlobalBatches(
            dataset=Numbers(10_000), global_batch_size=24, micro_batch_size=micro, dp_rank=r, dp_size=dp, ramp=ramp
        )
        for r in range(dp)
    ]
    numbers = [rank.sample_numbers(step) for rank in ranks]
    assert len({n.shape for n in numbers}) == 1, "as many micro-batches on every rank, none empty"
    return [int(n) for j in range(len(numbers[0])) for rank in numbers for n in rank[j]]


LAYOUTS = st.sampled_from(
    [(dp, micro) for dp in (1, 2, 3, 4, 6, 12) for micro in (1, 2, 3, 4, 6, 12) if 12 % (dp * micro) == 0]
)


@SETTINGS
@given(st.lists(LAYOUTS, min_size=1, max_size=5), st.integers(0, 4), st.sampled_from([None, (12, 12, 50)]))
def test_any_layout_and_any_place_to_resume_sees_the_same_samples(
    sessions: list[tuple[int, int]], steps: int, ramp: tuple[int, int, int] | None
) -> None:
    """Each session goes on where the one before stopped, on other ranks: B84 and the rest of resume (data order)."""
    seen: list[int] = []
    for number, (dp, micro) in enumerate(sessions):
        for step in range(number * steps, (number + 1) * steps):
            seen += samples_of(step, dp=dp, micro=micro, ramp=ramp)
    assert seen == list(range(BatchSizes(final=24, ramp=ramp).before(len(sessions) * steps)))


WEIGHTS = st.lists(st.floats(0.0005, 1.0), min_size=1, max_size=6)


@SETTINGS
@given(WEIGHTS, st.integers(1, 400))
def test_a_blend_asks_for_no_sample_that_is_not_there(weights: list[float], size: int) -> None:
    """B93: counts of each dataset never pass what was built for it, and shares hold in every prefix."""
    shares = normalise_weights(weights)
    datasets, samples = blend_order(shares, size)
    requests = blend_targets(shares, size, SURPLUS)
    for i, share in enumerate(shares):
        taken = np.cumsum(datasets == i)
        assert samples[datasets == i].tolist() == list(range(int(taken[-1]))) and taken[-1] <= requests[i]
        assert np.all(np.abs(taken - share * np.arange(1, size + 1)) <= max(2, len(shares)))


@SETTINGS
@given(st.lists(st.tuples(st.integers(1, 40), WEIGHTS), max_size=3), WEIGHTS, st.integers(1, 200))
def test_changes_of_a_blend_move_nothing_before_them(
    changes: list[tuple[int, list[float]]], weights: list[float], size: int
) -> None:
    first, phases = 0, [(0, normalise_weights(weights))]
    for length, later in changes:
        first += length
        padded = (later + [0.0] * 6)[: len(weights)]
        phases.append((first, normalise_weights(padded)))
    whole, samples = phased_order(phases, size)
    assert len(whole) == size
    for i in range(len(weights)):
        assert samples[whole == i].tolist() == list(range(int((whole == i).sum()))), "none twice, none left out"
    for count in range(1, len(phases)):
        shorter, _ = phased_order(phases[:count], size)
        until = phases[count][0]
        assert whole[:until].tolist() == shorter[:until].tolist()


def test_offsets_beyond_32_bits() -> None:
    """B90: byte offsets of lengths [2^29, 2^29, 5] in 4-byte tokens, and a sample index over more than 2^31 tokens."""
    assert running_offsets(np.array([2**29, 2**29, 5], dtype=np.int32), 4).tolist() == [0, 2**31, 2**32]
    lengths = np.full(3, 2**30, dtype=np.int32)
    index = build_index(plan_index(3 * 2**30, seq_len=2**29, num_samples=None), lengths, 0, seq_len=2**29, seed=0)
    assert (index["samples"][:, 0].astype(np.int64) * 2**30 + index["samples"][:, 1]).tolist() == [
        k * 2**29 for k in range(6)
    ]


def test_an_epoch_that_is_resumed_in_its_middle_has_no_sample_twice() -> None:
    """B96, B97: the order of all epochs is one array, so a resume at any step gives what the whole run gives."""
    with TemporaryDirectory() as folder:
        source = write(folder, [10] * 10)

        def ids(first: int, last: int) -> list[int]:
            data = PackedDataset(source, pack="none", seq_len=10, seed=3, num_samples=30)
            batches = GlobalBatches(dataset=data, global_batch_size=2, micro_batch_size=1)
            loaded = [m for step in range(first, last) for m in batches.microbatches(step)]
            return [int(m.tokens[0, 0]) // 100 for m in loaded]

        whole = ids(0, 15)
        assert Counter(whole) == dict.fromkeys(range(10), 3)
        for stop in range(16):
            assert ids(0, stop) + ids(stop, 15) == whole
