"""The sum of squares of a gradient."""

from __future__ import annotations

import pytest
import torch

from megalite.kernels import grad_norm
from megalite.kernels.grad_norm import sum_of_squares


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [0, 1, 1000])
def test_matches_float64(size: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grad_norm, "_CHUNK", 300)
    values = torch.randn(size, dtype=dtype)
    total = sum_of_squares(values)
    assert total.dtype == torch.float64 and total.shape == ()
    torch.testing.assert_close(total, values.double().square().sum(), rtol=1e-14, atol=0)


def test_large_is_finite_and_what_is_not_shows() -> None:
    values = torch.full((100,), 3e38)
    assert sum_of_squares(values).isfinite()
    for bad in (float("nan"), float("inf")):
        values[71] = bad
        assert not sum_of_squares(values).isfinite()
