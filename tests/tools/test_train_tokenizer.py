"""tools/train_tokenizer.py: what it refuses before it reads anything, and how it fails."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from tools.train_tokenizer import main


@pytest.fixture
def text(tmp_path: Path) -> str:
    path = tmp_path / "a.txt"
    path.write_text("\n".join(f"the cat number {i} sat on the mat" for i in range(400)))
    return str(path)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--output", "s3://bucket/t.model"), "--output s3://bucket/t.model: files are written to local disks only"),
        (("--output", "a.txt/t.model"), "a.txt is a file, not a folder"),
        (("--output", "a.txt/new/t.model"), "a.txt is a file, not a folder"),
        (("--output", "t.model", "--overwrite"), "--output t.model is a folder"),
        *(
            (("--output", "x.model", "--max-megabytes", size), f"--max-megabytes {size} must be a positive number")
            for size in ("inf", "nan", "0.0")
        ),
    ],
)
def test_what_cannot_work_is_refused_at_once(
    words: tuple[str, ...], message: str, text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(text).parent
    monkeypatch.chdir(folder)
    (folder / "t.model").mkdir()
    assert main(["--input", text, *words]) == 2
    assert message in capsys.readouterr().err
    assert sorted(path.name for path in folder.iterdir()) == ["a.txt", "t.model"]


def test_a_full_disk_names_the_file(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    output = tmp_path / "new" / "t.model"
    assert main(["--input", text, "--output", str(output), "--vocab-size", "300"]) == 1
    assert f"No space left on device: '{output}'" in capsys.readouterr().err
    assert not list(output.parent.iterdir())
