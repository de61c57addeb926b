"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434; DeepSeek-V3, arXiv:2412.19437).

Keys and values are made from one narrow latent of each token, and queries may be made from another. Positions turn
features of their own: those of each query head, and of one key that all heads share.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from megalite.axis import Axis
from megalite.kernels.attention import attention
from megalite.kernels.saved import Saved, chain, size_of
from megalite.mpu import ParallelState
from megalite.nn.attention import ParallelAttention
from megalite.nn.config import ModelConfig
from megalite.nn.context import Context
from megalite.nn.norm import RMSNorm
from megalite.nn.saved import BatchShape
from megalite.parallel.collectives import enter_parallel
from megalite.parallel.saved import column_saved, context_attention_saved, row_saved
from megalite.parallel.tensor import ColumnParallelLinear, FusedColumnParallelLinear, OutputPart

LATENT_NORM_EPS = 1e-6
"""The published models have it here whatever the other norms have."""


class LatentAttention(ParallelAttention):
    """Attention on keys and values from a latent: [s, b, h] -> ([s, b, h], None).

    down: x -> latents (of queries, if q_lora_rank, and of keys and values) and the shared key; each latent is normed.
    q_up, kv_up: latents -> heads, cut over tp as the heads are. The small projection `down` is whole on every rank.
    Without sequence parallelism all ranks compute the same latents, whose gradients are summed where they enter the
    heads; under it each rank makes those of its own tokens, and they, not x, are gathered.
    """

    def _make_inputs(self, config: ModelConfig, mpu: ParallelState) -> None:
        sequence_parallel = self.sequence_parallel
        self.tp, self.interleaved = mpu.tp, config.rope_interleaved
        self.nope = config.qk_nope_head_dim
        self.num_heads = self.num_kv_heads = config.num_heads // mpu.tp.size
        ranks = {"q": config.q_lora_rank} if config.q_lora_rank else {}
        ranks["kv"] = config.kv_lora_rank + config.qk_rope_head_dim
        shared = mpu.tp if sequence_parallel else None
        self.down = FusedColumnParallelLinear(
            config.hidden_size,
            {name: OutputPart(1, width, shared) for name, width in ranks.items()},
            axis=Axis("whole"),
            bias=False,
            init_std=config.init_std,
        )
        self.kv_rank = config.kv_lora_rank
        self.kv_norm = self._norm(config, mpu, config.kv_lora_rank)
        self.kv_up = self._up(config, config.kv_lora_rank, self.nope + self.value_size)
        self.q = self.q_norm = self.q_up = None
        if config.q_lora_rank:
            self.q_norm = self._norm(config, mpu, config.q_lora_rank)
            self.q_up = self._up(config, config.q_lora_rank, config.head_size)
        else:
            self.q = self._up(config, config.hidden_size, config.head_size)

    def _norm(self, config: ModelConfig, mpu: ParallelState, width: int) -> RMSNorm:
        return RMSNorm(replace(config, hidden_size=width, norm_eps=LATENT_NORM_EPS), mpu, self.kernels)

    def _up(self, config: ModelConfig, width: int, features: int) -> ColumnParallelLinear:
        """From `width` features to so many of each head."""
        return ColumnParallelLinear(
            width, config.num_heads * features, axis=self.tp, bias=False, sequence_parallel=self.sequence_parallel,
            init_std=config.init_std,
        )  # fmt: skip

    def forward(self, x: Tensor, context: Context) -> tuple[Tensor, Tensor | None]:
        """Returns the output; there is no bias."""
        q, k, v = self._make_heads(x, context)
        return self.proj(self._mix_heads(q, k, v, context).flatten(2))

    def _make_heads(self, x: Tensor, context: Context) -> tuple[Tensor, Tensor, Tensor]:
        """q, k [s, b, heads, head_size] and v [s, b, heads, value_size] of this rank's heads, turned by positions."""
        *q_latent, latent_and_key = self.down(x).split(self.down.sizes, -1)
        latent, key = latent_and_key.tensor_split((self.kv_rank,), -1)
        key = enter_parallel(key, self.tp, self.sequence_parallel).unsqueeze(2)
        q = self._queries(x, *q_latent).unflatten(-1, (self.num_heads, -1))
        kv = self.kv_up(self.kv_norm(latent)).unflatten(-1, (self.num_heads, -1))
        q_plain, q_turned = q.tensor_split((self.nope,), -1)
        k_plain, v = kv.tensor_split((self.nope,), -1)
        q = torch.cat((q_plain, self._turn(q_turned, context)), -1)
        k = torch.cat((k_plain, self._turn(key, context).expand(-1, -1, self.num_heads, -1)), -1)
        return q, k, v.contiguous()  # a view would keep what k is made from

    def _queries(self, x: Tensor, latent: Tensor | None = None) -> Tensor:
        """[s, b, heads * head_size]."""
        if self.q is not None:
            return self.q(x)
        assert self.q_up is not None and self.q_norm is not None and latent is not None
        return self.q_up(self.q_norm(latent))

    def _turn(self, x: Tensor, context: Context, num_turned: int | None = None) -> Tensor:
        """x [s, b, heads, rope] by its positions; neighbours that are turned together are first put half a head apart.

        Scores do not know the order of features, as long as it is that of queries and keys.
        """
        if self.interleaved and self.rope(context) is not None:
            x = x.unflatten(-1, (-1, 2)).mT.flatten(-2)
        return super()._turn(x, context, num_turned)

    def _mix_heads(self, q: Tensor, k: Tensor, v: Tensor, context: Context) -> Tensor:
        """[s, b, heads, value_size]."""
        dropout = self._dropout(context, q.device)
        if (backend := self._whole_backend(context, q)) is not None:
            return attention(q, k, v, backend=backend, scale=self.scale, dropout=dropout)
        return self._attend_rows(q, k, v, dropout, context)

    def saved(self, shape: BatchShape) -> Saved:
        """Inputs of the linears; what `down` makes, for the norms; heads that are tensors of their own."""
        rows = size_of((shape.rows, sum(self.down.sizes)), shape.dtype)
        norms = [self.kv_norm.saved(replace(shape, width=self.kv_rank))]
        ups = [column_saved(self.kv_up, shape.tokens, shape.dtype)]
        down = column_saved(self.down, shape.rows, shape.dtype)
        if self.q_up is not None and self.q_norm is not None:
            norms.append(self.q_norm.saved(replace(shape, width=self.down.sizes[0])))
            ups.append(column_saved(self.q_up, shape.tokens, shape.dtype))
        elif self.q is not None:
            direct = column_saved(self.q, shape.tokens, shape.dtype)
            down = replace(down, work=down.work + direct.work - direct.input)  # both keep x
        own, work = sum(norm.own for norm in norms), sum(up.work for up in ups)
        return chain(
            down,
            Saved(input=rows, own=own + sum(up.input for up in ups), work=work),
            self._attention_saved(shape),
            row_saved(self.proj, shape.tokens, shape.dtype),
        )

    def _attention_saved(self, shape: BatchShape) -> Saved:
        key, value, backend = self.head_size, self.value_size, None
        if self.across.num_ranks == 1 and not shape.has_documents:
            backend = self._causal_backend(shape.device, shape.dtype, self.dropout, shape.seq_len)
        is_cut = backend == "sdpa" and key > value
        if backend == "sdpa":
            key = value = max(key, value)
        kept = context_attention_saved(
            self.across, shape.tokens, num_heads=self.num_heads, num_kv_heads=self.num_heads, head_dim=key,
            value_dim=value, dtype=shape.dtype, remade=False, dropout=self.dropout > 0.0,
        )  # fmt: skip
        # An output that zeros have made wider is not what `proj` keeps.
        return replace(kept, own=kept.own + kept.output, output=0) if is_cut else kept
