"""The bytes of token files: on this machine, or behind fsspec and then read by blocks that stay on a local disk."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from megalite.data.cache import default_directory, key_of, locked
from megalite.files import replace_bytes
from megalite.remote import as_os_errors, file_system, is_remote

BLOCK_BYTES = 4 << 20
ATTEMPTS = 5
FIRST_PAUSE = 0.5
"""Seconds before the second attempt; each later pause is twice as long."""
_RECENT = 32
_LOCKS = 64
_NOTICE_BYTES = 64 << 20
_GIVEN_UP = (FileNotFoundError, PermissionError, IsADirectoryError)  # asking again changes nothing
Result = TypeVar("Result")
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class BlockCache:
    """Where blocks are kept; every process of a machine may share it."""

    directory: Path
    limit: int | None = None
    """Bytes that blocks may take, about; those that were not used for longest go first. None: without end."""

    @classmethod
    def default(cls) -> BlockCache:
        """In the user's cache."""
        return cls(default_directory() / "remote")

    def sweep(self) -> None:
        """Removes the blocks that were not used for longest, to nine tenths of the limit, if there are too many."""
        if self.limit is None:
            return
        with locked(self.directory / ".sweep", wait=False) as mine:
            blocks = sorted(self._blocks()) if mine else []
            total = sum(size for _, size, _ in blocks)
            if total <= self.limit:
                return
            for _, size, path in blocks:
                if total <= 0.9 * self.limit:
                    return
                with contextlib.suppress(OSError):
                    path.unlink()
                    total -= size

    def _blocks(self) -> Iterator[tuple[float, int, Path]]:
        """(Last use, size, place) of each block."""
        for path in self.directory.glob("*/*.block"):
            with contextlib.suppress(OSError):
                stat = path.stat()
                yield stat.st_mtime, stat.st_size, path


class RemoteFile:
    """The bytes of a file at a URL: what is read is fetched in whole blocks, once for each machine.

    Blocks lie in a folder of the cache that is named after the URL, the size and whatever else the storage says of the
    file's version, so that another file of the same name has others. A fetch that fails is repeated ATTEMPTS times
    with growing pauses. Raises FileNotFoundError, ImportError and ValueError as `file_system` does, and OSError that
    names the URL, the bytes asked for and the reason. Any thread may read.
    """

    def __init__(self, url: str, cache: BlockCache):
        self.url, self.cache = url, cache
        self._files, self._path = file_system(url)
        info = self._persistently(lambda: self._files.info(self._path), "asked about")
        if info.get("type") == "directory":
            raise FileNotFoundError(f"{url} is a folder")
        if info.get("size") is None:
            raise OSError(f"{url}: the server does not say how long it is, so ranges of it cannot be read")
        self.size = int(info["size"])
        version = self._persistently(lambda: str(self._files.ukey(self._path)), "asked about")
        identity = {"url": url, "size": self.size, "version": version, "block": BLOCK_BYTES}
        self.folder = cache.directory / key_of(identity)
        self._recent: dict[int, NDArray[np.uint8]] = {}
        self._guard = threading.Lock()
        self._unswept = 0
        cache.sweep()  # the limit may have been lowered

    def read(self, begin: int, size: int) -> NDArray[np.uint8]:
        """uint8 [size], read-only: the bytes from `begin` on."""
        if size == 0:
            return np.empty(0, dtype=np.uint8)
        first, last = begin // BLOCK_BYTES, (begin + size - 1) // BLOCK_BYTES
        joined = [self._block(i) for i in range(first, last + 1)]
        whole = joined[0] if len(joined) == 1 else np.concatenate(joined)
        return whole[begin - first * BLOCK_BYTES :][:size]

    def _block(self, i: int) -> NDArray[np.uint8]:
        with self._guard:
            block = self._recent.pop(i, None)
        if block is None:
            block = self._stored(i)
        if block is None:
            with locked(self.cache.directory / f".fetch{i % _LOCKS}"):  # the ranks of a machine read the same rows
                block = self._stored(i)
                if block is None:
                    block = self._fetched(i)
        with self._guard:
            self._recent[i] = block
            while len(self._recent) > _RECENT:
                del self._recent[next(iter(self._recent))]
        return block

    def _extent(self, i: int) -> tuple[int, int]:
        return i * BLOCK_BYTES, min((i + 1) * BLOCK_BYTES, self.size)

    def _stored(self, i: int) -> NDArray[np.uint8] | None:
        """The block on disk; None when it is not there, or not whole."""
        begin, end = self._extent(i)
        try:
            block = np.memmap(self._place(i), dtype=np.uint8, mode="r").view(np.ndarray)
            os.utime(self._place(i))
        except (OSError, ValueError):
            return None
        return block if len(block) == end - begin else None

    def _place(self, i: int) -> Path:
        return self.folder / f"{i:08d}.block"

    def _fetched(self, i: int) -> NDArray[np.uint8]:
        content = self._content(i)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            replace_bytes(self._place(i), content)
        except OSError as error:
            log.warning("a block of %s could not be kept in %s: %s", self.url, self.folder, error)
        self._unswept += len(content)
        if self.cache.limit is not None and self._unswept > self.cache.limit // 32:
            self._unswept = 0
            self.cache.sweep()
        return np.frombuffer(content, dtype=np.uint8)

    def _content(self, i: int) -> bytes:
        begin, end = self._extent(i)

        def fetch() -> bytes:
            content = self._files.cat_file(self._path, start=begin, end=end)
            if len(content) != end - begin:
                raise OSError(f"{len(content)} bytes came; has the file been replaced?")
            return content

        return self._persistently(fetch, f"read at bytes {begin} to {end}")

    def _persistently(self, call: Callable[[], Result], what: str) -> Result:
        for attempt in range(ATTEMPTS):
            try:
                with as_os_errors(self._path):
                    return call()
            except _GIVEN_UP as error:
                raise type(error)(f"{self.url} cannot be {what}: {error}") from error
            except OSError as error:
                if attempt == ATTEMPTS - 1:
                    raise OSError(f"{self.url} could not be {what}, {ATTEMPTS} times: {error}") from error
                log.warning("%s could not be %s (%s); trying again", self.url, what, error)
                time.sleep(FIRST_PAUSE * 2**attempt)
        raise AssertionError("ATTEMPTS is positive")

    def whole(self) -> NDArray[np.uint8]:
        """uint8 [size], read-only: all of it, from a copy on this machine's disk that no sweep removes."""
        if self.size == 0:
            return np.empty(0, dtype=np.uint8)
        copy = self.folder / "whole"
        self.folder.mkdir(parents=True, exist_ok=True)
        with locked(self.folder / ".whole"):
            if not copy.is_file() or copy.stat().st_size != self.size:
                self._copy_to(copy)
        return np.memmap(copy, dtype=np.uint8, mode="r").view(np.ndarray)

    def _copy_to(self, copy: Path) -> None:
        scratch, shown, begun = copy.with_name(f"whole.{os.getpid()}"), 0, time.monotonic()
        try:
            with scratch.open("wb") as file:
                for i in range(-(-self.size // BLOCK_BYTES)):
                    file.write(self._content(i))
                    done = file.tell()
                    if done - shown > _NOTICE_BYTES and done < self.size:
                        shown, rate = done, done / max(time.monotonic() - begun, 1e-9)
                        log.info(
                            "%s: %.0f of %.0f MB, %.1f MB/s, %.0f s to go",
                            self.url, done / 1e6, self.size / 1e6, rate / 1e6, (self.size - done) / rate,
                        )  # fmt: skip
                file.flush()
                os.fsync(file.fileno())
            os.replace(scratch, copy)
        finally:
            scratch.unlink(missing_ok=True)


class LocalFile:
    """The bytes of a file on this machine, memory-mapped; what `read` returns keeps the mapping alive."""

    def __init__(self, path: str):
        if not os.path.isfile(path):
            raise FileNotFoundError(f"{path} does not exist")
        self.size = os.path.getsize(path)
        # An empty file cannot be mapped.
        mapped: NDArray[Any] = np.memmap(path, dtype=np.uint8, mode="r") if self.size else np.empty(0, dtype=np.uint8)
        self._bytes: NDArray[np.uint8] = mapped.view(np.ndarray)

    def read(self, begin: int, size: int) -> NDArray[np.uint8]:
        """uint8 [size], read-only: a view of the bytes from `begin` on."""
        return self._bytes[begin : begin + size]

    def whole(self) -> NDArray[np.uint8]:
        """uint8 [size]: a view of all of it."""
        return self._bytes


def token_file(path: str, cache: BlockCache) -> LocalFile | RemoteFile:
    """The file at a path or a URL."""
    return RemoteFile(path, cache) if is_remote(path) else LocalFile(path)


def text_if_there(path: str) -> str | None:
    """What a small file at a path or a URL says, or None when there is none."""
    if not is_remote(path):
        return Path(path).read_text() if os.path.isfile(path) else None
    files, place = file_system(path)
    try:
        with as_os_errors(path):
            return files.cat_file(place).decode()
    except FileNotFoundError:
        return None


def is_there(path: str) -> bool:
    """Whether there is a file at a path or a URL."""
    if not is_remote(path):
        return os.path.isfile(path)
    files, place = file_system(path)
    with as_os_errors(path):
        return bool(files.isfile(place))
