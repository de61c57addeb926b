"""Triton kernels in the interpreter, which takes a process of its own: `make test` starts one."""

from __future__ import annotations

import os

import pytest

if os.environ.get("TRITON_INTERPRET") != "1":
    raise pytest.UsageError(
        "the interpreter's tests need a process of their own:"
        " TRITON_INTERPRET=1 OPENBLAS_NUM_THREADS=1 python -m pytest tests/kernels/interpreter"
    )

from megalite.kernels import products
from megalite.testing.triton_interpreter import repair

repair()


@pytest.fixture(autouse=True)
def native_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """The eager operation that a kernel must not be worse than rounds as a GPU's does, on any CPU."""
    monkeypatch.setattr(products, "has_instructions", lambda dtype: True)
