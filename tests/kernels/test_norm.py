"""Norms against their definition in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megalite.kernels.norm import layer_norm, layer_norm_add, rms_norm, rms_norm_add

SHAPES = [(7, 3, 33), (1, 1, 1), (5, 1000), (0, 2, 16), (33, 2880)]


def reference(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """The definition, in the inputs' dtype."""
    if bias is None:
        return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt() * weight + bias


def run(x: Tensor, weight: Tensor, bias: Tensor | None, dy: Tensor, *, ours: bool) -> list[Tensor]:
    """Output and gradients."""
    inputs = [t.detach().requires_grad_() for t in (x, weight, bias) if t is not None]
    if not ours:
        y = reference(inputs[0], inputs[1], inputs[2] if bias is not None else None, 1e-5)
    elif bias is None:
        y = rms_norm(*inputs, eps=1e-5)
    else:
        y = layer_norm(*inputs, eps=1e-5)
    return [y.detach(), *torch.autograd.grad(y, inputs, dy)]


@pytest.mark.parametrize("with_bias", [False, True], ids=["rms", "layer"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_definition_in_float64(shape: tuple[int, ...], with_bias: bool) -> None:
    torch.manual_seed(0)
    x, dy = torch.randn(shape, dtype=torch.float64) * 3 + 1, torch.randn(shape, dtype=torch.float64)
    weight, bias = torch.randn(2, shape[-1], dtype=torch.float64)
    args = x, weight, bias if with_bias else None, dy
    for ours, exact in zip(run(*args, ours=True), run(*args, ours=False), strict=True):
        torch.testing.assert_close(ours, exact, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("with_bias", [False, True], ids=["rms", "layer"])
@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float32], ids=str)
def test_bfloat16_is_rounded_once(with_bias: bool, weight_dtype: torch.dtype) -> None:
    """Every result is the float64 one to bfloat16 rounding: nothing is accumulated in bfloat16."""
    torch.manual_seed(0)
    x, dy = (torch.randn(2048, 96).bfloat16() for _ in range(2))
    weight, bias = (torch.randn(96).to(weight_dtype) for _ in range(2))
    args = x, weight, bias if with_bias else None, dy
    exact = run(*(None if t is None else t.double() for t in args), ours=False)  # type: ignore[arg-type]
    for ours, want in zip(run(*args, ours=True), exact, strict=True):
        tolerance = 2.0**-8 if ours.dtype == torch.bfloat16 else 1e-6
        assert (ours.double() - want).abs().max() <= tolerance * want.abs().max()


@pytest.mark.parametrize("with_bias", [False, True], ids=["rms", "layer"])
def test_gradcheck(with_bias: bool) -> None:
    torch.manual_seed(0)
    x, weight, bias = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((3, 2, 5), (5,), (5,)))
    if with_bias:
        assert torch.autograd.gradcheck(lambda *t: layer_norm(*t, eps=1e-3), (x, weight, bias))
    else:
        assert torch.autograd.gradcheck(lambda *t: rms_norm(*t, eps=1e-3), (x, weight))


def test_strided_input_and_gradient() -> None:
    torch.manual_seed(0)
    wide = torch.randn(4, 6, 40, dtype=torch.float64)
    x, dy, weight = wide[..., 3:19], wide.transpose(0, 1)[..., ::2][..., :16].transpose(0, 1), torch.randn(16).double()
    for ours, exact in zip(run(x, weight, None, dy, ours=True), run(x, weight, None, dy, ours=False), strict=True):
        torch.testing.assert_close(ours, exact, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_residual_forms_normalise_the_rounded_sum(dtype: torch.dtype) -> None:
    x, residual = (torch.randn(5, 33).to(dtype).requires_grad_() for _ in range(2))
    weight, bias = (torch.randn(33).to(dtype) for _ in range(2))
    out, total = rms_norm_add(x, residual, weight, 1e-5)
    assert torch.equal(total, x + residual) and torch.equal(out, rms_norm(total, weight, 1e-5))
    grads = torch.autograd.grad((out, total), (x, residual), (torch.ones_like(x), torch.ones_like(x)))
    assert torch.equal(grads[0], grads[1])
    out, total = layer_norm_add(x, residual, weight, bias, 1e-5)
    assert torch.equal(total, x + residual) and torch.equal(out, layer_norm(total, weight, bias, 1e-5))
