"""The manifest of a preparation: what was read, range by range, and what came of it. While it grows it is the journal.

PREFIX.manifest.jsonl holds JSON lines. The first says what was asked for; each further one is a commit: the ranges of
input since the last one with their sha256, where reading went on, counts so far, documents that were cut. A process
that finds PREFIX.manifest.jsonl.tmp goes on after its last whole line.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from typing import Any

from megalite.data.text_blocks import Block
from megalite.files import lock_for_writing, sync_folder

SUFFIX = ".manifest.jsonl"
VERSION = 1


class ResumeError(ValueError):
    """What lies there belongs to a run with other settings or other input."""


@dataclass
class Commit:
    """A point from which reading can go on."""

    source: int = 0
    """Index of the source to go on in."""
    offset: int = 0
    number: int = 1
    outputs: dict[str, list[int]] = field(default_factory=dict)
    """documents, tokens and largest id of each output."""
    counts: dict[str, int] = field(default_factory=dict)
    rejected_bytes: int = 0
    ranges: list[dict[str, Any]] = field(default_factory=list)
    """source, begin, end (bytes of decompressed text, or rows) and sha256 of the text in between."""
    cut: list[list[Any]] = field(default_factory=list)
    """Place and number of pieces of documents that were too long."""
    done: bool = False
    """Whether all has been read and completed."""


class Manifest:
    """The journal of one run; holds a lock while it is open.

    `settings` must be those of the run that it goes on with; with `restart` it begins again when they differ.
    Raises FileExistsError when another process is at work, ResumeError when the settings differ.
    """

    def __init__(self, prefix: str, settings: dict[str, Any], *, restart: bool = False):
        self.path = Path(prefix + SUFFIX)
        self._scratch = Path(f"{self.path}.tmp")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = _open_locked(self._scratch)
        self.commits: list[Commit] = []
        """The last one, if there is any."""
        try:
            lines = self._whole_lines()
            try:
                if lines:
                    self._check(json.loads(lines[0]), settings)
            except ResumeError:
                if not restart:
                    raise
                lines = []
            if not lines:
                self.restart(settings)
        except BaseException:
            self._file.close()
            raise
        self.commits = [Commit(**json.loads(line)) for line in lines[1:][-1:]]

    def restart(self, settings: dict[str, Any]) -> None:
        """Forgets what an earlier run did."""
        self._file.truncate(0)
        self.commits = []
        self._append({"version": VERSION} | settings)

    def _whole_lines(self) -> list[bytes]:
        """The lines that were written to their end; half a line is cut off."""
        self._file.seek(0)
        data = self._file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._file.truncate(len(whole))
        return whole.splitlines()

    def _check(self, found: dict[str, Any], settings: dict[str, Any]) -> None:
        wanted = json.loads(json.dumps({"version": VERSION} | settings))
        differing = [name for name in wanted | found if wanted.get(name) != found.get(name)]
        if differing:
            changes = "; ".join(f"{n}: {_short(found.get(n))} then, {_short(wanted.get(n))} now" for n in differing)
            raise ResumeError(
                f"{self._scratch} is that of an interrupted run with other settings ({changes});"
                " repeat its command to go on, or add --overwrite to begin again"
            )

    @property
    def last(self) -> Commit:
        """Where to go on."""
        return self.commits[-1] if self.commits else Commit()

    def ranges(self) -> list[list[dict[str, Any]]]:
        """All that was read, source by source in order; those without text have none."""
        found: list[list[dict[str, Any]]] = []
        for line in self._whole_lines()[1:]:
            for entry in json.loads(line)["ranges"]:
                if entry["begin"] == 0:
                    found.append([])
                found[-1].append(entry)
        return found

    def add(self, commit: Commit) -> None:
        """Appends a commit; it is on disk on return."""
        self._append(vars(commit))
        self.commits = [commit]

    def _append(self, entry: dict[str, Any]) -> None:
        size = self._file.seek(0, os.SEEK_END)
        try:
            line = memoryview(json.dumps(entry).encode() + b"\n")
            while line:
                line = line[self._file.write(line) :]
            os.fsync(self._file.fileno())
        except OSError:
            self._file.truncate(size)
            raise

    def publish(self) -> None:
        """Gives the manifest its final name."""
        os.replace(self._scratch, self.path)
        self._file.close()
        sync_folder(self.path.parent)

    def discard(self) -> None:
        """Removes the journal."""
        self._scratch.unlink(missing_ok=True)
        self._file.close()

    def close(self) -> None:
        """Leaves the journal to a process that goes on."""
        self._file.close()


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


class RangeHash:
    """The ranges of input since the last commit, and their hashes."""

    def __init__(self) -> None:
        self._ranges: list[dict[str, Any]] = []
        self._digest = hashlib.sha256()

    def add(self, source: str, block: Block) -> None:
        """Appends a block, which begins where the last one ended, or in another source."""
        begin, end = block.begin.offset, block.end.offset
        last = self._ranges[-1] if self._ranges else None
        if last is None or last["source"] != source or last["end"] != begin:
            self._close()
            self._ranges.append({"source": source, "begin": begin, "end": end})
        self._ranges[-1]["end"] = end
        self._digest.update(block.data)

    def _close(self) -> None:
        if self._ranges:
            self._ranges[-1]["sha256"] = self._digest.hexdigest()
        self._digest = hashlib.sha256()

    def take(self) -> list[dict[str, Any]]:
        """The ranges so far; begins anew."""
        self._close()
        ranges, self._ranges = self._ranges, []
        return ranges


def holds(text: Iterator[Block], ranges: Sequence[dict[str, Any]]) -> bool:
    """Whether a source begins with `ranges`; the blocks of `text` after them are left to be read."""
    for expected in ranges:
        found = RangeHash()
        for block in text:
            found.add(expected["source"], block)
            if block.end.offset >= expected["end"]:
                break
        if found.take() != [expected]:
            return False
    return True


def _open_locked(path: Path) -> FileIO:
    # Unbuffered: what a full disk refused must not be tried again on closing.
    file = open(path, "a+b", buffering=0)  # noqa: SIM115 (the manifest keeps it)
    lock_for_writing(file, path)
    return file
