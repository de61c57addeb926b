"""Attention written out with whole score matrices: what every way of cutting it must equal."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def dense_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    allowed: Tensor,
    *,
    scale: float,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """q [s, b, H, d], k and v [s, b, G, d], allowed bool [s (query), s (key), b] -> [s, b, H, d]."""
    group = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)
    scores = torch.einsum("qbhd,kbhd->bhqk", q, k) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~allowed.permute(2, 0, 1)[:, None], -math.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)), -1)
    probs = scores.softmax(-1).nan_to_num(nan=0.0)
    return torch.einsum("bhqk,kbhd->qbhd", probs[..., : len(k)], v)


def causal_mask(starts: Tensor, window: int = 0) -> Tensor:
    """bool [s, s, b]: which keys each query sees, from the places at which documents begin, int64 [s, b]."""
    place = torch.arange(len(starts))
    query, key = place[:, None, None], place[None, :, None]
    allowed = (key <= query) & (key >= starts[:, None, :])
    return allowed & (key > query - window) if window else allowed


def starts_of(*rows: list[int]) -> Tensor:
    """int64 [s, b] from the lengths of the documents of each row."""
    return torch.stack(
        [
            torch.repeat_interleave(torch.tensor([0, *lengths]).cumsum(0)[:-1], torch.tensor(lengths))
            for lengths in rows
        ],
        -1,
    )
