"""Files that are computed once and shared: any process may compute them, and none can see half of one."""

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
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

LOCK_SECONDS, NOTICE_SECONDS = 3600.0, 30.0
_LONG = 3.0
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
    directory: Path | None,
    key: str,
    shapes: Mapping[str, tuple[int | None, ...]],
    build: Callable[[], Arrays],
    *,
    what: str,
    seconds: float,
) -> Arrays:
    """The arrays of `build`, memory-mapped from `directory` when they are there with these shapes (None: any size).

    A process that finds nothing, or a damaged file, computes all arrays and renames each into place. Others wait for
    it, but not for ever (see `locked`), nor where there are no locks: then several compute the same bytes, and none
    sees half of a file. Failing to write is only logged. what, seconds: for the log, when it is to take long.
    """

    def make() -> Arrays:
        if seconds > _LONG:
            log.info("making %s; this takes about %.0f s, once", what, seconds)
        return build()

    if directory is None:
        return make()
    paths = {name: directory / f"{key}-{name}.npy" for name in shapes}
    if (found := _loaded(paths, shapes)) is not None:
        return found
    lock = directory / f"{key}.lock"
    with locked(lock):
        try:
            return _loaded(paths, shapes, damage=False) or _built(paths, make)
        finally:
            with contextlib.suppress(OSError):
                lock.unlink()  # who waits for it, or makes another, finds the arrays


def _built(paths: Mapping[str, Path], build: Callable[[], Arrays]) -> Arrays:
    """What `build` gives, from disk if it can be written: all processes then share the memory."""
    arrays = build()
    try:
        for name, path in paths.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            _save(path, arrays[name])
    except OSError as error:
        log.warning("an index could not be cached: %s", error)
        return arrays
    return _loaded(paths, {name: values.shape for name, values in arrays.items()}) or arrays


def _loaded(
    paths: Mapping[str, Path], shapes: Mapping[str, tuple[int | None, ...]], *, damage: bool = True
) -> Arrays | None:
    """The arrays on disk, or None when they are not there, or not whole (which is logged, if `damage`)."""
    try:
        arrays: Arrays = {name: np.load(path, mmap_mode="r").view(np.ndarray) for name, path in paths.items()}
        if all(_fits(arrays[name], shape) for name, shape in shapes.items()):
            return arrays
        reason: object = "arrays of other shapes or types"
    except FileNotFoundError:
        return None
    except Exception as error:  # numpy reads a damaged header as Python, which can go wrong in any way
        reason = error
    if damage:
        log.warning("a cached index is damaged (%s); building again %s", reason, ", ".join(map(str, paths.values())))
    return None


def _fits(array: NDArray[Any], wanted: tuple[int | None, ...]) -> bool:
    """Whether it is of integers, or records of such, and has the shape."""
    shape = array.shape
    is_same = len(shape) == len(wanted) and all(w in (None, n) for n, w in zip(shape, wanted, strict=True))
    return is_same and array.dtype.kind in "iuV"


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
    with locked(directory.with_name(directory.name + ".lock")) as exclusive:
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
def locked(path: Path, *, seconds: float | None = None) -> Iterator[bool]:
    """Holds a lock file, which the kernel takes back when this process dies.

    Yields False where it is not held: on file systems without locks, and (with a warning) when another process has held
    it for so many seconds, by default an hour, since no process may wait for another for ever.
    """
    with contextlib.ExitStack() as stack:
        file = None
        with contextlib.suppress(OSError):  # a folder that may only be read
            path.parent.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context(open(path, "ab"))
        yield file is not None and _acquired(file, path, LOCK_SECONDS if seconds is None else seconds)


def _acquired(file: IO[bytes], path: Path, seconds: float) -> bool:
    begun = time.monotonic()
    notice = begun + NOTICE_SECONDS
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if (now := time.monotonic()) - begun >= seconds:
                if seconds:
                    log.warning("another process has held %s for %.0f s: going on without it", path, seconds)
                return False
            if now >= notice:
                log.info("waiting for another process, which holds %s", path)
                notice = now + NOTICE_SECONDS
            time.sleep(0.05)
        except OSError:
            return False
