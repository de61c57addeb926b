"""Files that are there whole or not at all."""

import argparse
import errno
import json
import os
from pathlib import Path

import pytest

from megalite.files import output_file, replace_bytes, replace_json, url_problem


def test_a_file_is_replaced_and_nothing_else_is_left(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    path.write_text("old")
    replace_json(path, {"rate": 0.5})
    assert json.loads(path.read_text()) == {"rate": 0.5}
    assert list(tmp_path.iterdir()) == [path]


def test_a_link_stays_one(tmp_path: Path) -> None:
    place, link = tmp_path / "place", tmp_path / "link"
    place.write_text("old")
    link.symlink_to(place)
    replace_bytes(link, b"new")
    assert link.is_symlink() and place.read_bytes() == b"new"


def test_a_pipe_is_written_to(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    replace_bytes(path, b"figures")
    assert os.read(reader, 100) == b"figures" and path.is_fifo()
    os.close(reader)


def test_an_argument_that_cannot_be_written(tmp_path: Path) -> None:
    assert output_file(str(tmp_path / "new.json")) == tmp_path / "new.json"
    for text, reason in ((str(tmp_path), "is a folder"), (str(tmp_path / "none" / "x.json"), "make it first")):
        with pytest.raises(argparse.ArgumentTypeError, match=reason):
            output_file(text)


def test_a_url_is_no_place_to_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "s3:" / "bucket").mkdir(parents=True)
    assert url_problem("s3:/x") == "" and url_problem(tmp_path) == ""
    with pytest.raises(argparse.ArgumentTypeError, match=r"s3://bucket/x: .* local disks only; write there and copy"):
        output_file("s3://bucket/x")


def test_a_device_in_a_folder_that_takes_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)
    os.mkfifo(tmp_path / "pipe")
    assert output_file(str(tmp_path / "pipe")) == tmp_path / "pipe"
    with pytest.raises(argparse.ArgumentTypeError, match="may not be written to"):
        output_file(str(tmp_path / "file"))


def test_a_full_disk_names_the_file_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"No space left on device: '.*/x\.json'"):
        replace_json(tmp_path / "x.json", [])
    assert not list(tmp_path.iterdir())
