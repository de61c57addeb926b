"""One interface for what attends to a block of keys: the seam between attention backends and context parallelism."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .attention_mask import AttentionMask
from .attention_rows import AttentionDropout, same_width
from .masked_attention import add_sinks_, masked_backward, masked_forward, sinks_grad, weight


class AttentionKernel(ABC):
    """Attends from queries to some of the keys of their rows; attention of your own is a subclass with `forward`.

    Whatever calls it merges the results of all keys by their log-sum-exps, on one rank or on many, so that `forward` is
    all it takes to be context-parallel. Backends also write their own `backward`.
    """

    @property
    def name(self) -> str:
        """What the log calls it."""
        return type(self).__name__

    @property
    def takes_any_widths(self) -> bool:
        """Whether values may be narrower or wider than keys."""
        return True

    @abstractmethod
    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, dropout: AttentionDropout | None
    ) -> tuple[Tensor, Tensor]:
        """(out [sq, b, heads, dv], log-sum-exp [sq, b, heads]) of q [sq, b, heads, d] on k, v [sk, b, kv_heads, d, dv].

        Both in promote_types(q.dtype, float32); 0 and -inf for a query that sees none of these keys. Must be made of
        differentiable operations on q, k and v, unless the subclass has its own `backward`.
        """

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        delta: Tensor,
        mask: AttentionMask,
        dropout: AttentionDropout | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(dq, dk, dv) in promote_types(q.dtype, float32), from what these keys contribute.

        out and lse are the final ones, over all keys, and delta [sq, b, heads] is rowsum(dout * out). This version
        calls `forward` again and lets autograd differentiate it.
        """
        q, k, v = inputs = tuple(x.detach().requires_grad_() for x in (q, k, v))
        with torch.enable_grad():
            part, part_lse = self.forward(q, k, v, mask, dropout)
        if not part.requires_grad:  # nothing is seen
            dq, dk, dv = (torch.zeros_like(x, dtype=lse.dtype) for x in (q, k, v))
            return dq, dk, dv
        # The final out is the sum of all parts, each times its share exp(part_lse - lse).
        share = weight(part_lse.detach(), lse)
        d_part = dout.to(lse.dtype) * share.unsqueeze(-1)
        d_lse = (d_part * part.detach()).sum(-1) - share * delta
        grads = torch.autograd.grad((part, part_lse), inputs, (d_part, d_lse), materialize_grads=True)
        dq, dk, dv = (grad.to(lse.dtype) for grad in grads)
        return dq, dk, dv

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: AttentionMask,
        dropout: AttentionDropout | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """The function `attend`, for a backend that makes all of it in fewer passes; `dropout` drops something."""
        return _Attend.apply(q, k, v, sinks, mask, self, dropout)


@dataclass(frozen=True, kw_only=True)
class BlockKernel(AttentionKernel):
    """The `block` backend: matrix products over the blocks that are not empty; any mask, soft-capping and dropout."""

    scale: float
    """Factor on q k^T."""
    softcap: float = 0.0
    """Scores x become softcap * tanh(x / softcap) (Gemma 2, arXiv:2408.00118); 0 leaves them."""

    @property
    def name(self) -> str:
        """As in `kernels.attention`."""
        return "block"

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, dropout: AttentionDropout | None
    ) -> tuple[Tensor, Tensor]:
        """See `masked_forward`."""
        return masked_forward(q, k, v, mask, scale=self.scale, softcap=self.softcap, dropout=dropout)

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        delta: Tensor,
        mask: AttentionMask,
        dropout: AttentionDropout | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `masked_backward`."""
        return masked_backward(dout, q, k, v, lse, delta, mask, scale=self.scale, softcap=self.softcap, dropout=dropout)


@dataclass(frozen=True, kw_only=True)
class SameWidthKernel(AttentionKernel):
    """A backend for keys and values of one width on those of two (latent attention): zeros fill the narrower."""

    inner: AttentionKernel
    """Which backend."""

    @property
    def name(self) -> str:
        """That of the backend."""
        return self.inner.name

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, dropout: AttentionDropout | None
    ) -> tuple[Tensor, Tensor]:
        """See `AttentionKernel.forward`."""
        wide_q, wide_k, wide_v = same_width(q, k, v)
        out, lse = self.inner.forward(wide_q, wide_k, wide_v, mask, dropout)
        return out[..., : v.shape[-1]], lse

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        delta: Tensor,
        mask: AttentionMask,
        dropout: AttentionDropout | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `AttentionKernel.backward`."""
        wide_q, wide_k, wide_v, wide_dout, wide_out = same_width(q, k, v, dout, out)
        dq, dk, dv = self.inner.backward(wide_dout, wide_q, wide_k, wide_v, wide_out, lse, delta, mask, dropout)
        return dq[..., : q.shape[-1]], dk[..., : k.shape[-1]], dv[..., : v.shape[-1]]


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: AttentionMask,
    kernel: AttentionKernel,
    *,
    dropout: AttentionDropout | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention by `kernel` where all keys are here, with its gradient: [sq, b, heads, dv] in q's dtype.

    sinks: [heads], a learned logit of each head, see `add_sinks_`.
    """
    dropout = dropout if dropout is not None and dropout.p > 0.0 else None
    return kernel.attend(q, k, v, mask, dropout, sinks)


class _Attend(torch.autograd.Function):
    """Saves its inputs, its output and the log-sum-exp."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        mask: AttentionMask,
        kernel: AttentionKernel,
        dropout: AttentionDropout | None,
    ) -> Tensor:
        out, lse = kernel.forward(q, k, v, mask, dropout)
        if sinks is not None:
            add_sinks_(out, lse, sinks)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, sinks, out, lse)
        ctx.mask, ctx.kernel, ctx.dropout = mask, kernel, dropout
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, out, lse = ctx.saved_tensors
        delta = (grads[0].to(lse.dtype) * out).sum(-1)
        dq, dk, dv = ctx.kernel.backward(grads[0], q, k, v, out, lse, delta, ctx.mask, ctx.dropout)
        dsinks = None if sinks is None else sinks_grad(sinks, lse, delta).to(sinks.dtype)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dsinks, None, None, None
