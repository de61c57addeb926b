"""tools/data.py: what it says of files, what it refuses, and that what it cuts and joins is whole."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import fsspec
import numpy as np
import pytest

from megalite.data.build import build_datasets
from megalite.data.config import DataConfig
from megalite.data.gpt_dataset import GPTDataset
from megalite.data.indexed import IndexedDataset, IndexedWriter
from megalite.data.loss_mask import loss_mask_of
from tests.data.reference import prefix
from tools.data import main

BYTES = {"name": "byte", "fingerprint": "byte", "vocab_size": 257, "eod": 256}


@pytest.fixture
def text(tmp_path: Path) -> str:
    """Documents "document 0" to "document 9", and an empty one, with a side file."""
    writer = IndexedWriter(tmp_path / "text", dtype="uint16", vocab_size=257)
    for number in range(10):
        writer.add_document([*f"document {number}".encode(), 256])
    writer.add_document([])
    writer.finish(tokenizer=BYTES)
    return str(tmp_path / "text")


@pytest.fixture
def masked(tmp_path: Path) -> str:
    """Documents of two sequences, an empty one among them, and their mask."""
    for name, dtype in (("masked", "uint16"), ("masked_loss_mask", "u1")):
        with IndexedWriter(tmp_path / name, dtype=dtype) as writer:
            for number in range(7):
                values = np.arange(number * 3, number * 6)
                writer.add_document(
                    values % (2 if dtype == "u1" else 257), [number, number * 2] if number != 3 else [9]
                )
            writer.add_document([])
    return str(tmp_path / "masked")


def run(tmp_path: Path, *words: str) -> list[dict]:
    assert main([*words, "--json", str(tmp_path / "out.json")]) == 0
    return json.loads((tmp_path / "out.json").read_text())


def test_inspect_and_stats(tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    (row,) = run(tmp_path, "inspect", text)
    assert (row["documents"], row["empty_documents"], row["tokens"], row["longest"]) == (11, 1, 110, 11)
    assert (row["tokenizer"], row["vocab_size"], row["eod"], row["dtype"]) == ("byte", 257, 256, "uint16")
    assert "110" in capsys.readouterr().out
    (row,) = run(tmp_path, "stats", prefix("a_u16"))
    lengths = sorted(IndexedDataset(prefix("a_u16")).lengths.tolist())
    assert (row["documents"], row["p50"], row["longest"]) == (57, lengths[28], lengths[-1])
    assert row["longest_tenth"] == pytest.approx(sum(lengths[-5:]) / sum(lengths))


@pytest.mark.parametrize("name", ["zero_u16", "dt_float64", "dt_int8", "empties_tail_u16", "mm_i32", "a_u16"])
def test_validate_accepts_files_of_any_kind(name: str, tmp_path: Path) -> None:
    (row,) = run(tmp_path, "validate", prefix(name))
    assert row["problem"] is None and "no side file" in row["checked"][1]


def test_validate_finds_what_is_wrong(tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", text]) == 0 and "counts and checksum agree" in capsys.readouterr().out
    assert main(["validate", text, "--vocab-size", "256"]) == 1
    assert "has token id 256, but the vocabulary has 256 entries" in capsys.readouterr().out
    whole = Path(text + ".bin").read_bytes()
    for content, message in (
        (b"X" + whole[1:], "says sha256"),
        (whole[:-3], "has 217 bytes but text.idx describes 220"),
    ):
        Path(text + ".bin").write_bytes(content)
        assert main(["validate", text, prefix("a_u16")]) == 1
        out = capsys.readouterr().out
        assert "BAD" in out and message in out and "a_u16: good" in out
    assert main(["inspect", str(tmp_path / "none")]) == 1 and "none.idx does not exist" in capsys.readouterr().err


def test_what_is_cut_joins_to_the_same_bytes(tmp_path: Path, text: str) -> None:
    for name in (text, prefix("multiseq_i32"), prefix("empties_u16"), prefix("mm_i32")):
        parts = run(tmp_path, "split", name, "--parts", "3", "--output", str(tmp_path / "cut"), "--overwrite")
        names = [part["prefix"] for part in parts]
        assert len(names) == 3
        run(tmp_path, "merge", *names, "--output", str(tmp_path / "joined"), "--overwrite")
        for end in (".bin", ".idx"):
            assert (tmp_path / f"joined{end}").read_bytes() == Path(name + end).read_bytes()
    run(tmp_path, "split", text, "--parts", "80,20", "--output", str(tmp_path / "part"))
    assert [IndexedDataset(tmp_path / f"part_{k}").num_documents for k in (0, 1)] == [9, 2]
    side = IndexedDataset(tmp_path / "part_0").side_file()
    assert side is not None and side["tokenizer"] == BYTES


def test_refuses_to_join_what_does_not_fit(tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "joined")
    assert main(["merge", prefix("a_u16"), prefix("b_i32"), "--output", out]) == 1
    assert "holds int32, " in capsys.readouterr().err
    with IndexedWriter(tmp_path / "other", dtype="uint16") as writer:
        writer.add_document([1])
    side = json.loads((tmp_path / "other.json").read_text()) | {"tokenizer": BYTES | {"fingerprint": "x"}}
    (tmp_path / "other.json").write_text(json.dumps(side))
    assert main(["merge", text, str(tmp_path / "other"), "--output", out]) == 1
    assert "different tokenizers" in capsys.readouterr().err
    assert not list(tmp_path.glob("joined*"))
    assert main(["merge", text, "--output", text]) == 1 and "already exists" in capsys.readouterr().err


def test_text_comes_back(tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["detokenize", text, "--documents", "2", "8:10"]) == 0
    assert capsys.readouterr().out == "document 2\n\f\ndocument 8\n\f\ndocument 9\n\f\n"
    assert main(["detokenize", text, "--documents", "12"]) == 1 and "not within 0:11" in capsys.readouterr().err
    assert main(["detokenize", prefix("a_u16")]) == 1 and "give --tokenizer" in capsys.readouterr().err
    rows = run(tmp_path, "sample", text, "--seq-len", "20", "--count", "5")
    assert len(rows) == 5 and all("document" in row["text"] and len(row["tokens"]) == 20 for row in rows)
    assert sum(length for _, _, length in rows[0]["pieces"]) == 21
    assert main(["sample", text, "--seq-len", "20", "--first", "5"]) == 1


def test_a_picture_of_lengths_and_blend(tmp_path: Path) -> None:
    target = str(tmp_path / "p.png")
    (row,) = run(
        tmp_path, "plot", f"0.7 {prefix('a_u16')} 0.3 {prefix('b_i32')} @500 1 {prefix('b_i32')}", "--output", target,
        "--num-samples", "1000",
    )  # fmt: skip
    assert row["counts"] == [350, 650] and Path(target).read_bytes().startswith(b"\x89PNG")
    (row,) = run(tmp_path, "plot", prefix("a_u16"), "--output", target)
    assert np.sum(row["counts"]) == 0


def test_a_mask_is_cut_and_joined_with_its_tokens(
    tmp_path: Path, masked: str, capsys: pytest.CaptureFixture[str]
) -> None:
    parts = run(tmp_path, "split", masked, "--parts", "2,1", "--output", str(tmp_path / "cut"))
    assert [part["mask"] for part in parts] == [True, True]
    for k in (0, 1):
        side = IndexedDataset(tmp_path / f"cut_{k}").side_file()
        assert side is not None and side["loss_mask"] == f"cut_{k}_loss_mask"
    run(tmp_path, "merge", *(part["prefix"] for part in parts), "--output", str(tmp_path / "joined"))
    for end in (".bin", ".idx", "_loss_mask.bin", "_loss_mask.idx"):
        assert (tmp_path / f"joined{end}").read_bytes() == Path(masked + end).read_bytes()
    rows = [GPTDataset(IndexedDataset(name), seq_len=8, seed=1) for name in (masked, str(tmp_path / "joined"))]
    assert np.array_equal(rows[0][1].loss_mask, rows[1][1].loss_mask) and 0 < rows[1][1].loss_mask.sum() < 8
    assert not list(tmp_path.glob("*.tmp")) and "and their mask" in capsys.readouterr().out


def test_a_mask_of_some_files_only_is_refused(
    tmp_path: Path, text: str, masked: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["merge", text, masked, "--output", str(tmp_path / "joined")]) == 1
    assert f"but {text} has no mask" in capsys.readouterr().err and not list(tmp_path.glob("joined*"))
    with IndexedWriter(masked + "_loss_mask", dtype="u1", overwrite=True) as writer:
        lengths = IndexedDataset(masked).lengths
        writer.add_document(np.ones(lengths.sum(), dtype=np.int64), lengths.tolist())
    assert main(["split", masked, "--parts", "2", "--output", str(tmp_path / "cut")]) == 1
    assert "its documents have other sequences" in capsys.readouterr().err and not list(tmp_path.glob("cut*"))


def test_what_is_there_is_refused_before_any_work_and_replaced_with_its_mask(
    tmp_path: Path, text: str, masked: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with IndexedWriter(tmp_path / "cut_1_loss_mask", dtype="u1") as writer:
        writer.add_document([1])
    assert main(["split", text, "--parts", "2", "--output", str(tmp_path / "cut")]) == 1
    assert "cut_1_loss_mask.bin already exists" in capsys.readouterr().err and not list(tmp_path.glob("cut_0*"))
    run(tmp_path, "split", text, "--parts", "2", "--output", str(tmp_path / "cut"), "--overwrite")
    assert not list(tmp_path.glob("cut_*_loss_mask*"))
    run(tmp_path, "merge", masked, masked, "--output", masked, "--overwrite")  # onto itself
    data = IndexedDataset(masked)
    mask = loss_mask_of(data)
    assert data.num_documents == 16 and mask is not None and mask.num_documents == 16


def test_a_full_disk_keeps_what_was_there(
    tmp_path: Path, masked: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    monkeypatch.setattr(os, "fsync", full)
    target = tmp_path / "p.png"
    for words, name in (
        (("merge", masked, "--output", masked, "--overwrite"), f"{masked}.bin.tmp"),
        (("plot", masked, "--output", str(target)), str(target)),
        (("inspect", masked, "--json", str(target)), str(target)),
    ):
        assert main(words) == 1 and f"No space left on device: '{name}'" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("split", ["98,2,0", "50,50", "1"])
def test_rows_are_those_of_a_run(split: str, tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    data = run(tmp_path, "merge", *[text] * 5, "--output", str(tmp_path / "five"))[0]["prefix"]
    words = ("--seq-len", "20", "--seed", "7", "--num-samples", "40", "--count", "3", "--split", split)
    rows = run(tmp_path, "sample", data, *words)
    config = DataConfig(paths=(data,), seq_len=20, split=split, cache_dir=str(tmp_path / "cache"))
    train = build_datasets(config, seed=7, num_samples=40).train
    assert [row["tokens"] for row in rows] == [train[i].tokens.tolist() for i in range(3)]
    assert f"data.split={split}: sequences 0 to" in capsys.readouterr().out


def test_rows_of_the_default_split(tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    data = run(tmp_path, "merge", *[text] * 5, "--output", str(tmp_path / "five"))[0]["prefix"]
    (row,) = run(tmp_path, "sample", data, "--num-samples", "2")
    config = DataConfig(paths=(data,), cache_dir=str(tmp_path / "cache"))
    assert row["tokens"] == build_datasets(config, seed=1234, num_samples=2).train[0].tokens.tolist()
    assert main(["sample", data, "--split", "1,999"]) == 1
    assert f"--split 1,999 leaves none of the 50 sequences of {data} to train on" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("inspect", "--json", "none/x.json"), "--json: none/x.json: there is no folder none"),
        (("inspect", "--json", "s3://bucket/x.json"), "--json: s3://bucket/x.json: files are written to local disks"),
        (("plot", "--output", "s3://bucket/x.png"), "--output: s3://bucket/x.png: files are written to local disks"),
        (("merge", "--output", "s3://bucket/x"), "--output: s3://bucket/x: files are written to local disks only"),
        (("split", "--parts", "2", "--output", "s3://b/x"), "--output: s3://b/x: files are written to local disks"),
        *(
            (("split", "--output", "x", "--parts", parts), f"--parts: {parts} must be weights such as 98,1,1")
            for parts in ("inf", "1e30", "2.7", "abc", "0", "1,inf", "1e308,1e308", "1,,1", "0,0", "9" * 12)
        ),
        (("plot", "--output", "x.png", "--num-samples", "-3"), "--num-samples: -3 must be a whole number, at least 1"),
        (("sample", "--num-samples", "0"), "--num-samples: 0 must be a whole number, at least 1"),
        (("sample", "--split", "a"), "--split: data.split='a' must be"),
    ],
)
def test_a_command_line_that_cannot_work_is_refused_first(
    words: tuple[str, ...], message: str, tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(SystemExit) as stopped:
        main([words[0], text, *words[1:]])
    assert stopped.value.code == 2 and message in capsys.readouterr().err
    assert sorted(tmp_path.iterdir()) == before


def test_files_far_away_stay_where_told(tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    files = fsspec.filesystem("memory")
    for end in (".bin", ".idx", ".json"):
        files.pipe(f"/tools-data/text{end}", Path(text + end).read_bytes())
    out = str(tmp_path / "x")
    commands = (
        ("inspect",), ("validate",), ("stats",), ("merge", "--output", out), ("sample", "--seq-len", "20"),
        ("split", "--parts", "2", "--output", out), ("detokenize",), ("plot", "--output", out),
    )  # fmt: skip
    for k, words in enumerate(commands):
        cache = tmp_path / f"cache{k}"
        assert main([words[0], "memory://tools-data/text", *words[1:], "--cache-dir", str(cache)]) == 0
        assert list(cache.glob("remote/*/whole"))
    assert not (tmp_path / "home" / ".cache" / "megalite").exists()
    files.rm("/tools-data", recursive=True)
