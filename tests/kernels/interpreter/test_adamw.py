"""Fused AdamW against torch's and float64, and the bits of stochastic rounding, in guarded memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megalite.kernels import adamw as reference
from megalite.kernels.dropout import dropout_key, row_hash
from megalite.kernels.triton.adamw import fused_adamw_, round_stochastically
from megalite.optim.rounding import round_stochastically as round_reference
from megalite.testing.triton_interpreter import count_traffic
from tests.kernels.interpreter.checks import assert_canaries_live, guarded

NUMBERS: dict[str, Any] = dict(lr=1e-2, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1)


@pytest.mark.parametrize("size", [1, 17, 3000])
def test_twenty_steps_match_torch(size: int) -> None:
    torch.manual_seed(0)
    param, grad = guarded(torch.randn(size)), guarded(torch.empty(size))
    moments, lowp = [guarded(torch.zeros(size)) for _ in range(2)], guarded(torch.empty(size).bfloat16())
    exact = torch.nn.Parameter(param.double())
    optimizer = torch.optim.AdamW([exact], lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    for step in range(1, 21):
        grad.copy_(torch.randn(size))
        exact.grad = grad.double() * 0.5
        optimizer.step()
        scale = torch.tensor(0.5, dtype=torch.float64) if step % 2 else 0.5
        before = grad.clone()
        fused_adamw_(param, grad, *moments, **NUMBERS, step=step, grad_scale=scale, lowp_copy=lowp)
        assert torch.equal(grad, before)
    torch.testing.assert_close(param.double(), exact.detach(), rtol=1e-6, atol=1e-6)
    assert torch.equal(lowp, param.bfloat16())
    for tensor in (param, grad, *moments, lowp):
        assert tensor._base is not None
        assert_canaries_live(tensor._base)


def test_matches_the_torch_version_and_takes_bfloat16_gradients() -> None:
    torch.manual_seed(0)
    grad = torch.randn(500).bfloat16()
    ours, theirs = ([torch.ones(500), g, torch.zeros(500), torch.zeros(500)] for g in (grad, grad.float()))
    fused_adamw_(*ours, **NUMBERS, step=7, grad_scale=0.25)
    reference.fused_adamw_(*theirs, **NUMBERS, step=7, grad_scale=0.25)
    for a, b in zip(ours[::2], theirs[::2], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-8)


def test_found_inf_leaves_everything_untouched() -> None:
    before = [torch.randn(100), torch.full((100,), float("nan")), torch.randn(100), torch.rand(100), torch.randn(100)]
    after = [x.clone() for x in before]
    found = torch.ones(())
    fused_adamw_(*after[:4], **NUMBERS, step=3, lowp_copy=after[4], found_inf=found)
    assert all(torch.equal(a, b) for a, b in zip(after[:1] + after[2:], before[:1] + before[2:], strict=True))
    after[1].fill_(1.0)
    fused_adamw_(*after[:4], **NUMBERS, step=3, lowp_copy=after[4], found_inf=found.zero_())
    assert all((a != b).all() for a, b in zip(after[:1] + after[2:], before[:1] + before[2:], strict=True))


def test_padding_stays_zero_and_empty_is_nothing() -> None:
    buffers = [torch.zeros(10) for _ in range(4)]
    fused_adamw_(*buffers, **NUMBERS, step=1)
    assert not any(x.any() for x in buffers)
    fused_adamw_(*(torch.empty(0) for _ in range(4)), **NUMBERS, step=1)


def test_float64_is_refused() -> None:
    with pytest.raises(ValueError, match="updates float32 parameters"):
        fused_adamw_(*(torch.zeros(3, dtype=torch.float64) for _ in range(4)), **NUMBERS, step=1)


def test_stochastic_rounding_has_the_bits_of_the_optimizer() -> None:
    torch.manual_seed(0)
    values = guarded(torch.cat((torch.randn(3000) * 1e-3, torch.tensor([0.0, -0.0, 1e-40, 3.38e38, -1e-20]))))
    elements = torch.randperm(len(values)) * 2654435761
    key = dropout_key(3, 1, 4)
    want = round_reference(values, row_hash(key, elements))
    ours = round_stochastically(values, key, elements)
    assert torch.equal(ours.view(torch.int16), want.view(torch.int16))
    assert (ours != values.bfloat16()).any()


def test_traffic_is_the_minimum() -> None:
    """Bytes per parameter: 28 with bfloat16 gradients and a bfloat16 copy, 28 too with float32 ones and no copy."""
    for grad, lowp in ((torch.randn(3000).bfloat16(), torch.empty(3000).bfloat16()), (torch.randn(3000), None)):
        with count_traffic() as traffic:
            fused_adamw_(
                torch.zeros(3000), grad, torch.zeros(3000), torch.zeros(3000), **NUMBERS, step=1, lowp_copy=lowp
            )
        assert traffic.total == 28 * 3000


def test_opcheck() -> None:
    ops: Any = torch.ops.megalite
    tensors, lowp = [torch.rand(40) for _ in range(4)], torch.empty(40).bfloat16()
    torch.library.opcheck(ops.adamw_.default, (*tensors, lowp, torch.ones(()), torch.zeros(()), [1.0] * 7))
    torch.library.opcheck(ops.adamw_.default, (*tensors, None, None, None, [1.0] * 7))
    values = torch.randn(40), dropout_key(1, 2, 3), torch.arange(40)
    torch.library.opcheck(ops.round_stochastically.default, values)
