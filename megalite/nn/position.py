"""Learned position embeddings."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megalite.mpu import ParallelState
from megalite.nn.config import ModelConfig
from megalite.parallel.collectives import sequence_part
from megalite.parallel.random import normal_
from megalite.parallel.shard import Shard, ShardedModule, set_shard


class PositionEmbedding(ShardedModule):
    """A table [max_positions, hidden]; every rank holds it whole and looks up the rows of its part of the sequence."""

    def __init__(self, config: ModelConfig, mpu: ParallelState):
        super().__init__()
        self.tp, self.init_std = mpu.tp, config.init_std
        self.sequence_parallel = mpu.config.sequence_parallel and mpu.tp.size > 1
        partial = (mpu.tp,) if self.sequence_parallel else ()
        weight = nn.Parameter(torch.empty(config.max_positions, config.hidden_size))
        self.weight = set_shard(weight, Shard("weight", tuple(weight.shape), partial=partial))

    def init_parameters(self, seed: int) -> None:
        """N(0, init_std^2) by global index."""
        normal_(self.weight, seed, self.init_std)

    def forward(self, positions: Tensor) -> Tensor:
        """int64 [s, b] -> [s, b, hidden] ([s / tp, b, hidden] under sequence parallelism)."""
        return nn.functional.embedding(sequence_part(positions, self.tp, self.sequence_parallel), self.weight)
