"""The rules of the run folder."""

import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from megalite.mpu import ParallelConfig, ParallelState
from megalite.testing.world import World
from megalite.train.run_folder import JsonLines, RunFolder, RunFolderError, cut_back, read_rows


def open_folder(path: Path, *, resume: str = "none", read_only: bool = False, **kwargs: Any) -> RunFolder:
    return RunFolder.open(
        path, ParallelState.single(), resume=resume, read_only=read_only, console=Console(quiet=True), **kwargs
    )


def write_config(path: Path) -> None:
    path.write_text("model: {}\n")


def write_rows(path: Path, steps: range) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    file = JsonLines(path)
    for step in steps:
        file.append({"step": step, "loss": 1.0 / (3 * step)})
    file.close()


def test_a_new_folder_is_made_when_the_run_begins_and_not_before(tmp_path: Path) -> None:
    folder = open_folder(tmp_path / "runs" / "new", write_config=write_config)
    logging.getLogger("megalite").info("while building")
    assert not folder.path.exists()
    folder.begin(0)
    logging.getLogger("megalite.data").info("while training")
    folder.close()
    logging.getLogger("megalite").warning("after the run")
    assert folder.config_file.read_text() == "model: {}\n"
    log = folder.log_file.read_text().splitlines()
    assert [line.split(" INFO ")[-1] for line in log] == ["while building", "while training"]


def test_a_non_empty_folder_is_refused_without_resume(tmp_path: Path) -> None:
    write_rows(tmp_path / "metrics.jsonl", range(1, 8))
    with pytest.raises(RunFolderError, match=r"not empty \(metrics up to step 7\).*--train.resume auto.*run-dir"):
        open_folder(tmp_path, write_config=write_config)
    assert len(read_rows(tmp_path / "metrics.jsonl")) == 7


def test_any_file_makes_a_folder_non_empty(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(RunFolderError, match=r"not empty \(notes.txt\)"):
        open_folder(tmp_path, write_config=write_config)


def test_an_empty_folder_is_taken(tmp_path: Path) -> None:
    (tmp_path / ".gitignore").write_text("*")
    open_folder(tmp_path, write_config=write_config).close()


def test_a_file_in_the_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("")
    with pytest.raises(RunFolderError, match="is a file"):
        open_folder(tmp_path / "run", resume="auto", write_config=write_config)


def test_resume_continues_in_the_folder(tmp_path: Path) -> None:
    write_rows(tmp_path / "metrics.jsonl", range(1, 8))
    open_folder(tmp_path, resume="auto", write_config=write_config).close()
    open_folder(tmp_path, resume=str(tmp_path / "checkpoints/step_00000005"), write_config=write_config).close()


def test_a_checkpoint_of_another_run_needs_a_folder_of_its_own(tmp_path: Path) -> None:
    ours, theirs = tmp_path / "ours", tmp_path / "theirs/checkpoints/step_00000005"
    write_rows(ours / "metrics.jsonl", range(1, 8))
    with pytest.raises(RunFolderError, match="is not a checkpoint of it"):
        open_folder(ours, resume=str(theirs), write_config=write_config)
    open_folder(tmp_path / "fresh", resume=str(theirs), write_config=write_config).close()


def test_evaluation_may_look_at_any_folder(tmp_path: Path) -> None:
    write_rows(tmp_path / "metrics.jsonl", range(1, 8))
    open_folder(tmp_path, read_only=True, write_config=write_config).close()


def test_begin_cuts_all_records_back(tmp_path: Path) -> None:
    write_rows(tmp_path / "metrics.jsonl", range(1, 8))
    write_rows(tmp_path / "validation.jsonl", range(2, 8, 2))
    folder = open_folder(tmp_path, resume="auto", write_config=write_config)
    folder.begin(5)
    folder.close()
    assert [row["step"] for row in read_rows(folder.metrics_file)] == [1, 2, 3, 4, 5]
    assert [row["step"] for row in read_rows(folder.validation_file)] == [2, 4]


def test_begin_says_when_rows_are_missing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_rows(tmp_path / "metrics.jsonl", range(1, 4))
    folder = open_folder(tmp_path, resume="auto", write_config=write_config)
    folder.begin(5)
    folder.close()
    assert "ends at step 3, the run goes on after step 5" in caplog.text


def test_cut_back_keeps_lines_byte_for_byte_and_drops_a_torn_one(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write_rows(path, range(1, 4))
    whole = path.read_bytes()
    with path.open("a") as file:
        file.write('{"step": 4, "lo')  # the process was killed here
    assert cut_back(path, 10) == 3
    assert path.read_bytes() == whole
    assert cut_back(path, 2) == 2
    assert path.read_bytes() == b"".join(whole.splitlines(keepends=True)[:2])
    assert cut_back(path, 0) == 0 and path.read_bytes() == b""
    assert [entry.name for entry in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_cut_back_stops_at_a_line_that_is_no_row(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n\0\0\0\0\n{"step": 2}\n')  # zeros, as after a loss of power
    assert cut_back(path, 5) == 1
    assert path.read_text() == '{"step": 1}\n'


def test_cut_back_replaces_the_file_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "metrics.jsonl"
    write_rows(path, range(1, 4))
    before = path.read_bytes()

    def killed(source: Path, target: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        cut_back(path, 1)
    assert path.read_bytes() == before


def test_cut_back_of_no_file_makes_none(tmp_path: Path) -> None:
    assert cut_back(tmp_path / "metrics.jsonl", 3) == 0
    assert not (tmp_path / "metrics.jsonl").exists()


def test_rows_reach_the_file_at_once_in_full_precision(tmp_path: Path) -> None:
    file = JsonLines(tmp_path / "metrics.jsonl")
    file.append({"step": 1, "loss": 0.1 + 0.2})
    text = (tmp_path / "metrics.jsonl").read_text()
    assert json.loads(text)["loss"] == 0.1 + 0.2 and text.endswith("\n")
    with pytest.raises(ValueError):
        file.append({"step": 2, "loss": float("nan")})
    file.close()


def open_on_two_ranks(mpu: ParallelState, path: str) -> str:
    try:
        folder = RunFolder.open(path, mpu, resume="none", console=Console(quiet=True), write_config=write_config)
    except RunFolderError as error:
        return str(error)
    folder.begin(0)
    folder.close()
    return f"writer {folder.is_writer}"


def test_rank_0_alone_decides_and_writes(world: World, tmp_path: Path) -> None:
    path = str(tmp_path / "run")
    layout = ParallelConfig()
    assert world.run(open_on_two_ranks, path, layout=layout, ranks=2) == ["writer True", "writer False"]
    first, second = world.run(open_on_two_ranks, path, layout=layout, ranks=2)
    assert first == second and "not empty" in first


def test_a_folder_that_another_run_is_in_is_refused(tmp_path: Path) -> None:
    first = open_folder(tmp_path / "run", write_config=write_config)
    first.begin(0)
    second = open_folder(tmp_path / "run", resume="auto", write_config=write_config)
    with pytest.raises(RunFolderError, match="another process is training in run folder"):
        second.begin(0)
    second.close()
    first.close()
    third = open_folder(tmp_path / "run", resume="auto", write_config=write_config)
    third.begin(0)
    third.close()
