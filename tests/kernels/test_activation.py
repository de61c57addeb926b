"""Activations against their formulas in float64."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.kernels import activation
from megalite.kernels.activation import geglu, geglu_packed, gelu, swiglu, swiglu_packed


def grads(out: Tensor, inputs: list[Tensor], dy: Tensor) -> list[Tensor]:
    return [out.detach(), *torch.autograd.grad(out, inputs, dy)]


@pytest.mark.parametrize("shape", [(3, 5, 7), (1, 1), (0, 4), (600, 3, 211)], ids=str)
@pytest.mark.parametrize("chunk", [64, 1 << 18])
def test_swiglu_forms_agree(shape: tuple[int, ...], chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activation, "_CHUNK", chunk)
    torch.manual_seed(0)
    packed = torch.randn(*shape[:-1], 2 * shape[-1], dtype=torch.float64, requires_grad=True)
    dy = torch.randn(shape, dtype=torch.float64)
    gate, up = packed.chunk(2, -1)
    exact = grads(F.silu(gate) * up, [packed], dy)
    for out in (swiglu(gate, up), swiglu_packed(packed)):
        for ours, want in zip(grads(out, [packed], dy), exact, strict=True):
            torch.testing.assert_close(ours, want, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("shape", [(3, 5, 7), (1, 1), (0, 4)], ids=str)
def test_gelu_is_the_tanh_form(shape: tuple[int, ...], with_bias: bool) -> None:
    torch.manual_seed(0)
    x = (torch.randn(shape, dtype=torch.float64) * 4).requires_grad_()
    bias = torch.randn(shape[-1], dtype=torch.float64, requires_grad=True) if with_bias else None
    inputs = [t for t in (x, bias) if t is not None]
    dy = torch.randn(shape, dtype=torch.float64)
    z = x if bias is None else x + bias
    exact = 0.5 * z * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (z + 0.044715 * z**3)))
    for ours, want in zip(grads(gelu(x, bias), inputs, dy), grads(exact, inputs, dy), strict=True):
        torch.testing.assert_close(ours, want, rtol=1e-10, atol=1e-13)


def test_extremes_are_finite() -> None:
    x = torch.tensor([-1e4, -20.0, 0.0, 20.0, 1e4], requires_grad=True)
    for out in (gelu(x), swiglu(x, torch.ones(5))):
        (dx,) = torch.autograd.grad(out.sum(), x)
        torch.testing.assert_close(out.detach(), x.detach().clamp(min=0.0), rtol=0, atol=1e-6)
        assert dx.isfinite().all()


def test_bfloat16_no_worse_than_eager() -> None:
    torch.manual_seed(0)
    gate, up = (torch.randn(500, 64).bfloat16().requires_grad_() for _ in range(2))
    dy = torch.randn(500, 64).bfloat16()
    wide = [t.detach().double().requires_grad_() for t in (gate, up)]
    exact = grads(F.silu(wide[0]) * wide[1], wide, dy.double())
    eager = grads(F.silu(gate) * up, [gate, up], dy)
    for ours, other, want in zip(grads(swiglu(gate, up), [gate, up], dy), eager, exact, strict=True):
        assert (ours.double() - want).square().mean() <= 1.1 * (other.double() - want).square().mean()


def test_keep_only_their_inputs() -> None:
    packed = torch.randn(4, 6, requires_grad=True)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        swiglu_packed(packed)
    assert [t.data_ptr() for t in saved] == [packed.data_ptr()]


def test_geglu_forms_agree() -> None:
    x = torch.randn(5, 14, dtype=torch.float64)
    gate, up = x.chunk(2, -1)
    exact = torch.nn.functional.gelu(gate, approximate="tanh") * up
    torch.testing.assert_close(geglu(gate, up), exact)
    torch.testing.assert_close(geglu_packed(x), exact)
