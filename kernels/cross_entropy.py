"""The local halves of a vocabulary-parallel cross entropy: statistics of a chunk of logits, then its gradient in place.

A rank holds logits [n, v] of its part of the vocabulary. It computes statistics, exchanges them (four numbers a row),
merges those of all ranks, and turns its logits into their gradient. Nothing here communicates. For a row

    loss = lse - (1 - a) x_target - a mean(x) + z_loss * lse^2,    a = label_smoothing * V / (V - 1)

over the global vocabulary V: label smoothing puts label_smoothing / (V - 1) on each of the other entries
(Szegedy et al., 2015, arXiv:1512.00567); the last term is PaLM's z-loss (arXiv:2204.02311).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

_CHUNK = 1 << 18  # elements of float32 temporaries on a CPU, which then stay in cache
_LOG2_E = 1.4426950408889634  # powers of 2 are faster than powers of e


@dataclass(frozen=True, kw_only=True)
class CrossEntropyConfig:
    """The terms of the loss."""

    vocab_size: int
    """Global vocabulary V, without padding."""
    label_smoothing: float = 0.0
    """Probability mass shared by the entries other than the target."""
    z_loss: float = 0.0
    """Weight of the squared log-sum-exp."""

    @property
    def smoothing(self) -> float:
        """Weight a of the mean over all entries."""
        if self.label_smoothing == 0.0:
            return 0.0
        return self.label_smoothing * self.vocab_size / (self.vocab_size - 1)


def ce_stats(logits: Tensor, targets: Tensor, config: CrossEntropyConfig) -> Tensor:
    """Per row of logits [n, v]: max, sum of exp(x - max), target logit, sum of logits; [4, n], float32 or wider.

    targets: int64 [n], the target's column, or negative where another rank (or nobody) has it, which gives 0. The sum
    of logits is 0 without label smoothing. No column may be padding; v may be 0 (max -inf).
    """
    wide = torch.promote_types(logits.dtype, torch.float32)
    stats = torch.zeros(4, logits.shape[0], dtype=wide, device=logits.device)
    if logits.shape[1] == 0:
        stats[0] = float("-inf")
        return stats
    for part in _row_chunks(logits):
        x = logits[part].to(wide)
        top = x.amax(-1)
        stats[0, part] = top
        if config.smoothing > 0.0:
            stats[3, part] = x.sum(-1)
        # A row of -inf has no finite maximum to subtract.
        shift = top.masked_fill(top == float("-inf"), 0.0).unsqueeze(-1)
        stats[1, part] = torch.sub(x, shift).mul_(_LOG2_E).exp2_().sum(-1)
    here = targets >= 0
    picked = logits.gather(1, targets.clamp(min=0).unsqueeze(1)).squeeze(1)
    stats[2] = picked.to(wide).masked_fill_(~here, 0.0)
    return stats


def merge_ce_stats(stats: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(lse, target logit, sum of logits), [n] each and global, from the stats [ranks, 4, n] of all vocabulary parts."""
    top = stats[:, 0].amax(0)
    total = ((stats[:, 0] - top).exp() * stats[:, 1]).sum(0)
    return total.log().add_(top), stats[:, 2].sum(0), stats[:, 3].sum(0)


def ce_loss(lse: Tensor, target_logit: Tensor, logit_sum: Tensor, config: CrossEntropyConfig) -> Tensor:
    """The loss of each row [n] from the merged statistics."""
    loss = lse - (1.0 - config.smoothing) * target_logit
    if config.smoothing > 0.0:
        loss -= (config.smoothing / config.vocab_size) * logit_sum
    if config.z_loss > 0.0:
        loss += config.z_loss * lse.square()
    return loss


def ce_grad_(logits: Tensor, targets: Tensor, lse: Tensor, grad: Tensor, config: CrossEntropyConfig) -> Tensor:
    """Overwrites logits [n, v] with their gradient and returns them.

    targets as in `ce_stats`; lse [n], merged; grad [n], the gradient of each row's loss. A row with grad 0 gets a
    gradient of exactly 0, whatever its logits.
    """
    wide = lse.dtype
    grad = grad.to(wide)
    dead = grad == 0.0
    any_dead = dead.device.type != "cpu" or bool(dead.any())  # off the CPU the question would cost a synchronisation
    row_weight = grad if config.z_loss == 0.0 else grad * (2.0 * config.z_loss * lse).add_(1.0)
    at_target = torch.where(targets >= 0, grad, 0.0).mul_(config.smoothing - 1.0)
    everywhere = grad * (config.smoothing / config.vocab_size)
    columns = targets.clamp(min=0).unsqueeze(1)
    if logits.shape[1] == 0:
        return logits
    for part in _row_chunks(logits):
        rows = logits[part]
        out = rows if rows.dtype == wide else torch.empty_like(rows, dtype=wide)
        probs = torch.sub(rows, lse[part].unsqueeze(1), out=out).mul_(_LOG2_E).exp2_()
        probs.mul_(row_weight[part].unsqueeze(1))
        if config.smoothing > 0.0:
            probs.sub_(everywhere[part].unsqueeze(1))
        probs.scatter_add_(1, columns[part], at_target[part].unsqueeze(1))
        if any_dead:
            probs.masked_fill_(dead[part].unsqueeze(1), 0.0)
        if probs is not rows:
            rows.copy_(probs)
    return logits


def _row_chunks(logits: Tensor) -> Iterator[slice]:
    rows, width = logits.shape
    step = max(1, _CHUNK // max(1, width)) if logits.device.type == "cpu" else max(1, rows)
    for start in range(0, rows, step):
        yield slice(start, start + step)
