"""tools/data.py: what it says of files, what it refuses, and that what it cuts and joins is whole."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from megalite.data.indexed import IndexedDataset, IndexedWriter
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
