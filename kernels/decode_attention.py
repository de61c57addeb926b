"""Attention of one new token in each row on the keys that are kept of its row."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .products import product_dtype


def decode_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    hidden: Tensor | None = None,
) -> Tensor:
    """softmax(scores + hidden) v for q [1, b, heads, d] on k [b, kv_heads, n, d] and v [b, kv_heads, n, dv].

    Scores are q k^T * scale, or with a softcap c, c tanh(q k^T * scale / c). The query heads of a KV head become rows
    of one matrix, so that keys are read once and never repeated. hidden: [b, 1, 1, n], -inf for keys that a row does
    not see, 0 for others. sinks: [heads], logits without a value. Returns [1, b, heads, dv]; no gradient is meant.
    """
    dtype = product_dtype(q)
    rows, k, v = q[0].unflatten(1, (k.shape[1], -1)).to(dtype), k.to(dtype), v.to(dtype)  # [b, kv_heads, group, d]
    if not softcap and sinks is None:
        mask = None if hidden is None else hidden.to(dtype)
        out = F.scaled_dot_product_attention(rows, k, v, attn_mask=mask, scale=scale)
        return out.flatten(1, 2)[None].to(q.dtype)
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = (rows.to(wide) @ k.to(wide).mT).mul_(scale)
    if softcap:
        scores = scores.div_(softcap).tanh_().mul_(softcap)
    if hidden is not None:
        scores += hidden
    if sinks is not None:
        column = sinks.to(wide).view(1, rows.shape[1], rows.shape[2], 1).expand(rows.shape[0], -1, -1, -1)
        scores = torch.cat((scores, column), -1)
    probs = scores.softmax(-1)[..., : k.shape[2]]
    return (probs.to(dtype) @ v).flatten(1, 2)[None].to(q.dtype)
