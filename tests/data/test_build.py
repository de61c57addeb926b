import json
import logging
import multiprocessing
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megalite.data.blend_spec import parse_blend, same_until
from megalite.data.blended import BlendedDataset
from megalite.data.build import Datasets, build_datasets
from megalite.data.cache import build_once
from megalite.data.config import DataConfig, problems
from megalite.data.corpus import demo_documents, prepare_demo
from megalite.data.gpt_dataset import GPTDataset
from megalite.data.indexed import FormatError, IndexedDataset, IndexedWriter
from megalite.data.loss_mask import MASK_SUFFIX
from megalite.data.preprocess import preprocess
from megalite.data.tokenizer import load_tokenizer
from tests.data.reference import prefix


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def _build(
    cache: Path,
    *,
    num_samples: int | None = 50,
    valid: int = 0,
    vocab: int | None = None,
    orders: tuple[int, ...] = (),
    **data: Any,
) -> Datasets:
    settings: dict[str, Any] = {"seq_len": 16, "cache_dir": str(cache)} | data
    config = DataConfig(**settings)
    return build_datasets(
        config, seed=1, num_samples=num_samples, num_validation_samples=valid, vocab_size=vocab, orders=orders
    )


def _write(path: Path, lengths: list[int], **more: Any) -> str:
    with IndexedWriter(path, dtype="uint16", **more) as writer:
        for length in lengths:
            writer.add_document(np.arange(length) % 90)
    return str(path)


@pytest.fixture(scope="module")
def documents() -> list[str]:
    return demo_documents()


def test_demo_corpus(cache: Path, documents: list[str]) -> None:
    datasets = _build(cache, vocab=4093, valid=20)
    tokenizer = datasets.tokenizer
    assert tokenizer is not None and tokenizer.vocab_size == 4093
    assert isinstance(datasets.train, GPTDataset) and datasets.validation is not None
    data = datasets.train.source
    assert data.num_tokens > 200_000 and len(data) > 300
    assert len(documents) == len(data) and tokenizer.decode(data[3].tolist()) == documents[3]
    assert not any(re.search(r"\+-{3,}\+|^=====", text, re.MULTILINE) for text in documents)
    again = _build(cache, vocab=4093)
    assert again.fingerprint == datasets.fingerprint
    assert isinstance(again.train, GPTDataset) and again.train.source.prefix == data.prefix
    assert len(list(cache.glob("demo-*.tmp"))) == 0
    assert datasets.summary == [
        f"embedded demo: {len(data)} sequences, {data.num_tokens} tokens (uint16)",
        "embedded demo: 50 samples (100.0%), 0.00 epochs", "tokenizer: embedded demo, 4093 ids",
    ]  # fmt: skip


def _prepare(directory: str) -> tuple[str, bytes]:
    files = prepare_demo(Path(directory), tokenizer="byte")
    return str(files.prefix), Path(f"{files.prefix}.bin").read_bytes()


def test_demo_is_made_once_by_racing_processes(tmp_path: Path, documents: list[str]) -> None:
    with multiprocessing.get_context("spawn").Pool(3) as pool:
        results = pool.map(_prepare, [str(tmp_path)] * 3, chunksize=1)
    assert len(set(results)) == 1
    assert sorted(p.suffix for p in tmp_path.iterdir()) == ["", ".lock"]
    # The corpus does not depend on what a process has imported or replaced.
    assert [bytes(s[:-1].astype(np.uint8)).decode() for s in IndexedDataset(results[0][0])] == documents


def test_build_once_survives_a_failure_and_a_killed_builder(tmp_path: Path) -> None:
    target = tmp_path / "made"

    def fail(scratch: Path) -> None:
        (scratch / "half").write_text("half")
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        build_once(target, fail)
    assert not target.exists() and not list(tmp_path.glob("*.tmp"))
    (tmp_path / "made.123.tmp").mkdir()  # left by a killed process

    def succeed(scratch: Path) -> None:
        (scratch / "file").write_text("whole")

    build_once(target, succeed)
    assert (target / "file").read_text() == "whole" and not list(tmp_path.glob("*.tmp"))
    build_once(target, fail)


def test_text_is_tokenised_once(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = tmp_path / "mine.jsonl"
    text.write_text("".join(json.dumps({"text": f"line {i} " * 9}) + "\n" for i in range(60)))
    first = _build(cache, paths=(str(text),), tokenizer="byte", valid=3, vocab=257)
    assert isinstance(first.train, GPTDataset) and first.train.source.num_documents == 60
    assert first.validation is not None and len(first.validation) >= 3
    with monkeypatch.context() as patch:
        patch.setattr("megalite.data.build.preprocess", lambda *_, **__: pytest.fail("tokenised again"))
        assert _build(cache, paths=(str(text),), tokenizer="byte").fingerprint == first.fingerprint
    assert first.summary[0].startswith(f"{text}: 60 sequences,") and first.summary[2:] == ["tokenizer: byte, 257 ids"]
    text.write_text(text.read_text().replace("line 30", "LINE 30"))
    assert _build(cache, paths=(str(text),), tokenizer="byte").fingerprint != first.fingerprint
    demo = _build(cache, paths=(str(text),), vocab=4093)
    assert demo.tokenizer is not None and demo.summary[2] == "tokenizer: embedded demo, 4093 ids"


def test_megatron_files_and_blends(cache: Path) -> None:
    one = _build(cache, paths=(prefix("a_u16"),), vocab=1000)
    assert isinstance(one.train, GPTDataset) and one.tokenizer is None and len(one.train) >= 50
    paths = (prefix("a_u16"), prefix("b_i32"))
    mixed = _build(cache, paths=paths, num_samples=100, blend=(3.0, 1.0))
    assert isinstance(mixed.train, BlendedDataset) and mixed.train.counts() == [75, 25]
    by_size = _build(cache, paths=paths, num_samples=1000, split="1")
    assert isinstance(by_size.train, BlendedDataset)
    assert by_size.train.counts() == pytest.approx([1000 * 1471 / (1471 + 672), 1000 * 672 / (1471 + 672)], abs=2)
    everything = _build(cache, paths=paths, num_samples=None, split="1")
    assert len(everything.train) == (1471 - 1) // 16 + (672 - 1) // 16
    assert everything.summary == [
        f"{paths[0]}: 57 sequences, 1471 tokens (uint16)", f"{paths[1]}: 40 sequences, 672 tokens (int32)",
        f"{paths[0]}: 91 samples (68.9%), 0.99 epochs", f"{paths[1]}: 41 samples (31.1%), 0.98 epochs",
        "tokenizer: not recorded with the data",
    ]  # fmt: skip


def test_a_dataset_without_a_share(cache: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    paths = (prefix("a_u16"), prefix("b_i32"))
    alone = _build(cache, paths=paths, blend=(0.0, 1.0))
    assert isinstance(alone.train, GPTDataset) and alone.train.source.prefix == prefix("b_i32")
    assert "a_u16 has no share in train and is left out" in caplog.text
    small = _write(tmp_path / "small", [40])
    both = _build(cache, paths=(prefix("a_u16"), small), blend=(1.0, 1.0), valid=4)
    assert isinstance(both.train, BlendedDataset) and isinstance(both.validation, GPTDataset)


def test_corpus_smaller_than_a_sequence(cache: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tiny = _write(tmp_path / "tiny", [5, 5])
    with caplog.at_level(logging.WARNING):
        datasets = _build(cache, paths=(tiny,), num_samples=7, valid=4)
    assert len(datasets.train) >= 7 and "repeated for 12 epochs" in caplog.text
    assert datasets.validation is None and "leaves no validation documents (of 2)" in caplog.text
    with pytest.raises(ValueError, match="has 10 tokens, a sample needs 17"):
        _build(cache, paths=(tiny,), num_samples=None)
    for lengths in ([], [0, 0]):
        empty = _write(tmp_path / f"empty{len(lengths)}", lengths)
        with pytest.raises(ValueError, match=r"the train split of .* no tokens, but 7 samples of 16"):
            _build(cache, paths=(empty,), num_samples=7)


def test_missing_and_odd_paths(cache: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.md").write_text("x")
    for path, message in (
        (tmp_path / "none", r"none does not exist, and there is no .*none\.idx; give a \.jsonl, \.txt, \.parquet file"),
        (tmp_path / "none.jsonl", r"none\.jsonl does not exist"),
        (tmp_path / "notes.md", "is not a text file that is understood"),
    ):
        with pytest.raises(FileNotFoundError, match=message):
            _build(cache, paths=(str(path),), tokenizer="byte")


def test_vocabularies_must_fit(cache: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ValueError, match=r"has token id 999, but model\.vocab_size has 500 entries"):
        _build(cache, paths=(prefix("a_u16"),), vocab=500)
    with pytest.raises(ValueError, match="has token id 999, but the tokenizer has 257 entries"):
        _build(cache, paths=(prefix("a_u16"),), vocab=1000, tokenizer="byte")
    text = tmp_path / "a.txt"
    text.write_text("some text, " * 50)
    with pytest.raises(ValueError, match=r"vocab_size=200 is smaller than the 257 ids .*; set model.vocab_size=257"):
        _build(cache, paths=(str(text),), vocab=200, tokenizer="byte")
    _build(cache, paths=(str(text),), vocab=300, tokenizer="byte")
    assert "model.vocab_size=300, but the tokenizer" in caplog.text
    preprocess([text], tmp_path / "made", "byte")
    recorded = _build(cache, paths=(str(tmp_path / "made"),), vocab=257)
    assert recorded.tokenizer is not None and recorded.tokenizer.eod == 256
    other = prepare_demo(cache).tokenizer
    with pytest.raises(ValueError, match=r"was made with another tokenizer \(byte, 257 ids\)"):
        _build(cache, paths=(str(tmp_path / "made"),), vocab=4093, tokenizer=other)


def test_a_stale_side_file_does_not_hide_ids_beyond_the_vocabulary(cache: Path, tmp_path: Path) -> None:
    """The largest id is taken from the side file, so that start-up need not read the tokens; each row is looked at."""
    text = tmp_path / "a.txt"
    text.write_text("some text, " * 50)
    preprocess([text], tmp_path / "made", "byte")
    ids = np.fromfile(tmp_path / "made.bin", dtype=np.uint16)
    ids[5] = 300
    ids.tofile(tmp_path / "made.bin")
    datasets = _build(cache, paths=(str(tmp_path / "made"),), vocab=300)
    message = r"made has token id 300 in sample \d+, but the vocabulary has 257 entries; is it the right tokenizer\?"
    with pytest.raises(FormatError, match=message):
        [datasets.train[i] for i in range(len(datasets.train))]
    (tmp_path / "made.json").unlink()  # then the tokens are read at start-up
    with pytest.raises(ValueError, match=r"made has token id 300, but model\.vocab_size has 300 entries"):
        _build(cache, paths=(str(tmp_path / "made"),), vocab=300)


def test_the_recorded_tokenizer_may_be_gone(cache: Path, tmp_path: Path) -> None:
    model = tmp_path / "t.model"
    shutil.copy(prepare_demo(cache).tokenizer, model)
    text = tmp_path / "a.txt"
    text.write_text("some text, " * 50)
    preprocess([text], tmp_path / "made", str(model))
    found = _build(cache, paths=(str(tmp_path / "made"),), vocab=4093)
    assert found.tokenizer is not None and found.tokenizer.fingerprint == load_tokenizer(model).fingerprint
    assert found.summary[2] == f"tokenizer: {model}, 4093 ids"
    model.unlink()
    assert _build(cache, paths=(str(tmp_path / "made"),), vocab=4093, eod_mask_loss=True).tokenizer is None
    with pytest.raises(ValueError, match=r"model.vocab_size=4000 is smaller than the 4093 ids"):
        _build(cache, paths=(str(tmp_path / "made"),), vocab=4000)


def test_num_samples_makes_runs_prefixes_of_each_other(cache: Path) -> None:
    path = (prefix("a_u16"),)
    fixed = DataConfig(paths=path, seq_len=16, num_samples=300, cache_dir=str(cache))
    short, long = (build_datasets(fixed, seed=1, num_samples=n) for n in (100, 300))
    assert all(np.array_equal(short.train[i].tokens, long.train[i].tokens) for i in range(100))
    config = DataConfig(paths=path, seq_len=16, num_samples=50, cache_dir=str(cache))
    with pytest.raises(ValueError, match=r"data.num_samples=50 makes 91 samples, the run needs 100"):
        build_datasets(config, seed=1, num_samples=100)


A, B, C = (prefix(name) for name in ("a_u16", "b_i32", "c_u16"))
PAIRS: list[Any] = [
    f"0.7 {A} 0.3 {B}",
    (f"0.7 {A} 0.3 {B}",),
    (0.7, A, 0.3, B),
    ("b.yaml", f"{A}: 0.7\n{B}: 0.3\n"),
    ("b.yaml", f"0.7 {A} 0.3 {B}"),
    ("b.yaml", f"phases:\n- blend: 0.7 {A} 0.3 {B}\n"),
    ("b.json", json.dumps([[0.7, A], [0.3, B]])),
    ("b.json", json.dumps([{"weight": 0.7, "path": A}, {"weight": 0.3, "path": B}])),
    ("b.json", json.dumps([0.7, A, 0.3, B])),
]


@pytest.mark.parametrize("case", range(len(PAIRS)))
def test_every_way_to_write_a_blend(case: int, cache: Path, tmp_path: Path) -> None:
    blend = PAIRS[case]
    if isinstance(blend, tuple) and str(blend[0]).endswith((".yaml", ".json")):
        (tmp_path / blend[0]).write_text(blend[1])
        blend = str(tmp_path / blend[0])
    found, plain = _build(cache, blend=blend), _build(cache, paths=(A, B), blend=(0.7, 0.3))
    assert [found.train[i].tokens.tolist() for i in range(50)] == [plain.train[i].tokens.tolist() for i in range(50)]
    assert found.fingerprint == plain.fingerprint
    assert found.summary[2:4] == [f"{A}: 35 samples (70.0%), 0.38 epochs", f"{B}: 15 samples (30.0%), 0.36 epochs"]


def test_blends_that_mean_nothing(tmp_path: Path) -> None:
    for blend, message in (
        ("0.7 a 0.3", "after weight 0.3 comes nothing"),
        ("0.7 a b", "'b' is no weight; write WEIGHT PATH"),
        ("0.7 a @9 @12 1 b", r"weights \[\] must be|must be finite"),
        ("0.7 a @9 1 b @5 1 b", r"from steps \[0, 9, 5\]; they must begin at 0 and increase"),
        ((0.5, 30.0, 0.5, "b"), "after weight 0.5 comes 30.0, which is no path"),
        ("-1 a 2 b", "not negative, and not all zero"),
        ("0.7 it's 0.3 b", r'data\.blend is "0\.7 it\'s 0\.3 b": No closing quotation; put a path'),
    ):
        (problem,) = problems(DataConfig(blend=blend))
        assert re.search(message, problem), problem
    assert "data.paths must be left out" in problems(DataConfig(blend="1 a", paths=("a",)))[0]
    assert "cannot change at a step" in problems(DataConfig(validation="1 a @9 1 b"))[0]
    with pytest.raises(FileNotFoundError, match=r"data\.blend: .*none\.yaml cannot be read"):
        _build(tmp_path, blend=str(tmp_path / "none.yaml"))
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(ValueError, match=r"bad\.json is not JSON"):
        _build(tmp_path, blend=str(tmp_path / "bad.json"))
    for name, text, message in (
        ("b.yaml", "phases: 5", r"b\.yaml holds .*phases is a list of from_step and blend"),
        ("b.yaml", "phases: [{blend: 1 a}]\nc: 1", r"b\.yaml holds .*with nothing beside"),
        ("b.yaml", "[{weight: 1}]", r"b\.yaml: {'weight': 1} is not weight and path"),
        ("b.yaml", "[{weight: 1, path: a, from: 2}]", "is not weight and path"),
        ("b.yaml", "[[1, null]]", "None is no path"),
        ("b.yaml", "a: 0.3\nb: 0.4\na: 0.3", r"b\.yaml: 'a' stands twice in a mapping"),
        ("b.yaml", "phases:\n- blend: {a: 1, a: 2}", "'a' stands twice"),
        ("b.json", '{"a": 0.3, "b": 0.4, "a": 0.3}', r"b\.json: 'a' stands twice in a mapping"),
        ("b.yaml", "'0.7 a", r"b\.yaml is not YAML"),
        ("b.json", '"0.7 \'a"', r"b\.json is .*No closing quotation"),
    ):
        (tmp_path / name).write_text(text)
        with pytest.raises(ValueError, match=message):
            parse_blend(str(tmp_path / name), ())
    (tmp_path / "b.yaml").write_bytes(b"\xff")
    with pytest.raises(ValueError, match=r"b\.yaml is not YAML: 'utf-8'"):
        parse_blend(str(tmp_path / "b.yaml"), ())
    (tmp_path / "b.yaml").write_text(
        "phases:\n- blend: &first {a: 1, b: 2}\n- {from_step: 9, blend: {<<: *first, b: 3}}"
    )
    assert [phase.weights for phase in parse_blend(str(tmp_path / "b.yaml"), ()).phases] == [(1, 2), (1, 3)]


def _numbers(datasets: Datasets, count: int) -> list[list[int]]:
    return [datasets.train[i].tokens.tolist() for i in range(count)]


def test_a_blend_that_changes_at_a_step_repeats_and_skips_nothing(cache: Path) -> None:
    """Before the change all is as without it; after it, each dataset goes on where it stopped."""

    def build(blend: str, num_samples: int, orders: tuple[int, ...] = ()) -> Datasets:
        config = DataConfig(seq_len=16, cache_dir=str(cache), blend=blend)
        return build_datasets(config, seed=1, num_samples=num_samples, orders=orders, samples_before=lambda k: 4 * k)

    plain = build(f"0.7 {A} 0.3 {B}", 80)
    changed = build(f"0.7 {A} 0.3 {B} @10 0.2 {A} 0.5 {B} 0.3 {C}", 80)
    assert _numbers(changed, 40) == _numbers(plain, 40) and _numbers(changed, 80) != _numbers(plain, 80)
    blend = changed.train
    assert isinstance(blend, BlendedDataset) and np.bincount(blend.dataset_index[40:80]).tolist() == [8, 20, 12]
    for i in range(3):
        drawn = blend.sample_index[blend.dataset_index == i]
        assert drawn.tolist() == list(range(len(drawn)))
    later = build(f"0.7 {A} 0.3 {B} @10 0.2 {A} 0.5 {B} 0.3 {C} @15 1 {C}", 200, changed.orders)
    assert _numbers(later, 60) == _numbers(changed, 60) and len(later.train) >= 200
    assert isinstance(later.train, BlendedDataset) and set(later.train.dataset_index[60:].tolist()) == {2}
    with pytest.raises(ValueError, match="nothing says which samples its steps consume"):
        _build(cache, blend=f"1 {A} @9 1 {B}")


def test_which_changes_of_a_blend_a_resume_takes() -> None:
    def identity(blend: str) -> list[Any]:
        return parse_blend(blend, ()).identity

    plain, changed = identity("0.7 a 0.3 b"), identity("0.7 a 0.3 b @10 1 a 1 b")
    assert plain == [0.7, 0.3] and changed == [[0, 0.7, 0.3], [10, 1.0, 1.0]]
    assert same_until(plain, changed, 10) and not same_until(plain, changed, 11)
    assert not same_until(plain, identity("0.6 a 0.4 b"), 1) and same_until([], [], 5) and not same_until([], plain, 5)


def test_data_of_their_own_to_validate_on(cache: Path) -> None:
    found = _build(cache, paths=(A,), valid=12, validation=f"0.5 {B} 0.5 {C}", validate_each=True)
    assert isinstance(found.train, GPTDataset) and (found.train.first, found.train.last) == (0, 57)
    assert isinstance(found.validation, BlendedDataset) and found.validation.counts() == [6, 6]
    assert list(found.each_validation) == [B, C]
    assert all(isinstance(d, GPTDataset) and len(d) >= 12 for d in found.each_validation.values())
    split = _build(cache, paths=(A, B), valid=12, split="80,20", validate_each=True)
    assert list(split.each_validation) == [A, B] and _build(cache, paths=(A,), valid=2).each_validation == {}


def test_the_last_partial_sample_of_validation_data(cache: Path) -> None:
    paths = (prefix("a_u16"),)
    dropped, kept = (_build(cache, paths=paths, valid=1, split="50,50", keep_partial=k) for k in (False, True))
    assert dropped.validation is not None and kept.validation is not None
    assert len(kept.validation) == len(dropped.validation) + 1 and len(kept.train) == len(dropped.train)
    masks = [kept.validation[i].token_mask for i in range(len(kept.validation))]
    assert sum(mask is not None for mask in masks) == 1
    assert "float32_counts=true changes nothing" in problems(DataConfig(float32_counts=True))[0]
    assert "pack best_fit cuts nothing off" in problems(DataConfig(keep_partial=True, pack="best_fit"))[0]


def test_problems_are_reported_at_once() -> None:
    assert problems(DataConfig()) == []
    bad = DataConfig(
        paths=("a",), blend=(1.0, -1.0), seq_len=0, num_samples=0, split="x", pack="bestfit",  # type: ignore[arg-type]
    )  # fmt: skip
    found = problems(bad)
    for part in (
        "seq_len=0",
        "num_samples=0",
        "blend has 2 weights for 1",
        "split='x'",
        "can be concat, best_fit, none",
    ):
        assert sum(part in line for line in found) == 1, part
    assert len(found) == 5
    for size in (float("inf"), float("nan")):
        assert problems(DataConfig(remote_cache_gb=size)) == [
            f"data.remote_cache_gb={size} must be finite; 0 is without end"
        ]
    with pytest.raises(ValueError, match=r"(?s)seq_len=0.*data.pack='bestfit'"):
        build_datasets(bad, seed=1, num_samples=1)


@pytest.mark.parametrize("pack", ["concat", "best_fit", "none"])
def test_documents_are_kept_apart_and_reported(cache: Path, pack: str) -> None:
    plain = _build(cache, paths=(prefix("a_u16"), prefix("b_i32")), num_samples=60)
    kept = _build(
        cache, paths=(prefix("a_u16"), prefix("b_i32")), num_samples=60, pack=pack, reset_attention=True,
        reset_positions=True,
    )  # fmt: skip
    assert kept.fingerprint != plain.fingerprint and len(kept.summary) == len(plain.summary) + 2
    assert all("rows of 16 tokens" in line and "documents a row" in line for line in kept.summary[2:4])
    samples = [kept.train[i] for i in range(60)]
    assert all(s.documents is not None and (s.positions == np.arange(16) - s.documents).all() for s in samples)
    assert (pack == "concat") == all(s.token_mask is None for s in samples)
    assert (pack == "none") == all((s.documents > 0).sum() == 16 - len(_real(s)) for s in samples)  # type: ignore[operator]


def _real(sample: Any) -> Any:
    """The tokens that are not padding."""
    return sample.tokens if sample.token_mask is None else sample.tokens[sample.token_mask]


@pytest.mark.parametrize("pack", ["concat", "best_fit", "none"])
@pytest.mark.parametrize("paths", [1, 2])
def test_a_longer_order_begins_with_the_shorter_one(tmp_path: Path, pack: Any, paths: int) -> None:
    names = tuple(_write(tmp_path / f"d{i}", [9, 30, 5, 17, 40, 3, 21 + i]) for i in range(paths))

    def build(num_samples: int, orders: tuple[int, ...] = ()) -> Datasets:
        return _build(tmp_path, num_samples=num_samples, paths=names, split="100,0,0", pack=pack, orders=orders)

    def tokens(datasets: Datasets, numbers: range) -> list[list[int]]:
        return [datasets.train[i].tokens.tolist() for i in numbers]

    short = build(5)
    assert short.orders == (5,)
    size = len(short.train)
    longer = build(4 * size, short.orders)
    assert longer.orders == (5, 4 * size) and len(longer.train) >= 4 * size
    assert tokens(longer, range(size)) == tokens(short, range(size)), "nothing is reordered"
    fresh = build(4 * size)
    assert tokens(fresh, range(size)) != tokens(short, range(size)), "as a run of that length from the start would be"
    longest = build(9 * size, longer.orders)
    assert tokens(longest, range(4 * size)) == tokens(longer, range(4 * size))
    again = build(3, longest.orders)
    assert again.orders == longest.orders and tokens(again, range(5)) == tokens(short, range(5))
    if paths == 1 and pack == "none":  # an appended epoch has every row once, in an order of its own
        first, added = tokens(short, range(size)), tokens(build(2 * size, short.orders), range(size, 2 * size))
        assert added != first and sorted(added) == sorted(first)


def test_a_mask_is_part_of_what_data_are(cache: Path, tmp_path: Path) -> None:
    """A resume without the mask of its conversations would learn their prompts, too."""
    prints = []
    for learnt in (None, 0, 1):
        path, lengths = tmp_path / f"chat{learnt}", range(3, 40)
        _write(path, list(lengths))
        if learnt is not None:
            with IndexedWriter(f"{path}{MASK_SUFFIX}", dtype="uint8") as writer:
                for n in lengths:
                    writer.add_document([(k + learnt) % 2 for k in range(n)])
        prints.append(_build(cache, paths=(str(path),), vocab=100).fingerprint)
    assert len(set(prints)) == 3


@pytest.mark.parametrize("field", ["tokenizer", "largest_id", "tokens"])
def test_a_side_file_with_nonsense_in_it(field: str, cache: Path, tmp_path: Path) -> None:
    _write(tmp_path / "x", list(range(3, 40)), vocab_size=100)
    path = tmp_path / "x.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {field: "x"}))
    with pytest.raises(FormatError, match=r"x\.json (is not a side file|has 'x' where a whole number should be)"):
        _build(cache, paths=(str(tmp_path / "x"),), vocab=100)


def test_an_option_is_named_by_its_name(cache: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"data\.validation: nowhere\.jsonl does not exist"):
        _build(cache, paths=(prefix("a_u16"),), validation=("1", "nowhere.jsonl"), valid=2)
