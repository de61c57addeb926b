import hashlib
import logging
import multiprocessing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megalite.data.gpt_dataset import GPTDataset, Sample
from megalite.data.gpt_index import build_index, plan_index, split_ranges
from megalite.data.indexed import IndexedDataset, IndexedWriter
from tests.data.reference import EOD, GOLDEN, prefix, same_array, sha256_of_rows

PARTS = ("train", "valid", "test")
_DEFAULTS: dict[str, Any] = {"seq_len": 16, "seed": 1}


def _part(setting: dict[str, Any], name: str, **more: Any) -> GPTDataset:
    source = IndexedDataset(prefix(setting["prefix"]))
    k = PARTS.index(name)
    drop = setting.get("drop_last_partial_validation_sequence", True)
    return GPTDataset(
        source,
        seq_len=setting["sequence_length"],
        seed=setting["seed"],
        num_samples=setting.get("sizes", [None] * 3)[k],
        sequences=split_ranges(setting["split"], len(source))[k] or (0, 0),
        split_name=name,
        extra_token=setting.get("add_extra_token_to_sequence", True),
        keep_partial=name == "valid" and not drop,
        **more,
    )


@pytest.mark.parametrize("case", range(len(GOLDEN["gpt"])))
def test_index_and_samples_are_megatrons(case: int) -> None:
    setting, result = GOLDEN["gpt"][case]["setting"], GOLDEN["gpt"][case]["result"]
    if "error" in result:  # Megatron loops for ever on an empty split, or fails obscurely on one of a single token
        with pytest.raises(ValueError, match=r"the test split of .* has (0 of .* no tokens|1 tokens, .* needs 2)"):
            _part(setting, "test")
        return
    checked = 0
    for name in PARTS:
        expected = result.get(name)
        if not expected or not expected.get("len"):
            continue
        dataset = _part(setting, name)
        assert [dataset.first, dataset.last] == expected["indices"]
        assert (len(dataset), dataset.num_epochs, dataset.tokens_per_epoch) == tuple(
            expected[k] for k in ("len", "num_epochs", "tokens_per_epoch")
        )
        assert same_array(dataset.documents, expected["document_index"])
        assert same_array(dataset.samples, expected["sample_index"])
        assert same_array(dataset.shuffle, expected["shuffle_index"])
        rows = [dataset.read(i) for i in range(len(dataset))]
        for i, row in expected["samples"]["rows"].items():
            # Megatron pads with its pad id, -1; ours are zeros beyond the number of real tokens.
            assert rows[int(i)][0][: rows[int(i)][1]].tolist() == [t for t in row if t != -1]
        if all(count == len(row) for row, count in rows):
            assert sha256_of_rows([row for row, _ in rows]) == expected["samples"]["sha256_all_int64"]
        checked += 1
    if setting["prefix"] == "c_u16" and setting["sizes"][0] is None:
        with pytest.raises(ValueError, match="has 237 tokens, a sample needs 4097"):
            _part(setting, "train")
    else:
        assert checked


# A pad id that also occurs in the text makes Megatron rewrite the text: ours pads by place (tested below).
ITEMS = [item for item in GOLDEN["items"] if item["setting"].get("pad") == -1]


@pytest.mark.parametrize("case", range(len(ITEMS)))
def test_items_are_megatrons(case: int) -> None:
    setting, rows = ITEMS[case]["setting"], ITEMS[case]["result"]
    dataset = _part(
        setting,
        setting["which"],
        eod=EOD,
        eod_mask_loss=setting["eod_mask_loss"],
        boundaries="eod",
        reset_attention=setting["reset_attention_mask"],
        reset_positions=setting["reset_position_ids"],
    )
    for row in rows:
        if row["idx"] is None:
            continue
        sample = dataset[row["idx"]]
        assert sample.tokens.tolist() == row["tokens"]
        assert sample.labels.tolist() == row["labels"]
        assert sample.loss_mask.tolist() == row["loss_mask"]
        assert sample.positions.tolist() == row["position_ids"]
        assert _mask_sha256(sample) == row["attention_mask_sha256"]


def _mask_sha256(sample: Sample) -> str:
    """The hash of who may not attend to whom, as Megatron has it: padding is seen there as any token."""
    places = np.arange(len(sample.tokens))
    starts = np.zeros_like(places) if sample.documents is None else sample.documents.copy()
    if sample.token_mask is not None and sample.documents is not None:
        size = int(sample.token_mask.sum())
        starts[size:] = size if sample.tokens[size - 1] == EOD else starts[size - 1]
    mask = (places[None, :] > places[:, None]) | (places[None, :] < starts[:, None])
    return hashlib.sha256(mask.astype(np.uint8).tobytes()).hexdigest()


@pytest.mark.parametrize("case", range(len(GOLDEN["masks"])))
def test_masks_and_positions_are_megatrons(case: int, tmp_path: Path) -> None:
    mask = GOLDEN["masks"][case]
    data = mask["data"]
    with IndexedWriter(tmp_path / "x", dtype="uint16") as writer:
        writer.add_document([*data, 1])
    dataset = GPTDataset(
        IndexedDataset(tmp_path / "x"),
        seq_len=len(data),
        seed=0,
        boundaries="eod",
        eod=EOD,
        eod_mask_loss=mask["eod_mask_loss"],
        reset_attention=mask["reset_attention_mask"],
        reset_positions=mask["reset_position_ids"],
    )
    sample = dataset[0]
    assert sample.tokens.tolist() == data
    assert sample.labels.tolist() == [*data[1:], 1]
    assert sample.loss_mask.tolist() == mask["loss_mask"]
    assert sample.positions.tolist() == mask["position_ids"]
    starts = np.zeros(len(data), dtype=int) if sample.documents is None else sample.documents
    rows = ["".join(".x"[not starts[q] <= k <= q] for k in range(len(data))) for q in range(len(data))]
    assert rows == mask["masked_rows"]


PACKED = [item for item in GOLDEN["items"] if item["setting"].get("inter_document_masking")]


@pytest.mark.parametrize("case", range(len(PACKED)))
def test_documents_of_the_index_are_megatrons(case: int) -> None:
    """Its cumulative lengths; padding is a document of its own here, and the end of the last one there."""
    setting = PACKED[case]["setting"]
    dataset = _part(setting, setting["which"], reset_attention=True, reset_positions=True)
    for row in PACKED[case]["result"]:
        sample = dataset[row["idx"]]
        assert sample.documents is not None
        starts = sorted(set(sample.documents.tolist()) | {setting["sequence_length"]})
        places = np.arange(setting["sequence_length"])
        if sample.token_mask is not None:
            starts.remove(int(sample.token_mask.sum()))
            places = places[sample.token_mask]
        assert starts == sorted(set(row["cu_seqlens_trimmed"]))
        assert sample.positions[places].tolist() == np.array(row["position_ids"])[places].tolist()
        assert sample.tokens[places].tolist() == np.array(row["tokens"])[places].tolist()
        assert sample.labels[places].tolist() == np.array(row["labels"])[places].tolist()
        assert sample.loss_mask.tolist() == row["loss_mask"]


def test_samples_do_not_share_what_a_caller_may_write() -> None:
    dataset = GPTDataset(IndexedDataset(prefix("a_u16")), seq_len=16, seed=1, eod=EOD, eod_mask_loss=True)
    before = dataset[3].tokens.copy()
    dataset[3].tokens[:] = 0
    assert dataset[3].tokens.tolist() == before.tolist()
    assert not dataset[3].positions.flags.writeable


def test_kept_partial_sample_is_masked_by_place(tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "x", dtype="uint16") as writer:
        writer.add_document([0, 0, 5, 0, 0, 7, 0])
    dataset = GPTDataset(IndexedDataset(tmp_path / "x"), seq_len=4, seed=0, keep_partial=True)
    masks = {tuple(s.tokens.tolist()): s.loss_mask.tolist() for s in (dataset[i] for i in range(len(dataset)))}
    assert masks == {(0, 0, 5, 0): [1, 1, 1, 1], (0, 7, 0, 0): [1, 1, 0, 0]}


def test_partial_sample_after_an_empty_last_document() -> None:
    for seed in range(20):
        lengths = np.array([3, 0, 4, 0], dtype=np.int32)
        plan = plan_index(7, seq_len=4, num_samples=None, keep_partial=True)
        arrays = build_index(plan, lengths, 0, seq_len=4, seed=seed)
        place, offset = arrays["samples"][-1]
        assert offset == lengths[arrays["documents"][place]] - 1 >= 0


def test_partial_samples_are_counted_exactly() -> None:
    # float32 arithmetic gives 500,000 and 50,000,000 here.
    assert plan_index(50_000_002, seq_len=100, num_samples=None, keep_partial=True).num_samples == 500_001
    assert plan_index(200_000_006, seq_len=4, num_samples=None, keep_partial=True).num_samples == 50_000_002
    for tokens, seq_len, count in ((50_000_002, 100, 500_000), (200_000_006, 4, 50_000_000)):
        plan = plan_index(tokens, seq_len=seq_len, num_samples=None, keep_partial=True, float32_counts=True)
        assert plan.num_samples == count


def test_more_tokens_than_int32() -> None:
    lengths = np.full(5, 2**30, dtype=np.int32)
    plan = plan_index(5 * 2**30, seq_len=2**28, num_samples=None)
    arrays = build_index(plan, lengths, 0, seq_len=2**28, seed=0)
    begin = arrays["samples"][:, 0].astype(np.int64) * 2**30 + arrays["samples"][:, 1]
    assert begin.tolist() == [k * 2**28 for k in range(20)]


@pytest.mark.parametrize("seed", range(6))
def test_every_token_is_a_label_once_an_epoch(seed: int) -> None:
    random = np.random.RandomState(seed)
    lengths = random.randint(0, 9, 40).astype(np.int32)
    plan = plan_index(int(lengths.sum()), seq_len=5, num_samples=None)
    arrays = build_index(plan, lengths, 0, seq_len=5, seed=seed)
    starts = np.concatenate(([0], np.cumsum(lengths[arrays["documents"]])))
    flat = [int(starts[p]) + int(o) for p, o in arrays["samples"]]
    assert flat == [5 * k for k in range(plan.num_samples + 1)]
    assert sorted(arrays["shuffle"].tolist()) == list(range(plan.num_samples))


def test_splits() -> None:
    assert split_ranges("98,1,1", 40) == [(0, 39), (39, 40), (40, 40)]
    assert split_ranges("1", 7) == [(0, 7), None, None]
    assert split_ranges("0,1,0", 7) == [None, (0, 7), None]
    assert split_ranges("1e2, 1e2", 7) == [(0, 4), (4, 7), None]
    for bad in ("", "0,0,0", "1,2,3,4", "-1,2", "3,-1", "98/1/1", "1.2.3,1", "1,", "train", "inf,1", "nan"):
        with pytest.raises(ValueError, match="must be one to three weights"):
            split_ranges(bad, 7)


def test_small_corpus_is_repeated_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    source = IndexedDataset(prefix("c_u16"))
    with caplog.at_level(logging.WARNING):
        dataset = GPTDataset(source, seq_len=4096, seed=1, num_samples=3)
    assert len(dataset) >= 3 and "repeated for 52 epochs" in caplog.text
    assert dataset[2].tokens.shape == (4096,)


def test_bad_arguments() -> None:
    source = IndexedDataset(prefix("a_u16"))
    bad: list[tuple[dict[str, Any], str]] = [
        ({"seq_len": 0}, "seq_len=0"),
        ({"seed": -1}, "seed -1"),
        ({"eod_mask_loss": True}, "name the tokenizer"),
        ({"boundaries": "eod"}, "data.boundaries=eod needs the id"),
        ({"sequences": (5, 5), "num_samples": 9}, "0 of 57 sequences and no tokens, but 9 samples of 16"),
    ]
    for more, message in bad:
        with pytest.raises(ValueError, match=message):
            GPTDataset(source, **(_DEFAULTS | more))
    with pytest.raises(IndexError, match="sample 91 of 91"):
        GPTDataset(source, seq_len=16, seed=1)[91]
    with pytest.raises(ValueError, match=r"token id 999 .* vocabulary has 500 entries"):
        [GPTDataset(source, seq_len=16, seed=1, vocab_size=500)[i] for i in range(91)]


def _indices(dataset: GPTDataset) -> list[list[Any]]:
    return [a.tolist() for a in (dataset.documents, dataset.samples, dataset.shuffle)]


def test_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    source = IndexedDataset(prefix("a_u16"))

    def make(**more: Any) -> GPTDataset:
        settings: dict[str, Any] = {**_DEFAULTS, "num_samples": 200, "cache_dir": tmp_path, **more}
        return GPTDataset(source, **settings)

    expected = _indices(make())
    assert len(list(tmp_path.iterdir())) == 3
    with monkeypatch.context() as patch:
        patch.setattr("megalite.data.gpt_dataset.build_index", lambda *_, **__: pytest.fail("not from the cache"))
        assert _indices(make()) == expected
    # Whatever changes the result changes the key.
    different: list[dict[str, Any]] = [
        {"seed": 2},
        {"seq_len": 8},
        {"num_samples": 300},
        {"extra_token": False},
        {"sequences": (1, 57)},
    ]
    for count, more in enumerate(different, start=2):
        make(**more)
        assert len(list(tmp_path.iterdir())) == 3 * count
    for path in tmp_path.iterdir():
        path.write_bytes(path.read_bytes()[:-8])
    assert _indices(make()) == expected
    assert "damaged" in caplog.text
    caplog.clear()
    assert _indices(make()) == expected and not caplog.text


def test_cache_key_is_the_content(tmp_path: Path) -> None:
    for name in ("first", "second"):
        with IndexedWriter(tmp_path / name, dtype="uint16") as writer:
            for length in (9, 30, 4):
                writer.add_document(np.arange(length))
    cache = tmp_path / "cache"
    for name in ("first", "second"):
        GPTDataset(IndexedDataset(tmp_path / name), seq_len=4, seed=0, cache_dir=cache)
    assert len(list(cache.iterdir())) == 3
    with IndexedWriter(tmp_path / "first", dtype="uint16", overwrite=True) as writer:
        writer.add_document(np.arange(43))
    dataset = GPTDataset(IndexedDataset(tmp_path / "first"), seq_len=4, seed=0, cache_dir=cache)
    assert dataset.documents.tolist() == [0]


def test_unwritable_cache_is_only_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    dataset = GPTDataset(IndexedDataset(prefix("a_u16")), seq_len=16, seed=1, cache_dir=tmp_path / "file")
    assert len(dataset) == 91 and caplog.text


def _race(arguments: tuple[str, int]) -> list[list[Any]]:
    cache, seed = arguments
    return _indices(GPTDataset(IndexedDataset(prefix("a_u16")), seq_len=8, seed=seed, cache_dir=Path(cache)))


def test_processes_may_race_for_the_cache(tmp_path: Path) -> None:
    with multiprocessing.get_context("spawn").Pool(4) as pool:
        for seed in range(15):
            results = pool.map(_race, [(str(tmp_path), seed)] * 4, chunksize=1)
            assert all(r == results[0] for r in results)
    assert not list(tmp_path.glob("*.tmp"))


def test_documents_end_where_the_index_says(tmp_path: Path) -> None:
    lengths = [5, 1, 0, 17, 2, 30, 3]
    with IndexedWriter(tmp_path / "x", dtype="uint16") as writer:
        for number, length in enumerate(lengths):
            writer.add_document([100 * number + place for place in range(length)])
    data = GPTDataset(
        IndexedDataset(tmp_path / "x"), seq_len=8, seed=3, num_samples=14, reset_attention=True, reset_positions=True
    )
    plain = GPTDataset(IndexedDataset(tmp_path / "x"), seq_len=8, seed=3, num_samples=14)
    masked = GPTDataset(
        IndexedDataset(tmp_path / "x"), seq_len=8, seed=3, num_samples=14, eod=60000, eod_mask_loss=True
    )
    for i in range(14):
        sample, row = data[i], plain.read(i)[0]
        same = np.diff(row) == 1  # whether a label is of the same document; no two documents are neighbours in id
        assert sample.tokens.tolist() == plain[i].tokens.tolist() and sample.labels.tolist() == plain[i].labels.tolist()
        assert sample.loss_mask.all(), "attention apart from the loss: every label counts"
        assert masked[i].loss_mask.tolist() == same.astype(int).tolist(), "also where no id ends a document"
        starts = np.flatnonzero(np.concatenate(([True], ~same[:-1])))
        assert sample.documents is not None
        assert sample.documents.tolist() == [int(starts[starts <= place].max()) for place in range(8)]
        assert (sample.positions == np.arange(8) - sample.documents).all()
        assert plain[i].documents is None and plain[i].loss_mask.all()


def test_padding_of_a_partial_sample_is_a_document(tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "x", dtype="uint16") as writer:
        writer.add_document([7, 7, 7, 7, 7, 7, 7])
    data = GPTDataset(IndexedDataset(tmp_path / "x"), seq_len=4, seed=0, keep_partial=True, reset_attention=True)
    (last,) = [s for s in (data[0], data[1]) if s.token_mask is not None]
    assert last.documents is not None and last.token_mask is not None
    assert last.documents.tolist() == [0, 0, 0, 3] and last.token_mask.tolist() == [True, True, True, False]
