"""How rows are padded and cut: every token once, as much attention for every rank, and whole rows where needed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megalite.axis import Axis
from megalite.batch import MicroBatch
from megalite.mpu import ParallelConfig, ParallelState
from megalite.parallel.context import cut_rows, pad_rows, row_multiple, row_places
from megalite.parallel.context_balance import deal_row, imbalance, zigzag
from megalite.parallel.context_plan import Needs, Sight, gather_plan, ring_plan
from megalite.testing.world import World
from tests.parallel.dense_attention import causal_mask, starts_of


def batch_of(seq_len: int, rows: int = 2, documents: Tensor | None = None) -> MicroBatch:
    place = torch.arange(seq_len)[:, None].expand(-1, rows).contiguous()
    starts = torch.zeros_like(place) if documents is None else documents
    return MicroBatch(
        tokens=place + 100, labels=place + 101, loss_mask=torch.ones(seq_len, rows), positions=place - starts,
        samples=torch.arange(rows), step=0, documents=documents,
    )  # fmt: skip


def lengths_of(total: int, seed: int, longest: int) -> list[int]:
    """Documents of random lengths, short ones more often, that fill a row."""
    generator = torch.Generator().manual_seed(seed)
    lengths: list[int] = []
    while sum(lengths) < total:
        size = int(longest ** float(torch.rand(1, generator=generator)))
        lengths.append(min(size, total - sum(lengths)))
    return lengths


@pytest.mark.parametrize("seq_len", range(9, 18))
@pytest.mark.parametrize(("cp", "tp"), [(2, 1), (4, 1), (2, 2)])
def test_any_length_is_padded_to_equal_parts(seq_len: int, cp: int, tp: int) -> None:
    rows = pad_rows(batch_of(seq_len), row_multiple(cp, tp, tp > 1))
    assert rows.seq_len % (2 * cp * tp) == 0 and rows.seq_len - seq_len < 2 * cp * tp
    assert rows.row_length == seq_len
    if rows.seq_len == seq_len:
        assert rows.token_mask is None and rows.documents is None
        return
    assert rows.token_mask is not None and rows.documents is not None
    assert rows.token_mask.sum() == 2 * seq_len and not rows.token_mask[seq_len:].any()
    assert not rows.loss_mask[seq_len:].any()
    assert (rows.documents[seq_len:] == seq_len).all() and not rows.documents[:seq_len].any()
    assert row_places(rows, cp).shape == (cp, rows.seq_len // cp, 2)


def test_rows_that_were_not_padded_are_refused() -> None:
    with pytest.raises(ValueError, match=r"rows of 10 tokens cannot be cut into 2 \* cp = 4 chunks"):
        row_places(batch_of(10), 2)


@pytest.mark.parametrize("documents", [None, starts_of([1, 2, 7, 22], [31, 1])])
def test_everything_that_a_token_has_goes_with_it(documents: Tensor | None) -> None:
    rows, cp = batch_of(32, documents=documents), 4
    seen = []
    for rank in range(cp):
        batch, cut = cut_rows(rows, _axis(cp, rank))
        assert batch.places is not None and torch.equal(batch.places, cut.mine)
        assert torch.equal(batch.tokens, batch.places + 100) and torch.equal(batch.labels, batch.places + 101)
        if documents is not None:
            assert batch.documents is not None
            assert torch.equal(batch.positions, batch.places - documents.gather(0, batch.places))
        assert torch.equal(batch.token_index, rows.samples * 32 + batch.places)
        assert (batch.places[1:] > batch.places[:-1]).all()
        seen.append(batch.places)
    assert torch.equal(torch.cat(seen).sort(0).values, torch.arange(32)[:, None].expand(-1, 2))


def _axis(size: int, rank: int) -> Axis:
    """An axis that says where a rank stands, without a group to talk to."""
    axis = Axis("cp")
    axis.size, axis.rank = size, rank
    return axis


def whole_again(mpu: ParallelState, rows: MicroBatch) -> list[Tensor]:
    batch, cut = cut_rows(rows, mpu.cp)
    x = torch.stack((batch.tokens, batch.positions), -1)
    return [cut.whole(batch.tokens), cut.whole(x), cut.here(cut.whole(x)) - x]


def test_whole_rows_where_they_are_needed(world: World) -> None:
    rows = batch_of(32, documents=starts_of([1, 2, 7, 22], [31, 1]))
    for tokens, both, difference in world.run(whole_again, rows, layout=ParallelConfig(cp=4)):
        assert torch.equal(tokens, rows.tokens)
        assert torch.equal(both, torch.stack((rows.tokens, rows.positions), -1))
        assert not difference.any()


@pytest.mark.parametrize("cp", [2, 4, 8, 64])
def test_one_document_is_even(cp: int) -> None:
    sight = Sight.causal(zigzag(4096, cp)[..., None])
    assert sight.num_pairs.sum() == 4096 * 4097 // 2
    assert imbalance(sight.num_pairs) < 1e-9
    padded = pad_rows(batch_of(4095 - cp), 2 * cp)
    assert imbalance(Sight.causal(row_places(padded, cp), padded.documents).num_pairs) < 0.02


@pytest.mark.parametrize("cp", [2, 4, 8])
@pytest.mark.parametrize("window", [0, 300])
@pytest.mark.parametrize("longest", [60, 1000, 4096])
def test_packed_rows_are_even(longest: int, window: int, cp: int) -> None:
    for seed in range(8):
        starts = starts_of(lengths_of(4096, seed, longest))
        places = deal_row(starts[:, 0], cp, window)
        work = Sight.causal(places[..., None], starts, window).num_pairs
        assert imbalance(work) <= 0.1, (seed, work)
        assert torch.equal(places.flatten().sort().values, torch.arange(4096))


@pytest.mark.parametrize("seq_len", [8168, 8140, 6008 * 2, 8 * 1021])
def test_lengths_with_large_prime_factors_are_even(seq_len: int) -> None:
    starts = starts_of([5000, 200, 1000, 64, seq_len - 6264])
    places = deal_row(starts[:, 0], 2)
    assert places.shape == (2, seq_len // 2)
    assert imbalance(Sight.causal(places[..., None], starts).num_pairs) <= 0.1


@pytest.mark.parametrize("cp", [2, 4, 8])
@pytest.mark.parametrize("window", [16, 500, 2048, 9000])
def test_one_document_under_a_window_is_even(window: int, cp: int) -> None:
    places = row_places(batch_of(8192, rows=1), cp, window)
    sight = Sight.causal(places, None, window)
    assert imbalance(sight.num_pairs) <= 0.02
    sent = sum(ring_plan(sight, rank).tokens_sent for rank in range(cp))
    # the first `window` tokens to all ranks, and what each rank holds last to the next one
    assert sent <= min(2 * (cp - 1) * window, (cp - 1) * 8192 * 3 // 4)


def test_a_document_beside_many_short_ones() -> None:
    lengths = [1, 2, 7, 64, 3000, *[1] * 512, 510]
    starts = starts_of(lengths)
    uncut = Sight.causal(zigzag(4096, 4)[..., None], starts)
    dealt = Sight.causal(deal_row(starts[:, 0], 4)[..., None], starts)
    assert imbalance(dealt.num_pairs) < 0.05 < imbalance(uncut.num_pairs)


def test_short_documents_stay_where_they_are() -> None:
    starts = starts_of([64] * 64)
    places = deal_row(starts[:, 0], 4)
    assert torch.equal(places, torch.arange(4096).view(4, 1024))
    assert not any(ring_plan(Sight.causal(places[..., None], starts), rank).tokens_sent for rank in range(4))


def test_each_row_of_a_batch_has_its_own_cut() -> None:
    rows = batch_of(64, documents=starts_of([64], [8] * 8))
    places = row_places(rows, 2)
    assert torch.equal(places[..., 0], zigzag(64, 2))
    assert torch.equal(places[..., 1], torch.arange(64).view(2, 32))
    assert torch.equal(row_places(replace(rows, documents=None), 2)[..., 1], zigzag(64, 2))


ROWS = st.lists(st.integers(1, 9), min_size=1, max_size=8).map(lambda sizes: [*sizes, -sum(sizes) % 16 + 16])


@given(ROWS, st.sampled_from([2, 4, 8]), st.sampled_from([0, 1, 3, 10]))
@settings(max_examples=60, deadline=None)
def test_what_is_needed_is_what_the_mask_allows(lengths: list[int], cp: int, window: int) -> None:
    starts = starts_of(lengths)
    allowed = causal_mask(starts, window)[..., 0]
    places = deal_row(starts[:, 0], cp, window)
    sight = Sight.causal(places[..., None], starts, window)
    needs = Needs(sight)
    for rank in range(cp):
        rows = allowed[places[rank]]
        assert sight.num_pairs[rank] == rows.sum()
        assert torch.equal(sight.seen_by(rank)[:, 0], rows.any(0))
        for owner in range(cp):
            here = rows[:, places[owner]]
            assert torch.equal(needs.of(rank, owner), here.any(0).nonzero().flatten())
            mine = torch.zeros(len(starts), 1, dtype=torch.bool)
            mine[places[owner]] = True
            active = here.any(1).nonzero().flatten()
            expected = slice(int(active[0]), int(active[-1]) + 1) if len(active) else slice(0, 0)
            assert sight.queries(rank, mine) == expected


@given(ROWS, st.sampled_from([2, 4, 8]), st.sampled_from([0, 2, 10]))
@settings(max_examples=60, deadline=None)
def test_every_message_is_awaited(lengths: list[int], cp: int, window: int) -> None:
    starts = starts_of(lengths)
    sight = Sight.causal(deal_row(starts[:, 0], cp, window)[..., None], starts, window)
    needs = Needs(sight)
    plans = [ring_plan(sight, rank, needs) for rank in range(cp)]
    for number in range(cp + 1):
        for sends, receives in (("sends", "receives"), ("grad_sends", "grad_receives")):
            sent = [(r, m.peer, m.owner, m.count) for r in range(cp) for m in getattr(plans[r].steps[number], sends)]
            due = [(m.peer, r, m.owner, m.count) for r in range(cp) for m in getattr(plans[r].steps[number], receives)]
            assert sorted(sent) == sorted(due)
            for pair in {(a, b) for a, b, *_ in sent}:  # one order at both ends
                assert [s for s in sent if s[:2] == pair] == [d for d in due if d[:2] == pair]
    gathers = [gather_plan(sight, rank, needs) for rank in range(cp)]
    for rank in range(cp):
        assert [gathers[rank].send_rows[o] for o in range(cp)] == [gathers[o].receive_rows[rank] for o in range(cp)]
    least = sum(len(needs.of(r, o)) for r in range(cp) for o in range(cp) if r != o)
    for kind in (plans, gathers):  # each key once to each rank that sees it, each gradient once on
        assert sum(plan.tokens_sent for plan in kind) == sum(plan.grad_tokens_sent for plan in kind) == least
