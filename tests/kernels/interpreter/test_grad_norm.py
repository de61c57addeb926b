"""The two-stage sum of squares, in guarded memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megalite.kernels.triton.grad_norm import sum_of_squares
from megalite.testing.triton_interpreter import count_traffic
from tests.kernels.interpreter.checks import canaries, guarded


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [0, 1, 17, 50001])
def test_matches_float64(size: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    values = guarded(torch.randn(size, dtype=dtype))
    with canaries():
        total = sum_of_squares(values)
    assert total.dtype == torch.float64 and total.shape == ()
    torch.testing.assert_close(total, values.double().square().sum(), rtol=1e-13, atol=0)
    assert torch.equal(total, sum_of_squares(values))


def test_large_is_finite_and_what_is_not_shows() -> None:
    values = torch.full((5000,), 3e38)
    assert sum_of_squares(values).isfinite()
    for bad in (float("nan"), float("inf"), -float("inf")):
        values[4711] = bad
        assert not sum_of_squares(values).isfinite()


def test_traffic_is_the_minimum() -> None:
    values = torch.randn(20000)
    with count_traffic() as traffic:
        sum_of_squares(values)
    assert traffic.of(values) == 80000 and traffic.total <= 1.1 * 80000


def test_opcheck() -> None:
    ops: Any = torch.ops.megalite
    torch.library.opcheck(ops.sum_of_squares.default, (torch.randn(33),))
