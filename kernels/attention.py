"""Causal attention with grouped query heads, and the backends it can run on.

`sdpa` is torch's scaled_dot_product_attention. `block` is plain batched matrix products over the blocks on and below
the diagonal: a GQA group's query heads are folded into rows, so keys and values are never repeated, and no more than
one block of rows (forward) or columns (backward) of the score matrix exists at a time. Only `block` has dropout.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from .dropout import feature_hash, keep_threshold, mix_, row_hash

AttentionBackend = Literal["sdpa", "block"]

_BLOCK = 128  # query or key positions in a block of the `block` backend
_BLOCK_WINS_TO = 1024  # on CPUs with AVX-512, forward and backward: 1.1 to 1.6 times SDPA at 512, level at 2048
_LOG2_E = 1.4426950408889634  # powers of 2 are faster than powers of e
_HEAD_STEP = 0x85EBCA77  # odd, so that no two heads of a layer share a row hash


@dataclass(frozen=True, kw_only=True)
class AttentionDropout:
    """Dropout of attention probabilities, by hash of (query token, head, key position): see `dropout`."""

    p: float
    """Probability that a (query, key) pair of a head is dropped; below 1."""
    key: Tensor
    """int32 [2], from `dropout_key`."""
    token_index: Tensor
    """int64 [s, b]: number of each query token in the run."""
    head_offset: int = 0
    """Number of the first query head here, among all heads of the layer."""


def resolve_attention(
    choice: Literal["auto", "sdpa", "block"], *, device: torch.device, dropout: float, seq_len: int
) -> AttentionBackend:
    """The backend that `choice` means; a named one that cannot do the job raises ValueError."""
    if choice == "sdpa" and dropout > 0.0:
        raise ValueError(
            f"kernels.attention=sdpa has no layout-invariant dropout (attention_dropout={dropout}); "
            "use kernels.attention=block or auto, or attention_dropout=0"
        )
    if choice != "auto":
        return choice
    on_block = dropout > 0.0 or (device.type == "cpu" and seq_len <= _BLOCK_WINS_TO)
    return "block" if on_block else "sdpa"


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    backend: AttentionBackend,
    scale: float | None = None,
    dropout: AttentionDropout | None = None,
) -> Tensor:
    """softmax(q k^T * scale, causal) v for q [s, b, heads, d], k [s, b, kv_heads, d] and v [s, b, kv_heads, dv].

    Query head i reads key head i // (heads / kv_heads). scale is 1 / sqrt(d) by default. Returns [s, b, heads, dv].
    Scores and statistics are in promote_types(dtype, float32).
    """
    assert q.shape[2] % k.shape[2] == 0 and k.shape[:3] == v.shape[:3] and q.shape[:2] == k.shape[:2]
    scale = scale if scale is not None else 1.0 / math.sqrt(q.shape[-1])
    if backend == "sdpa":
        assert dropout is None or dropout.p == 0.0, "sdpa attention has no stateless dropout"
        return _sdpa(q, k, v, scale)
    drop = dropout if dropout is not None and dropout.p > 0.0 else None
    return _BlockAttention.apply(q, k, v, scale, drop)


def block_forward(
    q: Tensor, k: Tensor, v: Tensor, scale: float, dropout: AttentionDropout | None = None
) -> tuple[Tensor, Tensor]:
    """The `block` backend's forward, outside autograd: (out [s, b, heads, dv], log-sum-exp [s, b, heads])."""
    s, b, num_heads, _ = q.shape
    group, num_kv = num_heads // k.shape[2], k.shape[2]
    dtype, wide = q.dtype, torch.promote_types(q.dtype, torch.float32)
    q_rows, k_rows, v_rows = _rows(q, group, wide), _rows(k, 1, wide), _rows(v, 1, dtype)
    out = q_rows.new_empty(b * num_kv, s * group, v.shape[-1], dtype=dtype)
    lse = q_rows.new_empty(b * num_kv, s * group, 1)
    for start in range(0, s, _BLOCK):
        stop = min(start + _BLOCK, s)
        rows = slice(start * group, stop * group)
        scores = torch.bmm(q_rows[:, rows], k_rows[:, :stop].mT)
        scores[:, :, start:] += _future(stop - start, wide, q.device).mT.repeat_interleave(group, 0)
        top = scores.amax(-1, keepdim=True).mul_(scale)
        probs = _exp_(scores, scale, top)
        total = probs.sum(-1, keepdim=True)
        lse[:, rows] = total.log().add_(top)
        probs.div_(total)
        if dropout is not None:
            keep = _keep(dropout, slice(start, stop), slice(0, stop), group, num_heads).mT
            probs.masked_fill_(~keep, 0.0).mul_(1.0 / (1.0 - dropout.p))
        out[:, rows] = torch.bmm(probs.to(dtype), v_rows[:, :stop])
    return _unfold(out, b, num_heads, group), _unfold(lse, b, num_heads, group).squeeze(-1)


def block_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    dropout: AttentionDropout | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v from dout, given what `block_forward` returned.

    Works on blocks of keys, with probabilities transposed [keys, queries]: the gradients of k and v then come out of
    one product each, in the order of operands that CPU libraries run fastest.
    """
    s, b, num_heads, _ = q.shape
    group = num_heads // k.shape[2]
    dtype, wide = q.dtype, torch.promote_types(q.dtype, torch.float32)
    delta = (dout.to(wide) * out).sum(-1)
    lse, delta = (_rows(row.unsqueeze(-1), group, wide).mT for row in (lse, delta))
    q_rows, k_rows, v_rows, do_rows = (
        _rows(q, group, wide),
        _rows(k, 1, wide),
        _rows(v, 1, wide),
        _rows(dout, group, wide),
    )
    q_low, k_low, do_low = (x.to(dtype) for x in (q_rows, k_rows, do_rows))
    dq, dk, dv = torch.zeros_like(q_rows), torch.empty_like(k_low), torch.empty_like(v_rows, dtype=dtype)
    for start in range(0, s, _BLOCK):
        stop = min(start + _BLOCK, s)
        keys, queries = slice(start, stop), slice(start * group, s * group)
        scores = torch.bmm(k_rows[:, keys], q_rows[:, queries].mT)
        future = _future(stop - start, wide, q.device).repeat_interleave(group, 1)
        scores[:, :, : future.shape[1]] += future
        probs = dropped = _exp_(scores, scale, lse[:, :, queries])
        dprobs = torch.bmm(v_rows[:, keys], do_rows[:, queries].mT)
        if dropout is not None:
            drop = ~_keep(dropout, slice(start, s), keys, group, num_heads)
            rescale = 1.0 / (1.0 - dropout.p)
            dropped = probs.masked_fill(drop, 0.0).mul_(rescale)
            dprobs.masked_fill_(drop, 0.0).mul_(rescale)
        torch.bmm(dropped.to(dtype), do_low[:, queries], out=dv[:, keys])
        dscores = dprobs.sub_(delta[:, :, queries]).mul_(probs).to(dtype)
        dk[:, keys] = torch.bmm(dscores, q_low[:, queries]).mul_(scale)
        dq[:, queries] += torch.bmm(dscores.mT, k_low[:, keys])
    dq.mul_(scale)
    num_kv = k.shape[2]
    return _unfold(dq, b, num_heads, group).to(dtype), _unfold(dk, b, num_kv, 1), _unfold(dv, b, num_kv, 1)


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


def _sdpa(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
    grouped = q.shape[1] != k.shape[1]
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=grouped)
    return out.permute(2, 0, 1, 3)


def _rows(x: Tensor, group: int, dtype: torch.dtype) -> Tensor:
    """[s, b, heads, d] to [b * heads / group, s * group, d] in dtype: a group's heads are neighbouring rows."""
    s, b, heads, d = x.shape
    rows = x.new_empty(b, heads // group, s, group, d, dtype=dtype)
    rows.copy_(x.view(s, b, heads // group, group, d).permute(1, 2, 0, 3, 4))
    return rows.view(b * heads // group, s * group, d)


def _unfold(rows: Tensor, b: int, heads: int, group: int) -> Tensor:
    """The inverse of `_rows`: [s, b, heads, d], contiguous."""
    s, d = rows.shape[1] // group, rows.shape[2]
    return rows.view(b, heads // group, s, group, d).permute(2, 0, 1, 3, 4).reshape(s, b, heads, d)


def _exp_(scores: Tensor, scale: float, shift: Tensor) -> Tensor:
    """exp(scores * scale - shift) in place.

    Forward and backward scale here, not in their matrix products: those then agree on the scores to the last bit,
    in either order of operands, and the gradient of q does not suffer where keys are large.
    """
    return torch.add(shift * -_LOG2_E, scores, alpha=scale * _LOG2_E, out=scores).exp2_()


def _future(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[size, size]: -inf where the key (row) comes after the query (column), else 0."""
    return torch.full((size, size), float("-inf"), dtype=dtype, device=device).tril_(-1)


def _keep(dropout: AttentionDropout, queries: slice, keys: slice, group: int, num_heads: int) -> Tensor:
    """bool [b * kv_heads, keys, queries * group]: what dropout keeps of the transposed probabilities."""
    row = row_hash(dropout.key, dropout.token_index[queries]).t()[:, None, :, None]
    heads = torch.arange(num_heads, device=row.device).add_(dropout.head_offset).mul_(_HEAD_STEP).to(torch.int32)
    row = mix_(row + heads.view(-1, 1, group)).flatten(2).flatten(0, 1)
    feature = feature_hash(keys.start, keys.stop, row.device)
    return mix_(row[:, None, :] + feature[:, None]) >= keep_threshold(dropout.p)
