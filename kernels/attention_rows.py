"""Rows of attention: how heads that share keys become one matrix, for the backends made of matrix products."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .dropout import keep_threshold, mix_, row_hash

_CACHED = 1 << 20  # scores that a CPU thread works on at a time; smaller products do not run at full speed
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


@dataclass(frozen=True)
class Chunk:
    """KV heads `heads` of batch rows `batch`, and the query heads that read them; here they become `rows`.

    rows: [batch rows * KV heads, s * group, d], the `group` query heads of a KV head being neighbours (k and v: 1).
    """

    batch: slice
    heads: slice
    kv_heads: int

    def view(self, x: Tensor) -> Tensor:
        """The chunk's part of x [s, b, heads, d] as [batch rows, KV heads, s, group, d]."""
        group = x.shape[2] // self.kv_heads
        part = x[:, self.batch].unflatten(2, (self.kv_heads, group))[:, :, self.heads]
        return part.permute(1, 2, 0, 3, 4)

    def rows(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """The chunk's part of x [s, b, heads, d] as rows, a copy in dtype."""
        view = self.view(x)
        return torch.empty(view.shape, dtype=dtype, device=x.device).copy_(view).flatten(2, 3).flatten(0, 1)

    def store(self, rows: Tensor, x: Tensor) -> None:
        """The inverse of `rows`, into x."""
        view = self.view(x)
        view.copy_(rows.view(view.shape))


def chunks(q: Tensor, k: Tensor, rows: slice, scores: int) -> Iterator[Chunk]:
    """All heads of the batch rows `rows`; on a CPU, so many at a time that `scores` for each head stay in cache."""
    num_heads, kv_heads = q.shape[2], k.shape[2]
    pairs = max(1, (rows.stop - rows.start) * kv_heads)
    if q.device.type == "cpu":
        pairs = torch.get_num_threads() * max(1, _CACHED // max(1, scores * (num_heads // kv_heads)))
    num_rows, num_heads = max(1, pairs // kv_heads), min(pairs, kv_heads)
    for row in range(rows.start, rows.stop, num_rows):
        for head in range(0, kv_heads, num_heads):
            yield Chunk(
                slice(row, min(row + num_rows, rows.stop)), slice(head, min(head + num_heads, kv_heads)), kv_heads
            )


def same_width(*tensors: Tensor) -> list[Tensor]:
    """All with as many features as the widest, the others with zeros behind theirs: scores and outputs do not see it.

    Gradients, and features of outputs, beyond a tensor's own are to be dropped.
    """
    width = max(x.shape[-1] for x in tensors)
    return [x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1])) for x in tensors]


def product(a: Tensor, b: Tensor) -> Tensor:
    """a b^T, batch by batch. On a CPU, bmm would bring a slice of rows in order while it transposes it, far slower."""
    return torch.bmm(a, b.contiguous().mT)


def exp_(scores: Tensor, scale: float, shift: Tensor) -> Tensor:
    """exp(scores * scale - shift) in place.

    Forward and backward scale here, not in their matrix products: those then agree on the scores to the last bit,
    in either order of operands, and the gradient of q does not suffer where keys are large.
    """
    return torch.add(shift * -_LOG2_E, scores, alpha=scale * _LOG2_E, out=scores).exp2_()


def keep_mask(dropout: AttentionDropout, queries: slice, feature: Tensor, group: int, chunk: Chunk) -> Tensor:
    """bool [pairs of the chunk, keys, queries * group]: what dropout keeps of the transposed probabilities.

    feature: int32 [keys], the hash of each key's place, from `feature_hash` or `hash_features`.
    """
    row = row_hash(dropout.key, dropout.token_index[queries, chunk.batch]).t()[:, None, :, None]
    heads = torch.arange(chunk.heads.start * group, chunk.heads.stop * group, device=row.device)
    heads = heads.add_(dropout.head_offset).mul_(_HEAD_STEP).to(torch.int32)
    row = mix_(row + heads.view(-1, 1, group)).flatten(2).flatten(0, 1)
    return mix_(row[:, None, :] + feature[:, None]) >= keep_threshold(dropout.p)
