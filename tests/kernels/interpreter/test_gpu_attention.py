"""The GPU benchmark of attention and experts, at tiny sizes."""

from __future__ import annotations

import torch

from benchmarks import gpu_attention


def test_every_operation_runs_and_is_right() -> None:
    cpu = torch.device("cpu")
    assert gpu_attention.faults(cpu, tiny=True) == []
    rows = gpu_attention.measure(cpu, tiny=True)
    assert len(rows) == 9 and len(gpu_attention.table(rows).splitlines()) == 11


def test_what_counts_as_wrong() -> None:
    assert not gpu_attention.Check(operation="wrong", error=1.2e-3, eager=1e-3).passed
    assert gpu_attention.Check(operation="right", error=1.05e-3, eager=1e-3).passed
