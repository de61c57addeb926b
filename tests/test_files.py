"""Files that are there whole or not at all."""

import argparse
import json
import os
from pathlib import Path

import pytest

from megalite.files import output_file, replace_bytes, replace_json


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
