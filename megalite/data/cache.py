"""Files that are computed once and shared: every process may compute them, and none can see half of one."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

LOCK_SECONDS = 3600.0
Arrays = dict[str, NDArray[Any]]
log = logging.getLogger(__name__)


def default_directory() -> Path:
    """Where caches live unless data.cache_dir says otherwise."""
    return Path("~/.cache/megalite").expanduser()


def key_of(settings: Mapping[str, Any], *arrays: NDArray[Any]) -> str:
    """A key for the result of a computation: a hash of everything that it depends on."""
    digest = hashlib.blake2b(json.dumps(settings, sort_keys=True, default=str).encode(), digest_size=12)
    for values in arrays:
        digest.update(f"{values.dtype.str}{values.shape}".encode())
        digest.update(np.ascontiguousarray(values).data.cast("B"))
    return digest.hexdigest()


def cached_arrays(
    directory: Path | None, key: str, shapes: Mapping[str, tuple[int | None, ...]], build: Callable[[], Arrays]
) -> Arrays:
    """The arrays of `build`, memory-mapped from `directory` when they are there with these shapes (None: any size).

    Nobody waits for anybody: a process that finds nothing (or a damaged file) computes all arrays and renames each
    into place; what other processes rename at the same time has the same bytes. Failing to write is only logged.
    """
    if directory is None:
        return build()
    paths = {name: directory / f"{key}-{name}.npy" for name in shapes}
    try:
        arrays: Arrays = {name: np.load(path, mmap_mode="r").view(np.ndarray) for name, path in paths.items()}
        if all(_fits(arrays[name].shape, shape) for name, shape in shapes.items()):
            return arrays
        log.warning("%s holds arrays of other shapes; building them again", paths)
    except FileNotFoundError:
        pass
    except (OSError, ValueError, EOFError) as error:
        log.warning("cached index %s is damaged (%s); building it again", key, error)
    arrays = build()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name, path in paths.items():
            _save(path, arrays[name])
    except OSError as error:
        log.warning("the index could not be cached in %s: %s", directory, error)
    return arrays


def _fits(shape: tuple[int, ...], wanted: tuple[int | None, ...]) -> bool:
    return len(shape) == len(wanted) and all(w in (None, n) for n, w in zip(shape, wanted, strict=True))


def _save(path: Path, values: NDArray[Any]) -> None:
    handle, scratch = tempfile.mkstemp(prefix=path.name, suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            np.save(file, values)
        os.chmod(scratch, 0o644)
        os.replace(scratch, path)
    except BaseException:
        Path(scratch).unlink(missing_ok=True)
        raise


def build_once(directory: Path, build: Callable[[Path], None]) -> Path:
    """Makes `directory` by `build(scratch directory)` unless it exists; returns it.

    One process builds while the others wait for its lock, which the kernel takes back when the builder dies, and
    the finished directory appears by a rename. Where the file system has no locks several processes build the same
    thing and the first rename wins.
    """
    if directory.is_dir():
        return directory
    directory.parent.mkdir(parents=True, exist_ok=True)
    with _locked(directory.with_name(directory.name + ".lock")) as exclusive:
        if directory.is_dir():
            return directory
        if exclusive:
            for stale in directory.parent.glob(f"{directory.name}.*.tmp"):
                shutil.rmtree(stale, ignore_errors=True)
        scratch = Path(tempfile.mkdtemp(prefix=f"{directory.name}.", suffix=".tmp", dir=directory.parent))
        try:
            build(scratch)
            os.chmod(scratch, 0o755)
            _rename_unless_there(scratch, directory)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return directory


def _rename_unless_there(scratch: Path, directory: Path) -> None:
    try:
        os.rename(scratch, directory)
    except OSError:
        if not directory.is_dir():
            raise


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[bool]:
    """Holds a lock file; yields False on file systems without locks. TimeoutError after an hour."""
    with open(path, "ab") as file:
        deadline = time.monotonic() + LOCK_SECONDS
        exclusive = False
        while not exclusive:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                exclusive = True
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"another process has held {path} for {LOCK_SECONDS:.0f} s") from None
                time.sleep(0.1)
            except OSError:
                break
        yield exclusive
