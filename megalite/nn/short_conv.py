"""A gated short convolution in the place of attention, cut over tp along its channels."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from megalite.kernels.chosen import Kernels
from megalite.kernels.saved import Saved, chain
from megalite.kernels.short_conv import gated_short_conv_saved
from megalite.mpu import ParallelState
from megalite.nn.config import ModelConfig
from megalite.nn.context import Context
from megalite.nn.mlp import output_std
from megalite.nn.saved import BatchShape
from megalite.parallel.collectives import sequence_part
from megalite.parallel.halo import Halo, find_halo
from megalite.parallel.random import normal_
from megalite.parallel.saved import column_saved, row_saved
from megalite.parallel.shard import Cut, Shard, even_cut, set_shard
from megalite.parallel.tensor import FusedColumnParallelLinear, OutputPart, RowParallelLinear, init_unless_meta


class GatedShortConv(nn.Module):
    """out(c * conv(b * x)) with b, c, x = in_proj(hidden): [s, b, h] -> ([s, b, h], None), as attention does.

    A tp rank holds the same channels of b, c and x (parameters of their own in one GEMM) and of the convolution, which
    then needs no tp neighbour: under sequence parallelism in_proj has gathered the sequence. A context-parallel rank
    fetches the conv_kernel_size - 1 gated inputs before each of its runs of places from the rank that holds them, while
    it convolves the others. Documents see nothing of each other, and padding is zero to the tokens after it.
    """

    def __init__(self, config: ModelConfig, mpu: ParallelState, layer: int, kernels: Kernels | None = None):
        super().__init__()
        self.kernels = kernels if kernels is not None else Kernels()
        hidden = config.hidden_size
        self.tp, self.cp, self.init_std = mpu.tp, mpu.cp, config.init_std
        self.sequence_parallel = mpu.config.sequence_parallel and mpu.tp.size > 1
        self.in_proj = FusedColumnParallelLinear(
            hidden,
            {name: OutputPart(hidden) for name in ("b", "c", "x")},
            axis=mpu.tp,
            bias=False,
            sequence_parallel=self.sequence_parallel,
            init_std=config.init_std,
        )
        shard = Shard("conv", (hidden, config.conv_kernel_size), (Cut(mpu.tp, 0, even_cut(hidden, mpu.tp)),))
        self.conv = set_shard(nn.Parameter(torch.empty(shard.local_shape)), shard)
        self.proj = RowParallelLinear(
            hidden,
            hidden,
            axis=mpu.tp,
            bias=False,
            sequence_parallel=self.sequence_parallel,
            skip_bias_add=True,
            init_std=output_std(config),
        )
        init_unless_meta(self)

    def init_parameters(self, seed: int) -> None:
        """Taps N(0, init_std^2) by global name and index."""
        normal_(self.conv, seed, self.init_std)

    def forward(self, x: Tensor, context: Context) -> tuple[Tensor, Tensor | None]:
        """Returns the output; there is no bias left to add."""
        if context.batch.token_mask is not None:
            mask = sequence_part(context.batch.token_mask, self.tp, self.sequence_parallel)
            x = x.masked_fill(~mask[..., None], 0.0)
        bcx = self.in_proj(x)
        if context.cache is not None:
            bcx = context.cache.with_past(self, bcx, self.conv.shape[1] - 1)
        y = self.kernels.short_conv(bcx, self.conv, self._halo(context))
        return self.proj(y[len(y) - len(x) :] if context.cache is not None else y)

    def saved(self, shape: BatchShape) -> Saved:
        """The inputs of both linears and of the convolution; of padded rows, which tokens are real."""
        bcx = (shape.tokens, sum(self.in_proj.sizes))
        # A zigzag is two runs of places, each with what comes before it.
        fetched = 2 * (self.conv.shape[1] - 1) * shape.size if self.cp.size > 1 else 0
        enter = column_saved(self.in_proj, shape.tokens, shape.dtype)
        if shape.is_padded:
            enter = replace(enter, input=0, own=enter.input + shape.rows * torch.bool.itemsize)
        return chain(
            enter,
            gated_short_conv_saved(bcx, shape.dtype, fetched),
            row_saved(self.proj, shape.tokens, shape.dtype),
        )

    def _halo(self, context: Context) -> Halo | None:
        """What the taps see, made once for the layers of a stage that look back equally far."""
        depth = self.conv.shape[1] - 1
        plans, key = context.cut.plans, ("halo", depth)
        if key not in plans:
            plans[key] = find_halo(context.cut, depth) if depth else None
        return plans[key]
