"""Causal attention with grouped query heads, and the backends it can run on.

`sdpa` is torch's scaled_dot_product_attention. `block` is plain batched matrix products over the blocks on and below
the diagonal: a GQA group's query heads are folded into rows, so keys and values are never repeated, and no more than
one block of rows (forward) or columns (backward) of the score matrix exists at a time. Only `block` has dropout.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from .attention_rows import AttentionDropout, Chunk, chunks, exp_, keep_mask, product, same_width
from .dropout import feature_hash
from .products import product_dtype
from .saved import Saved, size_of
from .saved import wide as wide_type

CausalBackend = Literal["sdpa", "block"]

_BLOCK = 128  # query or key positions in a block of the `block` backend


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    backend: CausalBackend,
    scale: float | None = None,
    dropout: AttentionDropout | None = None,
) -> Tensor:
    """softmax(q k^T * scale, causal) v for q [s, b, heads, d], k [s, b, kv_heads, d] and v [s, b, kv_heads, dv].

    Query head i reads key head i // (heads / kv_heads). scale is 1 / sqrt(d) by default. Returns
    [s, b, heads, dv]. Scores and statistics are in promote_types(dtype, float32).
    """
    assert q.shape[2] % k.shape[2] == 0 and k.shape[:3] == v.shape[:3] and q.shape[:2] == k.shape[:2]
    scale = scale if scale is not None else 1.0 / math.sqrt(q.shape[-1])
    if backend == "sdpa":
        assert dropout is None or dropout.p == 0.0, "sdpa attention has no stateless dropout"
        return _sdpa(q, k, v, scale)
    return _BlockAttention.apply(q, k, v, scale, _active(dropout))


def packed_attention(
    qkv: Tensor,
    *,
    head_dim: int,
    num_kv_heads: int,
    backend: CausalBackend,
    scale: float | None = None,
    dropout: AttentionDropout | None = None,
) -> Tensor:
    """`attention` of q, k and v that lie side by side in qkv [s, b, (heads + 2 kv_heads) * head_dim].

    Returns [s, b, heads * head_dim]. `block` makes the gradient of qkv in one piece.
    """
    if backend == "block":
        scale = scale if scale is not None else 1.0 / math.sqrt(head_dim)
        return _PackedBlockAttention.apply(qkv, head_dim, num_kv_heads, scale, _active(dropout))
    q, k, v = _unpack(qkv, head_dim, num_kv_heads)
    return attention(q, k, v, backend=backend, scale=scale, dropout=dropout).flatten(2)


def attention_saved(
    tokens: int,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    remade: bool,
    dropout: bool,
    value_dim: int | None = None,
) -> Saved:
    """What attention of any backend keeps of q, k and v, side by side in one tensor of as many tokens.

    remade: q and k are tensors of their own by the time they are kept (turned or normed before). Packed or not, v is a
    view of what enters, which keeps all of it. Beside these there are the output and the log-sum-exp, and out of
    autograd's sight what dropout hashes. value_dim: the width of values, where it is not head_dim.
    """
    value_dim = value_dim if value_dim is not None else head_dim
    turned, values = size_of((tokens, num_heads + num_kv_heads, head_dim), dtype), tokens * value_dim * dtype.itemsize
    return Saved(
        input=turned + num_kv_heads * values,
        own=turned * remade + size_of((tokens, num_heads), wide_type(dtype)),
        output=num_heads * values,
        held=(8 + 8 * tokens) * dropout,
    )


def block_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    dropout: AttentionDropout | None = None,
) -> tuple[Tensor, Tensor]:
    """The `block` backend's forward, outside autograd: (out [s, b, heads, dv], log-sum-exp [s, b, heads])."""
    wide = torch.promote_types(q.dtype, torch.float32)
    out = q.new_empty(*q.shape[:3], v.shape[-1])
    lse = q.new_empty(*q.shape[:3], 1, dtype=wide)
    for chunk in _all_chunks(q, k):
        q_rows, k_rows = (chunk.rows(x, wide) for x in (q, k))
        out_rows, lse_rows = _chunk_forward(q_rows, k_rows, chunk.rows(v, product_dtype(v)), scale, chunk, dropout)
        chunk.store(out_rows, out)
        chunk.store(lse_rows, lse)
    return out, lse.squeeze(-1)


def block_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    dropout: AttentionDropout | None = None,
    grads: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v from dout, given what `block_forward` returned; written into `grads` where given."""
    dtype, wide = product_dtype(q), lse.dtype
    grads = grads if grads is not None else (torch.empty_like(q), torch.empty_like(k), torch.empty_like(v))
    for chunk in _all_chunks(q, k):
        q_rows, k_rows = (chunk.rows(x, dtype) for x in (q, k))
        do_rows = chunk.rows(dout, wide)
        delta = (do_rows * chunk.rows(out, wide)).sum(-1, keepdim=True)
        dq_rows, dk_rows, dv_rows = _chunk_backward(
            do_rows, q_rows, k_rows, chunk.rows(v, dtype), chunk.rows(lse.unsqueeze(-1), wide).mT, delta.mT,
            scale, chunk, dropout,
        )  # fmt: skip
        for rows, grad in zip((dq_rows, dk_rows, dv_rows), grads, strict=True):
            chunk.store(rows, grad)
    return grads


def _all_chunks(q: Tensor, k: Tensor) -> Iterator[Chunk]:
    s = q.shape[0]
    return chunks(q, k, slice(0, q.shape[1]), min(_BLOCK, s) * s)


def _chunk_forward(
    q: Tensor, k: Tensor, v: Tensor, scale: float, chunk: Chunk, dropout: AttentionDropout | None
) -> tuple[Tensor, Tensor]:
    """(out in v's dtype, log-sum-exp) from rows, q and k in float32 or wider."""
    s, group = k.shape[1], q.shape[1] // k.shape[1]
    out = torch.empty(*q.shape[:2], v.shape[-1], dtype=v.dtype, device=v.device)
    lse = q.new_empty(*q.shape[:2], 1)
    future = _future(min(_BLOCK, s), q).mT.repeat_interleave(group, 0)
    for start in range(0, s, _BLOCK):
        stop = min(start + _BLOCK, s)
        rows = slice(start * group, stop * group)
        scores = product(q[:, rows], k[:, :stop])
        scores[:, :, start:].add_(future[: (stop - start) * group, : stop - start])
        top = scores.amax(-1, keepdim=True).mul_(scale)
        probs = exp_(scores, scale, top)
        total = probs.sum(-1, keepdim=True)
        torch.add(total.log(), top, out=lse[:, rows])
        probs.div_(total)
        if dropout is not None:
            keep = keep_mask(dropout, slice(start, stop), feature_hash(0, stop, q.device), group, chunk).mT
            probs.masked_fill_(~keep, 0.0).mul_(1.0 / (1.0 - dropout.p))
        torch.bmm(probs.to(v.dtype), v[:, :stop], out=out[:, rows])
    return out, lse


def _chunk_backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    delta: Tensor,
    scale: float,
    chunk: Chunk,
    dropout: AttentionDropout | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the rows q, k and v; lse and delta [heads, 1, s * group] and do are in float32 or wider.

    Works on blocks of keys, with probabilities transposed [keys, queries]: the gradients of k and v then come out of
    one product each, in the order of operands that CPU libraries run fastest.
    """
    s, group = k.shape[1], q.shape[1] // k.shape[1]
    dtype, wide = q.dtype, do.dtype
    q_wide, k_wide, v_wide, do_low = q.to(wide), k.to(wide), v.to(wide), do.to(dtype)
    dq, dk, dv = torch.zeros_like(q_wide), torch.empty_like(k), torch.empty_like(v)
    future = _future(min(_BLOCK, s), do).repeat_interleave(group, 1)
    for start in range(0, s, _BLOCK):
        stop = min(start + _BLOCK, s)
        keys, queries = slice(start, stop), slice(start * group, s * group)
        scores = product(k_wide[:, keys], q_wide[:, queries])
        scores[:, :, : (stop - start) * group].add_(future[: stop - start, : (stop - start) * group])
        probs = dropped = exp_(scores, scale, lse[:, :, queries])
        dprobs = product(v_wide[:, keys], do[:, queries])
        if dropout is not None:
            drop = ~keep_mask(dropout, slice(start, s), feature_hash(start, stop, q.device), group, chunk)
            rescale = 1.0 / (1.0 - dropout.p)
            dropped = probs.masked_fill(drop, 0.0).mul_(rescale)
            dprobs.masked_fill_(drop, 0.0).mul_(rescale)
        torch.bmm(dropped.to(dtype), do_low[:, queries], out=dv[:, keys])
        dscores = dprobs.sub_(delta[:, :, queries]).mul_(probs).to(dtype)
        torch.bmm(dscores, q[:, queries], out=dk[:, keys])
        dq[:, queries].add_(torch.bmm(dscores.mT, k[:, keys]))
    return dq.mul_(scale), dk.mul_(scale), dv


class _BlockAttention(torch.autograd.Function):
    """The `block` backend; saves its inputs, its output and the log-sum-exp."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float, dropout: AttentionDropout | None) -> Tensor:
        out, lse = block_forward(q, k, v, scale, dropout)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.scale, ctx.dropout = scale, dropout
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        return *block_backward(grads[0], q, k, v, out, lse, ctx.scale, ctx.dropout), None, None


class _PackedBlockAttention(torch.autograd.Function):
    """The same for q, k and v in one tensor."""

    @staticmethod
    def forward(
        ctx: Any,
        qkv: Tensor,
        head_dim: int,
        num_kv_heads: int,
        scale: float,
        dropout: AttentionDropout | None,
    ) -> Tensor:
        out, lse = block_forward(*_unpack(qkv, head_dim, num_kv_heads), scale, dropout)
        ctx.save_for_backward(qkv, out, lse)
        ctx.sizes, ctx.scale, ctx.dropout = (head_dim, num_kv_heads), scale, dropout
        return out.flatten(2)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        qkv, out, lse = ctx.saved_tensors
        dqkv = torch.empty_like(qkv)
        block_backward(
            grads[0].view(out.shape), *_unpack(qkv, *ctx.sizes), out, lse, ctx.scale, ctx.dropout,
            _unpack(dqkv, *ctx.sizes),
        )  # fmt: skip
        return dqkv, None, None, None, None


def _unpack(qkv: Tensor, head_dim: int, num_kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    heads = qkv.unflatten(-1, (-1, head_dim))
    q, k, v = heads.split([heads.shape[2] - 2 * num_kv_heads, num_kv_heads, num_kv_heads], dim=2)
    return q, k, v


def _active(dropout: AttentionDropout | None) -> AttentionDropout | None:
    return dropout if dropout is not None and dropout.p > 0.0 else None


def _sdpa(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    value_size = v.shape[-1]
    q, k, v = (x.permute(1, 2, 0, 3) for x in same_width(q, k, v))  # flash kernels take no others
    grouped = q.shape[1] != k.shape[1]
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=grouped)
    return out.permute(2, 0, 1, 3)[..., :value_size]


def _future(size: int, like: Tensor) -> Tensor:
    """[size, size]: -inf where the key (row) comes after the query (column), else 0."""
    return like.new_full((size, size), float("-inf")).tril_(-1)
