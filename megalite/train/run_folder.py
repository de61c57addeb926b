"""The run folder: what a run leaves behind, and the rules for continuing in it.

    config.yaml               the merged config; itself a valid --config
    metrics.jsonl             one JSON object a step
    validation.jsonl          one JSON object an evaluation
    log.txt                   what the run said
    checkpoints/step_00000010/, checkpoints/latest
    router.jsonl              with experts: the tokens that chose each, one JSON object a step
    router_heatmap.png        the same as a picture, of the last checkpoint
    router_logits/            of the steps in train.record_router
    tensorboard/, profile/

Only rank 0 writes here (checkpoints apart), and it writes nothing before the run begins, so that a run that fails
while it is being built leaves no folder to clean up.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console

from megalite.files import replace_text
from megalite.mpu import ParallelState
from megalite.remote import is_remote
from megalite.train.logs import RunLog

logger = logging.getLogger("megalite")


class RunFolderError(ValueError):
    """The run folder cannot be used as asked; the message says what to do."""


class JsonLines:
    """A file of one JSON object a line, appended to and made by the first row; floats keep full precision.

    Each line reaches the operating system at once, so a killed process loses nothing; `sync` brings it to disk.
    """

    def __init__(self, path: Path):
        self._path = path
        self._file: TextIO | None = None

    def append(self, row: Mapping[str, Any]) -> None:
        """Writes one row."""
        if self._file is None:
            self._file = self._path.open("a", encoding="utf-8")
        self._file.write(json.dumps(row, allow_nan=False) + "\n")
        self._file.flush()

    def sync(self) -> None:
        """Waits until everything written is on disk."""
        if self._file is not None:
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Writes no more."""
        if self._file is not None:
            self._file.close()


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a JSON-lines file up to the first one that is not whole; none when there is no file."""
    return list(each_row(path))


def each_row(path: Path) -> Iterator[dict[str, Any]]:
    """`read_rows`, one by one."""
    return (json.loads(line) for line in _whole_lines(path))


def cut_back(path: Path, step: int) -> int:
    """Drops the rows after `step`, and a torn last line, by replacing the file at once; returns the last step kept.

    Kept lines stay byte for byte. Returns 0 when no row is left.
    """
    lines, last = [], 0
    for line in _whole_lines(path):
        row_step = json.loads(line)["step"]
        if row_step <= step:
            lines.append(line)
            last = row_step
    if path.exists():
        replace_text(path, "".join(lines))
    return last


def _whole_lines(path: Path) -> Iterator[str]:
    """Lines that end in a newline and hold an object with a step, up to the first that does not."""
    if not path.exists():
        return
    with path.open(encoding="utf-8", errors="replace", newline="\n") as file:
        for line in file:
            if not (line.endswith("\n") and _is_row(line)):
                return
            yield line


def _is_row(line: str) -> bool:
    try:
        return isinstance(json.loads(line)["step"], int)
    except (ValueError, KeyError, TypeError):
        return False


def _lies_in(place: str, folder: str) -> bool:
    """Whether a path or URL is below another one."""
    if is_remote(folder) or is_remote(place):
        return place.startswith(folder.rstrip("/") + "/")
    return Path(place).resolve().is_relative_to(Path(folder).resolve())


class RunFolder:
    """The places in one run's folder. `is_writer` says whether this process is the one that writes."""

    def __init__(self, path: str | Path, *, is_writer: bool = True, write_config: Callable[[Path], None] | None = None):
        self.path, self.is_writer, self._write_config = Path(path), is_writer, write_config
        self.config_file = self.path / "config.yaml"
        self.metrics_file = self.path / "metrics.jsonl"
        self.validation_file = self.path / "validation.jsonl"
        self.router_file = self.path / "router.jsonl"
        self.router_heatmap = self.path / "router_heatmap.png"
        self.router_logits = self.path / "router_logits"
        self.log_file = self.path / "log.txt"
        self.checkpoints = self.path / "checkpoints"
        self.tensorboard = self.path / "tensorboard"
        self.profile = self.path / "profile"
        self._log: RunLog | None = None
        self._lock: TextIO | None = None

    @staticmethod
    def open(
        path: str | Path,
        mpu: ParallelState,
        *,
        resume: str,
        checkpoints: str | None = None,
        read_only: bool = False,
        console: Console,
        write_config: Callable[[Path], None],
    ) -> RunFolder:
        """The folder for a run that resumes from `resume` (none, auto or a checkpoint); every rank calls this.

        checkpoints: where they are kept, if not here. read_only: the run will not write here (evaluation).
        write_config: writes the merged config to its argument. Raises RunFolderError, on all ranks, when the folder is
        not empty and the run does not continue it. Changes nothing on disk. From here to `close`, what rank 0 logs goes
        to `console` and, once the run begins, to log.txt.
        """
        folder = RunFolder(path, is_writer=mpu.world.is_first, write_config=write_config)
        # Rank 0 alone looks: the others might see what it has begun to write.
        problem = folder.problem(resume, checkpoints) if folder.is_writer and not read_only else None
        problem = mpu.world.gather_objects(problem)[0]
        if problem:
            raise RunFolderError(problem)
        if folder.is_writer:
            folder._log = RunLog(console)
        return folder

    def problem(self, resume: str, checkpoints: str | None = None) -> str | None:
        """Why a run with its checkpoints here (or in `checkpoints`) may not use this folder, or None."""
        if self.path.exists() and not self.path.is_dir():
            return f"run folder {self.path} is a file; choose another --train.run-dir"
        if self.is_empty or resume == "auto":
            return None
        if resume == "none":
            return (
                f"run folder {self.path} is not empty ({self._contents()});"
                " continue that run with --train.resume auto, or choose another --train.run-dir"
            )
        if not _lies_in(resume, str(self.path if checkpoints is None else checkpoints)):
            return (
                f"run folder {self.path} is not empty ({self._contents()}) and --train.resume {resume} is not a"
                " checkpoint of it; choose another --train.run-dir to branch off from that checkpoint"
            )
        return None

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing here (hidden files apart), or no folder."""
        return not self.path.is_dir() or all(entry.name.startswith(".") for entry in self.path.iterdir())

    def _contents(self) -> str:
        rows = list(_whole_lines(self.metrics_file))
        if rows:
            return f"metrics up to step {json.loads(rows[-1])['step']}"
        entries = sorted(entry.name for entry in self.path.iterdir())
        return ", ".join(entries[:3]) + (f" and {len(entries) - 3} more" if len(entries) > 3 else "")

    def begin(self, step: int) -> None:
        """Makes the folder, cuts the records back to `step` (where the run goes on) and writes the merged config.

        Only the writer acts; on other ranks this does nothing.
        """
        if not self.is_writer:
            return
        self.path.mkdir(parents=True, exist_ok=True)
        self._take_lock()
        last = cut_back(self.metrics_file, step)
        cut_back(self.validation_file, step)
        cut_back(self.router_file, step)
        if last < step and self.metrics_file.exists():
            logger.warning("%s ends at step %d, the run goes on after step %d", self.metrics_file, last, step)
        if self._write_config is not None:
            self._write_config(self.config_file)
        if self._log is not None:
            self._log.write_to(self.log_file)

    def _take_lock(self) -> None:
        """Keeps other processes out of the folder while this one lives; the system lets go when it ends."""
        self._lock = (self.path / ".lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunFolderError(
                f"another process is training in run folder {self.path}; wait for it, stop it, or choose another"
                " --train.run-dir"
            ) from None
        except OSError as error:
            logger.warning("run folder %s cannot be locked (%s): start only one run in it", self.path, error)

    def close(self) -> None:
        """Ends log.txt, leaves the console alone and lets others into the folder."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None
        if self._log is not None:
            self._log.close()
            self._log = None
