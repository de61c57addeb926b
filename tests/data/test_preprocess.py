import base64
import hashlib
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from megalite.data.indexed import IndexedDataset
from megalite.data.preprocess import PIECE_BYTES, Progress, TextError, TextOptions, Totals, preprocess
from megalite.data.text_blocks import Position, blocks
from megalite.data.text_sources import find_sources
from megalite.data.tokenizer import load_tokenizer
from tests.data.reference import prefix
from tools.preprocess_data import Arguments, Rates, usage_errors

ROOT = Path(__file__).parents[2]
TOOL = ROOT / "tools" / "preprocess_data.py"


def _jsonl(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"id": i, "text": text}) + "\n" for i, text in enumerate(texts)))
    return path


def _tool(*arguments: object, script: Path = TOOL) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(script), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)


def _texts(data: IndexedDataset) -> list[str]:
    return [bytes(s[s < 256].astype(np.uint8)).decode() for s in data]


def test_form_feeds_separate_documents_as_in_the_reference(tmp_path: Path) -> None:
    preprocess([Path(prefix("kjv_sample.txt"))], tmp_path / "x", "byte")
    for end in (".bin", ".idx"):
        assert (tmp_path / f"x{end}").read_bytes() == Path(prefix("bytes_u16") + end).read_bytes()


def test_workers_do_not_change_the_result(tmp_path: Path) -> None:
    texts = [f"document {i} " * (i % 50) + "é\n" for i in range(5000)]
    inputs = [_jsonl(tmp_path / "a.jsonl", texts[:3000]), _jsonl(tmp_path / "b.jsonl", texts[3000:])]
    for workers in (1, 3):
        totals = preprocess(inputs, tmp_path / f"w{workers}", "byte", workers=workers)
        assert totals.documents == 5000 and totals.bytes_read == sum(p.stat().st_size for p in inputs)
    for end in (".bin", ".idx", ".json"):
        assert (tmp_path / f"w1{end}").read_bytes() == (tmp_path / f"w3{end}").read_bytes()
    data = IndexedDataset(tmp_path / "w3")
    assert _texts(data) == texts
    assert all(s[-1] == 256 and 256 not in s[:-1] for s in data)


def test_texts_that_are_accepted(tmp_path: Path) -> None:
    lines = ['{"text": "bom"}', "", "   ", '{"text": "\\u0000 nul"}', '{"text": "\\ud800 lone"}', '{"text": ""}']
    lines += ['{"text": " \\n "}', '{"text": "<|endoftext|></s>"}']
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + "\r\n".join(lines).encode())
    totals = preprocess([tmp_path / "a.jsonl"], tmp_path / "x", "byte")
    assert _texts(IndexedDataset(tmp_path / "x")) == ["bom", "\0 nul", "\ufffd lone", "<|endoftext|></s>"]
    assert (totals.documents, totals.blank, totals.replaced, totals.broken) == (4, 2, 1, 0)


def test_blank_texts_can_be_kept_as_megatron_keeps_them(tmp_path: Path) -> None:
    path = _jsonl(tmp_path / "a.jsonl", ["a", "", "  ", "b"])
    preprocess([path], tmp_path / "x", "byte", options=TextOptions(keep_blank=True, append_eod=False))
    data = IndexedDataset(tmp_path / "x")
    assert _texts(data) == ["a", "  ", "b"]
    assert data.document_index.tolist() == [0, 1, 1, 2, 3]


def test_long_text_files_are_cut_at_blank_lines(tmp_path: Path) -> None:
    text = "".join(f"line {i} of the text\n" + ("\n" if i % 7 == 0 else "") for i in range(12000))
    (tmp_path / "a.txt").write_text(text + "\fsecond")
    (source,) = find_sources([tmp_path / "a.txt"])
    found = list(blocks(source, Position(), ["text"], 10**9))
    pieces = [part for block in found for part in block.parts or ()]
    assert b"".join(block.data for block in found) == (text + "second").encode()
    assert all(p.size < PIECE_BYTES + 500 for p in pieces)
    assert [p.is_end for p in pieces] == [False] * (len(pieces) - 2) + [True, True]
    preprocess([tmp_path / "a.txt"], tmp_path / "x", "byte")
    data = IndexedDataset(tmp_path / "x")
    assert int((data.tokens == 256).sum()) == 2 and len(data) == len(pieces)


@pytest.mark.parametrize(("tail", "documents"), [("\n", 1), ("\n\n\n", 1), ("\n\fsecond\n", 2), ("\n\n\f\n\n", 1)])
def test_a_long_document_that_ends_in_blank_lines_keeps_its_end(tmp_path: Path, tail: str, documents: int) -> None:
    (tmp_path / "a.txt").write_text("line of text\n" * 6000 + tail)
    preprocess([tmp_path / "a.txt"], tmp_path / "x", "byte")
    assert int((IndexedDataset(tmp_path / "x").tokens == 256).sum()) == documents


BROKEN = {
    "json": (b'{"text": "a', r"a\.jsonl:2: not JSON"),
    "array": (b"[1]", r"a\.jsonl:2: expected a JSON object, found list"),
    "key": (b'{"body": "x", "n": 1}', r"a\.jsonl:2: no key 'text'; keys are 'body', 'n'"),
    "null": (b'{"text": null}', r"a\.jsonl:2: 'text' is NoneType, expected text"),
    "utf-8": (b'{"text": "\xff"}', r"a\.jsonl:2: byte 10 is not UTF-8"),
}


@pytest.mark.parametrize(("kind", "workers"), [*((kind, 1) for kind in BROKEN), ("utf-8", 2)])
def test_broken_lines(kind: str, workers: int, tmp_path: Path) -> None:
    line, message = BROKEN[kind]
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "first"}\n' + line + b'\n{"text": "last"}\n')
    with pytest.raises(TextError, match=message):
        preprocess([path], tmp_path / "x", "byte", workers=workers)
    assert [p.name for p in tmp_path.iterdir()] == ["a.jsonl"]  # nothing was committed, nothing stays
    reported: list[str] = []
    options = TextOptions(on_error="skip")
    totals = preprocess([path], tmp_path / "x", "byte", options=options, workers=workers, report=reported.append)
    assert _texts(IndexedDataset(tmp_path / "x")) == ["first", "last"]
    assert totals.broken == 1 and len(reported) == 1
    (aside,) = map(json.loads, (tmp_path / "x.rejected.jsonl").read_text().splitlines())
    assert re.match(f".*{message}", aside["reason"])
    raw = aside["line"].encode() if "line" in aside else base64.b64decode(aside["base64"])
    assert raw == line + b"\n"


def test_other_formats_are_recognised(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"PK\x03\x04rest")
    with pytest.raises(ValueError, match="is a zip archive"):
        preprocess([tmp_path / "a.jsonl"], tmp_path / "x", "byte")
    (tmp_path / "a.parquet").write_bytes(b'{"text": "a"}')
    with pytest.raises(ValueError, match="is not a parquet file"):
        preprocess([tmp_path / "a.parquet"], tmp_path / "x", "byte")
    (tmp_path / "a.csv").write_text("a")
    with pytest.raises(ValueError, match=r"expected a \.jsonl, \.txt, \.parquet file"):
        preprocess([tmp_path / "a.csv"], tmp_path / "x", "byte")
    (tmp_path / "a.txt").write_text("\n \f \n")
    with pytest.raises(ValueError, match=r"no documents in .* \(2 blank, 0 broken\)"):
        preprocess([tmp_path / "a.txt"], tmp_path / "x", "byte")
    assert not list(tmp_path.glob("x*"))


def test_several_keys_give_several_files(tmp_path: Path) -> None:
    lines = [{"text": f"text {i}", "title": f"title {i}" if i != 3 else ""} for i in range(6)] + [{"text": "only"}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    options = TextOptions(json_keys=("text", "title"), on_error="skip")
    prefixes = {"text": tmp_path / "x_text", "title": tmp_path / "x_title"}
    totals = preprocess([tmp_path / "a.jsonl"], prefixes, "byte", options=options)
    assert _texts(IndexedDataset(tmp_path / "x_text")) == [f"text {i}" for i in range(6)]
    assert _texts(IndexedDataset(tmp_path / "x_title")) == [f"title {i}" for i in range(6) if i != 3]
    assert (totals.documents, totals.blank, totals.broken) == (11, 1, 1)


@pytest.mark.parametrize("kind", ["jsonl", "txt"])
def test_long_documents_are_cut_at_whitespace_and_keep_every_byte(kind: str, tmp_path: Path) -> None:
    words = "".join(f"wörd{i} " + "\n" * (i % 97 == 0) for i in range(4000)) + "ü" * 9000
    path = tmp_path / f"a.{kind}"
    path.write_text(words if kind == "txt" else json.dumps({"text": words}) + '\n{"text": "short"}\n')
    options = TextOptions(max_document_mb=0.004)
    preprocess([path], tmp_path / "x", "byte", options=options)
    data = IndexedDataset(tmp_path / "x")
    texts = _texts(data)
    cut = texts if kind == "txt" else texts[:-1]
    assert "".join(cut) == words and len(cut) > 10
    assert all(len(t.encode()) <= 4000 for t in cut)
    assert all(b[0].isspace() or a[-1].isspace() or len(a) > 1990 for a, b in itertools.pairwise(cut))
    assert [int(s[-1]) == 256 for s in data] == [False] * (len(cut) - 1) + [True] * (len(texts) - len(cut) + 1)
    if kind == "jsonl":
        assert (data.side_file() or {})["counts"]["cut"] == 1
        manifest = [json.loads(line) for line in (tmp_path / "x.manifest.jsonl").read_text().splitlines()]
        assert manifest[1]["cut"] == [[f"{path}:1", len(cut)]]


def test_the_manifest_names_the_bytes_that_were_read(tmp_path: Path) -> None:
    path = _jsonl(tmp_path / "a.jsonl", [f"document {i} " * 99 for i in range(4000)])
    preprocess([path, path], tmp_path / "x", "byte", commit_bytes=1 << 20)
    header, *commits = [json.loads(line) for line in (tmp_path / "x.manifest.jsonl").read_text().splitlines()]
    assert header["inputs"] == [[str(path), path.stat().st_size]] * 2
    text, at = path.read_bytes(), 0
    for found in (r for commit in commits for r in commit["ranges"]):
        at = 0 if at == len(text) else at
        assert (found["source"], found["begin"]) == (str(path), at)
        at = found["end"]
        assert found["sha256"] == hashlib.sha256(text[found["begin"] : at]).hexdigest()
    assert at == len(text) and commits[-1]["done"]
    assert len(commits) > 5 and commits[-1]["outputs"]["text"][0] == 8000


def test_the_tool_from_text_to_tokens(tmp_path: Path) -> None:
    path = _jsonl(tmp_path / "a.jsonl", [f"the cat number {i} sat on the mat\n" for i in range(400)])
    trainer = ROOT / "tools" / "train_tokenizer.py"
    trained = _tool("--input", path, "--output", tmp_path / "t.model", "--vocab-size", 300, script=trainer)
    assert trained.returncode == 0, trained.stderr
    made = _tool(
        "--input", path, "--output-prefix", tmp_path / "new" / "x", "--tokenizer", f"sentencepiece:{tmp_path}/t.model",
        "--workers", 2,
    )  # fmt: skip
    assert made.returncode == 0, made.stderr
    assert "400 documents" in made.stdout
    data = IndexedDataset(tmp_path / "new" / "x_text_document")
    tokenizer = load_tokenizer(tmp_path / "t.model")
    assert tokenizer.decode(data[7].tolist()) == "the cat number 7 sat on the mat\n" and data[7][-1] == tokenizer.eod
    side = data.side_file()
    assert side is not None and side["tokenizer"]["fingerprint"] == tokenizer.fingerprint


def test_progress_names_rates_and_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "monotonic", lambda: 100.0)
    rates = Rates()
    monkeypatch.setattr(time, "monotonic", lambda: 110.0)
    totals = Totals(documents=1234, tokens=3_000_000, bytes_read=50_000_000)
    line = rates.describe(Progress(totals, 20_000_000, 40_000_000, (30_000_000, 1_000_000)))
    assert line == "20.0 of 40.0 MB read, 1,234 documents, 3,000,000 tokens, 2.00 MB/s, 200,000 tokens/s, 25 s left"
    assert rates.describe(Progress(totals, 0, 0, (0, 0))).startswith("0.0 MB read")


def test_tokens_are_not_written_to_a_url() -> None:
    found = usage_errors(Arguments(input=(__file__,), output_prefix="s3://bucket/x", tokenizer="byte"))
    assert "--output-prefix s3://bucket/x: files are written to local disks only; write there and copy them" in found


def test_exit_status(tmp_path: Path) -> None:
    good = _jsonl(tmp_path / "a.jsonl", ["a text"])
    out = tmp_path / "out" / "x"
    for arguments, named in (
        (
            ("--input", tmp_path / "none.jsonl", "--output-prefix", out, "--tokenizer", "byte"),
            "none.jsonl does not exist",
        ),
        (("--input", good, "--output-prefix", out, "--tokenizer", "byte", "--workers", 0), "--workers 0"),
        (("--input", good, "--output-prefix", out, "--tokenizer", tmp_path / "t.model"), "t.model does not exist"),
        (("--input", good, "--output-prefix", out, "--tokenizer", "byte", "--colour", "red"), "colour"),
    ):
        failed = _tool(*arguments)
        assert failed.returncode == 2 and named in failed.stderr, failed.stderr
    command = ("--input", good, "--output-prefix", out, "--tokenizer", "byte")
    assert _tool(*command).returncode == 0
    again = _tool(*command)
    assert again.returncode == 2 and "add --overwrite" in again.stderr
    good.write_text("broken\n")
    bad = _tool(*command, "--overwrite", "--workers", 2, "--on-error", "fail")
    assert bad.returncode == 1 and "a.jsonl:1: not JSON" in bad.stderr and "Traceback" not in bad.stderr
    assert _texts(IndexedDataset(f"{out}_text_document")) == ["a text"]  # the old files are untouched
    made = [f"x_text_document{end}" for end in (".bin", ".idx", ".json", ".manifest.jsonl")]
    assert sorted(p.name for p in out.parent.iterdir()) == made


@pytest.mark.parametrize("size", ["inf", "nan", "0"])
def test_a_document_needs_a_limit(size: str, tmp_path: Path) -> None:
    path = _jsonl(tmp_path / "a.jsonl", ["a text"])
    args = Arguments(
        input=(str(path),), output_prefix=str(tmp_path / "x"), tokenizer="byte", max_document_mb=float(size)
    )
    assert usage_errors(args) == [f"--max-document-mb {float(size)} must be finite and more than 0"]


def _children(parent: int) -> list[int]:
    path = Path(f"/proc/{parent}/task/{parent}/children")
    return [int(p) for p in path.read_text().split()] if path.exists() else []


def _is_running(process: int) -> bool:
    """Whether a process is there and no zombie."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("kind", ["worker killed", "terminated", "killed"])
def test_no_death_hangs_or_leaves_workers(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    os.mkfifo(path)  # a reader waits for more text for as long as we hold it open
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    arguments = ["--input", path, "--output-prefix", tmp_path / "x", "--tokenizer", "byte", "--workers", "2"]
    tool = subprocess.Popen([sys.executable, TOOL, *arguments], env=environment, stderr=subprocess.PIPE)
    line = b'{"text": "' + b"word " * 700 + b'"}\n'  # smaller than a pipe's atomic write
    deadline = time.monotonic() + 60
    pipe = os.open(path, os.O_RDWR | os.O_NONBLOCK)  # also a reader, so that it opens at once
    workers: list[int] = []
    try:
        while tool.poll() is None and time.monotonic() < deadline:
            try:
                os.write(pipe, line)
            except BlockingIOError:
                time.sleep(0.005)
            if not workers and len(children := _children(tool.pid)) > 1:
                workers = children
                victims = workers if kind == "worker killed" else [tool.pid]
                for victim in victims:
                    os.kill(victim, signal.SIGTERM if kind == "terminated" else signal.SIGKILL)
    finally:
        os.close(pipe)
    assert workers
    error = tool.communicate(timeout=30)[1].decode()
    assert tool.returncode == {"worker killed": 1, "terminated": 143, "killed": -9}[kind], error
    while any(map(_is_running, workers)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(_is_running, workers))
    made = tmp_path / "x_text_document"
    assert not made.with_suffix(".bin").exists() and not made.with_suffix(".idx").exists()
    assert made.with_suffix(".bin.tmp").exists() == (kind == "killed")
