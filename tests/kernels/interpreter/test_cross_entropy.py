"""Statistics and gradients of the loss against float64, cut over a vocabulary and in guarded memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.kernels import cross_entropy as reference
from megalite.kernels.cross_entropy import CrossEntropyConfig, ce_loss, merge_ce_stats
from megalite.kernels.triton import cross_entropy
from megalite.kernels.triton.launch import Launch, launch_row
from megalite.testing.triton_interpreter import count_traffic
from tests.kernels.interpreter.checks import DTYPES, assert_canaries_live, assert_close, canaries, guarded, ulps


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several pieces a row, several blocks a piece."""

    def small(kernel: str, dtype: torch.dtype, size: int = 0) -> Launch:
        row = launch_row(kernel, dtype, size)
        sizes = {"ce_stats": {"PIECE": 512, "BLOCK": 256}, "ce_grad": {"BLOCK": 512}}.get(kernel, row.constants)
        return Launch(kernel=kernel, arch="sm90", dtype="any", up_to=0, constants=sizes, num_warps=1, num_stages=1)

    monkeypatch.setattr(cross_entropy, "launch_row", small)


def whole(logits: Tensor, targets: Tensor, grad: Tensor, terms: CrossEntropyConfig) -> tuple[Tensor, Tensor]:
    """Loss and gradient by autograd in float64."""
    x = logits.double().requires_grad_()
    lse = x.logsumexp(-1)
    picked = x.gather(1, targets.clamp(min=0).unsqueeze(1)).squeeze(1)
    smoothing = terms.label_smoothing
    others = (x.sum(-1) - picked) / max(1, terms.vocab_size - 1)
    loss = lse - (1 - smoothing) * picked - smoothing * others + terms.z_loss * lse.square()
    (gradient,) = torch.autograd.grad(loss, x, grad.double())
    return loss.detach(), gradient


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("terms", [(0.0, 0.0), (0.1, 1e-3)], ids=["plain", "smooth+z"])
@pytest.mark.parametrize(("vocab_size", "parts"), [(1, 1), (5, 2), (1000, 1), (1500, 4)])
def test_matches_float64(vocab_size: int, parts: int, terms: tuple[float, float], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    smoothing = terms[0] if vocab_size > 1 else 0.0
    config = CrossEntropyConfig(vocab_size=vocab_size, label_smoothing=smoothing, z_loss=terms[1])
    logits = (torch.randn(7, vocab_size) * 4).to(dtype)
    logits[1] += 1e4
    targets, grad = torch.randint(vocab_size, (7,)), torch.rand(7)
    loss, gradient = whole(logits, targets, grad, config)

    cuts = [guarded(part, gap=3) for part in logits.tensor_split(parts, 1)]
    starts = [sum(c.shape[1] for c in cuts[:i]) for i in range(parts)]
    local = [
        torch.where((targets >= s) & (targets < s + c.shape[1]), targets - s, -1)
        for s, c in zip(starts, cuts, strict=True)
    ]
    with canaries():
        stats = torch.stack([cross_entropy.ce_stats(c, t, config) for c, t in zip(cuts, local, strict=True)])
    lse, picked, total = merge_ce_stats(stats)
    live, shifted = [0, 2, 3, 4, 5, 6], 1
    ours = ce_loss(lse, picked, total, config)
    assert_close(ours[live], loss[live], scale=1.0)
    # Differences of numbers around 1e4 are as exact as these are in float32.
    torch.testing.assert_close(ours[shifted].double(), loss[shifted], rtol=1e-6, atol=2e-3)
    for cut, target, part in zip(cuts, local, gradient.tensor_split(parts, 1), strict=True):
        base = cut._base
        assert cross_entropy.ce_grad_(cut, target, lse, grad, config) is cut
        assert (cut.double() - part)[shifted].abs().max() < 4e-3 if part.numel() else True
        if dtype == torch.bfloat16:
            near = (cut - part).abs() < 1e-6
            assert ulps(cut[live].masked_fill(near[live], 0.0), part[live].masked_fill(near[live], 0.0)) <= 1.0
        else:
            assert_close(cut[live], part[live], scale=1e-1)
        assert base is not None
        assert_canaries_live(base)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_same_as_the_torch_version_in_float64(smoothing: float) -> None:
    terms = CrossEntropyConfig(vocab_size=2000, label_smoothing=smoothing, z_loss=1e-3)
    logits, targets = torch.randn(3, 700, dtype=torch.float64), torch.tensor([5, -1, 699])
    ours, theirs = (m.ce_stats(logits, targets, terms) for m in (cross_entropy, reference))
    torch.testing.assert_close(ours, theirs, rtol=1e-13, atol=1e-13)
    lse, grad = theirs[1].log() + theirs[0], torch.rand(3, dtype=torch.float64)
    ours, theirs = (m.ce_grad_(logits.clone(), targets, lse, grad, terms) for m in (cross_entropy, reference))
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-15)


def test_edges() -> None:
    """Empty parts, rows of -inf, dead rows of anything, NaN, no rows."""
    terms, inf = CrossEntropyConfig(vocab_size=700, label_smoothing=0.1), float("inf")
    empty = cross_entropy.ce_stats(torch.empty(3, 0), torch.full((3,), -1), terms)
    assert torch.equal(empty, reference.ce_stats(torch.empty(3, 0), torch.full((3,), -1), terms))
    assert cross_entropy.ce_stats(torch.empty(0, 700), torch.empty(0, dtype=torch.int64), terms).shape == (4, 0)
    logits = torch.randn(4, 700).bfloat16()
    logits[0], logits[1, ::2], logits[2, 300] = -inf, -inf, float("nan")
    plain = CrossEntropyConfig(vocab_size=700)
    stats = cross_entropy.ce_stats(logits, torch.tensor([-1, 1, -1, 600]), plain)
    assert stats[0, 0] == -inf and stats[1, 0] == 0
    assert stats[1, 2].isnan()
    torch.testing.assert_close(stats[0, [1, 3]], logits[[1, 3]].float().amax(-1))
    torch.testing.assert_close(stats[1].log()[[1, 3]] + stats[0, [1, 3]], logits[[1, 3]].float().logsumexp(-1))
    logits[3] = inf
    grad = cross_entropy.ce_grad_(logits, torch.full((4,), -100), torch.full((4,), inf), torch.zeros(4), terms)
    assert not grad.any()


def test_masked_rows_against_torch() -> None:
    """Labels of -100 with no weight are what torch's ignore_index makes of them."""
    logits, labels = torch.randn(6, 40), torch.tensor([3, -100, 39, 0, -100, 7])
    weight = (labels >= 0).float() / 4
    leaf = logits.clone().requires_grad_()
    F.cross_entropy(leaf, labels).backward()
    terms = CrossEntropyConfig(vocab_size=40)
    lse, picked, total = merge_ce_stats(cross_entropy.ce_stats(logits, labels, terms).unsqueeze(0))
    loss = torch.where(labels >= 0, ce_loss(lse, picked, total, terms), 0.0).sum() / 4
    torch.testing.assert_close(loss, F.cross_entropy(logits, labels))
    torch.testing.assert_close(cross_entropy.ce_grad_(logits, labels, lse, weight, terms), leaf.grad)


def test_rows_far_apart() -> None:
    """Offsets of rows exceed 32 bits: the second row lies 2^33 bytes behind the first, in memory never touched."""
    buffer = torch.empty(0, dtype=torch.bfloat16)
    try:
        storage = torch.UntypedStorage(2 * ((1 << 32) + 64))
    except RuntimeError:
        pytest.fail("the kernel of this machine does not overcommit address space")
    logits = buffer.set_(storage, 0, (2, 64), (1 << 32, 1))
    logits.copy_(torch.randn(2, 64))
    terms = CrossEntropyConfig(vocab_size=64)
    stats = cross_entropy.ce_stats(logits, torch.tensor([1, 2]), terms)
    torch.testing.assert_close(stats[0], logits.float().amax(-1))
    assert stats[2, 1] == logits[1, 2]
    lse = stats[1].log() + stats[0]
    want = reference.ce_grad_(logits.clone(), torch.tensor([1, 2]), lse, torch.ones(2), terms)
    assert torch.equal(cross_entropy.ce_grad_(logits, torch.tensor([1, 2]), lse, torch.ones(2), terms), want)


def test_traffic_is_the_minimum() -> None:
    """Bytes per bfloat16 logit: 2 for statistics, 4 for the gradient."""
    logits, targets = torch.randn(8, 1024).bfloat16(), torch.arange(8)
    terms = CrossEntropyConfig(vocab_size=1024)
    with count_traffic() as statistics:
        stats = cross_entropy.ce_stats(logits, targets, terms)
    with count_traffic() as gradient:
        cross_entropy.ce_grad_(logits, targets, stats[1].log() + stats[0], torch.ones(8), terms)
    assert statistics.total <= 1.1 * 2 * logits.numel()
    assert gradient.total <= 1.1 * 4 * logits.numel()


def test_opcheck() -> None:
    ops: Any = torch.ops.megalite
    logits, targets, row = torch.randn(2, 300), torch.tensor([1, 2]), torch.ones(2)
    torch.library.opcheck(ops.ce_stats.default, (logits, targets, True))
    torch.library.opcheck(ops.ce_grad_.default, (logits, targets, row, row, 0.1, 300, 0.0))
