"""Vocabulary-parallel cross entropy: parts of the vocabulary in one process against dense float64."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.kernels import cross_entropy as module
from megalite.kernels.cross_entropy import CrossEntropyConfig, ce_grad_, ce_loss, ce_stats, merge_ce_stats


def parts(vocab: int, tp: int) -> list[slice]:
    return [slice(r * vocab // tp, (r + 1) * vocab // tp) for r in range(tp)]


def sharded(
    logits: Tensor, target: Tensor, weight: Tensor, config: CrossEntropyConfig, tp: int
) -> tuple[Tensor, Tensor]:
    """(loss of each row, gradient of sum(weight * loss)), computed in `tp` parts of the vocabulary."""
    cuts = parts(config.vocab_size, tp)
    local = [torch.where((target >= c.start) & (target < c.stop), target - c.start, -1) for c in cuts]
    shards = [logits[:, c].clone() for c in cuts]
    stats = torch.stack([ce_stats(x, t, config) for x, t in zip(shards, local, strict=True)])
    lse, target_logit, logit_sum = merge_ce_stats(stats)
    loss = ce_loss(lse, target_logit, logit_sum, config)
    grads = [ce_grad_(x, t, lse, weight, config) for x, t in zip(shards, local, strict=True)]
    assert all(g is x for g, x in zip(grads, shards, strict=True))
    return loss, torch.cat(grads, 1)


def dense(logits: Tensor, target: Tensor, weight: Tensor, config: CrossEntropyConfig) -> tuple[Tensor, Tensor]:
    """The same by autograd from the definition: a target distribution, and the squared log-sum-exp."""
    x = logits.double().requires_grad_()
    rows, vocab = x.shape
    spread = config.label_smoothing / (vocab - 1) if vocab > 1 else 0.0
    wanted = torch.full((rows, vocab), spread, dtype=torch.float64)
    wanted.scatter_(1, target.unsqueeze(1), 1.0 - config.label_smoothing)
    loss = -(wanted * F.log_softmax(x, -1)).sum(-1) + config.z_loss * x.logsumexp(-1).square()
    (grad,) = torch.autograd.grad((loss * weight).sum(), x)
    return loss.detach(), grad


@pytest.mark.parametrize("tp", [1, 2, 3, 5])
@pytest.mark.parametrize("smoothing,z_loss", [(0.0, 0.0), (0.1, 0.0), (0.0, 1e-2), (0.2, 1e-3)])
@pytest.mark.parametrize("vocab", [5, 1000, 37])
def test_any_cut_equals_dense(
    vocab: int, smoothing: float, z_loss: float, tp: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_CHUNK", 3 * vocab)
    torch.manual_seed(0)
    logits, target = torch.randn(13, vocab, dtype=torch.float64) * 5 + 3, torch.randint(0, vocab, (13,))
    weight = torch.rand(13, dtype=torch.float64)
    config = CrossEntropyConfig(vocab_size=vocab, label_smoothing=smoothing, z_loss=z_loss)
    for ours, want in zip(
        sharded(logits, target, weight, config, tp), dense(logits, target, weight, config), strict=True
    ):
        torch.testing.assert_close(ours, want, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_smoothing_convention(tp: int) -> None:
    """Mass 0.1 over the 7 others of 8 entries, logits 0, 0.5 .. 3.5, target 2: 3.3286 in every cut."""
    config = CrossEntropyConfig(vocab_size=8, label_smoothing=0.1)
    logits = torch.arange(8, dtype=torch.float64).unsqueeze(0) / 2
    loss, _ = sharded(logits, torch.tensor([2]), torch.ones(1), config, tp)
    assert loss.item() == pytest.approx(3.3286, abs=5e-5)
    loss, grad = sharded(logits * 1000, torch.tensor([2]), torch.ones(1), config, tp)
    assert loss.isfinite().all() and grad.isfinite().all()


def test_vocabulary_of_one_and_empty_parts() -> None:
    config = CrossEntropyConfig(vocab_size=1)
    loss, grad = sharded(torch.randn(4, 1), torch.zeros(4, dtype=torch.long), torch.ones(4), config, 3)
    assert loss.abs().max() == 0 and grad.abs().max() == 0 and grad.shape == (4, 1)
    none, no_grad = sharded(
        torch.randn(0, 7), torch.zeros(0, dtype=torch.long), torch.ones(0), CrossEntropyConfig(vocab_size=7), 2
    )
    assert none.shape == (0,) and no_grad.shape == (0, 7)


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_masked_rows_have_zero_gradient_whatever_they_hold(bad: float) -> None:
    torch.manual_seed(0)
    logits, weight = torch.randn(3, 6), torch.tensor([1.0, 0.0, 1.0])
    logits[1, 4] = bad
    config = CrossEntropyConfig(vocab_size=6, label_smoothing=0.1, z_loss=0.1)
    loss, grad = sharded(logits, torch.tensor([0, 1, 5]), weight, config, 2)
    assert torch.equal(grad[1], torch.zeros(6)) and grad.isfinite().all() and loss[[0, 2]].isfinite().all()


def test_part_of_minus_infinity() -> None:
    logits = torch.randn(2, 6, dtype=torch.float64)
    logits[:, 3:] = -math.inf
    config, target, weight = CrossEntropyConfig(vocab_size=6), torch.tensor([0, 2]), torch.ones(2).double()
    loss, grad = sharded(logits, target, weight, config, 2)
    torch.testing.assert_close(loss, F.cross_entropy(logits[:, :3], target, reduction="none"))
    assert torch.equal(grad[:, 3:], torch.zeros(2, 3).double())


@pytest.mark.parametrize("dtype,tolerance", [(torch.float32, 3e-6), (torch.bfloat16, 2.0**-8)], ids=str)
def test_low_precision(dtype: torch.dtype, tolerance: float) -> None:
    """Statistics in float32: losses exact to float32, gradients rounded once."""
    torch.manual_seed(0)
    logits, target = (torch.randn(64, 999) * 4).to(dtype), torch.randint(0, 999, (64,))
    weight = torch.rand(64)
    config = CrossEntropyConfig(vocab_size=999, label_smoothing=0.1, z_loss=1e-4)
    loss, grad = sharded(logits, target, weight, config, 2)
    want_loss, want_grad = dense(logits, target, weight.double(), config)
    assert loss.dtype == torch.float32 and grad.dtype == dtype
    torch.testing.assert_close(loss.double(), want_loss, rtol=3e-6, atol=3e-6)
    assert ((grad.double() - want_grad).abs() <= tolerance * want_grad.abs() + 1e-7).all()
