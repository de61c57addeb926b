import contextlib
import gc
import gzip
import io
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megalite.data.indexed import IndexedDataset
from megalite.data.preprocess import Progress, ResumeError, TextError, TextOptions, preprocess
from megalite.data.text_blocks import Position, blocks, cut_text
from megalite.data.text_sources import find_sources

TEXTS = [f"document {i} wörd\n" * (i % 40 + 1) for i in range(3000)]
LINES = "".join(json.dumps({"text": t}) + "\n" for t in TEXTS).encode()


def _documents(inputs: list[Any], prefix: Path, **options: Any) -> list[str]:
    preprocess(inputs, prefix, "byte", options=TextOptions(**options))
    return [bytes(s[s < 256].astype(np.uint8)).decode() for s in IndexedDataset(prefix)]


def _zstd(data: bytes, frames: int = 1) -> bytes:
    package = pytest.importorskip("zstandard", reason="optional package")
    size = -(-len(data) // frames)
    return b"".join(package.ZstdCompressor().compress(data[i : i + size]) for i in range(0, len(data), size))


def test_compression_is_known_by_the_first_bytes(tmp_path: Path) -> None:
    half = len(LINES) // 2
    files = {
        "a.jsonl.gz": gzip.compress(LINES), "b.jsonl": gzip.compress(LINES[:half]) + gzip.compress(LINES[half:]),
        "c.jsonl.zst": _zstd(LINES), "d.jsonl.gz": _zstd(LINES, frames=3), "e.jsonl.gz": LINES,
    }  # fmt: skip
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
        assert _documents([tmp_path / name], tmp_path / f"x_{name}") == TEXTS, name


def test_parquet(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="optional package")
    parquet = pytest.importorskip("pyarrow.parquet", reason="optional package")
    table = pyarrow.table({"n": list(range(3000)), "text": [*TEXTS[:-1], None], "title": ["t"] * 3000})
    parquet.write_table(table, tmp_path / "a.parquet", row_group_size=700)
    (tmp_path / "b.jsonl").write_bytes((tmp_path / "a.parquet").read_bytes())
    for name in ("a.parquet", "b.jsonl"):
        assert _documents([tmp_path / name], tmp_path / f"x_{name}", on_error="skip") == TEXTS[:-1]
    with pytest.raises(TextError, match=r"a\.parquet:3000: column 1 of 1 has no value"):
        preprocess([tmp_path / "a.parquet"], tmp_path / "y", "byte")
    for key, reason in (
        ("body", r"no column 'body'; columns are 'n', 'text', 'title'"),
        ("n", r"a\.parquet:1: column 'n' is int"),
    ):
        with pytest.raises(TextError, match=reason):
            preprocess([tmp_path / "a.parquet"], tmp_path / "y", "byte", options=TextOptions(json_keys=(key,)))
    (tmp_path / "cut.parquet").write_bytes((tmp_path / "a.parquet").read_bytes()[:-300])
    with pytest.raises(TextError, match=r"cut\.parquet: damaged parquet file"):
        preprocess([tmp_path / "cut.parquet"], tmp_path / "y", "byte")


@pytest.mark.parametrize("kind", ["string", "large_string", "string_view", "dictionary"])
def test_a_row_of_parquet_that_is_not_utf_8_is_a_broken_row(kind: str, tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="optional package")
    parquet = pytest.importorskip("pyarrow.parquet", reason="optional package")
    view = pyarrow.array([b"good", b"b\xffd", None, "wörd".encode()]).view
    column = view(pyarrow.string())
    if kind != "string":
        column = column.dictionary_encode() if kind == "dictionary" else column.cast(getattr(pyarrow, kind)())
    parquet.write_table(pyarrow.table({"text": column}), tmp_path / "a.parquet")
    assert _documents([tmp_path / "a.parquet"], tmp_path / "x", on_error="skip") == ["good", "wörd"]
    reasons = [json.loads(line)["reason"] for line in (tmp_path / "x.rejected.jsonl").read_text().splitlines()]
    assert [reason.removeprefix(str(tmp_path)) for reason in reasons] == [
        "/a.parquet:2: byte 1 is not UTF-8 (invalid start byte)",
        "/a.parquet:3: column 1 of 1 has no value",
    ]


def test_two_columns_of_one_name(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="optional package")
    parquet = pytest.importorskip("pyarrow.parquet", reason="optional package")
    table = pyarrow.Table.from_arrays([pyarrow.array(["a"]), pyarrow.array(["b"])], names=["text", "text"])
    parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(TextError, match=r"a\.parquet: 2 columns are called 'text'; rename"):
        preprocess([tmp_path / "a.parquet"], tmp_path / "x", "byte")


def test_blocks_from_any_block_on_are_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megalite.data.text_blocks.BLOCK_BYTES", 1 << 12)
    long = json.dumps({"text": "long " * 5000}).encode() + b"\n"
    data = LINES[:40_000].rpartition(b"\n")[0] + b"\n" + long + LINES[:20_000] + long[:-1]
    (tmp_path / "a.jsonl").write_bytes(data)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(data))
    (tmp_path / "a.txt").write_bytes(b"\f".join(data.split(b"\n")) + b"\n\n" + b"word \n\n" * 40_000)
    pyarrow = pytest.importorskip("pyarrow", reason="optional package")
    parquet = pytest.importorskip("pyarrow.parquet", reason="optional package")
    parquet.write_table(pyarrow.table({"text": TEXTS[:500]}), tmp_path / "a.parquet", row_group_size=70)
    for name in ("a.jsonl", "a.jsonl.gz", "a.txt", "a.parquet"):
        (source,) = find_sources([tmp_path / name])
        whole = list(blocks(source, Position(), ["text"], 10_000))
        if not name.endswith("parquet"):
            whole_text = b"".join(b.data for b in whole)
            assert whole_text == (data if name != "a.txt" else (tmp_path / name).read_bytes().replace(b"\f", b""))
        assert [b.begin for b in whole[1:]] == [b.end for b in whole[:-1]] and len(whole) > 5
        for i in range(0, len(whole), 3):
            rest = list(blocks(source, whole[i].begin, ["text"], 10_000))
            assert [(b.data, b.begin, b.end, b.parts) for b in rest] == [
                (b.data, b.begin, b.end, b.parts) for b in whole[i:]
            ], name


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst"])
def test_a_file_that_was_cut_is_an_error_and_not_a_short_file(name: str, tmp_path: Path) -> None:
    data = gzip.compress(LINES) if name.endswith("gz") else _zstd(LINES)
    damaged = data[: len(data) // 2] + bytes(8) + data[len(data) // 2 + 8 :]
    for kind, content in (("cut", data[:-1]), ("half", data[: len(data) // 2]), ("damaged", damaged)):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(TextError, match=rf"{name}.*(damaged near byte \d+ of its text|not JSON|not UTF-8)"):
            preprocess([tmp_path / name], tmp_path / kind, "byte")


def test_a_folder_stands_for_its_files_by_path(tmp_path: Path) -> None:
    for name in ("b/2.jsonl", "b/1.txt", "a.jsonl.gz", "skipped.csv", ".hidden/x.txt", "b/.tmp.txt"):
        path = tmp_path / "in" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        data = json.dumps({"text": name}).encode() if "jsonl" in name else name.encode()
        path.write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    assert _documents([tmp_path / "in"], tmp_path / "x") == ["a.jsonl.gz", "b/1.txt", "b/2.jsonl"]
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"empty holds no \.jsonl"):
        find_sources([tmp_path / "empty"])


def test_links_in_a_folder_are_followed(tmp_path: Path) -> None:
    (tmp_path / "far" / "deep").mkdir(parents=True)
    (tmp_path / "far" / "deep" / "b.txt").write_text("far")
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "a.txt").write_text("near")
    (folder / "linked").symlink_to(tmp_path / "far")
    (folder / "loop").symlink_to(folder)
    (tmp_path / "far" / "loop").symlink_to(folder)
    (folder / ".hidden").symlink_to(tmp_path / "far")
    assert _documents([folder], tmp_path / "x") == ["near", "far"]
    for name in ("gone.txt", "gone"):
        (folder / name).symlink_to(tmp_path / "nothing")
        with pytest.raises(FileNotFoundError, match=rf"in/{name} is a link to nothing; .*/nothing"):
            find_sources([folder])
        (folder / name).unlink()
    os.mkfifo(folder / "pipe.txt")
    with pytest.raises(ValueError, match=r"in/pipe\.txt is no file; a pipe must be named itself"):
        find_sources([folder])


@pytest.mark.parametrize(
    ("name", "data"),
    [("b.jsonl.gz", b""), ("b.jsonl.gz", b"\x1f"), ("e.txt.zst", b"\x28"), ("e.txt.zst", b"\x28\xb5\x2f")],
)
def test_a_compressed_file_that_was_cut_to_next_to_nothing(name: str, data: bytes, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ValueError, match=rf"{name} was cut: {len(data)} bytes are no \.(gz|zst) file"):
        find_sources([tmp_path])


def test_standard_input_goes_on_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Stdin:
        buffer = io.BytesIO(LINES)

    monkeypatch.setattr(sys, "stdin", Stdin)

    def stop(_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        preprocess(["-"], tmp_path / "x", "byte", progress=stop, commit_bytes=1000)
    Stdin.buffer = io.BytesIO(LINES)
    notes: list[str] = []
    preprocess(["-"], tmp_path / "x", "byte", report=notes.append, commit_bytes=1000)
    assert "going on after 1.0 MB" in notes[0]
    data = IndexedDataset(tmp_path / "x")
    assert [bytes(s[:-1].astype(np.uint8)).decode() for s in data] == TEXTS
    with pytest.raises(FileExistsError):
        preprocess(["-"], tmp_path / "x", "byte")


def _begun_from_stdin(inputs: list[Any], prefix: Path, text: bytes, monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    """A run that reads `text` and dies after `at` bytes."""

    def stop(progress: Progress) -> None:
        if progress.totals.bytes_read > at:
            raise KeyboardInterrupt

    monkeypatch.setattr("megalite.data.text_blocks.BLOCK_BYTES", 1 << 12)
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(text)))
    with pytest.raises(KeyboardInterrupt):
        preprocess(inputs, prefix, "byte", progress=stop, commit_bytes=1 << 14)


@pytest.mark.parametrize("change", ["early", "late", "all", "shorter", "none"])
@pytest.mark.parametrize("after", [False, True], ids=["within", "after"])
def test_other_standard_input_does_not_go_on(
    change: str, after: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether it was interrupted while standard input was read, or in the file after it."""
    text = LINES[:200_000].rpartition(b"\n")[0] + b"\n"
    (tmp_path / "a.jsonl").write_bytes(text.replace(b"document", b"text"))
    inputs = ["-", tmp_path / "a.jsonl"]
    _begun_from_stdin(inputs, tmp_path / "x", text, monkeypatch, at=300_000 if after else 100_000)
    early, late = text.replace(b"document 3 ", b"document X "), text.replace(b"document 100 ", b"document XYZ ")
    other = {"early": early, "late": late, "all": text.upper(), "shorter": text[:4000], "none": b""}[change]
    assert other != text
    stdin = SimpleNamespace(buffer=io.BytesIO(other))
    monkeypatch.setattr(sys, "stdin", stdin)
    with pytest.raises(ResumeError, match=r"standard input has changed since .*; add --overwrite to begin again"):
        preprocess(inputs, tmp_path / "x", "byte", commit_bytes=1 << 14)
    if change == "late":
        stdin.buffer = io.BytesIO(other)
        notes: list[str] = []
        preprocess(inputs, tmp_path / "x", "byte", commit_bytes=1 << 14, overwrite=True, report=notes.append)
        assert "beginning again" in notes[0]
        (tmp_path / "b.jsonl").write_bytes(other)
        preprocess([tmp_path / "b.jsonl", inputs[1]], tmp_path / "y", "byte")
        assert (tmp_path / "x.bin").read_bytes() == (tmp_path / "y.bin").read_bytes()


@pytest.mark.parametrize("word", ["word", "WORD"])
def test_a_named_pipe_is_compared_and_goes_on(word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megalite.data.text_blocks.BLOCK_BYTES", 1 << 12)
    pipe = tmp_path / "a.txt"
    os.mkfifo(pipe)
    text = "".join(f"{i} word\f" for i in range(4000))

    def write(text: str) -> None:
        with contextlib.suppress(BrokenPipeError):
            pipe.write_text(text)

    def stop(progress: Progress) -> None:
        if progress.totals.bytes_read > 20_000:
            raise KeyboardInterrupt

    def run(text: str, **more: Any) -> None:
        writer = threading.Thread(target=write, args=(text,))
        writer.start()
        try:
            preprocess([pipe], tmp_path / "x", "byte", commit_bytes=1 << 13, **more)
        finally:
            gc.collect()  # closes what an error kept open
            writer.join()

    with pytest.raises(KeyboardInterrupt):
        run(text, progress=stop)
    if word == "WORD":
        with pytest.raises(ResumeError, match=r"a\.txt has changed since"):
            run(text.replace("word", word, 1))
        return
    run(text)
    assert [bytes(s[:-1].astype(np.uint8)).decode() for s in IndexedDataset(tmp_path / "x")] == text.split("\f")[:-1]


def test_missing_packages_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    (tmp_path / "a.jsonl").write_bytes(b"\x28\xb5\x2f\xfd")
    for module in ("pyarrow.parquet", "pyarrow", "zstandard"):
        monkeypatch.setitem(sys.modules, module, None)
    for name, package in (("a.parquet", "pyarrow"), ("a.jsonl", "zstandard")):
        with pytest.raises(ImportError, match=rf"{name} needs the package {package}: pip install {package}"):
            find_sources([tmp_path / name])


@pytest.mark.parametrize(
    "text", ["x" * 100, "ab cd\n" * 40, "wörd " * 50, "日本語" * 30, "\U0001f600" * 40, "a" * 30 + "\n" + "b" * 90]
)
@pytest.mark.parametrize("limit", [7, 16, 1000])
def test_cut_text_keeps_everything(text: str, limit: int) -> None:
    pieces = list(cut_text([text], limit))
    assert "".join(p for p, _ in pieces) == text
    assert all(0 < len(p.encode()) <= limit for p, _ in pieces)
    assert [last for _, last in pieces] == [False] * (len(pieces) - 1) + [True]


def test_preparation_needs_no_torch() -> None:
    code = (
        "import sys; import tools.preprocess_data, megalite.data.worker_pool;"
        " heavy = {'torch', 'jinja2', 'pyarrow', 'tokenizers', 'matplotlib', 'fsspec'} & set(sys.modules);"
        " assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
