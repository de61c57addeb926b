"""Grouped products against a dense definition, and grouped_mm against the loop."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.kernels import activation
from megalite.kernels.backends import Traits
from megalite.kernels.clamped_swiglu import weighted_clamped_swiglu, weighted_clamped_swiglu_backward
from megalite.kernels.grouped import (
    GroupedBackend,
    accumulate_grouped_bias_grad,
    accumulate_grouped_weight_grad,
    grouped_input_grad,
    grouped_linear,
    weighted_swiglu,
    weighted_swiglu_backward,
)
from megalite.kernels.registry import resolve

COUNTS = [[5, 0, 3], [0, 0, 7], [1, 2, 0], [0, 0, 0], [4, 4, 4]]
CPU = torch.device("cpu")


def values(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def one_hot(counts: list[int]) -> Tensor:
    return torch.eye(len(counts), dtype=torch.float64)[
        torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    ]


@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_loop_equals_the_definition(counts: list[int]) -> None:
    n, own = sum(counts), one_hot(counts)
    x, weight, dy, bias = values(n, 5), values(3, 7, 5, seed=1), values(n, 7, seed=2), values(3, 7, seed=3)
    y = torch.einsum("ne,eoi,ni->no", own, weight, x)
    torch.testing.assert_close(grouped_linear(x, weight, counts), y)
    torch.testing.assert_close(grouped_linear(x, weight, counts, bias), y + own @ bias)
    torch.testing.assert_close(grouped_input_grad(dy, weight, counts), torch.einsum("ne,eoi,no->ni", own, weight, dy))
    grad, bias_grad = torch.ones_like(weight), torch.ones_like(bias)
    accumulate_grouped_weight_grad(grad, dy, x, counts)
    accumulate_grouped_bias_grad(bias_grad, dy, counts)
    torch.testing.assert_close(grad, 1 + torch.einsum("ne,no,ni->eoi", own, dy, x))
    torch.testing.assert_close(bias_grad, 1 + own.t() @ dy)


def products(counts: list[int], sizes: tuple[int, int], dtype: torch.dtype, backend: GroupedBackend) -> list[Tensor]:
    (inputs, outputs), n = sizes, sum(counts)
    x, weight, dy = (
        t.to(dtype) for t in (values(n, inputs), values(3, outputs, inputs, seed=1), values(n, outputs, seed=2))
    )
    bias = values(3, outputs, dtype=dtype, seed=3)
    grad = torch.zeros(3, outputs, inputs)
    accumulate_grouped_weight_grad(grad, dy, x, counts, backend=backend)
    return [
        grouped_linear(x, weight, counts, backend=backend),
        grouped_linear(x, weight, counts, bias, backend=backend),
        grouped_input_grad(dy, weight, counts, backend=backend),
        grad,
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("sizes", [(16, 24), (13, 7), (16, 7), (1, 9)], ids=str)
@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_grouped_mm_equals_the_loop(counts: list[int], sizes: tuple[int, int], dtype: torch.dtype) -> None:
    """In float32 as close as two orders of summation; in half precision within its rounding of the exact result."""
    loop, grouped = (products(counts, sizes, dtype, backend) for backend in ("loop", "grouped_mm"))
    bound = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}[dtype]
    for one, other in zip(loop, grouped, strict=True):
        assert one.dtype == other.dtype and one.shape == other.shape and other.is_contiguous()
        torch.testing.assert_close(other, one, rtol=bound, atol=bound)


@pytest.mark.parametrize("backend", ["loop", "grouped_mm"])
def test_an_expert_without_tokens_gets_exactly_nothing(
    backend: GroupedBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever lies in fresh memory, and whatever a kernel leaves in the slab of an empty run."""
    function: Any = F.grouped_mm

    def careless(*args: Any, offs: Tensor, **kwargs: Any) -> Tensor:
        out = function(*args, offs=offs, **kwargs)
        if out.dim() == 3:
            out[offs.diff(prepend=offs.new_zeros(1)) == 0] = float("nan")
        return out

    monkeypatch.setattr(F, "grouped_mm", careless)
    x, dy = values(8, 16, dtype=torch.float32), values(8, 24, dtype=torch.float32)
    poison = torch.full((3, 24, 16), float("nan"))
    del poison
    grad = torch.zeros(3, 24, 16)
    accumulate_grouped_weight_grad(grad, dy, x, [5, 0, 3], backend=backend)
    assert grad[1].eq(0).all() and grad[0].abs().sum() > 0 and grad.isfinite().all()


@pytest.mark.parametrize("backend", ["loop", "grouped_mm"])
def test_wide_main_grad_keeps_small_contributions(backend: GroupedBackend) -> None:
    grad, ones = torch.zeros(1, 8, 8), torch.ones(1, 8, dtype=torch.bfloat16)
    for _ in range(512):
        accumulate_grouped_weight_grad(grad, ones, ones, [1], backend=backend)
    assert grad.eq(512).all()


def test_backends_are_chosen_by_name_and_place() -> None:
    def chosen(choice: str, dtype: torch.dtype) -> str:
        return resolve("grouped_linear", choice, Traits(device=CPU, dtype=dtype)).backend

    assert chosen("auto", torch.bfloat16) == "loop"
    assert chosen("loop", torch.float64) == "loop"
    assert chosen("grouped_mm", torch.bfloat16) == "grouped_mm"
    with pytest.raises(ValueError, match=r"grouped_mm takes no float64.*kernels\.grouped=loop or auto"):
        chosen("grouped_mm", torch.float64)


@pytest.mark.parametrize("chunk", [64, 1 << 18])
@pytest.mark.parametrize("shape", [(5, 7), (1, 1), (0, 4), (300, 21)], ids=str)
def test_weighted_swiglu(shape: tuple[int, int], chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activation, "_CHUNK", chunk)
    gate_up, probs = values(shape[0], 2 * shape[1]).requires_grad_(), values(shape[0], seed=1).requires_grad_()
    dy = values(*shape, seed=2)
    gate, up = gate_up.chunk(2, -1)
    exact = F.silu(gate) * up * probs[:, None]
    grads = torch.autograd.grad(exact, (gate_up, probs), dy)
    with torch.no_grad():
        torch.testing.assert_close(weighted_swiglu(gate_up, probs), exact, rtol=1e-12, atol=1e-14)
        for ours, want in zip(weighted_swiglu_backward(dy, gate_up, probs), (exact, *grads), strict=True):
            torch.testing.assert_close(ours, want, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("chunk", [64, 1 << 18])
@pytest.mark.parametrize("shape", [(5, 7), (0, 4), (300, 21)], ids=str)
def test_weighted_clamped_swiglu(shape: tuple[int, int], chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two thirds of the values are clamped."""
    monkeypatch.setattr(activation, "_CHUNK", chunk)
    gate_up, probs = values(shape[0], 2 * shape[1]).requires_grad_(), values(shape[0], seed=1).requires_grad_()
    dy, alpha, limit = values(*shape, seed=2), 1.3, 0.4
    gate, up = gate_up.chunk(2, -1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    exact = (up + 1) * (gate * torch.sigmoid(gate * alpha)) * probs[:, None]
    grads = torch.autograd.grad(exact, (gate_up, probs), dy)
    with torch.no_grad():
        torch.testing.assert_close(weighted_clamped_swiglu(gate_up, probs, alpha, limit), exact, rtol=1e-12, atol=1e-14)
        found = weighted_clamped_swiglu_backward(dy, gate_up, probs, alpha, limit)
        for ours, want in zip(found, (exact, *grads), strict=True):
            torch.testing.assert_close(ours, want, rtol=1e-12, atol=1e-14)


def test_weighted_swiglu_in_bfloat16_rounds_once() -> None:
    gate_up, probs = values(500, 128, dtype=torch.bfloat16), values(500, seed=1, dtype=torch.float32).sigmoid()
    gate, up = gate_up.double().chunk(2, -1)
    exact = (F.silu(gate) * up * probs.double()[:, None]).to(torch.bfloat16)
    ours = weighted_swiglu(gate_up, probs)
    assert ours.dtype == torch.bfloat16 and (ours != exact).double().mean() < 1e-3, "one unit at ties, rarely"
