"""Interval masks of every kind, and attention under them by a dense softmax in float64."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from megalite.kernels.attention_mask import AttentionMask, first_seen
from megalite.kernels.attention_rows import AttentionDropout
from megalite.kernels.dropout import feature_hash, keep_threshold, mix_, row_hash

HEADS, GROUPS, DIM, SCALE = 6, 2, 5, 0.4
LENGTHS = [(1, 2, 7, 64, 3, 1, 23), (101,)]  # of the documents of each batch row


def rows(lengths: list[tuple[int, ...]] = LENGTHS, window: int = 0) -> AttentionMask:
    """Whole rows, each packed with documents of these lengths."""
    starts = [
        torch.tensor([start for n, start in zip(row, _sums(row), strict=False) for _ in range(n)]) for row in lengths
    ]
    documents = torch.stack(starts, 1)
    places = torch.arange(len(documents))[:, None].expand_as(documents)
    return AttentionMask(query=places, start=first_seen(places, documents, window), key=places)


def _sums(lengths: tuple[int, ...]) -> list[int]:
    return [sum(lengths[:n]) for n in range(len(lengths))]


def part(mask: AttentionMask, queries: Tensor, keys: Tensor, batch: slice = slice(None)) -> AttentionMask:
    """The mask of some queries and some keys."""
    query, start, key = mask.query[queries, batch], mask.start[queries, batch], mask.key[keys, batch]
    return AttentionMask(query=query, start=start, key=key)


def zigzag(size: int, rank: int, ranks: int = 3) -> Tensor:
    """Chunks of a row that a rank of a ring holds."""
    chunks = torch.arange(size).tensor_split(2 * ranks)
    return torch.cat((chunks[rank], chunks[2 * ranks - 1 - rank]))


def allowed(mask: AttentionMask) -> Tensor:
    """bool [b, 1, sq, sk]: the definition."""
    query, start, key = mask.query.t()[:, None, :, None], mask.start.t()[:, None, :, None], mask.key.t()[:, None, None]
    return (start <= key) & (key <= query)


Heads = tuple[Tensor, Tensor, Tensor]


def inputs(mask: AttentionMask, dtype: torch.dtype = torch.float64, dim: int = DIM) -> tuple[Heads, Tensor]:
    """q, k, v that require gradients, and a gradient of the output."""
    generator = torch.Generator().manual_seed(0)
    (sq, b), sk = mask.query.shape, mask.key.shape[0]
    shapes = [(sq, b, HEADS, dim), (sk, b, GROUPS, dim), (sk, b, GROUPS, dim), (sq, b, HEADS, dim)]
    q, k, v, dout = (torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes)
    return (q.requires_grad_(), k.requires_grad_(), v.requires_grad_()), dout


def detached(heads: Heads) -> Heads:
    q, k, v = heads
    return q.detach(), k.detach(), v.detach()


def reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: AttentionMask,
    *,
    softcap: float = 0.0,
    dropout: AttentionDropout | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(out, log-sum-exp) by a dense softmax in float64; differentiable."""
    q, k, v = (x.double() for x in (q, k, v))
    k, v = (x.repeat_interleave(HEADS // GROUPS, 2) for x in (k, v))
    scores = torch.einsum("ibhd,jbhd->bhij", q, k) * SCALE
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    scores = scores.masked_fill(~allowed(mask), -math.inf)
    everything = scores
    if sinks is not None:
        everything = torch.cat((scores, sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)), -1)
    lse = everything.logsumexp(-1, keepdim=True)
    probs = (scores - lse.masked_fill(lse == -math.inf, 0.0)).exp()
    if dropout is not None:
        probs = probs * kept(dropout, mask) / (1.0 - dropout.p)
    return torch.einsum("bhij,jbhd->ibhd", probs, v), lse.squeeze(-1).permute(2, 0, 1)


def kept(dropout: AttentionDropout, mask: AttentionMask) -> Tensor:
    """bool [b, heads, sq, sk], from the mask that a whole row has."""
    size = int(mask.key.max()) + 1
    token, heads = dropout.token_index, torch.arange(HEADS) + dropout.head_offset
    keys = mask.key.t()[:, None, None].expand(-1, HEADS, len(token), -1)
    return _whole_mask(dropout, token, heads, size).gather(-1, keys)


def _whole_mask(dropout: AttentionDropout, token: Tensor, heads: Tensor, size: int) -> Tensor:
    row = mix_(row_hash(dropout.key, token).t()[:, None] + (heads * 0x85EBCA77).to(torch.int32)[:, None])
    return mix_(row[..., None] + feature_hash(0, size, token.device)) >= keep_threshold(dropout.p)


def close(ours: Tensor | None, theirs: Tensor | None, tolerance: float = 1e-12, name: str = "") -> None:
    assert ours is not None and theirs is not None and ours.shape == theirs.shape, name
    ours, theirs = ours.detach().double(), theirs.detach().double()
    scale = theirs.masked_fill(theirs.isinf(), 0.0).abs().max().clamp_min(0.1)
    worst = (ours - theirs).masked_fill(ours == theirs, 0.0).abs().max() / scale
    assert worst <= tolerance, f"{name}: off by {float(worst):.1e}"


MASKS: dict[str, Callable[[], AttentionMask]] = {
    "documents": rows,
    "causal": lambda: rows([(53,)] * 3),
    "window": lambda: rows(window=9),
    "window of one": lambda: rows([(20,)], window=1),
    "one token": lambda: rows([(1,)]),
    "no rows": lambda: part(rows(), torch.arange(5), torch.arange(5), batch=slice(0)),
    "zigzag": lambda: part(rows(), zigzag(101, 1), zigzag(101, 1)),
    "keys of another rank": lambda: part(rows(), zigzag(101, 0), zigzag(101, 2)),
    "window, keys of another rank": lambda: part(rows(window=30), zigzag(101, 2), zigzag(101, 1)),
    "gathered, rank by rank": lambda: part(
        rows(window=40), zigzag(101, 1), torch.cat([zigzag(101, rank) for rank in range(3)])
    ),
    "every third": lambda: part(rows(window=50), torch.arange(1, 101, 3), torch.arange(0, 101, 2)),
    "every other key": lambda: part(rows([(1,) * 40]), torch.arange(40), torch.arange(0, 40, 2)),
    "nothing": lambda: part(rows([(40,)]), torch.arange(20), torch.arange(20, 40)),
}  # fmt: skip
