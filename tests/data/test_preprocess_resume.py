import contextlib
import gzip
import hashlib
import json
import os
import random
import resource
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megalite.data import text_blocks
from megalite.data.indexed import IndexedDataset
from megalite.data.preprocess import Progress, ResumeError, TextError, TextOptions, preprocess

COMMIT = 20_000
OPTIONS = TextOptions(on_error="skip", max_document_mb=0.003)


@pytest.fixture
def inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Several formats, broken lines, documents that are cut, and blocks of 4 KB."""
    monkeypatch.setattr(text_blocks, "BLOCK_BYTES", 4096)
    draw = random.Random(7)
    lines = [json.dumps({"text": f"{i} wörd " * draw.randrange(1, 200)}).encode() for i in range(300)]
    lines[5], lines[77], lines[200] = b'{"text": 3}', b"{", b'{"text": "' + b"long line " * 3000 + b'"}'
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(lines))
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(b"\n".join(lines[:150])))
    text = "".join(f"line {i}\n" + "\n" * (i % 9 == 0) + "\f" * (i % 300 == 0) for i in range(9000))
    (tmp_path / "c.txt").write_text(text)
    return [tmp_path / "a.jsonl", tmp_path / "b.jsonl.gz", tmp_path / "c.txt"]


def _run(inputs: list[Path], prefix: Path, **more: Any) -> None:
    preprocess(inputs, prefix, "byte", options=OPTIONS, commit_bytes=COMMIT, **more)


def _hashes(prefix: Path) -> dict[str, str]:
    ends = (".bin", ".idx", ".json", ".rejected.jsonl")
    found = {end: hashlib.sha256(Path(f"{prefix}{end}").read_bytes()).hexdigest() for end in ends}
    assert not list(prefix.parent.glob(f"{prefix.name}*.tmp")), "something temporary is left"
    _, *commits = Path(f"{prefix}.manifest.jsonl").read_text().splitlines()
    return found | {"manifest": hashlib.sha256("\n".join(commits).encode()).hexdigest()}


def _forked(work: Callable[[], None]) -> int:
    """Runs `work` in a forked process; its number."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            with contextlib.suppress(OSError, KeyboardInterrupt):
                work()
                status = 0
        finally:
            os._exit(status)
    return child


def test_killed_at_random_points_the_run_goes_on_to_the_same_files(inputs: list[Path], tmp_path: Path) -> None:
    _run(inputs, tmp_path / "whole")
    expected = _hashes(tmp_path / "whole")
    assert IndexedDataset(tmp_path / "whole", check_offsets=True).num_documents > 500
    draw, kills = random.Random(3), 0
    for _ in range(200):
        slowly = lambda _: time.sleep(0.002)  # noqa: E731
        child = _forked(lambda: _run(inputs, tmp_path / "x", progress=slowly))  # noqa: B023
        time.sleep(draw.uniform(0.01, 0.15))
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        if os.waitstatus_to_exitcode(status) == 0:
            break
        kills += 1
        assert not (tmp_path / "x.idx").exists() or (tmp_path / "x.bin").exists()
    else:
        _run(inputs, tmp_path / "x")
    assert kills > 1
    assert _hashes(tmp_path / "x") == expected


@pytest.mark.parametrize("after", range(0, 60, 7))
def test_stopped_after_any_block_the_run_goes_on(after: int, inputs: list[Path], tmp_path: Path) -> None:
    _run(inputs, tmp_path / "whole")
    seen = 0

    def stop(_: Progress) -> None:
        nonlocal seen
        seen += 1
        if seen > after:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        _run(inputs, tmp_path / "x", progress=stop)
    assert not (tmp_path / "x.bin").exists()
    notes: list[str] = []
    done: list[Progress] = []
    _run(inputs, tmp_path / "x", report=notes.append, progress=lambda p: done.append(p))
    assert any("going on after" in note for note in notes) == (after >= 6)
    assert _hashes(tmp_path / "x") == _hashes(tmp_path / "whole")


def test_a_full_disk_loses_nothing_that_was_committed(inputs: list[Path], tmp_path: Path) -> None:
    _run(inputs, tmp_path / "whole")

    def on_a_small_disk() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (200_001, 200_001))
        _run(inputs, tmp_path / "x")

    _, status = os.waitpid(_forked(on_a_small_disk), 0)
    assert os.waitstatus_to_exitcode(status) == 1 and not (tmp_path / "x.bin").exists()
    notes: list[str] = []
    _run(inputs, tmp_path / "x", report=notes.append)
    assert "going on after" in notes[0]
    assert _hashes(tmp_path / "x") == _hashes(tmp_path / "whole")


def _interrupt(inputs: list[Path], prefix: Path) -> None:
    def stop(progress: Progress) -> None:
        if progress.totals.bytes_read > 3 * COMMIT:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        _run(inputs, prefix, progress=stop)


def test_other_settings_or_other_text_do_not_go_on(inputs: list[Path], tmp_path: Path) -> None:
    _interrupt(inputs, tmp_path / "x")
    with pytest.raises(ResumeError, match=r"options.*repeat its command"):
        preprocess(inputs, tmp_path / "x", "byte", options=TextOptions(append_eod=False), commit_bytes=COMMIT)
    with pytest.raises(ResumeError, match="inputs"):
        _run(inputs[:2], tmp_path / "x")
    text = bytearray(inputs[0].read_bytes())
    place = text.find(b"wo", len(text) // 4)
    text = text.replace(b"rd", b"RD")
    assert place and len(text) == inputs[0].stat().st_size
    inputs[0].write_bytes(text)
    with pytest.raises(ResumeError, match=r"a\.jsonl has changed"):
        _run(inputs, tmp_path / "x")
    _run(inputs, tmp_path / "x", overwrite=True)
    _run(inputs, tmp_path / "whole")
    assert _hashes(tmp_path / "x") == _hashes(tmp_path / "whole")


def _interrupt_in(number: int, inputs: list[Path], prefix: Path) -> None:
    """Stops after the first commit inside a source."""
    seen = 0

    def stop(progress: Progress) -> None:
        nonlocal seen
        seen += progress.disk_bytes > sum(p.stat().st_size for p in inputs[:number])
        if seen > 2 * COMMIT // 4096 + 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        _run(inputs, prefix, progress=stop)


@pytest.mark.parametrize("at", [0.01, 0.5, 0.99])
def test_every_source_that_was_read_is_compared(at: float, inputs: list[Path], tmp_path: Path) -> None:
    """Another text of the same size, in a file that had been read to its end."""
    _interrupt_in(2, inputs, tmp_path / "x")
    text = inputs[0].read_bytes()
    place = text.find(b"rd ", int(len(text) * at))
    inputs[0].write_bytes(text[:place] + b"RD" + text[place + 2 :])
    with pytest.raises(ResumeError, match=r"a\.jsonl has changed since .*--overwrite"):
        _run(inputs, tmp_path / "x")
    inputs[0].write_bytes(text)
    os.utime(inputs[0], (0, 0))
    notes: list[str] = []
    _run(inputs, tmp_path / "x", report=notes.append)
    assert "going on after" in notes[0]
    _run(inputs, tmp_path / "whole")
    assert _hashes(tmp_path / "x") == _hashes(tmp_path / "whole")


def test_text_that_was_damaged_since_does_not_keep_a_run_from_beginning_again(
    inputs: list[Path], tmp_path: Path
) -> None:
    _interrupt_in(2, inputs, tmp_path / "x")
    data = inputs[1].read_bytes()
    inputs[1].write_bytes(data[:-8] + bytes(8))
    with pytest.raises(ResumeError, match=r"b\.jsonl\.gz has changed \(.*damaged near byte"):
        _run(inputs, tmp_path / "x")
    with pytest.raises(TextError, match="damaged near byte"):
        _run(inputs, tmp_path / "x", overwrite=True)


def test_a_run_that_died_while_it_named_its_files_is_compared_too(
    inputs: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(_: str) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("megalite.data.preprocess.publish", die)
        with pytest.raises(KeyboardInterrupt):
            _run(inputs, tmp_path / "x")
    text = inputs[2].read_bytes()
    inputs[2].write_bytes(text.replace(b"line 8999", b"line 0000"))
    with pytest.raises(ResumeError, match=r"c\.txt has changed"):
        _run(inputs, tmp_path / "x")
    inputs[2].write_bytes(text)
    _run(inputs, tmp_path / "x")
    _run(inputs, tmp_path / "whole")
    assert _hashes(tmp_path / "x") == _hashes(tmp_path / "whole")


def test_inputs_may_be_named_from_elsewhere(
    inputs: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    _interrupt_in(2, [Path(p.name) for p in inputs], tmp_path / "x")
    notes: list[str] = []
    text = inputs[0].read_bytes()
    inputs[0].write_bytes(text.replace(b"rd", b"RD", 1))
    monkeypatch.chdir("/")
    with pytest.raises(ResumeError, match=r"a\.jsonl has changed since"):
        _run(inputs, tmp_path / "x")
    inputs[0].write_bytes(text)
    _run(inputs, tmp_path / "x", report=notes.append)
    assert "going on after" in notes[0]


def test_a_lost_file_is_noticed(inputs: list[Path], tmp_path: Path) -> None:
    _interrupt(inputs, tmp_path / "x")
    (tmp_path / "x.bin.tmp").unlink()
    with pytest.raises(ResumeError, match=r"x\.bin\.tmp was lost"):
        _run(inputs, tmp_path / "x")
    _run(inputs, tmp_path / "x", overwrite=True)
    _run(inputs, tmp_path / "whole")
    assert _hashes(tmp_path / "x") == _hashes(tmp_path / "whole")


def test_a_run_that_replaces_files_goes_on_too(inputs: list[Path], tmp_path: Path) -> None:
    preprocess(inputs[1:2], tmp_path / "x", "byte", options=OPTIONS)
    old = (tmp_path / "x.bin").read_bytes()
    with pytest.raises(FileExistsError):
        _run(inputs, tmp_path / "x")

    def stop(progress: Progress) -> None:
        if progress.totals.bytes_read > 3 * COMMIT:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        _run(inputs, tmp_path / "x", overwrite=True, progress=stop)
    assert (tmp_path / "x.bin").read_bytes() == old
    notes: list[str] = []
    _run(inputs, tmp_path / "x", overwrite=True, report=notes.append)
    assert "going on after" in notes[0]
    _run(inputs, tmp_path / "whole")
    assert _hashes(tmp_path / "x") == _hashes(tmp_path / "whole")


def test_a_broken_line_late_in_a_strict_run_can_be_skipped_afterwards(inputs: list[Path], tmp_path: Path) -> None:
    good = inputs[0].read_bytes().splitlines(keepends=True)[7:70]
    inputs[0].write_bytes(b"".join(good) * 3 + b"{\n")
    strict = TextOptions(on_error="fail", max_document_mb=0.003)
    with pytest.raises(TextError, match="not JSON"):
        preprocess(inputs[:1], tmp_path / "x", "byte", options=strict, commit_bytes=COMMIT)
    notes: list[str] = []
    _run(inputs[:1], tmp_path / "x", report=notes.append)
    assert "going on after" in notes[0] and "skipped" in notes[1]
    _run(inputs[:1], tmp_path / "whole")
    assert _hashes(tmp_path / "x") == _hashes(tmp_path / "whole")


def test_one_run_at_a_time(inputs: list[Path], tmp_path: Path) -> None:
    def second(_: Progress) -> None:
        with pytest.raises(FileExistsError, match="being written by another process"):
            _run(inputs, tmp_path / "x")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        _run(inputs, tmp_path / "x", progress=second)
