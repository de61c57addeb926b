"""Causal self-attention, cut over tp along its heads."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor, nn

from megalite.kernels.attention import (
    AttentionBackend,
    AttentionDropout,
    Rope,
    attention,
    packed_attention,
    resolve_attention,
)
from megalite.kernels.attention_kernel import AttentionKernel, BlockKernel, attend
from megalite.kernels.config import KernelConfig
from megalite.kernels.dropout import dropout_key
from megalite.kernels.norm import rms_norm
from megalite.kernels.rope import apply_rope
from megalite.mpu import Axis, ParallelState
from megalite.nn.config import ModelConfig
from megalite.nn.context import Context, Site, layer_site
from megalite.nn.mlp import output_std
from megalite.parallel.context_attention import ContextAttention
from megalite.parallel.shard import Shard, set_shard
from megalite.parallel.tensor import FusedColumnParallelLinear, OutputPart, RowParallelLinear


def head_problems(num_heads: int, kv_heads: int, tp: int) -> list[str]:
    """Why heads cannot be cut over `tp` ranks (empty when they can)."""
    found = []
    legal = [t for t in range(1, num_heads + 1) if num_heads % t == 0 and (kv_heads % t == 0 or t % kv_heads == 0)]
    choices = ", ".join(map(str, legal))
    if num_heads % kv_heads:
        found.append(f"num_heads={num_heads} is not divisible by num_kv_heads={kv_heads}")
    elif num_heads % tp:
        found.append(f"num_heads={num_heads} is not divisible by tp={tp}; tp can be {choices}")
    elif kv_heads % tp and tp % kv_heads:
        found.append(
            f"num_kv_heads={kv_heads} and tp={tp}: one must divide the other, so that KV heads can be cut or shared;"
            f" tp can be {choices}"
        )
    return found


class ParallelAttention(nn.Module):
    """Grouped-query attention (Ainslie et al., 2023, arXiv:2305.13245): [s, b, h] -> ([s, b, h], bias or None).

    A tp rank holds num_heads / tp query heads and their KV heads; with fewer KV heads than ranks, consecutive ranks
    share one and its gradient is summed over them. `kernels.attention` names the backend; "auto" lets each call choose.
    """

    bias = False

    def __init__(self, config: ModelConfig, mpu: ParallelState, layer: int, kernels: KernelConfig):
        super().__init__()
        if problems := head_problems(config.num_heads, config.kv_heads, mpu.tp.size):
            raise ValueError("\n".join(problems))
        self.layer, self.head_size, self.dropout = layer, config.head_size, config.attention_dropout
        self.window, self.sinks, self.is_plain = 0, None, True
        self.across = ContextAttention.of(mpu)
        self.scale = 1.0 / math.sqrt(config.head_size)
        self.choice: Literal["auto", "sdpa", "block"] = kernels.attention
        self.first_head = mpu.tp.rank * config.num_heads // mpu.tp.size
        sequence_parallel = mpu.config.sequence_parallel and mpu.tp.size > 1
        kv = OutputPart(config.kv_heads, config.head_size, _kv_replicas(mpu, config.kv_heads))
        self.qkv = FusedColumnParallelLinear(
            config.hidden_size,
            {"q": OutputPart(config.num_heads, config.head_size), "k": kv, "v": kv},
            axis=mpu.tp,
            bias=self.bias,
            sequence_parallel=sequence_parallel,
            init_std=config.init_std,
        )
        self.num_kv_heads = self.qkv.sizes[1] // config.head_size
        self.proj = RowParallelLinear(
            config.num_heads * config.head_size,
            config.hidden_size,
            axis=mpu.tp,
            bias=self.bias,
            sequence_parallel=sequence_parallel,
            skip_bias_add=True,
            init_std=output_std(config),
            unit=config.head_size,
        )

    def forward(self, x: Tensor, context: Context) -> tuple[Tensor, Tensor | None]:
        """Returns the output and the bias still to be added."""
        return self.proj(self._attend(self.qkv(x), context))

    def _attend(self, qkv: Tensor, context: Context) -> Tensor:
        """[s, b, (heads + 2 kv_heads) * d] -> [s, b, heads * d]."""
        p = self.dropout if context.training else 0.0
        dropout = None
        if p > 0.0:
            key = dropout_key(
                context.seed, context.batch.step, layer_site(self.layer, Site.ATTENTION_PROBS), qkv.device
            )
            dropout = AttentionDropout(p=p, key=key, token_index=context.batch.token_index, head_offset=self.first_head)
        if self.is_plain and context.batch.documents is None and context.cut.axis.size == 1:
            backend = resolve_attention(self.choice, device=qkv.device, dropout=p, seq_len=qkv.shape[0])
            return self._mix(qkv, backend, dropout, context.rope)
        q, k, v = self.heads(qkv)
        if context.rope is not None:
            q, k = apply_rope(q, *context.rope), apply_rope(k, *context.rope)
        return self._attend_rows(q, k, v, dropout, context).flatten(2)

    def heads(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q [s, b, heads, d], k and v [s, b, kv_heads, d], before rotary positions."""
        q, k, v = (part.unflatten(-1, (-1, self.head_size)) for part in qkv.split(self.qkv.sizes, -1))
        return q, k, v

    def kernel(self, device: torch.device, dropout: float) -> AttentionKernel:
        """What attends to a block of keys, wherever they come from: override it with a kernel of your own."""
        return BlockKernel(scale=self.scale)

    def _attend_rows(
        self, q: Tensor, k: Tensor, v: Tensor, dropout: AttentionDropout | None, context: Context
    ) -> Tensor:
        """[s, b, heads, d] of this rank's queries on all keys that they see, by intervals of places."""
        kernel = self.kernel(q.device, dropout.p if dropout is not None else 0.0)
        if context.cut.axis.size > 1:
            return self.across(q, k, v, context.cut, kernel, window=self.window, dropout=dropout, sinks=self.sinks)
        return attend(q, k, v, context.mask(self.window), kernel, dropout=dropout, sinks=self.sinks)

    def _mix(
        self, qkv: Tensor, backend: AttentionBackend, dropout: AttentionDropout | None, rope: Rope | None
    ) -> Tensor:
        """Causal attention within rows that are whole here and one document each."""
        return packed_attention(
            qkv,
            head_dim=self.head_size,
            num_kv_heads=self.num_kv_heads,
            backend=backend,
            scale=self.scale,
            dropout=dropout,
            rope=rope,
        )


class QKNormAttention(ParallelAttention):
    """Attention with an RMSNorm over each query and key head, before rotary positions (Qwen3, LFM2).

    Henry et al. (2020, arXiv:2010.04245) and Dehghani et al. (2023, arXiv:2302.05442): logits cannot grow without end.
    """

    def __init__(self, config: ModelConfig, mpu: ParallelState, layer: int, kernels: KernelConfig):
        super().__init__(config, mpu, layer, kernels)
        self.q_norm = HeadNorm(config, mpu)
        self.k_norm = HeadNorm(config, mpu)

    def heads(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The same, with q and k normed."""
        q, k, v = super().heads(qkv)
        return self.q_norm(q), self.k_norm(k), v

    def _mix(
        self, qkv: Tensor, backend: AttentionBackend, dropout: AttentionDropout | None, rope: Rope | None
    ) -> Tensor:
        q, k, v = self.heads(qkv)
        return attention(q, k, v, backend=backend, scale=self.scale, dropout=dropout, rope=rope).flatten(2)


class HeadNorm(nn.Module):
    """RMSNorm over the features of a head, [.., heads, head_dim], with one weight for all heads of a layer.

    A tp rank sees its own heads only, so that the gradient of the weight is a partial sum over tp.
    """

    def __init__(self, config: ModelConfig, mpu: ParallelState):
        super().__init__()
        self.eps = config.norm_eps
        shape, partial = (config.head_size,), (mpu.tp,) if mpu.tp.size > 1 else ()
        self.weight = set_shard(nn.Parameter(torch.ones(shape)), Shard("weight", shape, partial=partial, decay=False))

    def init_parameters(self, seed: int) -> None:
        """Weight one."""
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """[.., heads, head_dim] -> the same."""
        return rms_norm(x, self.weight, self.eps)


def _kv_replicas(mpu: ParallelState, kv_heads: int) -> Axis | None:
    """The tp ranks that share this rank's KV head, when there are fewer heads than ranks."""
    return mpu.blocks(mpu.tp, mpu.tp.size // kv_heads) if mpu.tp.size > kv_heads else None
