"""The experts of one MoE layer on this rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megalite.kernels.chosen import Kernels
from megalite.kernels.grouped import accumulate_grouped_bias_grad
from megalite.kernels.saved import Saved, size_of, wide
from megalite.mpu import ParallelState
from megalite.nn.config import ModelConfig
from megalite.nn.mlp import output_std
from megalite.parallel.random import normal_
from megalite.parallel.shard import Cut, Shard, ShardedModule, even_cut, set_shard
from megalite.parallel.tensor import init_unless_meta, main_grads
from megalite.parallel.wgrad import WeightGradQueue


class Experts(ShardedModule):
    """down_e(silu(gate_e x) * up_e x) * prob for each token x of expert e: SwiGLU experts, tokens sorted by expert.

    fc1 [E, 2 f, h] (gate rows first) and fc2 [E, h, f] are cut over mpu.ep on E and over mpu.etp on f; with etp > 1
    the output is a partial sum over mpu.etp. The prob weighs the activation, before fc2, so that nothing of the
    outputs need be kept; backward keeps the tokens, fc1's output and the probs.

    Class attributes choose the form as in `ParallelMLP`: `parts` names the blocks of fc1, `activation` joins them,
    `bias` adds fc1_bias [E, sum of parts] and fc2_bias [E, h] (times the prob).
    """

    parts: tuple[str, ...] = ("gate", "up")
    bias = False

    def __init__(self, config: ModelConfig, mpu: ParallelState, kernels: Kernels | None = None):
        super().__init__()
        self.kernels = kernels if kernels is not None else Kernels()
        self.queue = WeightGradQueue()
        self.init_std, self.output_std = config.init_std, output_std(config)
        # fc2's bias joins one of the partial sums.
        self.adds_bias = mpu.etp.is_first
        experts, hidden, ffn = config.num_experts, config.hidden_size, config.expert_ffn_size
        ((start, length),) = even_cut(ffn, mpu.etp)
        rows = tuple((start + part * ffn, length) for part in range(len(self.parts)))
        over_ep, over_rows = Cut(mpu.ep, 0, even_cut(experts, mpu.ep)), Cut(mpu.etp, 1, rows)
        over_columns, width = Cut(mpu.etp, 2, ((start, length),)), len(self.parts) * ffn
        self.fc1 = _parameter(Shard("fc1", (experts, width, hidden), (over_ep, over_rows), group="expert"))
        self.fc2 = _parameter(Shard("fc2", (experts, hidden, ffn), (over_ep, over_columns), group="expert"))
        self.fc1_bias = self.fc2_bias = None
        if self.bias:
            partial = (mpu.etp,) if mpu.etp.size > 1 else ()
            first = Shard("fc1_bias", (experts, width), (over_ep, over_rows), group="expert", decay=False)
            second = Shard("fc2_bias", (experts, hidden), (over_ep,), partial, group="expert", decay=False)
            self.fc1_bias, self.fc2_bias = _parameter(first), _parameter(second)
        init_unless_meta(self)

    def init_parameters(self, seed: int) -> None:
        """Weights N(0, init_std^2), fc2 scaled as a projection into the residual stream, biases zero."""
        normal_(self.fc1, seed, self.init_std)
        normal_(self.fc2, seed, self.output_std)
        for bias in (self.fc1_bias, self.fc2_bias):
            if bias is not None:
                nn.init.zeros_(bias)

    def activation(self, x: Tensor) -> Tensor:
        """[n, sum of parts] -> [n, f], differentiable; a form that overrides it needs nothing else."""
        return self.kernels.swiglu(x)

    @property
    def _is_swiglu(self) -> bool:
        """Whether the activation is the one that has kernels of its own."""
        return type(self).activation is Experts.activation

    def weighted(self, x: Tensor, probs: Tensor) -> Tensor:
        """activation(x) times its prob [n], in x's dtype."""
        if self._is_swiglu:
            return self.kernels.weighted_swiglu(x, probs)
        y = self.activation(x)
        return (y * probs[:, None]).to(y.dtype)

    def weighted_backward(self, dy: Tensor, x: Tensor, probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(`weighted` again, gradient of x, gradient of probs)."""
        if self._is_swiglu:
            return self.kernels.weighted_swiglu_backward(dy, x, probs)
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            y = self.activation(x)
        (dx,) = torch.autograd.grad(y, x, (dy * probs[:, None]).to(y.dtype))
        y = y.detach()
        dprobs = (dy * y).sum(-1, dtype=probs.dtype)
        return (y * probs[:, None]).to(y.dtype), dx, dprobs

    def forward(self, tokens: Tensor, probs: Tensor, counts: Sequence[int]) -> Tensor:
        """tokens [n, h] sorted by local expert, probs [n] -> [n, h], each row times its prob."""
        assert len(counts) == self.fc1.shape[0] and sum(counts) == tokens.shape[0], "counts are not those of the tokens"
        biases = [bias for bias in (self.fc1_bias, self.fc2_bias) if bias is not None]
        return _Experts.apply(tokens, probs, self, tuple(counts), self.fc1, self.fc2, *biases)

    def saved(self, rows: int, dtype: torch.dtype) -> Saved:
        """Of `rows` tokens: tokens, probs and fc1's output; put-off work keeps both inputs and both gradients."""
        hidden, width = self.fc2.shape[1:]
        tokens, middle, first = (size_of((rows, n), dtype) for n in (hidden, width, self.fc1.shape[1]))
        probs = size_of((rows,), wide(dtype))
        return Saved(own=tokens + probs + first, work=2 * tokens + middle + first)

    def extra_repr(self) -> str:
        """Local sizes."""
        return f"fc1={tuple(self.fc1.shape)}, fc2={tuple(self.fc2.shape)}"


class GeluExperts(Experts):
    """fc2_e(gelu(fc1_e x + b)) + b, the feed-forward of GPT-2 in every expert."""

    parts = ("up",)
    bias = True

    def activation(self, x: Tensor) -> Tensor:
        """[n, f] -> [n, f]; GELU in its tanh form."""
        return self.kernels.gelu(x)


class ClampedSwigluExperts(Experts):
    """down((up + 1) * gate * sigmoid(alpha gate)) with biases, gate and up clamped: the experts of gpt-oss."""

    bias = True

    def __init__(self, config: ModelConfig, mpu: ParallelState, kernels: Kernels | None = None):
        super().__init__(config, mpu, kernels)
        self.alpha, self.limit = config.swiglu_alpha, config.swiglu_limit

    def activation(self, x: Tensor) -> Tensor:
        """[n, 2 f] -> [n, f]."""
        gate, up = x.chunk(2, -1)
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return (up + 1) * (gate * torch.sigmoid(gate * self.alpha))

    @property
    def _is_clamped_swiglu(self) -> bool:
        return type(self).activation is ClampedSwigluExperts.activation

    def weighted(self, x: Tensor, probs: Tensor) -> Tensor:
        """See `Experts.weighted`."""
        if not self._is_clamped_swiglu:
            return super().weighted(x, probs)
        return self.kernels.weighted_clamped_swiglu(x, probs, self.alpha, self.limit)

    def weighted_backward(self, dy: Tensor, x: Tensor, probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """See `Experts.weighted_backward`."""
        if not self._is_clamped_swiglu:
            return super().weighted_backward(dy, x, probs)
        return self.kernels.weighted_clamped_swiglu_backward(dy, x, probs, self.alpha, self.limit)


def _parameter(shard: Shard) -> nn.Parameter:
    return set_shard(nn.Parameter(torch.empty(shard.local_shape)), shard)


class _Experts(torch.autograd.Function):
    """Both products and the activation between them, which backward computes again from fc1's output."""

    @staticmethod
    def forward(
        ctx: Any, tokens: Tensor, probs: Tensor, module: Experts, counts: tuple[int, ...], *parameters: Tensor
    ) -> Tensor:
        # The module is kept for its parameters: they carry main_grad, checkpointing's copies of them do not.
        ctx.module, ctx.counts = module, counts
        fc1, fc2, *biases = parameters
        linear = module.kernels.grouped_linear
        hidden = linear(tokens, fc1, counts, biases[0] if biases else None)
        y = linear(module.weighted(hidden, probs), fc2, counts)
        if biases and module.adds_bias:
            y += _rows(biases[1], counts) * probs[:, None].to(y.dtype)
        ctx.save_for_backward(tokens, probs, hidden)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (dy,), (tokens, probs, hidden) = grads, ctx.saved_tensors
        module, counts, kernels = ctx.module, ctx.counts, ctx.module.kernels
        dy = dy.contiguous()
        middle, dhidden, dprobs = module.weighted_backward(
            kernels.grouped_input_grad(dy, module.fc2, counts), hidden, probs
        )
        _put(module, module.fc2, dy, middle, counts)
        del middle
        _put(module, module.fc1, dhidden, tokens, counts)
        biases: tuple[Tensor | None, ...] = ()
        if module.fc1_bias is not None:
            dfirst, dsecond = torch.zeros_like(module.fc1_bias), torch.zeros_like(module.fc2_bias)
            accumulate_grouped_bias_grad(dfirst, dhidden, counts)
            if module.adds_bias:
                accumulate_grouped_bias_grad(dsecond, dy * probs[:, None].to(dy.dtype), counts)
                dprobs = dprobs + (dy * _rows(module.fc2_bias, counts)).sum(-1, dtype=dprobs.dtype)
            biases = dfirst, dsecond
        dtokens = kernels.grouped_input_grad(dhidden, module.fc1, counts) if ctx.needs_input_grad[0] else None
        return dtokens, dprobs, None, None, None, None, *biases


def _rows(bias: Tensor, counts: Sequence[int]) -> Tensor:
    """The bias of each row's expert."""
    repeats = torch.tensor(counts, device=bias.device)
    return bias.repeat_interleave(repeats, 0, output_size=sum(counts))


def _put(module: Experts, weight: nn.Parameter, dy: Tensor, x: Tensor, counts: Sequence[int]) -> None:
    """The weight gradient, now or when the queue is drained."""
    if not weight.requires_grad:
        return
    version, x = x._version, x.detach()  # a saved tensor holds on to the graph that made it

    def work() -> None:
        assert x._version == version, "the tokens of experts were changed in place before their weight gradient"
        module.kernels.grouped_weight_grad(main_grads([weight])[0], dy, x, counts)

    module.queue.put(work, [weight])
