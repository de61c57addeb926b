"""Fixtures of the whole suite."""

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

from megalite.testing.world import World
from tests.tiny import write_tokens


def pytest_collection_finish() -> None:
    """Modules and tests stay to the end: a collection of garbage, of which many tests ask, need not go through them."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    """Extensions that count what is left at the end would take the modules for a leak."""
    gc.unfreeze()


@pytest.fixture(scope="session")
def world() -> Iterator[World]:
    """Gloo ranks that live for the session: `world.run(fn, *args, layout=..., ranks=n)`."""
    with World() as session_world:
        yield session_world


@pytest.fixture(scope="session")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The prefix of a small token file of documents of odd lengths."""
    return write_tokens(tmp_path_factory.mktemp("tokens") / "odd")


@pytest.fixture(scope="session")
def references(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where one-rank runs are kept: layouts of one config are all compared with the same one."""
    return tmp_path_factory.mktemp("references")
