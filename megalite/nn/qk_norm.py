"""RMSNorm over all queries of a token, and over all its keys, when their heads are cut over ranks (OLMo 2, OLMoE)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from megalite.axis import Axis
from megalite.kernels.attention import CausalBackend, attention
from megalite.kernels.attention_rows import AttentionDropout
from megalite.kernels.chosen import Kernels
from megalite.kernels.saved import Saved, size_of, wide
from megalite.mpu import ParallelState
from megalite.nn.attention import ParallelAttention
from megalite.nn.config import ModelConfig
from megalite.nn.context import Context
from megalite.nn.saved import BatchShape
from megalite.parallel.shard import Shard, ShardedModule, set_shard, shard_of
from megalite.parallel.tensor import FusedColumnParallelLinear


class WholeQKNormAttention(ParallelAttention):
    """Attention whose queries are normed all together, as its keys are, before they are cut into heads.

    The statistic of a token is over the heads of all tp ranks (OLMo 2, arXiv:2501.00656; OLMoE, arXiv:2409.02060).
    """

    def __init__(self, config: ModelConfig, mpu: ParallelState, layer: int, kernels: Kernels | None = None):
        super().__init__(config, mpu, layer, kernels)
        self.q_norm, self.k_norm = (CutRMSNorm(self.qkv, name, config.norm_eps) for name in ("q", "k"))

    def heads(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The same, with q and k normed."""
        q, k, v = qkv.split(self.qkv.sizes, -1)
        q, k, v = (part.unflatten(-1, (-1, self.head_size)) for part in (self.q_norm(q), self.k_norm(k), v))
        return q, k, v

    def _mix(self, qkv: Tensor, backend: CausalBackend, dropout: AttentionDropout | None, context: Context) -> Tensor:
        q, k, v = self.heads(qkv)
        q, k = self._turn(q, context), self._turn(k, context)
        return attention(q, k, v, backend=backend, scale=self.scale, dropout=dropout).flatten(2)

    def _heads_saved(self, shape: BatchShape) -> Saved:
        """q, k and v as they enter, one number of each norm a token, and the normed ones."""
        tokens, one = shape.tokens, size_of((shape.tokens,), wide(shape.dtype))
        return Saved(
            input=size_of((tokens, sum(self.qkv.sizes)), shape.dtype), own=2 * one,
            output=size_of((tokens, sum(self.qkv.sizes[:2])), shape.dtype),
            results=2 * one if self.qkv.axis.size > 1 else 0,
        )  # fmt: skip


class CutRMSNorm(ShardedModule):
    """RMSNorm of one part of a fused linear's outputs, [.., features], of which this rank has its own.

    copies: of ranks that share features (KV heads), how many; their squares would count as often.
    """

    def __init__(self, linear: FusedColumnParallelLinear, part: str, eps: float):
        super().__init__()
        whole = shard_of(linear.part(part).weight)
        (cut,) = whole.cuts
        self.axis, self.eps, self.width = linear.axis, eps, whole.shape[0]
        self.copies = whole.partial[0].size if whole.partial else 1
        shard = Shard("weight", whole.shape[:1], (cut,), whole.partial, decay=False)
        self.weight = set_shard(nn.Parameter(torch.ones(shard.local_shape)), shard)

    def init_parameters(self, seed: int) -> None:
        """Weight one."""
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """[.., features] -> the same."""
        return _CutRMSNorm.apply(x, self.weight, self.axis, self.width, self.copies, self.eps)


class _CutRMSNorm(torch.autograd.Function):
    """One sum over the ranks in each direction, of a number a token; saves its input and the inverse root."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, axis: Axis, width: int, copies: int, eps: float) -> Tensor:
        y = x.to(wide(x.dtype))
        # Not in place: a stash for the recomputation may keep the sum.
        squares = axis.all_reduce(y.square().sum(-1, keepdim=True)) / (width * copies)
        rstd = squares.add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, rstd)
        ctx.axis, ctx.count = axis, width * copies
        return (y * rstd).mul_(weight).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, rstd = ctx.saved_tensors
        dy, normed = grads[0].to(rstd.dtype), x.to(rstd.dtype) * rstd
        product = dy * normed
        dweight = product.flatten(0, -2).sum(0)
        along = ctx.axis.all_reduce((product * weight).sum(-1, keepdim=True)) / ctx.count
        dx = (dy * weight).sub_(normed * along).mul_(rstd)
        return dx.to(x.dtype), dweight.to(weight.dtype), None, None, None, None
