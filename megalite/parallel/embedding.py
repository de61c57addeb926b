"""The embedding cut by rows of its table over the tensor-parallel axis (Shoeybi et al., 2019, arXiv:1909.08053)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from megalite.axis import Axis
from megalite.parallel.collectives import reduce_from, reduce_scatter_sequence
from megalite.parallel.random import normal_
from megalite.parallel.shard import Cut, Shard, ShardedModule, even_cut, set_shard
from megalite.parallel.tensor import init_unless_meta
from megalite.parallel.wgrad import WeightGradQueue


class _Embedding(torch.autograd.Function):
    """Rows of a table; the gradient is added to the main gradient row by row, never as a dense copy of the table."""

    @staticmethod
    def forward(ctx: Any, ids: Tensor, outside: Tensor | None, weight: nn.Parameter, queue: WeightGradQueue) -> Tensor:
        ctx.save_for_backward(ids, outside)
        ctx.weight, ctx.queue = weight, queue
        rows = weight.index_select(0, ids.flatten()).view(*ids.shape, weight.shape[1])
        return rows if outside is None else rows.masked_fill_(outside[..., None], 0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, Tensor | None, None]:
        ids, outside = ctx.saved_tensors
        weight: nn.Parameter = ctx.weight
        main_grad = getattr(weight, "main_grad", None)
        target = main_grad if main_grad is not None else torch.zeros_like(weight)
        rows = grads[0].to(target.dtype)
        if outside is not None:
            rows = rows.masked_fill(outside[..., None], 0)
        # At once even when the queue defers: rows are as large as the work would be, and would have to be kept.
        ctx.queue.run(lambda: _add_rows(target, ids.flatten(), rows.reshape(-1, rows.shape[-1])), [weight])
        return None, None, None if main_grad is not None else target, None


def _add_rows(target: Tensor, ids: Tensor, rows: Tensor) -> None:
    """target[ids] += rows in a fixed order (index_add_ on CUDA would add in any order)."""
    if target.is_cuda:
        target.index_put_((ids,), rows, accumulate=True)
    else:
        target.index_add_(0, ids, rows)


class VocabParallelEmbedding(ShardedModule):
    """A table [vocab, hidden] cut by rows: rank r owns [r V // n, (r + 1) V // n), whether or not n divides V.

    ids [s, b] -> [s, b, hidden], or this rank's rows of the sequence [s / n, b, hidden] under sequence parallelism.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        axis: Axis,
        sequence_parallel: bool = False,
        init_std: float = 0.02,
    ):
        super().__init__()
        self.axis, self.sequence_parallel, self.init_std = axis, sequence_parallel, init_std
        self.queue = WeightGradQueue()
        ((self.start, self.length),) = even_cut(num_embeddings, axis)
        shard = Shard("weight", (num_embeddings, embedding_dim), (Cut(axis, 0, ((self.start, self.length),)),))
        self.weight = set_shard(nn.Parameter(torch.empty(self.length, embedding_dim)), shard)
        init_unless_meta(self)

    def init_parameters(self, seed: int) -> None:
        """Weight N(0, init_std^2) by global name and index."""
        normal_(self.weight, seed, self.init_std)

    def forward(self, ids: Tensor) -> Tensor:
        """ids [s, b] int64 -> [s, b, hidden] (or [s / n, b, hidden])."""
        if self.axis.size == 1:
            return _Embedding.apply(ids, None, self.weight, self.queue)
        local = ids - self.start
        outside = (local < 0) | (local >= self.length)
        rows = _Embedding.apply(local.masked_fill(outside, 0), outside, self.weight, self.queue)
        if self.sequence_parallel:
            return reduce_scatter_sequence(rows, self.axis)
        return reduce_from(rows, self.axis)
