"""Cross entropy over a vocabulary that is cut over tp: logits are never gathered, nor all held at once.

Each rank reduces its own columns to four numbers a row (kernels), the ranks exchange only those. Following Megatron-LM
(Shoeybi et al., 2019, arXiv:1909.08053), with one all-gather of the four statistics instead of three all-reduces.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megalite.axis import Axis
from megalite.kernels.chosen import Kernels
from megalite.kernels.cross_entropy import CrossEntropyConfig, ce_grad_, ce_loss, ce_stats, merge_ce_stats
from megalite.kernels.linear import input_grad_into, linear
from megalite.parallel.shard import even_cut
from megalite.parallel.wgrad import WeightGradQueue

_CHUNK_ELEMENTS = 1 << 23


@dataclass(frozen=True)
class VocabCut:
    """Which columns of `vocab_size` this rank holds on `axis`."""

    vocab_size: int
    axis: Axis

    def local(self, labels: Tensor) -> Tensor:
        """Labels as column numbers of this rank, -1 for those that another rank holds."""
        ((start, length),) = even_cut(self.vocab_size, self.axis)
        here = (labels >= start) & (labels < start + length)
        return torch.where(here, labels - start, -1)

    def chunk_rows(self) -> int:
        """Rows of logits to hold at once (about 8 M elements), the same on every rank of the axis."""
        return max(1, _CHUNK_ELEMENTS // math.ceil(self.vocab_size / self.axis.size))


def _merged(stats: Tensor, axis: Axis) -> tuple[Tensor, Tensor, Tensor]:
    """Global (lse, target logit, sum of logits), [n] each, from this rank's statistics [4, n]."""
    return merge_ce_stats(axis.all_gather(stats).view(axis.size, *stats.shape))


class _CrossEntropy(torch.autograd.Function):
    """Per-row loss of logits [n, vocab_local]."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, cut: VocabCut, terms: CrossEntropyConfig) -> Tensor:
        local = cut.local(labels)
        lse, target, total = _merged(ce_stats(logits, local, terms), cut.axis)
        ctx.save_for_backward(logits, local, lse)
        ctx.terms = terms
        return ce_loss(lse, target, total, terms)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        logits, local, lse = ctx.saved_tensors
        return ce_grad_(logits.clone(), local, lse, grads[0], ctx.terms), None, None, None


def vocab_parallel_cross_entropy(
    logits: Tensor,
    labels: Tensor,
    *,
    axis: Axis,
    vocab_size: int | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> Tensor:
    """Loss of each token, [..] in at least float32, from this rank's columns of the logits [.., vocab_local].

    `vocab_size` is the global vocabulary (by default vocab_local x axis size). Smoothing spreads its mass over the
    other vocab_size - 1 entries; z_loss adds z_loss * log(Z)^2. Raises ValueError when the columns are not this
    rank's part, as they are not when the logits were gathered already.
    """
    vocab_size = vocab_size if vocab_size is not None else logits.shape[-1] * axis.size
    ((_, length),) = even_cut(vocab_size, axis)
    if logits.shape[-1] != length:
        raise ValueError(
            f"logits have {logits.shape[-1]} columns, but rank {axis.rank} of {axis.size} holds {length} of"
            f" vocab_size={vocab_size}; pass the cut logits, or axis=ParallelState.single().tp for gathered ones"
        )
    terms = CrossEntropyConfig(vocab_size=vocab_size, label_smoothing=label_smoothing, z_loss=z_loss)
    flat = logits.reshape(-1, logits.shape[-1])
    return _CrossEntropy.apply(flat, labels.reshape(-1), VocabCut(vocab_size, axis), terms).view(labels.shape)


_FP16_LIFT = 256.0
"""What the gradients of logits, the small probabilities among them, are multiplied by while fp16 holds them: they are
made before the loss scale is known to backward."""


class _LinearCrossEntropy(torch.autograd.Function):
    """Sum over rows of mask * loss(hidden W^T), a chunk of rows at a time.

    The loss is a scalar, so that its gradients are known up to one factor: they are made in the forward pass while
    a chunk's logits exist, and scaled in backward (the idea of Liger kernels, Hsu et al., 2024, arXiv:2410.10989).
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: nn.Parameter,
        labels: Tensor,
        mask: Tensor,
        cut: VocabCut,
        terms: CrossEntropyConfig,
        queue: WeightGradQueue,
        kernels: Kernels,
        learning: bool,
        rows: Tensor | None,
        softcap: float,
    ) -> Tensor:
        ctx.weight, ctx.queue = weight, queue
        wants_dx, wants_dw = (learning and needed for needed in ctx.needs_input_grad[:2])
        dx = torch.empty_like(hidden) if wants_dx else None
        wide = torch.promote_types(weight.dtype, torch.float32)
        dw = torch.zeros_like(weight, dtype=wide) if wants_dw else None
        local = cut.local(labels)
        loss = torch.zeros((), dtype=wide, device=hidden.device)
        ctx.lift = _FP16_LIFT if weight.dtype == torch.float16 else 1.0
        weights = mask * ctx.lift if ctx.lift != 1.0 else mask
        for begin in range(0, hidden.shape[0], cut.chunk_rows()):
            part = slice(begin, begin + cut.chunk_rows())
            logits = linear(hidden[part], weight)
            slopes = _cap_(logits, softcap) if softcap else None
            lse, target, total = _merged(kernels.ce_stats(logits, local[part], terms), cut.axis)
            of_rows = ce_loss(lse, target, total, terms)
            # A masked row may hold anything, inf included: it must not touch the sum.
            loss += torch.where(mask[part] > 0, of_rows * mask[part], 0.0).sum()
            if rows is not None:
                rows[part] = torch.where(mask[part] > 0, of_rows, 0.0)
            if dx is None and dw is None:
                continue
            kernels.ce_grad(logits, local[part], lse, weights[part], terms)
            if slopes is not None:
                logits.mul_(slopes.nan_to_num_(0.0))  # a masked row may hold anything; the others keep their NaN
            if dx is not None:
                input_grad_into(dx[part], logits, weight)
            if dw is not None:
                kernels.wgrad(dw, logits, hidden[part])
        ctx.gradients = dx, dw
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.gradients is None:
            raise RuntimeError("the gradients of this loss were made once, in its forward pass, and are spent")
        (dx, dw), ctx.gradients = ctx.gradients, None
        scale, weight = grads[0] / ctx.lift, ctx.weight
        weight_grad = None
        if dw is not None:
            main_grad = getattr(weight, "main_grad", None)
            if main_grad is not None or ctx.queue.deferring:
                ctx.queue.put(lambda: _add_scaled(weight, dw, scale), [weight])
            else:
                weight_grad = dw.mul_(scale).to(weight.dtype)
        return dx.mul_(scale) if dx is not None else None, weight_grad, *(None for _ in range(9))


def soft_cap(logits: Tensor, cap: float) -> Tensor:
    """cap * tanh(logits / cap) (Gemma 2, arXiv:2408.00118), for a cap above 0."""
    return torch.tanh(logits / cap) * cap if cap else logits


def _cap_(logits: Tensor, cap: float) -> Tensor:
    """`soft_cap` in place; returns its slope 1 - tanh^2 at each of them."""
    logits.div_(cap).tanh_()
    slopes = 1.0 - logits.square()
    logits.mul_(cap)
    return slopes


def _add_scaled(weight: nn.Parameter, dw: Tensor, scale: Tensor) -> None:
    """main_grad (or grad) += scale * dw."""
    grad = getattr(weight, "main_grad", None)
    if grad is None:
        weight.grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
        grad = weight.grad
    grad.add_(dw.mul_(scale))


def linear_cross_entropy(
    hidden: Tensor,
    weight: nn.Parameter,
    labels: Tensor,
    mask: Tensor,
    *,
    axis: Axis,
    vocab_size: int,
    queue: WeightGradQueue,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float = 0.0,
    kernels: Kernels | None = None,
    rows: Tensor | None = None,
) -> Tensor:
    """The scalar sum of mask * loss over all tokens, in at least float32, without ever holding all logits.

    hidden [s, b, h], whole on every rank of `axis`; weight [vocab_local, h]; labels int64 and mask [s, b]. With a
    softcap c the loss is that of c tanh(logits / c). The gradient of `hidden` is this rank's partial sum: enter the
    region with `collectives.enter_parallel`. rows [s, b]: receives the loss of each token, 0 where the mask is.
    """
    wide = torch.promote_types(hidden.dtype, torch.float32)
    return _LinearCrossEntropy.apply(
        hidden.reshape(-1, hidden.shape[-1]),
        weight,
        labels.reshape(-1),
        mask.reshape(-1).to(wide),
        VocabCut(vocab_size, axis),
        CrossEntropyConfig(vocab_size=vocab_size, label_smoothing=label_smoothing, z_loss=z_loss),
        queue,
        kernels if kernels is not None else Kernels(),
        torch.is_grad_enabled(),  # the function itself always runs without
        rows.view(-1) if rows is not None else None,
        softcap,
    )
