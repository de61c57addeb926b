"""Rotary embedding: it is a rotation, by the right angle, and its gradient rotates back."""

from __future__ import annotations

import math

import pytest
import torch

from megalite.kernels.rope import apply_rope, rope_tables


def tables(s: int, b: int, d: int) -> tuple[torch.Tensor, torch.Tensor]:
    positions = torch.arange(s * b).view(b, s).t() % 11
    return rope_tables(positions, d, 100.0, torch.float64)


@pytest.mark.parametrize("shape", [(5, 3, 2, 8), (1, 1, 1, 2), (0, 2, 4, 6), (9, 2, 3, 34)], ids=str)
def test_rotates_pairs_of_halves(shape: tuple[int, int, int, int]) -> None:
    torch.manual_seed(0)
    s, b, _, d = shape
    x = torch.randn(shape, dtype=torch.float64)
    cos, sin = tables(s, b, d)
    pairs = torch.complex(x[..., : d // 2], x[..., d // 2 :]) * torch.complex(cos, sin).unsqueeze(2)
    torch.testing.assert_close(apply_rope(x, cos, sin), torch.cat((pairs.real, pairs.imag), -1), rtol=0, atol=1e-14)


def test_angle_of_each_position() -> None:
    cos, sin = rope_tables(torch.tensor([[3, 70001]]), 6, 10000.0)
    assert cos.dtype == torch.float32 and cos.shape == (1, 2, 3) and cos.is_contiguous()
    for column, position in enumerate((3, 70001)):
        for i in range(3):
            angle = position * 10000.0 ** (-2 * i / 6)
            assert cos[0, column, i].item() == pytest.approx(math.cos(angle), abs=1e-7)
            assert sin[0, column, i].item() == pytest.approx(math.sin(angle), abs=1e-7)


def test_gradient_rotates_back_and_tail_passes() -> None:
    torch.manual_seed(0)
    cos, sin = tables(7, 2, 6)
    x = torch.randn(7, 2, 3, 9, dtype=torch.float64, requires_grad=True)
    y = apply_rope(x, cos, sin)
    assert torch.equal(y[..., 6:], x[..., 6:])
    (dx,) = torch.autograd.grad(y, x, y.detach())
    torch.testing.assert_close(dx, x.detach(), rtol=0, atol=1e-14)
    assert torch.autograd.gradcheck(lambda t: apply_rope(t, cos, sin), (x,))


def test_scores_depend_on_distance_only() -> None:
    q, k = torch.randn(2, 1, 1, 1, 8, dtype=torch.float64).unbind(0)
    scores = []
    for shift in (0, 5, 1000):
        rotated = [
            apply_rope(t, *rope_tables(torch.tensor([[p + shift]]), 8, 50.0, torch.float64))
            for t, p in ((q, 4), (k, 1))
        ]
        scores.append((rotated[0] * rotated[1]).sum())
    torch.testing.assert_close(torch.stack(scores), scores[0].expand(3), rtol=1e-10, atol=1e-12)


def test_bfloat16_is_rounded_once() -> None:
    torch.manual_seed(0)
    x = torch.randn(64, 2, 3, 16).bfloat16()
    positions = torch.arange(5000, 5064).unsqueeze(1).expand(64, 2)
    exact = apply_rope(x.double(), *rope_tables(positions, 16, 1e4, torch.float64))
    ours = apply_rope(x, *rope_tables(positions, 16, 1e4))
    assert ours.dtype == torch.bfloat16 and ours.is_contiguous()
    assert ((ours.double() - exact).abs() <= 2.0**-8 * exact.abs() + 1e-6).all()
