"""Masked softmax against float64 and the torch version, in guarded memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megalite.kernels import softmax as reference
from megalite.kernels.triton.softmax import masked_softmax
from megalite.testing.triton_interpreter import count_traffic
from tests.kernels.interpreter.checks import DTYPES, assert_close, assert_no_worse, canaries, forward_backward, guarded

SHAPES = [(2, 3, 5, 17), (1, 1, 1, 1), (1, 2, 3, 1000), (1, 0, 4, 8), (1, 1, 9, 4)]


def masks(shape: tuple[int, ...]) -> list[Tensor | None]:
    b, _, sq, sk = shape
    return [None, torch.rand(b, 1, 1, sk) > 0.4, torch.rand(shape) > 0.4, torch.rand(sq, sk) > 0.4]


def defined(x: Tensor, mask: Tensor | None, scale: float, causal: bool) -> Tensor:
    seen = torch.ones(x.shape, dtype=torch.bool) if mask is None else mask.expand(x.shape)
    if causal:
        seen = seen & torch.ones(x.shape[-2:], dtype=torch.bool).tril(x.shape[-1] - x.shape[-2])
    return torch.where(seen, (x * scale).masked_fill(~seen, -1e300).softmax(-1), 0.0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_float64(shape: tuple[int, ...], causal: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, dout = (guarded(torch.randn(shape).mul(3).to(dtype), gap=3) for _ in range(2))
    for mask in masks(shape):
        exact = forward_backward(lambda x, m=mask: defined(x, m, 0.3, causal), [x.double()], [dout.double()])
        eager = forward_backward(lambda x, m=mask: reference.masked_softmax(x, m, 0.3, causal=causal), [x], [dout])
        with canaries():
            ours = forward_backward(lambda x, m=mask: masked_softmax(x, m, 0.3, causal=causal), [x], [dout])
        assert_close(ours[0], exact[0], scale=1.0)
        # The gradient is that of the rounded probabilities.
        p = eager[0].double()
        want = 0.3 * p * (dout.double() - (p * dout.double()).sum(-1, keepdim=True))
        if torch.equal(ours[0], eager[0]):
            assert_close(ours[1], want, scale=1.0)
        for mine, theirs, right in zip(ours, eager, exact, strict=True):
            assert_no_worse(mine, theirs, right)


def test_rows_that_see_nothing_far_values_and_equal_values() -> None:
    x = torch.tensor([[1e4, -1e4, 1e4, 0.0], [2.0, 2.0, 2.0, 2.0], [3.0, 1.0, 0.0, 2.0]]).view(1, 1, 3, 4)
    mask = torch.tensor([[True] * 4, [True] * 4, [False] * 4]).view(1, 1, 3, 4)
    for function in (masked_softmax, reference.masked_softmax):
        want = torch.tensor([[0.5, 0.0, 0.5, 0.0], [0.25] * 4, [0.0] * 4]).view(1, 1, 3, 4)
        probs, dx = forward_backward(lambda x, f=function: f(x, mask, 1.0), [x], [torch.ones_like(x)])
        torch.testing.assert_close(probs, want)
        assert not dx[0, 0, 2].any() and dx.isfinite().all()
    above = masked_softmax(torch.full((1, 1, 3, 2), float("nan")), None, 1.0, causal=True)
    assert not above[0, 0, 0].any(), "three queries, two keys: the first query sees none, whatever is there"


def test_gradcheck_and_refusal() -> None:
    x, mask = torch.randn(1, 2, 2, 3, dtype=torch.float64, requires_grad=True), torch.tensor([True, False, True])
    assert torch.autograd.gradcheck(lambda x: masked_softmax(x, mask, 0.5), x)
    assert torch.autograd.gradcheck(lambda x: reference.masked_softmax(x, mask, 0.5, causal=True), x)
    with pytest.raises(ValueError, match="over 20000 keys"):
        masked_softmax(torch.empty(1, 1, 0, 20000), None, 1.0)


def test_traffic_is_the_minimum() -> None:
    """Bytes per element of bfloat16: 4 forward, less what causality hides, and 6 backward; 1 for a mask."""
    x = torch.randn(1, 2, 32, 256).bfloat16().requires_grad_()
    with count_traffic() as forward:
        out = masked_softmax(x, torch.ones(1, 2, 32, 256, dtype=torch.bool), 0.1)
    with count_traffic() as backward:
        out.backward(torch.ones_like(out))
    assert forward.total == 5 * x.numel() and backward.total == 6 * x.numel()
    with count_traffic() as causal:
        masked_softmax(x, None, 0.1, causal=True)
    assert causal.of(x) < 2 * x.numel()


def test_opcheck() -> None:
    ops: Any = torch.ops.megalite
    x, mask = torch.randn(1, 2, 3, 4, requires_grad=True), torch.rand(1, 1, 3, 4) > 0.5
    torch.library.opcheck(ops.masked_softmax.default, (x, mask, 0.5, True))
    torch.library.opcheck(ops.masked_softmax.default, (x, None, 0.5, False))
