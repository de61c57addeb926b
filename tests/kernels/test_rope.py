"""Rotary embedding: it is a rotation, by the right angle, and its gradient rotates back."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from megalite.kernels.rope import RopeScaling, apply_rope, rope_tables
from tests.hugging_face import float64


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


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "pairs"])
def test_heads_that_pass_through(interleaved: bool) -> None:
    cos, sin = tables(7, 2, 6)
    x = torch.randn(7, 2, 5, 9, dtype=torch.float64, requires_grad=True)
    y = apply_rope(x, cos, sin, 3, interleaved=interleaved)
    assert torch.equal(y[:, :, :3], apply_rope(x[:, :, :3], cos, sin, interleaved=interleaved))
    assert torch.equal(y[:, :, 3:], x[:, :, 3:]) and y.is_contiguous()
    assert torch.autograd.gradcheck(lambda t: apply_rope(t, cos, sin, 3, interleaved=interleaved), (x,))


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


def hf_tables(
    positions: torch.Tensor, dim: int, parameters: dict[str, Any], *, longest: int, length: int | None = None
):
    """cos and sin of Hugging Face's own functions, in float64."""
    config = LlamaConfig(
        hidden_size=4 * dim, num_attention_heads=4, max_position_embeddings=longest,
        rope_parameters=parameters | {"rope_theta": 5e3},
    )  # fmt: skip
    with float64():
        frequencies, factor = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, torch.device("cpu"), seq_len=length)
    angle = positions[..., None].double() * frequencies.double()
    return angle.cos() * factor, angle.sin() * factor


YARN: dict[str, Any] = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
LLAMA3: dict[str, Any] = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
CASES: dict[str, tuple[RopeScaling, dict[str, Any], int | None]] = {
    "linear": (RopeScaling(kind="linear", factor=2.5), {"rope_type": "linear", "factor": 2.5}, None),
    "ntk": (
        RopeScaling(kind="ntk", factor=2.0, original_positions=128, length=256),
        {"rope_type": "dynamic", "factor": 2.0}, 256,
    ),
    "ntk-long": (
        RopeScaling(kind="ntk", factor=3.0, original_positions=128, length=1000),
        {"rope_type": "dynamic", "factor": 3.0}, 1000,
    ),
    "yarn": (RopeScaling(kind="yarn", factor=4.0, original_positions=128), YARN, None),
    "yarn-exact-ramp": (
        RopeScaling(kind="yarn", factor=4.0, original_positions=128, beta_fast=20, beta_slow=2, truncate=False),
        YARN | {"beta_fast": 20.0, "beta_slow": 2.0, "truncate": False}, None,
    ),
    "yarn-mscale": (
        RopeScaling(kind="yarn", factor=40.0, original_positions=128, mscale=0.8, mscale_all_dim=0.5),
        YARN | {"factor": 40.0, "mscale": 0.8, "mscale_all_dim": 0.5}, None,
    ),
    "yarn-factor": (
        RopeScaling(kind="yarn", factor=4.0, original_positions=128, attention_factor=0.7),
        YARN | {"attention_factor": 0.7}, None,
    ),
    "llama3": (RopeScaling(kind="llama3", factor=8.0, original_positions=64), LLAMA3, None),
    "llama3-wide": (
        RopeScaling(kind="llama3", factor=8.0, original_positions=64, low_freq_factor=2.0, high_freq_factor=16.0),
        LLAMA3 | {"low_freq_factor": 2.0, "high_freq_factor": 16.0}, None,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dim", [8, 32])
def test_scaled_tables_are_hugging_faces(case: str, dim: int) -> None:
    scaling, parameters, length = CASES[case]
    positions = torch.tensor([[0, 1], [17, 127], [128, 511]])
    ours = rope_tables(positions, dim, 5e3, torch.float64, scaling)
    theirs = hf_tables(positions, dim, parameters, longest=128, length=length)
    plain = rope_tables(positions, dim, 5e3, torch.float64)
    for table, wanted, unscaled in zip(ours, theirs, plain, strict=True):
        torch.testing.assert_close(table, wanted, rtol=0, atol=1e-12)
        assert (table - unscaled).abs().max() > 1e-2


def test_gradient_of_tables_with_a_factor() -> None:
    torch.manual_seed(0)
    scaling = RopeScaling(kind="yarn", factor=4.0, original_positions=16)
    tables = rope_tables(torch.arange(5)[:, None].expand(5, 2), 6, 50.0, torch.float64, scaling)
    assert scaling.table_factor > 1.1
    x = torch.randn(5, 2, 3, 8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda t: apply_rope(t, *tables), (x,))


def test_interleaved_pairs_are_halves_in_another_order() -> None:
    x, (cos, sin) = torch.randn(5, 3, 2, 10, dtype=torch.float64, requires_grad=True), tables(5, 3, 8)
    order = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7, 8, 9])
    ours = apply_rope(x, cos, sin, interleaved=True)
    halves = apply_rope(x[..., order], cos, sin)
    torch.testing.assert_close(ours[..., order], halves, rtol=1e-14, atol=1e-14)
    dy = torch.randn_like(x)
    for a, b in zip(torch.autograd.grad(ours[..., order], x, dy), torch.autograd.grad(halves, x, dy), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-14, atol=1e-14)
