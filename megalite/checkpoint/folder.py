"""Folders of checkpoints: on a file system of this machine, or behind fsspec (s3://, gs://, memory://, ...).

What differs between the two is how a checkpoint comes to be there whole or not at all. Files of a disk are written
beside it, synced and renamed. Object stores cannot rename, but they replace one object at once: data go under a fresh
name, and the manifest, written last, is what makes a checkpoint of them.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import secrets
import shutil
import stat
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from megalite.checkpoint.errors import CheckpointError
from megalite.files import replace_text, sync_folder
from megalite.remote import as_os_errors, file_system, is_remote

logger = logging.getLogger("megalite")

MANIFEST = "manifest.json"
_SPARE = 64 << 20
"""Bytes that must stay free after a save, for the manifest and the run's logs."""
_WRITING, _OLD = ".writing_", ".old_"


@dataclass(frozen=True)
class Draft:
    """Where the files of a checkpoint are written before it is there. path: ends in a slash. prefix: what stands before
    their names in the manifest."""

    path: str
    prefix: str = ""


class Reader(ABC):
    """A file that is read in ranges, by several threads at once."""

    size: int
    """Bytes."""

    @abstractmethod
    def read_into(self, buffer: memoryview, begin: int) -> int:
        """Fills as much of `buffer` as it likes with the bytes from `begin` on; returns how many, 0 at the end."""

    @abstractmethod
    def close(self) -> None:
        """Reads no more."""


class Folder(ABC):
    """A folder, with checkpoints in it or that of a checkpoint; paths inside are relative, with slashes.

    Every method raises OSError when the storage does not do as it is told.
    """

    address: Path | str
    """A path, or a URL."""
    block: int
    """Bytes that are best read at once."""

    def __str__(self) -> str:
        return str(self.address)

    @abstractmethod
    def child(self, name: str) -> Folder:
        """The folder `name` in it."""

    @abstractmethod
    def names(self) -> list[str]:
        """Everything in it, hidden or not; empty when there is no such folder."""

    @abstractmethod
    def size(self, path: str) -> int | None:
        """Bytes of a file; None when there is none."""

    @abstractmethod
    def written(self, path: str) -> float:
        """When a file was written, to be compared with others."""

    @abstractmethod
    def read_text(self, path: str) -> str:
        """A file of UTF-8 (ValueError if it is not)."""

    @abstractmethod
    def reader(self, path: str) -> Reader:
        """A file to read ranges of."""

    @abstractmethod
    def writer(self, path: str) -> contextlib.AbstractContextManager[IO[bytes]]:
        """A new file to write to; on disk when the context ends without an error."""

    @abstractmethod
    def replace_text(self, path: str, text: str) -> None:
        """Writes a file at once: a reader, or a crash, sees the old one or the new one."""

    @abstractmethod
    def remove(self, name: str) -> None:
        """Removes the checkpoint `name`, if it is there, so that none half removed looks complete."""

    @abstractmethod
    def sweep(self) -> None:
        """Removes what replaced and removed checkpoints have left."""

    @abstractmethod
    def lock(self) -> contextlib.AbstractContextManager[None]:
        """Keeps other savers out, where the storage can; they get a CheckpointError."""

    @abstractmethod
    def draft(self, name: str, size: int) -> Draft:
        """Where to write the `size` bytes of the files of checkpoint `name`.

        Clears what saves that were cut short have left. Raises CheckpointError when there is no room.
        """

    @abstractmethod
    def publish(self, draft: Draft, name: str, manifest: str) -> None:
        """Makes what was written to `draft` the checkpoint `name`, in place of an older one of that name."""

    @abstractmethod
    def discard(self, draft: Draft) -> None:
        """Removes a draft that will not be published; never raises."""

    def set_aside(self, name: str) -> str:
        """Where the older checkpoint `name` lies while a new one takes its place."""
        return _OLD + name


def folder_at(address: Path | str) -> Folder:
    """The folder at a path or a URL; CheckpointError when what the URL needs is not installed."""
    text = str(address)
    if not is_remote(text):
        return LocalFolder(Path(text))
    try:
        files, path = file_system(text)
    except (ImportError, ValueError) as error:
        raise CheckpointError(str(error)) from error
    return RemoteFolder(files, path.rstrip("/"), text.rstrip("/"))


class _LocalReader(Reader):
    def __init__(self, path: Path):
        self._file = os.open(path, os.O_RDONLY)
        self.size = os.fstat(self._file).st_size

    def read_into(self, buffer: memoryview, begin: int) -> int:
        return os.preadv(self._file, [buffer], begin)

    def close(self) -> None:
        os.close(self._file)


class LocalFolder(Folder):
    """A folder on a file system that all ranks share."""

    block = 4 << 20

    def __init__(self, path: Path):
        self.address = self._path = path

    def child(self, name: str) -> LocalFolder:
        """The folder `name` in it."""
        return LocalFolder(self._path / name)

    def names(self) -> list[str]:
        """Everything in it."""
        return [entry.name for entry in self._path.iterdir()] if self._path.is_dir() else []

    def size(self, path: str) -> int | None:
        """Bytes of a file."""
        try:
            found = (self._path / path).stat()  # one look: a save may move it away between two
        except (FileNotFoundError, NotADirectoryError):
            return None
        return found.st_size if stat.S_ISREG(found.st_mode) else None

    def written(self, path: str) -> float:
        """In nanoseconds."""
        return (self._path / path).stat().st_mtime_ns

    def read_text(self, path: str) -> str:
        """A file of UTF-8."""
        return (self._path / path).read_text(encoding="utf-8")

    def reader(self, path: str) -> Reader:
        """A file to read ranges of."""
        return _LocalReader(self._path / path)

    @contextlib.contextmanager
    def writer(self, path: str) -> Iterator[IO[bytes]]:
        """A new file, synced at the end."""
        with (self._path / path).open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())

    def replace_text(self, path: str, text: str) -> None:
        """Writes a file at once."""
        replace_text(self._path / path, text)

    def remove(self, name: str) -> None:
        """Hidden first: a folder half removed must not look complete."""
        hidden = self._path / self.set_aside(name)
        shutil.rmtree(hidden, ignore_errors=True)
        if (self._path / name).exists():
            os.rename(self._path / name, hidden)
            shutil.rmtree(hidden)

    def sweep(self) -> None:
        """Those that a crash has left hidden."""
        for entry in self.names():
            if entry.startswith(_OLD):
                shutil.rmtree(self._path / entry)

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Of this folder itself, so that no file is left; the system lets go when the process ends."""
        self._path.mkdir(parents=True, exist_ok=True)
        handle = os.open(self._path, os.O_RDONLY)
        try:
            self._take(handle)
            yield
        finally:
            os.close(handle)

    def _take(self, handle: int) -> None:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CheckpointError(
                f"another process is saving into {self._path}; wait for it, stop it, or save elsewhere"
            ) from None
        except OSError as error:
            logger.warning("%s cannot be locked (%s): let only one run save into it", self._path, error)

    def draft(self, name: str, size: int) -> Draft:
        """A hidden folder beside the checkpoint."""
        for entry in self.names():
            if entry.startswith(_WRITING):
                shutil.rmtree(self._path / entry)
            elif entry.startswith(".latest."):
                (self._path / entry).unlink()
        free = shutil.disk_usage(self._path).free
        if free < size + _SPARE:
            raise CheckpointError(
                f"the checkpoint takes {size / 2**20:.0f} MiB and {_SPARE >> 20} MiB must stay free,"
                f" but {free / 2**20:.0f} MiB are free; make room, or lower checkpoint.keep_last"
            )
        draft = Draft(f"{_WRITING}{name}.{secrets.token_hex(4)}/")
        (self._path / draft.path).mkdir()
        return draft

    def publish(self, draft: Draft, name: str, manifest: str) -> None:
        """Completes the folder and renames it."""
        fresh, final, old = self._path / draft.path, self._path / name, self._path / self.set_aside(name)
        replace_text(fresh / MANIFEST, manifest)
        if (final / MANIFEST).is_file():
            shutil.rmtree(old, ignore_errors=True)
            os.rename(final, old)
        elif final.exists():
            shutil.rmtree(final)
        os.rename(fresh, final)
        sync_folder(self._path)

    def discard(self, draft: Draft) -> None:
        """Removes a draft."""
        shutil.rmtree(self._path / draft.path, ignore_errors=True)


class _RemoteReader(Reader):
    def __init__(self, files: Any, path: str):
        self._files, self._path = files, path
        with as_os_errors(path):
            self.size = int(files.info(path)["size"])

    def read_into(self, buffer: memoryview, begin: int) -> int:
        with as_os_errors(self._path):
            content = self._files.cat_file(self._path, start=begin, end=begin + len(buffer))
        buffer[: len(content)] = content
        return len(content)

    def close(self) -> None:
        """Nothing is open."""


class RemoteFolder(Folder):
    """A folder behind fsspec.

    The files of a checkpoint lie in a folder of their own inside of it, one for each attempt to save it.
    """

    block = 32 << 20

    def __init__(self, files: Any, path: str, address: str):
        self._files, self._path, self.address = files, path, address

    def child(self, name: str) -> RemoteFolder:
        """The folder `name` in it."""
        return RemoteFolder(self._files, self._at(name), f"{self.address}/{name}")

    def names(self) -> list[str]:
        """Everything in it."""
        with as_os_errors(self._path):
            self._files.invalidate_cache()
            if not self._files.isdir(self._path):
                return []
            return [entry.rstrip("/").rpartition("/")[2] for entry in self._files.ls(self._path, detail=False)]

    def size(self, path: str) -> int | None:
        """Bytes of a file."""
        with as_os_errors(self._at(path)):
            self._files.invalidate_cache()
            return int(self._files.info(self._at(path))["size"]) if self._files.isfile(self._at(path)) else None

    def written(self, path: str) -> float:
        """In seconds."""
        with as_os_errors(self._at(path)):
            return self._files.modified(self._at(path)).timestamp()

    def read_text(self, path: str) -> str:
        """A file of UTF-8."""
        with as_os_errors(self._at(path)):
            content = self._files.cat_file(self._at(path))
        return content.decode("utf-8")

    def reader(self, path: str) -> Reader:
        """A file to read ranges of."""
        return _RemoteReader(self._files, self._at(path))

    @contextlib.contextmanager
    def writer(self, path: str) -> Iterator[IO[bytes]]:
        """A new file; nothing of it is seen before it is whole, where the storage does so."""
        with as_os_errors(self._at(path), CheckpointError), self._files.open(self._at(path), "wb") as file:
            yield file

    def replace_text(self, path: str, text: str) -> None:
        """Writes a file at once."""
        with as_os_errors(self._at(path)):
            self._files.pipe_file(self._at(path), text.encode())

    def remove(self, name: str) -> None:
        """The manifest first: what is left is then no checkpoint."""
        with as_os_errors(self._at(name)):
            self._files.invalidate_cache()
            for path in (f"{name}/{MANIFEST}", name):
                if self._files.exists(self._at(path)):
                    self._files.rm(self._at(path), recursive=path == name)

    def sweep(self) -> None:
        """Nothing: what a crash leaves goes when its step is saved again. It may be another saver's draft."""

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Object stores have no locks; two savers write to different drafts, and the last manifest wins."""
        yield

    def draft(self, name: str, size: int) -> Draft:
        """A folder inside of the checkpoint's; an object store has no end, so room is not asked for."""
        attempt = secrets.token_hex(4)
        with as_os_errors(self._path):
            self._files.makedirs(self._at(f"{name}/{attempt}"), exist_ok=True)
        return Draft(f"{name}/{attempt}/", f"{attempt}/")

    def publish(self, draft: Draft, name: str, manifest: str) -> None:
        """Writes the manifest, then removes the files that the one before spoke of."""
        self.replace_text(f"{name}/{MANIFEST}", manifest)
        folder = self.child(name)
        for entry in folder.names():
            if entry not in (draft.prefix.rstrip("/"), MANIFEST):
                with as_os_errors(folder._path):
                    self._files.rm(folder._at(entry), recursive=True)

    def discard(self, draft: Draft) -> None:
        """Removes a draft."""
        with contextlib.suppress(Exception):
            self._files.rm(self._at(draft.path).rstrip("/"), recursive=True)

    def _at(self, path: str) -> str:
        return f"{self._path}/{path}"
