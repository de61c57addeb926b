"""Compiled kernels against plain torch: float64 to the last digits, bfloat16 no worse against float64.

Compiling takes seconds a function the first time, and is kept on disk; `make test` runs one kernel of each sort.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from megalite.kernels import activation, compiled, cross_entropy, dropout, grouped, norm, rope, short_conv
from megalite.kernels.backends import Traits, compile_problem
from megalite.kernels.cross_entropy import CrossEntropyConfig
from megalite.kernels.dropout import dropout_key

pytestmark = pytest.mark.skipif(compile_problem(Traits()) is not None, reason="no C++ compiler")

KEY, INDEX = dropout_key(3, 1, 4), torch.arange(33).view(11, 3) + (1 << 32) - 5


def values(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def tables(dim: int) -> tuple[Tensor, Tensor]:
    return rope.rope_tables(torch.arange(11)[:, None].expand(11, 3) * 100, dim, 1e4, torch.float64)


def bias_dropout_add(module: Any, x: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
    return module.bias_dropout_add(x, bias, residual, 0.3, KEY, INDEX)


# name -> (function of a module and the inputs, shapes of the inputs that have gradients)
CASES: dict[str, tuple[Callable[..., Tensor], Any, Sequence[tuple[int, ...]]]] = {
    "rms_norm": (lambda m, x, w: m.rms_norm(x, w, 1e-3), norm, [(11, 3, 20), (20,)]),
    "layer_norm": (lambda m, x, w, b: m.layer_norm(x, w, b, 1e-3), norm, [(11, 3, 20), (20,), (20,)]),
    "swiglu": (lambda m, x: m.swiglu_packed(x), activation, [(11, 3, 42)]),
    "gelu": (lambda m, x: m.gelu(x), activation, [(11, 3, 21)]),
    "gelu with bias": (lambda m, x, b: m.gelu(x, b), activation, [(11, 3, 21), (21,)]),
    "rope": (lambda m, x: m.apply_rope(x, *(t.to(_table(x)) for t in tables(12))), rope, [(11, 3, 4, 12)]),
    "partial rope": (lambda m, x: m.apply_rope(x, *(t.to(_table(x)) for t in tables(6))), rope, [(11, 3, 4, 10)]),
    "rope of 3 heads": (lambda m, x: m.apply_rope(x, *(t.to(_table(x)) for t in tables(6)), 3), rope, [(11, 3, 4, 6)]),
    "dropout": (lambda m, x: m.dropout(x, 0.4, KEY, INDEX, 3), dropout, [(11, 3, 32)]),
    "odd dropout": (lambda m, x: m.dropout(x, 0.4, KEY, INDEX, 3), dropout, [(11, 3, 21)]),
    "bias_dropout_add": (bias_dropout_add, dropout, [(11, 3, 32), (32,), (11, 3, 32)]),
    "short_conv": (lambda m, x, w: m.gated_short_conv(x, w), short_conv, [(11, 3, 24), (8, 3)]),
}  # fmt: skip
TELLING = ("rms_norm", "bias_dropout_add")


def _table(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def outputs(name: str, module: Any, dtype: torch.dtype) -> list[Tensor]:
    """Result and gradients of one form of the operation."""
    function, _, shapes = CASES[name]
    leaves = [values(*shape, seed=seed).to(dtype).requires_grad_() for seed, shape in enumerate(shapes)]
    y = function(module, *leaves)
    dy = values(*y.shape, seed=9).to(dtype)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in TELLING else pytest.mark.full) for n in CASES], ids=str
)
def test_against_torch(name: str) -> None:
    module = CASES[name][1]
    exact = outputs(name, module, torch.float64)
    for ours, wanted in zip(outputs(name, compiled, torch.float64), exact, strict=True):
        torch.testing.assert_close(ours, wanted, rtol=1e-12, atol=1e-12)
    rounded = outputs(name, module, torch.bfloat16)
    inputs_rounded = [x.double() for x in rounded]
    found = outputs(name, compiled, torch.bfloat16)
    for ours, eager, wanted in zip(found, inputs_rounded, exact, strict=True):
        assert ours.dtype == torch.bfloat16 and ours.shape == wanted.shape
        error, eager_error = ((x.double() - wanted).norm() for x in (ours, eager))
        assert error <= 1.1 * eager_error + 1e-3 * wanted.norm()


@pytest.mark.full
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("width", [17, 48])
def test_cross_entropy(smoothing: float, dtype: torch.dtype, width: int) -> None:
    """In place, with rows of -inf, targets elsewhere, rows without a gradient, and an empty part."""
    terms = CrossEntropyConfig(vocab_size=60, label_smoothing=smoothing, z_loss=1e-2)
    logits = (values(9, width) * 5).to(dtype)
    logits[3], logits[4, 5] = float("-inf"), 1e4
    targets, grad = torch.tensor([0, 16, -1, 2, 5, -1, 7, 8, 9]), values(9, seed=1).to(_table(logits))
    grad[2] = grad[3] = 0.0
    stats = [module.ce_stats(logits, targets, terms) for module in (cross_entropy, compiled)]
    bound = 1e-12 if dtype == torch.float64 else 1e-5
    torch.testing.assert_close(stats[1], stats[0], rtol=bound, atol=bound)
    lse = cross_entropy.merge_ce_stats(stats[0][None])[0]
    parts = [logits.clone(), logits.clone()]
    found = [m.ce_grad_(x, targets, lse, grad, terms) for m, x in zip((cross_entropy, compiled), parts, strict=True)]
    assert found[1] is parts[1] and found[1][2:4].eq(0).all()
    torch.testing.assert_close(found[1], found[0], rtol=max(bound, 1e-2 * (bound > 1e-9)), atol=bound)
    for part in (logits[:0], logits[:, :0]):
        empty = compiled.ce_stats(part, targets[: len(part)], terms)
        torch.testing.assert_close(empty, cross_entropy.ce_stats(part, targets[: len(part)], terms))


@pytest.mark.full
def test_weighted_swiglu() -> None:
    gate_up, probs, dy = values(13, 42), values(13, seed=1), values(13, 21, seed=2)
    torch.testing.assert_close(compiled.weighted_swiglu(gate_up, probs), grouped.weighted_swiglu(gate_up, probs))
    ours = compiled.weighted_swiglu_backward(dy, gate_up, probs)
    for one, wanted in zip(ours, grouped.weighted_swiglu_backward(dy, gate_up, probs), strict=True):
        torch.testing.assert_close(one, wanted, rtol=1e-12, atol=1e-12)


def test_any_number_of_rows_by_one_piece_of_code(caplog: pytest.LogCaptureFixture) -> None:
    """It is made, and announced, once; the sizes 0 and 1 are torch's special cases."""
    weight = values(24).float()
    with caplog.at_level(logging.INFO, logger="megalite"):
        for rows in (7, 12, 33, 1, 0):
            x = values(rows, 24).float()
            torch.testing.assert_close(compiled.rms_norm(x, weight, 1e-4), norm.rms_norm(x, weight, 1e-4))
    assert [record.message.split(" in ")[0] for record in caplog.records] == ["compiled rms_forward"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("width", [21, 48])
def test_masks_are_those_of_torch(width: int, dtype: torch.dtype) -> None:
    """To the bit, past token 2^32 as well."""
    x = values(11, 3, width).to(dtype)
    ours = compiled.bias_dropout_add(x, None, torch.zeros_like(x), 0.3, KEY, INDEX)
    wanted = dropout.bias_dropout_add(x, None, torch.zeros_like(x), 0.3, KEY, INDEX)
    assert ours.eq(0).equal(wanted.eq(0)) and 0 < ours.eq(0).sum() < ours.numel()
