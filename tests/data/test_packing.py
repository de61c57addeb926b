"""Packing: rows are those of plain best fit; every token is there once, and every label that should count."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from megalite.data.indexed import IndexedDataset, IndexedWriter
from megalite.data.packed_dataset import PackedDataset
from megalite.data.packing import best_fit_rows, cut_documents, draw_order, pack_best_fit
from megalite.data.rows import DocumentRules

EOD = 999


def plain_best_fit(lengths: np.ndarray, seq_len: int) -> list[int]:
    """The definition, a document at a time."""
    rooms: list[int] = []
    rows = [0] * len(lengths)
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        fitting = [row for row, room in enumerate(rooms) if room >= lengths[i]]
        if not fitting:
            fitting = [len(rooms)]
            rooms.append(seq_len)
        rows[i] = min(fitting, key=lambda row: (rooms[row], row))
        rooms[rows[i]] -= int(lengths[i])
    return rows


@pytest.mark.parametrize("seed", range(12))
def test_best_fit_places_each_document_as_the_definition_does(seed: int) -> None:
    random = np.random.RandomState(seed)
    seq_len = int(random.choice([1, 5, 16, 33]))
    lengths = random.randint(1, seq_len + 1, random.randint(1, 120)).astype(np.int64)
    assert best_fit_rows(lengths, seq_len).tolist() == plain_best_fit(lengths, seq_len)


@pytest.mark.parametrize(("seed", "window"), list(itertools.product(range(4), (1, 7, 1000))))
def test_rows_hold_every_token_once(seed: int, window: int) -> None:
    random = np.random.RandomState(seed)
    lengths = random.randint(0, 70, 50).astype(np.int32)
    pieces, bounds = pack_best_fit(cut_documents(lengths, 5, 16), 16, seed=seed, window=window)
    assert bounds[0] == 0 and bounds[-1] == len(pieces) and (np.diff(bounds) > 0).all()
    assert np.add.reduceat(pieces["length"], bounds[:-1]).max() <= 16
    seen = sorted((int(s), int(b), int(n)) for s, b, n in pieces)
    wanted = [(5 + k, b, min(16, n - b)) for k, n in enumerate(lengths.tolist()) for b in range(0, n, 16)]
    assert seen == wanted
    again, _ = pack_best_fit(cut_documents(lengths, 5, 16), 16, seed=seed, window=window)
    assert (again == pieces).all()


def test_packing_leaves_almost_no_padding() -> None:
    lengths = np.clip(np.random.RandomState(0).lognormal(5.5, 1.0, 200_000), 1, 1e6).astype(np.int32)
    pieces = cut_documents(lengths, 0, 2048)
    _, bounds = pack_best_fit(pieces, 2048, seed=0)
    assert lengths.sum() / ((len(bounds) - 1) * 2048) > 0.9995


@pytest.mark.parametrize(("wanted", "epochs", "apart"), [(None, 1, 0), (10, 1, 0), (25, 3, 20), (29, 3, 0), (30, 3, 0)])
def test_epochs_are_drawn_together_but_for_a_short_last_one(wanted: int | None, epochs: int, apart: int) -> None:
    order = draw_order(10, wanted, seed=3)
    assert sorted(order.tolist()) == sorted(list(range(10)) * epochs)
    assert order.tolist() != sorted(order.tolist()) and draw_order(10, wanted, seed=4).tolist() != order.tolist()
    if apart:
        assert sorted(order[apart:].tolist()) == list(range(10)) and len(set(order[:10].tolist())) < 10
    elif epochs > 1:
        assert len(set(order[-10:].tolist())) < 10


def written(path: Path, lengths: list[int]) -> IndexedDataset:
    """Documents whose tokens say where they are, 100 x document + place, and that end in EOD."""
    with IndexedWriter(path, dtype="uint16") as writer:
        for number, length in enumerate(lengths):
            writer.add_document([*(100 * number + place for place in range(length - 1)), EOD][:length])
    return IndexedDataset(path)


def dataset(path: Path, pack: Literal["best_fit", "none"], **rules: Any) -> PackedDataset:
    source = written(path / "x", [4, 9, 1, 0, 3, 22, 8, 2, 5])
    return PackedDataset(source, pack=pack, seq_len=8, seed=1, rules=DocumentRules(eod=EOD, **rules))


@pytest.mark.parametrize(
    "rules", [{}, {"reset_attention": True}, {"reset_positions": True, "eod_mask_loss": True}], ids=str
)
def test_labels_of_packed_documents(tmp_path: Path, rules: dict[str, bool]) -> None:
    data = dataset(tmp_path, "best_fit", **rules)
    text = [t for k in range(len(data.source)) for t in data.source.get(k).tolist()]
    tokens: list[int] = []
    counted = 0
    for i in range(len(data)):
        row = data[i]
        real = row.token_mask if row.token_mask is not None else np.ones(8, dtype=bool)
        size = int(real.sum())
        assert real.tolist() == [place < size for place in range(8)] and not row.tokens[size:].any()
        tokens += row.tokens[:size].tolist()
        ends = [place for place in range(size) if row.tokens[place] == EOD]
        starts = [0, *(place + 1 for place in ends if place + 1 < 8)] + (
            [size] if size < 8 and size - 1 not in ends else []
        )
        documents = [max(start for start in starts if start <= place) for place in range(8)]
        if rules.get("reset_attention"):
            assert row.documents is not None and row.documents.tolist() == documents
        else:
            assert row.documents is None
        reset = [place - start for place, start in enumerate(documents)]
        assert row.positions.tolist() == (reset if rules.get("reset_positions") else list(range(8)))
        for place in range(8):
            if row.loss_mask[place]:
                assert row.labels[place] in (row.tokens[place] + 1, EOD, *row.tokens[[s for s in starts if s < size]])
                counted += 1
            else:
                last = place >= size - 1
                assert last or row.tokens[place] == EOD, f"the label at {place} of row {i} is lost"
    assert sorted(tokens) == sorted(text)
    inside = sum(max(n - 1, 0) for n in (4, 9, 1, 0, 3, 22, 8, 2, 5))
    across = sum(int(r.loss_mask[r.tokens == EOD].sum()) for r in (data[i] for i in range(len(data))))
    # No label inside a document is lost, not even where a document is cut.
    assert counted == inside + across and (across > 0) == (not rules.get("eod_mask_loss"))


def test_one_document_a_row_is_cut_with_its_label(tmp_path: Path) -> None:
    data = dataset(tmp_path, "none", reset_attention=True)
    rows = {int(row.tokens[0]): row for row in (data[i] for i in range(len(data)))}
    assert len(data) == len(rows) == 8
    long, short = rows[500], rows[400]
    assert long.tokens.tolist() == list(range(500, 508)) and long.labels.tolist() == list(range(501, 509))
    assert long.loss_mask.all() and long.token_mask is None and long.documents is not None and not long.documents.any()
    assert short.tokens.tolist() == [400, 401, EOD, 0, 0, 0, 0, 0] and short.labels[:2].tolist() == [401, EOD]
    assert short.loss_mask.tolist() == [1, 1, 0, 0, 0, 0, 0, 0]
    assert short.documents is not None and short.documents.tolist() == [0, 0, 0, 3, 3, 3, 3, 3]
    assert data.report == (
        "8 rows of 8 tokens, pack none: 1.0 documents a row, 39.1% padding, 27.8% of all tokens are beyond the row"
    )


def test_index_is_cached_and_rebuilt_when_damaged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = written(tmp_path / "x", [4, 9, 1, 3, 22, 8])

    def rows() -> list[list[int]]:
        data = PackedDataset(source, pack="best_fit", seq_len=8, seed=1, cache_dir=tmp_path / "cache")
        return [data[i].tokens.tolist() for i in range(len(data))]

    first = rows()
    files = sorted((tmp_path / "cache").iterdir())
    assert [file.name.split("-")[-1] for file in files] == ["pieces.npy", "rows.npy"] and rows() == first
    files[0].write_bytes(files[0].read_bytes()[:100])
    assert rows() == first and "damaged" in caplog.text


def test_errors(tmp_path: Path) -> None:
    source = written(tmp_path / "x", [3, 4])
    with pytest.raises(ValueError, match=r"the test split of .* has 0 of 2 sequences and no tokens"):
        PackedDataset(source, pack="none", seq_len=8, seed=1, sequences=(1, 1), split_name="test")
    with pytest.raises(IndexError, match="sample 1 of 1"):
        PackedDataset(source, pack="best_fit", seq_len=8, seed=1)[1]
    with pytest.raises(ValueError, match="name the tokenizer"):
        DocumentRules(eod_mask_loss=True)
