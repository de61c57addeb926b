"""Norms, with and without the residual addition: every form against float64, in guarded memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megalite.kernels import norm as reference
from megalite.kernels.triton import norm
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

EPS = 1e-5
SHAPES = [(7, 3, 17), (1, 1), (33, 128), (2, 2880), (0, 128)]
FORMS = ["rms_norm", "layer_norm", "rms_norm_add", "layer_norm_add"]


def arguments(form: str, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
    """Inputs and gradients of outputs, strided and guarded."""
    torch.manual_seed(0)
    added = form.endswith("add")
    rows = [guarded(torch.randn(shape).mul(3).add(1).to(dtype), gap=3) for _ in range(4)]
    vectors = [guarded(torch.randn(shape[-1]).to(dtype)) for _ in range(1 + form.startswith("layer"))]
    return rows[: 1 + added] + vectors, rows[3 - added :][: 1 + added]


def defined(form: str, *inputs: Tensor) -> tuple[Tensor, ...]:
    """The definition, in the inputs' dtype."""
    x, *rest = inputs
    total = x
    if form.endswith("add"):
        residual, *rest = rest
        x = total = x + residual
    if form.startswith("rms"):
        out = torch.nn.functional.rms_norm(x, x.shape[-1:], rest[0], EPS)
    else:
        out = torch.nn.functional.layer_norm(x, x.shape[-1:], rest[0], rest[1], EPS)
    return (out, total) if form.endswith("add") else (out,)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_definition(shape: tuple[int, ...], form: str, dtype: torch.dtype) -> None:
    check(form, shape, dtype)


@pytest.mark.parametrize("form", FORMS)
def test_rows_longer_than_registers(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norm, "_WIDEST", 1024)
    check(form, (3, 5000), torch.bfloat16)
    check(form, (21, 1030), torch.float32)


def check(form: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    inputs, grads = arguments(form, shape, dtype)
    exact_inputs = double(inputs)
    if form.endswith("add"):  # what is normalised is the rounded sum
        exact_inputs[0] = (inputs[0] + inputs[1]).double() - exact_inputs[1]
    exact = forward_backward(lambda *x: defined(form, *x), exact_inputs, double(grads))
    eager = forward_backward(lambda *x: defined(form, *x), inputs, grads)
    with canaries():
        ours = forward_backward(lambda *x: getattr(norm, form)(*x, EPS), inputs, grads)
    for mine, theirs, want in zip(ours, eager, exact, strict=True):
        # All are differences of numbers of this size, but for RMSNorm's output.
        size = want.abs().max().item() if want.numel() else 0.0
        assert_close(mine, want, scale=None if mine is ours[0] and form == "rms_norm" else max(1.0, size))
        assert_no_worse(mine, theirs, want)


@pytest.mark.parametrize("form", FORMS)
def test_float64_matches_reference(form: str) -> None:
    inputs, grads = arguments(form, (6, 50), torch.float64)
    ours = forward_backward(lambda *x: getattr(norm, form)(*x, EPS), inputs, grads)
    exact = forward_backward(lambda *x: getattr(reference, form)(*x, EPS), inputs, grads)
    for mine, want in zip(ours, exact, strict=True):
        torch.testing.assert_close(mine, want, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("form", FORMS)
def test_gradcheck_of_the_references(form: str) -> None:
    inputs, _ = arguments(form, (2, 3), torch.float64)
    assert torch.autograd.gradcheck(lambda *x: getattr(reference, form)(*x, EPS), [x.requires_grad_() for x in inputs])


def test_recomputed_and_repeated_bits_are_equal() -> None:
    """Backward normalises the stored sum again: bit by bit what forward normalised; sums have one order."""
    inputs, grads = arguments("rms_norm_add", (40, 257), torch.bfloat16)
    once, twice = (forward_backward(lambda x, r, w: norm.rms_norm_add(x, r, w, EPS), inputs, grads) for _ in range(2))
    for a, b in zip(once, twice, strict=True):
        assert torch.equal(a, b)
    assert torch.equal(norm.rms_norm(once[1], inputs[2], EPS), once[0])


def test_large_means_do_not_cancel() -> None:
    x = torch.randn(3, 500) + 1e4
    out = norm.layer_norm(x, torch.ones(500), torch.zeros(500), EPS)
    torch.testing.assert_close(out.double(), torch.layer_norm(x.double(), (500,), eps=EPS), rtol=2e-3, atol=2e-3)


def test_traffic_is_the_minimum() -> None:
    """Bytes per element of bfloat16: 4 and 6, with a residual 8 and 8; then row statistics and partial sums."""
    width, count = 2048, 16
    x, residual, dout = (torch.randn(count, width).bfloat16() for _ in range(3))
    weight = torch.randn(width).bfloat16()
    sums = 4 * width * count  # a tile, and so a program, for each of so few rows
    for inputs, forward_bytes, backward_bytes in (((x, weight), 4, 6), ((x, residual, weight), 8, 8)):
        function: Any = norm.rms_norm if len(inputs) == 2 else norm.rms_norm_add
        leaves = [x.clone().requires_grad_() for x in inputs]
        with count_traffic() as forward:
            out: Any = function(*leaves, EPS)
        outputs = out if isinstance(out, tuple) else (out,)
        with count_traffic() as backward:
            torch.autograd.backward(outputs, [dout] * len(outputs))
        assert forward.total - forward.of(leaves[-1]) == forward_bytes * x.numel() + 4 * count
        assert backward.total - backward.of(leaves[-1]) - sums == backward_bytes * x.numel() + 4 * count


def test_opcheck() -> None:
    x, residual, weight, bias = (torch.randn(s, requires_grad=True) for s in ((3, 8), (3, 8), (8,), (8,)))
    ops: Any = torch.ops.megalite
    # The statistics are not differentiable, so gradients are asked of the whole function.
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(ops.norm.default, (x, weight, bias, EPS), test_utils=tests)
    torch.library.opcheck(ops.norm.default, (x, weight, None, EPS), test_utils=tests)
    torch.library.opcheck(ops.add_norm.default, (x, residual, weight, bias, EPS), test_utils=tests)
