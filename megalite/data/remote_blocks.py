"""The bytes of token files: on this machine, or behind fsspec and then read by blocks that stay on a local disk."""

from __future__ import annotations

import contextlib
import errno
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
from megalite.data.indexed_format import FormatError
from megalite.files import replace_bytes
from megalite.remote import as_os_errors, file_system, is_remote

BLOCK_BYTES = 4 << 20
ATTEMPTS = 5
FIRST_PAUSE = 0.5
"""Seconds before the second attempt; each later pause is twice as long."""
LIMIT_BYTES = 64_000_000_000
_RECENT = 32
_LOCKS = 64
_LOCK_SECONDS = 60.0
"""For a block that another process is fetching; to fetch it twice does no harm."""
_ABANDONED_SECONDS = 3600.0
_NOTICE_BYTES = 64 << 20
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM)
_VERSION = ("ETag", "Content-MD5", "Digest", "Last-Modified")
"""What servers say of a file's version where their clients take all files for fixed."""
_GIVEN_UP = (FileNotFoundError, PermissionError, IsADirectoryError)  # asking again changes nothing
Result = TypeVar("Result")
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class BlockCache:
    """Where blocks are kept; every process of a machine may share it."""

    directory: Path
    limit: int | None = LIMIT_BYTES
    """Bytes that it may take, about; what was not used for longest goes first. None: without end."""

    @classmethod
    def default(cls) -> BlockCache:
        """In the user's cache."""
        return cls(default_directory() / "remote")

    def sweep(self) -> None:
        """Removes what was not used for longest, to nine tenths of the limit, if there is too much.

        Processes that have mapped what goes keep it.
        """
        if self.limit is None:
            return
        with locked(self.directory / ".sweep", seconds=0.0) as mine:
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
        """(Last use, size, place) of each block and copy; what a killed process has left of one goes at once."""
        for path in (*self.directory.glob("*/.*.block.*"), *self.directory.glob("*/whole.*")):
            with contextlib.suppress(OSError):
                if time.time() - path.stat().st_mtime > _ABANDONED_SECONDS:
                    path.unlink()
        for path in (*self.directory.glob("*/*.block"), *self.directory.glob("*/whole")):
            with contextlib.suppress(OSError):
                stat = path.stat()
                yield stat.st_mtime, stat.st_size, path


class RemoteFile:
    """The bytes of a file at a URL: what is read is fetched in whole blocks, once for each machine.

    Blocks lie in a folder of the cache that is named after the URL, the size and whatever else the storage says of the
    file's version, so that another file of the same name has others; one that is replaced while it is open is an error
    (FormatError). A fetch that fails is repeated ATTEMPTS times with growing pauses. Raises FileNotFoundError, what
    `file_system` raises, and OSError that names the URL, the bytes asked for and the reason. Any thread may read.
    """

    def __init__(self, url: str, cache: BlockCache):
        self.url, self.cache = url, cache
        self._files, self._path = file_system(url)
        self.size, self._version = persistently(url, self._look, "asked about")
        identity = {"url": url, "size": self.size, "version": self._version, "block": BLOCK_BYTES}
        self.folder = cache.directory / key_of(identity)
        self._recent: dict[int, NDArray[np.uint8]] = {}
        self._guard = threading.Lock()
        self._unswept = 0
        cache.sweep()  # the limit may have been lowered

    def _look(self) -> tuple[int, str]:
        """(Size, version) of the file as it is now."""
        self._files.invalidate_cache()
        info = self._files.info(self._path)
        if info.get("type") == "directory":
            raise FileNotFoundError(f"{self.url} is a folder")
        if info.get("size") is None:
            raise OSError(f"{self.url}: the server does not say how long it is, so ranges of it cannot be read")
        told = [str(info[name]) for name in _VERSION if info.get(name)]
        return int(info["size"]), " ".join([str(self._files.ukey(self._path)), *told])

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
            # The ranks of a machine read the same rows.
            with locked(self.folder / f".fetch{i % _LOCKS}", seconds=_LOCK_SECONDS):
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
        stored = self._stored(i)  # memory that all processes share, and that can be dropped
        return stored if stored is not None else np.frombuffer(content, dtype=np.uint8)

    def _content(self, i: int) -> bytes:
        begin, end = self._extent(i)

        def fetch() -> bytes:
            content = self._files.cat_file(self._path, start=begin, end=end)
            if self._look() != (self.size, self._version):
                raise FormatError(f"{self.url} has been replaced since it was opened: start again")
            if len(content) != end - begin:
                raise OSError(f"{len(content)} bytes came")
            return content

        return persistently(self.url, fetch, f"read at bytes {begin} to {end}")

    @property
    def copy(self) -> Path:
        """Where `whole` keeps the file."""
        return self.folder / "whole"

    def whole(self) -> NDArray[np.uint8]:
        """uint8 [size], read-only: all of it, from a copy on this machine's disk, in memory where that has no room."""
        if self.size == 0:
            return np.empty(0, dtype=np.uint8)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with locked(self.folder / ".whole"):
                if not self.copy.is_file() or self.copy.stat().st_size != self.size:
                    self._copy_to(self.copy)
                os.utime(self.copy)
                return np.memmap(self.copy, dtype=np.uint8, mode="r").view(np.ndarray)
        except OSError as error:
            if error.errno not in _NO_ROOM:
                raise
            log.warning("a copy of %s could not be kept in %s: %s", self.url, self.folder, error)
        return np.frombuffer(b"".join(map(self._content, range(-(-self.size // BLOCK_BYTES)))), dtype=np.uint8)

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
    """What a small file at a path or a URL says, or None when there is none; FormatError for what is no UTF-8."""
    if not is_there(path):
        return None
    if is_remote(path):
        files, place = file_system(path)
        content = persistently(path, lambda: files.cat_file(place), "read")
    else:
        content = Path(path).read_bytes()
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise FormatError(f"{path} is not UTF-8: {error}") from error


def is_there(path: str) -> bool:
    """Whether there is a file at a path or a URL; a server that does not answer is an error, not an absent file."""
    if not is_remote(path):
        return os.path.isfile(path)
    files, place = file_system(path)
    try:
        return persistently(path, lambda: files.info(place)["type"], "asked about") == "file"
    except FileNotFoundError:
        return False


def persistently(url: str, call: Callable[[], Result], what: str) -> Result:
    """`call()`, ATTEMPTS times with growing pauses as long as it fails; OSError that names the URL and `what`."""
    for attempt in range(ATTEMPTS):
        try:
            with as_os_errors(url, FormatError):
                return call()
        except _GIVEN_UP as error:
            raise type(error)(f"{url} cannot be {what}: {error}") from error
        except OSError as error:
            if attempt == ATTEMPTS - 1:
                raise OSError(f"{url} could not be {what}, {ATTEMPTS} times: {error}") from error
            log.warning("%s could not be %s (%s); trying again", url, what, error)
            time.sleep(FIRST_PAUSE * 2**attempt)
    raise AssertionError("ATTEMPTS is positive")
