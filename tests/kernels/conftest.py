"""Kernel tests work on small tensors: one thread is faster than waking a second."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from megalite.kernels import attention_mask, attention_rows

OWN_PROCESS = ("interpreter", "aot")
"""Folders whose tests need a process of their own: collected only when they are named on the command line."""


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    if collection_path.name not in OWN_PROCESS or collection_path.parent != Path(__file__).parent:
        return None
    return True if not any(collection_path.name in Path(name.split("::")[0]).parts for name in config.args) else None


@pytest.fixture(autouse=True, scope="package")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention in blocks so small that short rows have several."""
    monkeypatch.setattr(attention_mask, "_BLOCK", 16)
    monkeypatch.setattr(attention_mask, "_WIDTH", 24)
    monkeypatch.setattr(attention_rows, "_CACHED", 500)
