"""The feed-forward block, cut over tp along its width."""

from __future__ import annotations

import math

from torch import Tensor, nn

from megalite.kernels.activation import gelu, swiglu_packed
from megalite.mpu import ParallelState
from megalite.nn.config import ModelConfig
from megalite.nn.context import Context
from megalite.parallel.tensor import FusedColumnParallelLinear, OutputPart, RowParallelLinear


def output_std(config: ModelConfig) -> float:
    """Initial scale of a projection into the residual stream: init_std / sqrt(2 x layers), whatever the cut."""
    return config.init_std / math.sqrt(2 * config.num_layers)


class ParallelMLP(nn.Module):
    """down(silu(gate x) * up x) (Shazeer, 2020, arXiv:2002.05202): [s, b, h] -> ([s, b, h], bias or None).

    Class attributes choose the form: `parts` names the blocks of the first GEMM, `activation` joins them, `bias`.
    """

    parts: tuple[str, ...] = ("gate", "up")
    bias = False

    def __init__(self, config: ModelConfig, mpu: ParallelState):
        super().__init__()
        sequence_parallel = mpu.config.sequence_parallel and mpu.tp.size > 1
        self.fc1 = FusedColumnParallelLinear(
            config.hidden_size,
            {name: OutputPart(config.ffn_size) for name in self.parts},
            axis=mpu.tp,
            bias=self.bias,
            sequence_parallel=sequence_parallel,
            init_std=config.init_std,
        )
        self.fc2 = RowParallelLinear(
            config.ffn_size,
            config.hidden_size,
            axis=mpu.tp,
            bias=self.bias,
            sequence_parallel=sequence_parallel,
            skip_bias_add=True,
            init_std=output_std(config),
        )

    def activation(self, x: Tensor) -> Tensor:
        """[s, b, sum of parts] -> [s, b, ffn / tp]."""
        return swiglu_packed(x)

    def forward(self, x: Tensor, context: Context) -> tuple[Tensor, Tensor | None]:
        """Returns the output and the bias still to be added."""
        return self.fc2(self.activation(self.fc1(x)))


class GeluMLP(ParallelMLP):
    """fc2(gelu(fc1 x + b)) + b, the feed-forward of GPT-2."""

    parts = ("up",)
    bias = True

    def activation(self, x: Tensor) -> Tensor:
        """[s, b, ffn / tp] -> [s, b, ffn / tp]; GELU in its tanh form."""
        return gelu(x)
