"""Fixtures of the whole suite."""

from collections.abc import Iterator

import pytest

from megalite.testing.world import World


@pytest.fixture(scope="session")
def world() -> Iterator[World]:
    """Gloo ranks that live for the session: `world.run(fn, *args, layout=..., ranks=n)`."""
    with World() as session_world:
        yield session_world
