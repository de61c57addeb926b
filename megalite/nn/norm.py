"""Normalisation over the hidden dim; statistics in at least float32."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from megalite.kernels.chosen import Kernels
from megalite.kernels.norm import layer_norm_saved, rms_norm_saved
from megalite.kernels.saved import Saved, size_of, wide
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


class OffsetRMSNorm(RMSNorm):
    """x / rms(x) * (1 + weight), with weights that begin at 0 (Gemma, arXiv:2403.08295)."""

    def init_parameters(self, seed: int) -> None:
        """Weight zero."""
        nn.init.zeros_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """[.., hidden] -> [.., hidden]."""
        return self.kernels.rms_norm(x, plus_one(self.weight), self.eps)

    def saved(self, shape: BatchShape) -> Saved:
        """Also the sum."""
        norm = super().saved(shape)
        return replace(norm, own=norm.own + size_of(self.weight.shape, wide(shape.dtype)))


def plus_one(weight: Tensor) -> Tensor:
    """1 + weight in at least float32: near 1, 16 bits could not tell small weights apart."""
    return weight.to(wide(weight.dtype)) + 1.0


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
