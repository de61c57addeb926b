"""Files behind fsspec: s3://, gs://, https://, memory:// and whatever else it knows."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def is_remote(address: Path | str) -> bool:
    """Whether `address` is a URL."""
    return "://" in str(address)


def file_system(url: str) -> tuple[Any, str]:
    """(fsspec's client of `url`, its path there).

    Raises ImportError, with what to install, for a missing package and ValueError for a protocol that nobody knows.
    """
    try:
        import fsspec  # only those who need it wait for it
    except ImportError as error:
        raise ImportError(f"{url} needs fsspec: pip install fsspec") from error
    try:
        return fsspec.core.url_to_fs(url)
    except ImportError as error:
        raise ImportError(f"{url} cannot be reached: {error}") from error
    except ValueError as error:
        raise ValueError(f"{url} cannot be reached: {error}") from error


@contextlib.contextmanager
def as_os_errors(path: str, *passed: type[Exception]) -> Iterator[None]:
    """Clients of object stores have exceptions of their own: an OSError instead, but for those to be `passed` on."""
    try:
        yield
    except (OSError, *passed):
        raise
    except Exception as error:
        raise OSError(f"{path}: {type(error).__name__}: {error}") from error
