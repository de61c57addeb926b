"""16-bit products on CPUs with and without instructions for them: one result, but for its last place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megalite.kernels import grouped, linear, products
from megalite.kernels.attention import block_backward, block_forward
from megalite.kernels.decode_attention import decode_attention
from megalite.kernels.masked_attention import masked_backward, masked_forward
from tests.kernels.masked import rows

HALF = (torch.bfloat16, torch.float16)
TOKENS, INPUTS, OUTPUTS = 37, 29, 43


@pytest.fixture(params=[True, False], ids=["native", "in_float32"])
def native(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Both kinds of CPU, whichever this one is: torch multiplies in 16 bits anywhere, if slowly."""
    monkeypatch.setattr(products, "has_instructions", lambda dtype: request.param)
    return request.param


def _random(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, dtype=torch.float32).to(dtype)


def _check(run: Callable[..., Any], *inputs: Tensor, dtype: torch.dtype, units: float = 1.0) -> None:
    """run(inputs) in `dtype` against the same in float64, in units of the last place of the largest result."""
    results, exact = run(*inputs), run(*(x.double() for x in inputs))
    for got, wanted in zip(results, exact, strict=True):
        assert got.isfinite().all()
        error = (got.double() - wanted).abs().max().item()
        assert error <= units * torch.finfo(dtype).eps * wanted.abs().max().item(), error


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("tokens", [TOKENS, 3, 0])
def test_linear_and_its_gradients(dtype: torch.dtype, tokens: int) -> None:
    x, dy = _random(tokens, INPUTS, dtype=dtype), _random(tokens, OUTPUTS, dtype=dtype)
    weight, bias = _random(OUTPUTS, INPUTS, dtype=dtype), _random(OUTPUTS, dtype=dtype)

    def run(x: Tensor, dy: Tensor, weight: Tensor, bias: Tensor) -> list[Tensor]:
        y, dx = torch.empty_like(dy), torch.empty_like(x)
        linear.linear_into(y, x, weight, bias)
        linear.input_grad_into(dx, dy, weight)
        grad = torch.ones(weight.shape, dtype=torch.promote_types(x.dtype, torch.float32))
        linear.accumulate_weight_grad(grad, dy, x)
        assert y.dtype == dx.dtype == x.dtype
        return [linear.linear(x[None], weight)[0], y, linear.input_grad(dy[None], weight)[0], dx, grad]

    if tokens:
        _check(run, x, dy, weight, bias, dtype=dtype)
    else:
        assert (run(x, dy, weight, bias)[-1] == 1.0).all()


@pytest.mark.parametrize("dtype", HALF)
def test_an_input_gradient_of_a_few_rows_is_made_in_float32(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There torch's loops are slow for a single row, too."""
    made: list[torch.dtype] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func in (torch.ops.aten.mm.default, torch.ops.aten.mm.out):
                made.append(args[0].dtype)
            return func(*args, **(kwargs or {}))

    monkeypatch.setattr(products, "has_instructions", lambda dtype: False)
    dy, weight = _random(1, OUTPUTS, dtype=dtype), _random(OUTPUTS, INPUTS, dtype=dtype)
    with Watch():
        linear.input_grad(dy, weight)
        linear.input_grad_into(torch.empty(1, INPUTS, dtype=dtype), dy, weight)
    assert made == [torch.float32, torch.float32]


@pytest.mark.parametrize("dtype", HALF)
def test_a_weight_gradient_made_in_float32_is_not_rounded(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "has_instructions", lambda dtype: False)
    x, dy = _random(TOKENS, INPUTS, dtype=dtype), _random(TOKENS, OUTPUTS, dtype=dtype)
    grad = torch.zeros(OUTPUTS, INPUTS)
    linear.accumulate_weight_grad(grad, dy, x)
    torch.testing.assert_close(grad.double(), dy.double().t() @ x.double(), rtol=0, atol=1e-5)


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("dtype", HALF)
def test_grouped_linears(dtype: torch.dtype) -> None:
    counts = (20, 0, 1, 16)
    x, dy = _random(TOKENS, INPUTS, dtype=dtype), _random(TOKENS, OUTPUTS, dtype=dtype)
    weight, bias = _random(4, OUTPUTS, INPUTS, dtype=dtype), _random(4, OUTPUTS, dtype=dtype)

    def run(x: Tensor, dy: Tensor, weight: Tensor, bias: Tensor) -> list[Tensor]:
        return [
            grouped.grouped_linear(x, weight, counts, bias),
            grouped.grouped_linear(x, weight, counts),
            grouped.grouped_input_grad(dy, weight, counts),
        ]

    _check(run, x, dy, weight, bias, dtype=dtype)


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("window", [0, 50])
def test_attention(dtype: torch.dtype, window: int) -> None:
    size, mask = 150, rows([(100, 50), (150,)], window) if window else None
    q, dout = (_random(size, 2, 4, 16, dtype=dtype) for _ in range(2))
    k, v = (_random(size, 2, 2, 16, dtype=dtype) for _ in range(2))

    def run(q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> list[Tensor]:
        if mask is None:
            out, lse = block_forward(q, k, v, 0.25)
            return [out, *block_backward(dout, q, k, v, out, lse, 0.25)]
        out, lse = masked_forward(q, k, v, mask, scale=0.25)
        delta = (dout.to(out.dtype) * out).sum(-1)
        return [out, *masked_backward(dout, q, k, v, lse, delta, mask, scale=0.25)]

    _check(run, q, k, v, dout, dtype=dtype, units=3.0)


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("softcap", [0.0, 3.0])
def test_attention_of_a_new_token(dtype: torch.dtype, softcap: float) -> None:
    q = _random(1, 2, 4, 16, dtype=dtype)
    k, v = (_random(2, 2, 40, 16, dtype=dtype) for _ in range(2))
    hidden = torch.zeros(2, 1, 1, 40, dtype=dtype)
    hidden[0, ..., :7] = -torch.inf

    def run(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> list[Tensor]:
        out = decode_attention(q, k, v, scale=0.25, softcap=softcap, hidden=hidden)
        assert out.dtype == q.dtype
        return [out]

    _check(run, q, k, v, hidden, dtype=dtype)


def test_products_that_need_no_help_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "has_instructions", lambda dtype: False)
    assert products.product_dtype(torch.ones(99, 2, dtype=torch.float64)) == torch.float64
    assert products.product_dtype(torch.ones(99, 2)) == torch.float32
    assert products.product_dtype(torch.ones(99, 2, dtype=torch.bfloat16, device="meta")) == torch.bfloat16
    assert products.product_dtype(torch.ones(1, 2, dtype=torch.bfloat16)) == torch.float32
    assert products.linear_dtype(torch.ones(1, 2, dtype=torch.bfloat16)) == torch.bfloat16
    assert products.describe_products(torch.float32) is None
    assert "in float32" in (products.describe_products(torch.bfloat16) or "")
