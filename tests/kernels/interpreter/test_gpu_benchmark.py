"""The GPU benchmark's correctness part, at small sizes; its arithmetic."""

from __future__ import annotations

import pytest

from benchmarks import gpu_kernels


def test_every_operation_is_right() -> None:
    lines: list[str] = []
    operations = gpu_kernels._chosen(gpu_kernels.SMALL, "cpu", "")
    assert gpu_kernels._check_all(operations, report=lines.append) == []
    assert len(lines) >= 13


def test_a_wrong_kernel_is_found() -> None:
    (operation,) = gpu_kernels._chosen(gpu_kernels.SMALL, "cpu", "sum_of_squares")
    wrong = gpu_kernels.Operation(
        name="wrong",
        inputs=operation.inputs,
        ours=lambda x: operation.ours(x[1:]),
        eager=operation.eager,
        forward_bytes=1,
    )
    (fault,) = gpu_kernels._check_all(iter([wrong]), report=lambda line: None)
    assert fault.startswith("wrong: result 0 has error")


def test_numbers_of_a_row() -> None:
    row = gpu_kernels._row("op", "forward", 4 * 10**9, {"ours": 2e-3, "eager": 5e-3}, 2.5e12)
    assert row.milliseconds == 2.0 and row.gigabytes_per_second == 2000.0
    assert row.share_of_copy == pytest.approx(0.8) and row.times_as_long == {"eager": 2.5}
    assert gpu_kernels._markdown_row(row) == "| op | forward | 2.000 | 2000 | 0.80 | eager 2.50 |"
    assert gpu_kernels._peers(nobody=("no_such_module", "f", lambda f: None)) == {}
