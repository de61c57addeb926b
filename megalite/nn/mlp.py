"""The feed-forward block, cut over tp along its width."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from megalite.kernels.activation import activation_saved, geglu_packed
from megalite.kernels.chosen import Kernels
from megalite.kernels.saved import Saved, chain
from megalite.mpu import ParallelState
from megalite.nn.config import ModelConfig
from megalite.nn.context import Context
from megalite.nn.saved import BatchShape
from megalite.parallel.saved import column_saved, row_saved
from megalite.parallel.tensor import FusedColumnParallelLinear, OutputPart, RowParallelLinear


def output_std(config: ModelConfig) -> float:
    """Initial scale of a projection into the residual stream: init_std / sqrt(2 x layers), whatever the cut."""
    return config.init_std / math.sqrt(2 * config.num_layers)


class ParallelMLP(nn.Module):
    """down(silu(gate x) * up x) (Shazeer, 2020, arXiv:2002.05202): [s, b, h] -> ([s, b, h], bias or None).

    Class attributes choose the form: `parts` names the blocks of the first GEMM, `activation` joins them, `bias`.

    With `sequence_chunk` the block goes through the sequence so many tokens at a time and keeps its input alone, so
    that no more than a chunk is ever as wide as the feed-forward layer (the tiled MLP of ALST, Bekman et al., 2025,
    arXiv:2506.13996). Backward computes fc1 and the activation again, chunk by chunk; weight gradients that a schedule
    puts off keep their chunks until they are computed.
    """

    parts: tuple[str, ...] = ("gate", "up")
    bias = False

    def __init__(self, config: ModelConfig, mpu: ParallelState, kernels: Kernels | None = None):
        super().__init__()
        self.kernels = kernels if kernels is not None else Kernels()
        self.sequence_chunk = 0
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
        return self.kernels.swiglu(x)

    def forward(self, x: Tensor, context: Context) -> tuple[Tensor, Tensor | None]:
        """Returns the output and the bias still to be added."""
        rows = self._rows_at_once(x.shape[0], x.shape[1])
        if rows >= x.shape[0]:
            return self.fc2(self.activation(self.fc1(x)))
        return _Chunked.apply(x, self, rows, *self.fc1.parameters(), self.fc2.weight), self.fc2.bias

    def saved(self, shape: BatchShape) -> Saved:
        """The inputs of both linears and of the activation; of a block that goes through in chunks, its input."""
        tokens = shape.tokens
        whole = chain(
            column_saved(self.fc1, tokens, shape.dtype),
            activation_saved((tokens, sum(self.fc1.sizes)), shape.dtype),
            row_saved(self.fc2, tokens, shape.dtype),
        )
        length = shape.rows // shape.size
        if self._rows_at_once(length, shape.size) >= length:
            return whole
        return Saved(input=whole.input, work=whole.work, results=whole.last_results)

    def _rows_at_once(self, length: int, size: int) -> int:
        """Rows of x [length, size, h] (a tp rank's own, under sequence parallelism) that make a chunk on all ranks."""
        gathered = self.fc1.axis.size if self.fc2.sequence_parallel else 1
        return max(1, self.sequence_chunk // (size * gathered)) if self.sequence_chunk else length


class _Chunked(torch.autograd.Function):
    """The whole block over a chunk of rows at a time, in both directions."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mlp: ParallelMLP, rows: int, *parameters: nn.Parameter) -> Tensor:
        # The parameters are here for autograd alone: `mlp` has those that carry main_grad.
        ctx.mlp, ctx.rows = mlp, rows
        ctx.save_for_backward(x)
        y = torch.empty_like(x)
        for into, part in zip(y.split(rows), x.split(rows), strict=True):
            into.copy_(mlp.fc2(mlp.activation(mlp.fc1(part)))[0])
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (x,), mlp = ctx.saved_tensors, ctx.mlp
        dx = torch.empty_like(x)
        learning = [p for name, p in mlp.fc1.named_parameters() if name.endswith("bias") and p.requires_grad]
        sums = {bias: torch.zeros_like(bias) for bias in learning}
        for into, part, dy in zip(*(t.split(ctx.rows) for t in (dx, x, grads[0])), strict=True):
            with torch.enable_grad():
                part = part.detach().requires_grad_()
                middle = mlp.activation(mlp.fc1(part))
            dmiddle = mlp.fc2.backward_of(middle.detach(), dy)
            dpart, *dbiases = torch.autograd.grad(middle, [part, *learning], dmiddle)
            into.copy_(dpart)
            for total, dbias in zip(sums.values(), dbiases, strict=True):
                total += dbias
        # Linears have added their weights' gradients themselves.
        return dx, None, None, *(sums.get(parameter) for parameter in mlp.fc1.parameters()), None


class GegluMLP(ParallelMLP):
    """down(gelu(gate x) * up x) with the tanh form of GELU (Shazeer, 2020, arXiv:2002.05202), that of Gemma."""

    def activation(self, x: Tensor) -> Tensor:
        """[s, b, 2 ffn / tp] -> [s, b, ffn / tp]."""
        return geglu_packed(x)


class GeluMLP(ParallelMLP):
    """fc2(gelu(fc1 x + b)) + b, the feed-forward of GPT-2."""

    parts = ("up",)
    bias = True

    def activation(self, x: Tensor) -> Tensor:
        """[s, b, ffn / tp] -> [s, b, ffn / tp]; GELU in its tanh form."""
        return self.kernels.gelu(x)


class ExactGeluMLP(GeluMLP):
    """The same with GELU itself (Hendrycks & Gimpel, 2016, arXiv:1606.08415), that of GPT-NeoX."""

    def activation(self, x: Tensor) -> Tensor:
        """[s, b, ffn / tp] -> [s, b, ffn / tp]; x times the normal distribution at x."""
        return nn.functional.gelu(x)
