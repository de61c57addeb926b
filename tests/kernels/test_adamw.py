"""The fused AdamW step against the update written out in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megalite.kernels.adamw import fused_adamw_

HYPER = {"lr": 0.01, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}


def written_out(p: Tensor, grad: Tensor, m: Tensor, v: Tensor, step: int) -> tuple[Tensor, Tensor, Tensor]:
    """Decoupled decay, then Adam with bias correction."""
    m = 0.9 * m + 0.1 * grad
    v = 0.95 * v + 0.05 * grad.square()
    update = (m / (1 - 0.9**step)) / ((v / (1 - 0.95**step)).sqrt() + 1e-8)
    return p * (1 - 0.01 * 0.1) - 0.01 * update, m, v


@pytest.mark.parametrize("dtype,tolerance", [(torch.float64, 1e-13), (torch.float32, 2e-6)], ids=str)
@pytest.mark.parametrize("scale", [1.0, 0.37, torch.tensor(0.37, dtype=torch.float64)], ids=["1", "float", "tensor"])
def test_twenty_steps(dtype: torch.dtype, tolerance: float, scale: float | Tensor) -> None:
    torch.manual_seed(0)
    state = [torch.randn(130, dtype=torch.float64), *torch.zeros(2, 130, dtype=torch.float64)]
    param, exp_avg, exp_avg_sq = (t.to(dtype) for t in state)
    low = torch.zeros(130, dtype=torch.bfloat16)
    for step in range(1, 21):
        grad = torch.randn(130, dtype=torch.float64)
        state = list(written_out(state[0], grad * float(scale), state[1], state[2], step))
        scaled = grad.to(dtype, copy=True)
        fused_adamw_(param, scaled, exp_avg, exp_avg_sq, step=step, grad_scale=scale, lowp_copy=low, **HYPER)
        torch.testing.assert_close(scaled.double(), grad * float(scale), rtol=1e-6, atol=1e-6)
    for ours, want in zip((param, exp_avg, exp_avg_sq), state, strict=True):
        torch.testing.assert_close(ours.double(), want, rtol=tolerance, atol=tolerance)
    assert torch.equal(low, param.bfloat16())


def test_padding_stays_zero_and_nothing_else_moves() -> None:
    buffers = [torch.full((200,), 7.0) for _ in range(4)]
    views = [b[50:150] for b in buffers]
    for view in views:
        view.zero_()
        view[:60] = torch.rand(60)
    fused_adamw_(*views, step=1, **HYPER)
    for buffer in buffers:
        assert (buffer[:50] == 7).all() and (buffer[150:] == 7).all() and (buffer[110:150] == 0).all()
    fused_adamw_(*(torch.empty(0) for _ in range(4)), step=1, **HYPER)
