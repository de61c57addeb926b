"""Triton kernels in the interpreter, which takes a process of its own: `make test` starts one."""

from __future__ import annotations

import os

import pytest

if os.environ.get("TRITON_INTERPRET") != "1":
    raise pytest.UsageError(
        "the interpreter's tests need a process of their own:"
        " TRITON_INTERPRET=1 OPENBLAS_NUM_THREADS=1 python -m pytest tests/kernels/interpreter"
    )

from megalite.testing.triton_interpreter import repair

repair()
