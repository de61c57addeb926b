"""Files that are there whole or not at all."""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from megalite.remote import is_remote


def output_file(text: str) -> Path:
    """The type of a command's argument that names a file to write: an error before any work if it cannot be made."""
    if problem := url_problem(text):
        raise argparse.ArgumentTypeError(problem)
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a folder: name a file in it")
    if path.exists() and not path.is_file():
        return path  # a pipe or a device: nothing is made
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text}: there is no folder {path.parent}, make it first")
    if not os.access(path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text}: folder {path.parent} may not be written to")
    return path


def url_problem(output: Path | str) -> str:
    """Why nothing can be written to `output`, if it is a URL; otherwise nothing.

    (A local folder could be called "s3:", but nobody means it.)
    """
    return f"{output}: files are written to local disks only; write there and copy them" if is_remote(output) else ""


@contextlib.contextmanager
def naming(path: Path | str) -> Iterator[None]:
    """An error of the system that does not say which file it is about (a full disk) names `path`."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise


def replace_text(path: Path, text: str) -> None:
    """`replace_bytes` of UTF-8."""
    replace_bytes(path, text.encode())


def replace_json(path: Path, value: Any) -> None:
    """`replace_text` of a value as JSON, indented."""
    replace_text(path, json.dumps(value, indent=1) + "\n")


def replace_bytes(path: Path, content: bytes) -> None:
    """Writes `path` so that a reader, or a crash, sees the old file or the new one, never a part.

    On disk when it returns; where that fails, nothing is left behind. Processes that write the same file at once do not
    mix: the last one wins. A link, a device or a pipe (/dev/stdout) is written through, not replaced.
    """
    with naming(path):
        if path.is_symlink() or (path.exists() and not path.is_file()):
            path.write_bytes(content)
            return
        fresh = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            with fresh.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(fresh, path)
        except BaseException:
            with contextlib.suppress(OSError):
                fresh.unlink()
            raise
        sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Waits until the entries of a folder are on disk."""
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def lock_for_writing(file: IO[Any], path: str | Path) -> None:
    """Keeps other processes from writing the open `file` until it is closed; closes it and raises FileExistsError where
    one writes it already. A file system without locks has none."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.close()
        raise FileExistsError(f"{path} is being written by another process") from error
    except OSError:
        pass
