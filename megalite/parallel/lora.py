"""Low-rank adapters of parallel linears: y = W x + (alpha / r) B A x, W as it is (Hu et al., 2022, arXiv:2106.09685).

Beside a column-parallel W, A is whole on every rank and B is cut as W; what is between has r features a token and
crosses the ranks alone. Beside a row-parallel W, A is cut as W and B is whole: its partial products join W's before
the one sum over the ranks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megalite.kernels.chosen import Kernels
from megalite.kernels.dropout import dropout_key
from megalite.parallel.collectives import enter_parallel
from megalite.parallel.random import normal_
from megalite.parallel.shard import Shard, ShardedModule, set_shard, shard_of
from megalite.parallel.tensor import (
    ColumnParallelLinear,
    FusedColumnParallelLinear,
    RowParallelLinear,
    apply_linear,
    init_unless_meta,
)
from megalite.parallel.wgrad import WeightGradQueue


@dataclass(frozen=True, kw_only=True)
class Noise:
    """Where dropout is in a run. stream: int64 token numbers of this rank's residual stream; rows: of its rows."""

    seed: int
    step: int
    stream: Tensor
    rows: Tensor


class LowRankPair(ShardedModule):
    """A [r, in] ~ N(0, 1 / in) and B [out, r], which begins as zero: at first the model is that without adapters."""

    def __init__(self, a: Tensor, a_shard: Shard, b_shard: Shard):
        super().__init__()
        self.A = set_shard(nn.Parameter(a), a_shard)
        self.B = set_shard(nn.Parameter(torch.empty(b_shard.local_shape)), b_shard)
        init_unless_meta(self)

    def init_parameters(self, seed: int) -> None:
        """A by global name and index, B zero."""
        normal_(self.A, seed, shard_of(self.A).shape[1] ** -0.5)
        nn.init.zeros_(self.B)


class _Adapter(nn.Module):
    """What adapters share: their scale, dropout of what enters them, and the queue of their weight gradients."""

    noise: Noise | None = None
    """Of the micro-batch that comes next; None without dropout."""

    def __init__(self, rank: int, alpha: float, p: float, kernels: Kernels):
        super().__init__()
        self.rank, self.scale, self.p, self.kernels = rank, alpha / rank, p, kernels
        self.queue = WeightGradQueue()

    def _dropped(self, x: Tensor, first: LowRankPair, feature_offset: int = 0) -> Tensor:
        if self.noise is None:
            return x
        stream, rows = self.noise.stream, self.noise.rows
        index = stream if x.shape[0] == stream.shape[0] else rows
        digest = hashlib.blake2b(shard_of(first.A).name.encode(), digest_size=8).digest()
        key = dropout_key(self.noise.seed, self.noise.step, int.from_bytes(digest, "little"), x.device)
        return self.kernels.dropout(x, self.p, key, index, feature_offset)


class ColumnAdapter(_Adapter):
    """Of a column-parallel linear, or some parts of a fused one: x as it enters that -> what is added to its output.

    One mask of dropout serves all of them.
    """

    def __init__(
        self, linear: FusedColumnParallelLinear | ColumnParallelLinear, parts: Sequence[str], rank: int, alpha: float,
        p: float, kernels: Kernels,
    ):  # fmt: skip
        super().__init__(rank, alpha, p, kernels)
        self.axis, self.sequence_parallel = linear.axis, linear.enter == "gather"
        names = linear.names if isinstance(linear, FusedColumnParallelLinear) else ("weight",)
        weights = dict(zip(names, linear.weights, strict=True))
        self.sizes = {name: weight.shape[0] for name, weight in weights.items()}
        partial = (self.axis,) if self.sequence_parallel and self.axis.size > 1 else ()
        in_features = linear.weights[0].shape[1]
        # Side by side, so that one product serves all.
        for name, a in zip(parts, torch.empty(rank * len(parts), in_features).split(rank), strict=True):
            base = shard_of(weights[name])
            b_shard = Shard("B", (base.shape[0], rank), base.cuts, base.partial)
            self.add_module(name, LowRankPair(a, Shard("A", (rank, in_features), partial=partial), b_shard))
        self.names = tuple(parts)

    def pair(self, name: str) -> LowRankPair:
        """The matrices of one part."""
        pair = getattr(self, name)
        assert isinstance(pair, LowRankPair)
        return pair

    def forward(self, x: Tensor) -> Tensor:
        """x [s, b, in] ([s / tp, b, in] under sequence parallelism) -> [s, b, sum of the parts' local features]."""
        pairs = [self.pair(name) for name in self.names]
        low = apply_linear(self._dropped(x, pairs[0]), self.axis, self.queue, [pair.A for pair in pairs])
        low = enter_parallel(low * self.scale, self.axis, self.sequence_parallel)
        of_part = dict(zip(self.names, low.split(self.rank, -1), strict=True))
        made = [
            apply_linear(of_part[name], self.axis, self.queue, [self.pair(name).B])
            if name in of_part
            else low.new_zeros(*low.shape[:-1], size)
            for name, size in self.sizes.items()
        ]
        return torch.cat(made, -1)


class RowAdapter(_Adapter):
    """Of a row-parallel linear: x as it enters that -> what is added to its partial product."""

    def __init__(self, linear: RowParallelLinear, rank: int, alpha: float, p: float, kernels: Kernels):
        super().__init__(rank, alpha, p, kernels)
        base, self.axis = shard_of(linear.weight), linear.axis
        (((self.first_feature, _),),) = (cut.segments for cut in base.cuts)
        partial = (self.axis,) if self.axis.size > 1 else ()
        a_shard = Shard("A", (rank, base.shape[1]), base.cuts)
        b_shard = Shard("B", (base.shape[0], rank), partial=partial)
        self.weight = LowRankPair(torch.empty(a_shard.local_shape), a_shard, b_shard)

    def forward(self, x: Tensor) -> Tensor:
        """x [s, b, in / n] -> [s, b, out], this rank's part of a sum."""
        pair = self.weight
        low = apply_linear(self._dropped(x, pair, self.first_feature), self.axis, self.queue, [pair.A])
        return apply_linear(low * self.scale, self.axis, self.queue, [pair.B])
