"""Triton kernels compiled ahead of time, which a process with the interpreter cannot do."""

from __future__ import annotations

import os

import pytest

if os.environ.get("TRITON_INTERPRET"):
    raise pytest.UsageError("TRITON_INTERPRET is set: python -m pytest tests/kernels/aot in a process without it")
