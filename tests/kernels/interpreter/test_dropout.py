"""Dropout in the interpreter: the bits of the torch version, and values against float64, in guarded memory."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from megalite.kernels import dropout as reference
from megalite.kernels.dropout import dropout_key, keep_mask
from megalite.kernels.triton import dropout
from megalite.testing.triton_interpreter import count_traffic
from tests.kernels.interpreter.checks import (
    DTYPES,
    assert_close,
    assert_no_worse,
    canaries,
    double,
    forward_backward,
    guarded,
)

KEY = dropout_key(1234, 5, 6)
TOKENS = torch.tensor([0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**40 + 12345, 2**62])
SHAPES = [(7, 3, 17), (1, 1), (8, 128), (2, 2880), (0, 16)]


def tokens(shape: tuple[int, ...]) -> Tensor:
    rows = shape[:-1]
    return (torch.arange(rows.numel() if isinstance(rows, torch.Size) else math.prod(rows)) * 7919 + 2**33).view(rows)


@pytest.mark.parametrize("p", [0.001, 0.1, 0.5, 0.999, 1.0 - 1e-12, 1.0])
def test_mask_has_the_bits_of_the_torch_version(p: float) -> None:
    ours = dropout.dropout(torch.ones(8, 3000), p, KEY, TOKENS, 7)
    assert torch.equal(ours != 0, keep_mask(KEY, p, TOKENS, 3000, 7))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("with_bias", [True, False], ids=["bias", "plain"])
@pytest.mark.parametrize(("p", "shape"), [*((0.25, s) for s in SHAPES), (0.0, (3, 17)), (1.0, (3, 17))], ids=str)
def test_bias_dropout_add(shape: tuple[int, ...], p: float, with_bias: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, residual, dout = (guarded(torch.randn(shape).to(dtype), gap=3) for _ in range(3))
    bias = [guarded(torch.randn(shape[-1]).to(dtype))] if with_bias else []
    token_index = tokens(shape)
    factor = keep_mask(KEY, p, token_index, shape[-1]).double() * (1 / (1 - p) if p < 1 else 0.0)

    def ours(x: Tensor, residual: Tensor, bias: Tensor | None = None) -> Tensor:
        return dropout.bias_dropout_add(x, bias, residual, p, KEY, token_index)

    def eager(x: Tensor, residual: Tensor, bias: Tensor | None = None) -> Tensor:
        return reference.bias_dropout_add(x, bias, residual, p, KEY, token_index)

    def defined(x: Tensor, residual: Tensor, bias: Tensor | None = None) -> Tensor:
        return residual + (x if bias is None else x + bias) * factor

    inputs = [x, residual, *bias]
    exact = forward_backward(defined, double(inputs), double([dout]))
    theirs = forward_backward(eager, inputs, [dout])
    with canaries():
        mine = forward_backward(ours, inputs, [dout])
    for a, b, want in zip(mine, theirs, exact, strict=True):
        assert_close(a, want, scale=1.0)
        assert_no_worse(a, b, want)


def test_bias_gradient_over_many_rows() -> None:
    """More rows than programs take at once."""
    x, dout, bias = torch.zeros(300, 8), torch.randn(300, 8), torch.zeros(8)
    index = tokens((300, 8))
    _, dx, dbias = forward_backward(lambda x, b: dropout.bias_dropout_add(x, b, x, 0.1, KEY, index), [x, bias], [dout])
    assert_close(dbias, (dx - dout).double().sum(0), scale=10.0)


def test_dropout_alone_and_in_cuts() -> None:
    x, dout, token_index = guarded(torch.randn(6, 10, 48), gap=2), torch.randn(6, 10, 48), tokens((6, 10, 48))
    mine = forward_backward(lambda x: dropout.dropout(x, 0.3, KEY, token_index), [x], [dout])
    theirs = forward_backward(lambda x: reference.dropout(x, 0.3, KEY, token_index), [x], [dout])
    for a, b in zip(mine, theirs, strict=True):
        assert torch.equal(a, b)
    cut = [dropout.dropout(x[..., i : i + 16], 0.3, KEY, token_index, i) for i in (0, 16, 32)]
    assert torch.equal(torch.cat(cut, -1), mine[0])


def test_gradcheck_and_float64() -> None:
    x, residual, bias = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((3, 4), (3, 4), (4,)))
    index = tokens((3, 4))
    ours = dropout.bias_dropout_add(x, bias, residual, 0.4, KEY, index)
    torch.testing.assert_close(ours, reference.bias_dropout_add(x, bias, residual, 0.4, KEY, index), rtol=1e-14, atol=0)
    assert torch.autograd.gradcheck(
        lambda x, r, b: dropout.bias_dropout_add(x, b, r, 0.4, KEY, index), (x, residual, bias)
    )


def test_edges() -> None:
    x = torch.randn(3, 4)
    assert dropout.dropout(x, 0.0, KEY, torch.arange(3)) is x
    assert torch.equal(dropout.bias_dropout_add(x, None, x, 0.0, None, None), x + x)
    infinite = dropout.dropout(torch.full((200, 8), math.inf), 0.5, KEY, torch.arange(200))
    assert not infinite.isnan().any()


def test_traffic_is_the_minimum() -> None:
    """Bytes per element of bfloat16: 6 forward and 4 backward; then token numbers and partial sums."""
    x, residual = (torch.randn(64, 1024).bfloat16().requires_grad_() for _ in range(2))
    bias, index = torch.randn(1024).bfloat16().requires_grad_(), torch.arange(64)
    with count_traffic() as forward:
        out = dropout.bias_dropout_add(x, bias, residual, 0.1, KEY, index)
    with count_traffic() as backward:
        out.backward(torch.ones_like(out))
    assert forward.total - forward.of(bias) <= 6.1 * x.numel()
    assert backward.total - 4 * 1024 * 16 <= 4.1 * x.numel()


def test_opcheck() -> None:
    x, residual, bias = (torch.randn(s, requires_grad=True) for s in ((3, 8), (3, 8), (8,)))
    ops: Any = torch.ops.megalite
    torch.library.opcheck(ops.dropout.default, (x, 0.5, KEY, torch.arange(3), 0))
    torch.library.opcheck(ops.bias_dropout_add.default, (x, bias, residual, 0.5, KEY, torch.arange(3)))
    torch.library.opcheck(ops.bias_dropout_add.default, (x, None, residual, 0.5, KEY, torch.arange(3)))
