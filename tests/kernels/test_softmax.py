"""Masked softmax against its definition in float64."""

from __future__ import annotations

import pytest
import torch

from megalite.kernels.softmax import masked_softmax


@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_matches_float64(dtype: torch.dtype, causal: bool) -> None:
    torch.manual_seed(0)
    x, mask = torch.randn(2, 3, 5, 9).to(dtype), torch.rand(2, 1, 5, 9) > 0.3
    seen = mask & torch.ones(5, 9, dtype=torch.bool).tril(4) if causal else mask
    exact = torch.where(seen, (x.double() * 0.3).masked_fill(~seen, -1e300).softmax(-1), 0.0)
    probs = masked_softmax(x, mask, 0.3, causal=causal)
    assert probs.dtype == dtype
    torch.testing.assert_close(probs.double(), exact, rtol=0, atol=2 * torch.finfo(dtype).eps)


def test_rows_that_see_nothing_are_zero() -> None:
    x = torch.randn(1, 1, 3, 2, requires_grad=True)
    probs = masked_softmax(x, None, 1.0, causal=True)
    assert not probs[0, 0, 0].any()
    probs.square().sum().backward()
    assert x.grad is not None and x.grad.isfinite().all() and not x.grad[0, 0, 0].any()


def test_gradcheck() -> None:
    x, mask = torch.randn(1, 2, 2, 4, dtype=torch.float64, requires_grad=True), torch.tensor([True, False, True, True])
    assert torch.autograd.gradcheck(lambda x: masked_softmax(x, mask, 0.5, causal=True), x)
