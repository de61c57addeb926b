"""Attention of any queries to any keys of their rows under an interval mask, with its log-sum-exp.

The pieces of context-parallel attention, of packed documents and of sliding windows. `masked_forward` and
`masked_backward` are batched matrix products over the blocks that `AttentionMask` does not leave empty; the query heads
of a group become rows of one matrix, as in `attention`. What different keys give is put together by `merge`: outputs
weigh as their log-sum-exps say (Dao et al., 2022, arXiv:2205.14135), and gradients add up.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from .attention_mask import AttentionMask, Block, Columns, Span, Tile
from .attention_rows import AttentionDropout, Chunk, chunks, exp_, keep_mask, product
from .dropout import hash_features
from .products import product_dtype


def masked_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: AttentionMask,
    *,
    scale: float,
    softcap: float = 0.0,
    dropout: AttentionDropout | None = None,
) -> tuple[Tensor, Tensor]:
    """softmax(scores, mask) v for q [sq, b, heads, d], k [sk, b, kv_heads, d] and v [sk, b, kv_heads, dv], no autograd.

    scores are q k^T * scale, or with a softcap c, c tanh(q k^T * scale / c). Query head i reads key head
    i // (heads / kv_heads). Returns (out [sq, b, heads, dv], log-sum-exp [sq, b, heads]) in promote_types(dtype,
    float32); a query that sees nothing has out 0 and log-sum-exp -inf.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    out = q.new_zeros(*q.shape[:3], v.shape[-1], dtype=wide)
    lse = q.new_full((*q.shape[:3], 1), -math.inf, dtype=wide)
    for chunk, work in _work(q, k, mask):
        q_rows, k_rows = (chunk.rows(x, wide) for x in (q, k))
        out_rows, lse_rows = work.forward(q_rows, k_rows, chunk.rows(v, product_dtype(v)), scale, softcap, dropout)
        chunk.store(out_rows, out)
        chunk.store(lse_rows, lse)
    return out, lse.squeeze(-1)


def masked_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    delta: Tensor,
    mask: AttentionMask,
    *,
    scale: float,
    softcap: float = 0.0,
    dropout: AttentionDropout | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) in promote_types(dtype, float32), from what these keys contribute.

    lse [sq, b, heads] is the final one, over all keys; delta [sq, b, heads] is rowsum(dout * out) with the final out.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    grads = tuple(torch.zeros_like(x, dtype=wide, memory_format=torch.contiguous_format) for x in (q, k, v))
    # A query that sees nothing has no finite shift; its scores are all -inf.
    lse = lse.masked_fill(lse == -math.inf, 0.0).unsqueeze(-1)
    for chunk, work in _work(q, k, mask):
        q_rows, k_rows, v_rows = (chunk.rows(x, product_dtype(x)) for x in (q, k, v))
        lse_rows, delta_rows = (chunk.rows(x, wide).mT for x in (lse, delta.unsqueeze(-1)))
        rows = work.backward(
            chunk.rows(dout, wide), q_rows, k_rows, v_rows, lse_rows, delta_rows, scale, softcap, dropout
        )
        for part, grad in zip(rows, grads, strict=True):
            chunk.store(part, grad)
    dq, dk, dv = grads
    return dq, dk, dv


def merge(out: Tensor, lse: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Puts what the same queries got from other keys (out_b, lse_b) into (out, lse), in place; returns these.

    out [sq, b, heads, dv] and lse [sq, b, heads] are in float32 or wider. Where neither saw a key, 0 and -inf stay.
    """
    total = torch.logaddexp(lse, lse_b)
    out.mul_(weight(lse, total).unsqueeze(-1)).add_(out_b * weight(lse_b, total).unsqueeze(-1))
    return out, lse.copy_(total)


def weight(lse: Tensor, total: Tensor) -> Tensor:
    """exp(lse - total): the share that keys with log-sum-exp `lse` have among all; 0 where there are none."""
    return (lse - total.masked_fill(total == -math.inf, 0.0)).exp_()


def add_sinks_(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Lets each head attend to nothing with the logit sinks [heads] (gpt-oss, arXiv:2508.10925): changes out and lse.

    To be done once, on the final (out, lse). The gradient of the others needs no more than these results.
    """
    total = torch.logaddexp(lse, sinks.to(lse.dtype))
    out.mul_(weight(lse, total).unsqueeze(-1))
    return out, lse.copy_(total)


def sinks_grad(sinks: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    """The gradient of sinks [heads] in lse's dtype; lse and delta [sq, b, heads] are the final ones, with sinks."""
    return -(weight(sinks.to(lse.dtype), lse) * delta).sum((0, 1))


def _work(q: Tensor, k: Tensor, mask: AttentionMask) -> Iterator[tuple[Chunk, _Work]]:
    """What is to be done, a chunk of heads and batch rows at a time."""
    group = q.shape[2] // k.shape[2]
    for columns in mask.columns:
        if columns.blocks:
            scores = max(
                (b.queries[1] - b.queries[0]) * (t.keys[1] - t.keys[0]) for b in columns.blocks for t in b.tiles
            )
            for chunk in chunks(q, k, columns.batch, scores):
                yield chunk, _Work(mask, columns, chunk, group)


class _Work:
    """The blocks of one chunk: [heads, s * group, d] rows, the queries of a place being neighbours."""

    def __init__(self, mask: AttentionMask, columns: Columns, chunk: Chunk, group: int):
        row = columns.batch.start
        self.query, self.start, self.key = mask.query[:, row], mask.start[:, row], mask.key[:, row]
        self.blocks, self.chunk, self.group = columns.blocks, chunk, group

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, softcap: float, dropout: AttentionDropout | None
    ) -> tuple[Tensor, Tensor]:
        """(out, log-sum-exp) in the dtype of q and k, float32 or wider."""
        out = q.new_zeros(*q.shape[:2], v.shape[-1])
        lse = q.new_full((*q.shape[:2], 1), -math.inf)
        for block in self.blocks:
            rows = self._rows(block.queries)
            self._forward_block(block, q[:, rows], k, v, (out[:, rows], lse[:, rows]), scale, softcap, dropout)
        return out, lse

    def _forward_block(
        self,
        block: Block,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        result: tuple[Tensor, Tensor],
        scale: float,
        softcap: float,
        dropout: AttentionDropout | None,
    ) -> None:
        """Softmax over the tiles one after another, the sums so far being scaled to the largest score so far."""
        out, lse = result
        top, total = lse.clone(), torch.zeros_like(lse)
        for tile in block.tiles:
            keys = slice(*tile.keys)
            scores, factor = _capped_(product(q, k[:, keys]), scale, softcap)
            self._hide_(scores, block.queries, tile)
            new_top = torch.maximum(top, scores.amax(-1, keepdim=True).mul_(factor))
            shift = new_top.masked_fill(new_top == -math.inf, 0.0)
            probs, fade = exp_(scores, factor, shift), (top - shift).exp_()
            total.mul_(fade).add_(probs.sum(-1, keepdim=True))
            if dropout is not None:
                probs.masked_fill_(~self._keep(dropout, block.queries, keys).mT, 0.0).mul_(1.0 / (1.0 - dropout.p))
            _accumulate_(out.mul_(fade), probs.to(v.dtype), v[:, keys])
            top = new_top
        torch.add(total.log(), top, out=lse)
        out.div_(total.masked_fill_(total == 0.0, 1.0))

    def backward(
        self,
        do: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        lse: Tensor,
        delta: Tensor,
        scale: float,
        softcap: float,
        dropout: AttentionDropout | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of the rows q, k and v in the dtype of do, lse and delta [heads, 1, rows], float32 or wider.

        Probabilities are transposed, [keys, queries]: two of the three products then take their operands in order.
        """
        dtype, wide = q.dtype, do.dtype
        q_wide, k_wide, v_wide, do_low = q.to(wide), k.to(wide), v.to(wide), do.to(dtype)
        dq, dk, dv = (torch.zeros_like(x) for x in (q_wide, k_wide, v_wide))
        for block in self.blocks:
            rows = self._rows(block.queries)
            for tile in block.tiles:
                keys = slice(*tile.keys)
                scores, factor = _capped_(product(k_wide[:, keys], q_wide[:, rows]), scale, softcap)
                slope = 1.0 - scores.square() if softcap else None
                self._hide_(scores.mT, block.queries, tile)
                probs = dropped = exp_(scores, factor, lse[:, :, rows])
                dprobs = product(v_wide[:, keys], do[:, rows])
                if dropout is not None:
                    drop, rescale = ~self._keep(dropout, block.queries, keys), 1.0 / (1.0 - dropout.p)
                    dropped = probs.masked_fill(drop, 0.0).mul_(rescale)
                    dprobs.masked_fill_(drop, 0.0).mul_(rescale)
                _accumulate_(dv[:, keys], dropped.to(dtype), do_low[:, rows])
                dscores = dprobs.sub_(delta[:, :, rows]).mul_(probs)
                dscores = (dscores.mul_(slope) if slope is not None else dscores).to(dtype)
                _accumulate_(dk[:, keys], dscores, q[:, rows])
                _accumulate_(dq[:, rows], dscores.mT, k[:, keys])
        return dq.mul_(scale), dk.mul_(scale), dv

    def _rows(self, queries: Span) -> slice:
        return slice(queries[0] * self.group, queries[1] * self.group)

    def _hide_(self, scores: Tensor, queries: Span, tile: Tile) -> None:
        """-inf in place of the scores [heads, queries * group, keys] that the mask does not allow."""
        (begin, end), (first, stop) = tile.keys, tile.full
        for left, right in ((begin, first), (stop, end)):
            if left < right:
                key = self.key[left:right]
                hidden = (key < self.start[slice(*queries), None]) | (key > self.query[slice(*queries), None])
                scores[:, :, left - begin : right - begin].masked_fill_(
                    hidden.repeat_interleave(self.group, 0), -math.inf
                )

    def _keep(self, dropout: AttentionDropout, queries: Span, keys: slice) -> Tensor:
        return keep_mask(dropout, slice(*queries), hash_features(self.key[keys]), self.group, self.chunk)


def _capped_(scores: Tensor, scale: float, softcap: float) -> tuple[Tensor, float]:
    """(x, f) such that f * x are the scores that products without scale give; x is made in place."""
    return (scores.mul_(scale / softcap).tanh_(), softcap) if softcap else (scores, scale)


def _accumulate_(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a b, batch by batch."""
    if total.dtype == a.dtype:
        total.baddbmm_(a, b)
    else:
        total.add_(torch.bmm(a, b))
