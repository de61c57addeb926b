"""Gated units and GELU: every form against float64, in guarded memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.kernels import activation as reference
from megalite.kernels import clamped_swiglu as clamped_reference
from megalite.kernels import grouped
from megalite.kernels.triton import activation, clamped_swiglu
from megalite.testing.triton_interpreter import count_traffic
from tests.kernels.interpreter.checks import (
    DTYPES,
    assert_close,
    assert_no_worse,
    canaries,
    double,
    forward_backward,
    guarded,
)  # fmt: skip

SHAPES = [(7, 3, 17), (1, 1), (2, 1000), (0, 128), (5, 2880)]


def silu(x: Tensor) -> Tensor:
    return F.silu(x)


def gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


ACTS: list[tuple[str, Callable[[Tensor], Tensor]]] = [("swiglu", silu), ("geglu", gelu)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("name", "act"), ACTS, ids=["silu", "gelu"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gated(shape: tuple[int, ...], name: str, act: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    gate, up, dout = (guarded(torch.randn(shape).mul(3).to(dtype), gap=5) for _ in range(3))

    def defined(gate: Tensor, up: Tensor) -> Tensor:
        return act(gate) * up

    exact = forward_backward(defined, double([gate, up]), double([dout]))
    eager = forward_backward(defined, [gate, up], [dout])
    with canaries():
        ours = forward_backward(getattr(activation, name), [gate, up], [dout])
    for mine, theirs, want in zip(ours, eager, exact, strict=True):
        assert_close(mine, want)
        assert_no_worse(mine, theirs, want)
    packed, dpacked = torch.cat((gate, up), -1), torch.cat(ours[1:], -1)
    with canaries():
        out, dboth = forward_backward(getattr(activation, name + "_packed"), [guarded(packed, gap=3)], [dout])
    assert torch.equal(out, ours[0]) and torch.equal(dboth, dpacked)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("with_bias", [True, False], ids=["bias", "plain"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gelu(shape: tuple[int, ...], with_bias: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, dout = (guarded(torch.randn(shape).mul(3).to(dtype), gap=5) for _ in range(2))
    inputs = [x, *([guarded(torch.randn(shape[-1]).to(dtype))] if with_bias else [])]

    def defined(x: Tensor, bias: Tensor | None = None) -> Tensor:
        return gelu(x if bias is None else x + bias)

    exact = forward_backward(defined, double(inputs), double([dout]))
    eager = forward_backward(defined, inputs, [dout])
    with canaries():
        ours = forward_backward(activation.gelu, inputs, [dout])
    for mine, theirs, want in zip(ours, eager, exact, strict=True):
        assert_close(mine, want, scale=1.0 if mine.ndim == 1 else None)
        assert_no_worse(mine, theirs, want)


def test_bias_gradient_over_many_rows() -> None:
    """More rows than programs take at once."""
    x, dout, bias = torch.randn(300, 8), torch.randn(300, 8), torch.randn(8)
    _, dx, dbias = forward_backward(activation.gelu, [x, bias], [dout])
    assert_close(dbias, dx.double().sum(0), scale=10.0)


@pytest.mark.parametrize("name", ["geglu", "swiglu"])
def test_far_from_zero(name: str) -> None:
    """Saturated tails, where x^3 or exp overflow, are 0 or the identity, and so are the slopes."""
    gate = torch.tensor([-1e30, -1e13, -20.0, -10.0, 0.0, 10.0, 20.0, 1e13, 1e30])
    out, dgate, _ = forward_backward(getattr(activation, name), [gate, torch.ones(9)], [torch.ones(9)])
    act = dict(ACTS)[name]
    assert_close(out[2:7], act(gate[2:7].double()))
    assert out.isfinite().all() and dgate.isfinite().all()
    assert torch.equal(out[7:], gate[7:]) and torch.equal(dgate[7:], torch.ones(2)) and not dgate[:2].any()


@pytest.mark.parametrize("name", ["swiglu", "swiglu_packed", "geglu", "geglu_packed", "gelu"])
def test_gradcheck_and_float64(name: str) -> None:
    torch.manual_seed(0)
    inputs = [torch.randn(2, 4, dtype=torch.float64, requires_grad=True)]
    inputs += [torch.randn(2, 4, dtype=torch.float64, requires_grad=True)] if name in ("swiglu", "geglu") else []
    inputs += [torch.randn(4, dtype=torch.float64, requires_grad=True)] if name == "gelu" else []
    ours: Callable[..., Any] = getattr(activation, name)
    assert torch.autograd.gradcheck(ours, inputs)
    torch.testing.assert_close(ours(*inputs), getattr(reference, name)(*inputs), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(7, 17), (1, 1), (3, 1500), (0, 128)], ids=str)
def test_weighted_swiglu(shape: tuple[int, int], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    n, f = shape
    gate_up, dout = guarded(torch.randn(n, 2 * f).to(dtype), gap=3), guarded(torch.randn(n, f).to(dtype), gap=2)
    probs = guarded(torch.rand(n, dtype=torch.promote_types(dtype, torch.float32)))

    def defined(gate_up: Tensor, probs: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        return silu(gate) * up * probs[:, None]

    exact = forward_backward(defined, double([gate_up, probs]), double([dout]))
    theirs = [grouped.weighted_swiglu(gate_up, probs), *grouped.weighted_swiglu_backward(dout, gate_up, probs)]
    with canaries():
        out = activation.weighted_swiglu(gate_up, probs)
        mine = [out, *activation.weighted_swiglu_backward(dout, gate_up, probs)]
    assert torch.equal(mine[0], mine[1])
    for a, b, want in zip(mine, theirs, [exact[0], *exact], strict=True):
        assert a.dtype == b.dtype
        assert_close(a, want, scale=1.0 if a.ndim == 1 else None)
        assert_no_worse(a, b, want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(7, 17), (3, 1500), (0, 128)], ids=str)
def test_weighted_clamped_swiglu(shape: tuple[int, int], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    n, f = shape
    gate_up, dout = guarded(torch.randn(n, 2 * f).to(dtype), gap=3), guarded(torch.randn(n, f).to(dtype), gap=2)
    probs = guarded(torch.rand(n, dtype=torch.promote_types(dtype, torch.float32)))
    alpha, limit = 1.702, 0.75

    def defined(gate_up: Tensor, probs: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return (up + 1) * (gate * torch.sigmoid(gate * alpha)) * probs[:, None]

    exact = forward_backward(defined, double([gate_up, probs]), double([dout]))
    theirs = [
        clamped_reference.weighted_clamped_swiglu(gate_up, probs, alpha, limit),
        *clamped_reference.weighted_clamped_swiglu_backward(dout, gate_up, probs, alpha, limit),
    ]
    with canaries():
        out = clamped_swiglu.weighted_clamped_swiglu(gate_up, probs, alpha, limit)
        mine = [out, *clamped_swiglu.weighted_clamped_swiglu_backward(dout, gate_up, probs, alpha, limit)]
    assert torch.equal(mine[0], mine[1])
    for a, b, want in zip(mine, theirs, [exact[0], *exact], strict=True):
        assert a.dtype == b.dtype
        assert_close(a, want, scale=1.0 if a.ndim == 1 else None)
        assert_no_worse(a, b, want)


def test_traffic_is_the_minimum() -> None:
    """Bytes per element of bfloat16 output: 6 and 10 for a gated unit, 4 and 6 (and partial sums) for GELU."""
    x, bias, dout = torch.randn(64, 1024).bfloat16(), torch.randn(1024).bfloat16(), torch.randn(64, 512).bfloat16()
    n = dout.numel()
    with count_traffic() as forward:
        out = activation.swiglu_packed(x.requires_grad_())
    with count_traffic() as backward:
        out.backward(dout)
    assert forward.total == 6 * n and backward.total == 10 * n
    with count_traffic() as forward:
        out = activation.gelu(x, bias)
    with count_traffic() as backward:
        out.backward(torch.ones_like(out))
    assert forward.total - forward.of(bias) == 4 * x.numel()
    assert backward.total - backward.of(bias) == 6 * x.numel() + 4 * 16 * 1024


def test_opcheck() -> None:
    x, bias = torch.randn(3, 8, requires_grad=True), torch.randn(8, requires_grad=True)
    ops: Any = torch.ops.megalite
    torch.library.opcheck(ops.gated.default, (x, torch.randn(3, 8, requires_grad=True), False))
    torch.library.opcheck(ops.gated_packed.default, (x, True))
    torch.library.opcheck(ops.gelu.default, (x, bias))
    torch.library.opcheck(ops.gelu.default, (x, None))
    gate_up, probs = torch.randn(3, 8), torch.rand(3)
    torch.library.opcheck(ops.weighted_swiglu.default, (gate_up, probs))
    torch.library.opcheck(ops.weighted_swiglu_backward.default, (torch.randn(3, 4), gate_up, probs))
    torch.library.opcheck(ops.weighted_clamped_swiglu.default, (gate_up, probs, 1.702, 7.0))
    given = torch.randn(3, 4), gate_up, probs, 1.702, 7.0
    torch.library.opcheck(ops.weighted_clamped_swiglu_backward.default, given)
