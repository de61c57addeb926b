"""Normalisation over the hidden dim; statistics in at least float32."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megalite.kernels.chosen import Kernels
from megalite.kernels.norm import layer_norm_saved, rms_norm_saved
from megalite.kernels.saved import Saved
from megalite.mpu import ParallelState
from megalite.nn.config import ModelConfig
from megalite.nn.saved import BatchShape
from megalite.parallel.shard import Shard, ShardedModule, set_shard


def _whole(value: Tensor, mpu: ParallelState, name: str) -> nn.Parameter:
    """A vector that every rank holds; on a cut sequence its gradient is a partial sum over tp."""
    partial = (mpu.tp,) if mpu.config.sequence_parallel and mpu.tp.size > 1 else ()
    return set_shard(nn.Parameter(value), Shard(name, tuple(value.shape), partial=partial, decay=False))


class RMSNorm(ShardedModule):
    """x / rms(x) * weight (Zhang & Sennrich, 2019, arXiv:1910.07467) on [.., hidden]."""

    def __init__(self, config: ModelConfig, mpu: ParallelState, kernels: Kernels | None = None):
        super().__init__()
        self.kernels = kernels if kernels is not None else Kernels()
        self.eps = config.norm_eps
        self.weight = _whole(torch.ones(config.hidden_size), mpu, "weight")

    def init_parameters(self, seed: int) -> None:
        """Weight one."""
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """[.., hidden] -> [.., hidden]."""
        return self.kernels.rms_norm(x, self.weight, self.eps)

    def saved(self, shape: BatchShape) -> Saved:
        """See `rms_norm_saved`."""
        return rms_norm_saved((shape.rows, shape.width), shape.dtype)


class LayerNorm(ShardedModule):
    """(x - mean) / std * weight + bias (Ba et al., 2016, arXiv:1607.06450) on [.., hidden]."""

    def __init__(self, config: ModelConfig, mpu: ParallelState, kernels: Kernels | None = None):
        super().__init__()
        self.kernels = kernels if kernels is not None else Kernels()
        self.eps = config.norm_eps
        self.weight = _whole(torch.ones(config.hidden_size), mpu, "weight")
        self.bias = _whole(torch.zeros(config.hidden_size), mpu, "bias")

    def init_parameters(self, seed: int) -> None:
        """Weight one, bias zero."""
        nn.init.ones_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """[.., hidden] -> [.., hidden]."""
        return self.kernels.layer_norm(x, self.weight, self.bias, self.eps)

    def saved(self, shape: BatchShape) -> Saved:
        """See `layer_norm_saved`."""
        return layer_norm_saved((shape.rows, shape.width), shape.dtype)
