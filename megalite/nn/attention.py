"""Causal self-attention, cut over tp along its heads."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from megalite.axis import Axis
from megalite.kernels.attention import CausalBackend, attention, packed_attention
from megalite.kernels.attention_kernel import AttentionKernel, attend
from megalite.kernels.attention_rows import AttentionDropout
from megalite.kernels.backends import Traits
from megalite.kernels.chosen import Kernels
from megalite.kernels.dropout import dropout_key
from megalite.kernels.norm import rms_norm_saved
from megalite.kernels.registry import problems
from megalite.kernels.rope import Rope
from megalite.kernels.saved import Saved, beside, chain, size_of, wide
from megalite.mpu import ParallelState
from megalite.nn.config import ModelConfig
from megalite.nn.context import Context, Site, layer_site
from megalite.nn.mlp import output_std
from megalite.nn.norm import plus_one
from megalite.nn.saved import BatchShape
from megalite.parallel.context_attention import ContextAttention
from megalite.parallel.saved import column_saved, context_attention_saved, row_saved
from megalite.parallel.shard import Cut, Shard, ShardedModule, even_cut, set_shard
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
    """Of queries, keys and values; model.attention_bias adds them to an architecture without."""
    output_bias = False

    def __init__(self, config: ModelConfig, mpu: ParallelState, layer: int, kernels: Kernels | None = None):
        super().__init__()
        self.kernels = kernels if kernels is not None else Kernels()
        self.across = ContextAttention.of(mpu, layer)
        wrong = head_problems(config.num_heads, config.kv_heads, mpu.tp.size)
        if wrong := wrong or self.across.problems(config.num_heads // mpu.tp.size):
            raise ValueError("\n".join(wrong))
        self.layer, self.dropout = layer, config.attention_dropout
        self.head_size, self.value_size = config.head_size, config.value_size
        self.scale, self.softcap, self.window = config.score_scale, config.attention_softcap, config.window_of(layer)
        self.turns, self.has_own_rope = config.turns(layer), bool(config.rope_local_theta and self.window)
        self.sinks = HeadSinks(config, mpu) if config.attention_sinks else None
        self.is_plain = not (self.softcap or config.attention_sinks)
        if wrong := problems("attention", self.kernels.config.attention, self.traits(dropout=self.dropout)):
            raise ValueError("\n".join(wrong))
        self.first_head = mpu.tp.rank * config.num_heads // mpu.tp.size
        self.sequence_parallel = mpu.config.sequence_parallel and mpu.tp.size > 1
        self._make_inputs(config, mpu)
        self.proj = RowParallelLinear(
            config.num_heads * config.value_size,
            config.hidden_size,
            axis=mpu.tp,
            bias=self.output_bias or config.attention_bias,
            sequence_parallel=self.sequence_parallel,
            skip_bias_add=True,
            init_std=output_std(config),
            unit=config.value_size,
        )

    def _make_inputs(self, config: ModelConfig, mpu: ParallelState) -> None:
        """The linears before attention."""
        kv = OutputPart(config.kv_heads, config.head_size, _kv_replicas(mpu, config.kv_heads))
        self.qkv = FusedColumnParallelLinear(
            config.hidden_size,
            {"q": OutputPart(config.num_heads, config.head_size), "k": kv, "v": kv},
            axis=mpu.tp,
            bias=self.bias or config.attention_bias,
            sequence_parallel=self.sequence_parallel,
            init_std=config.init_std,
        )
        self.num_kv_heads = self.qkv.sizes[1] // config.head_size

    def forward(self, x: Tensor, context: Context) -> tuple[Tensor, Tensor | None]:
        """Returns the output and the bias still to be added."""
        return self.proj(self._attend(self.qkv(x), context))

    def _attend(self, qkv: Tensor, context: Context) -> Tensor:
        """[s, b, (heads + 2 kv_heads) * d] -> [s, b, heads * d]."""
        dropout = self._dropout(context, qkv.device)
        if (backend := self._whole_backend(context, qkv)) is not None:
            return self._mix(qkv, backend, dropout, context)
        q, k, v = self.heads(qkv)
        return self._attend_rows(self._turn(q, context), self._turn(k, context), v, dropout, context).flatten(2)

    def _dropout(self, context: Context, device: torch.device) -> AttentionDropout | None:
        if not (context.training and self.dropout > 0.0):
            return None
        key = dropout_key(context.seed, context.batch.step, layer_site(self.layer, Site.ATTENTION_PROBS), device)
        return AttentionDropout(
            p=self.dropout, key=key, token_index=context.batch.token_index, head_offset=self.first_head
        )

    def _whole_backend(self, context: Context, like: Tensor) -> CausalBackend | None:
        """`_causal_backend` where rows are whole here, new, and one document each."""
        if context.cut.axis.size > 1 or context.batch.documents is not None or context.cache is not None:
            return None
        dropout = self.dropout if context.training else 0.0
        return self._causal_backend(like.device, like.dtype, dropout, context.batch.seq_len)

    def rope(self, context: Context) -> Rope | None:
        """The rotary tables of this layer, if it has any."""
        if not self.turns:
            return None
        return context.local_rope if self.has_own_rope else context.rope

    def _turn(self, x: Tensor, context: Context, num_turned: int | None = None) -> Tensor:
        """x [s, b, heads, d] by its positions, but for heads from num_turned on."""
        rope = self.rope(context)
        return x if rope is None else self.kernels.rope(x, *rope, num_turned)

    def heads(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q [s, b, heads, d], k and v [s, b, kv_heads, d], before rotary positions."""
        q, k, v = (part.unflatten(-1, (-1, self.head_size)) for part in qkv.split(self.qkv.sizes, -1))
        return q, k, v

    def traits(self, like: Tensor | None = None, *, dropout: float = 0.0) -> Traits:
        """What the backend must be able to do, for tensors like `like` where that is known."""
        device, dtype = (like.device, like.dtype) if like is not None else (None, None)
        return Traits(
            device=device, dtype=dtype, dropout=dropout, softcap=self.softcap, window=self.window,
            head_size=self.head_size, value_size=self.value_size,
        )  # fmt: skip

    def kernel(self, like: Tensor, dropout: float) -> AttentionKernel:
        """What attends to a block of keys, wherever they come from, for tensors like `like`.

        Attention of your own returns its own `AttentionKernel` here: one method, which computes the output of a block
        and its log-sum-exp, makes it run on documents, windows and sinks, and under context parallelism.
        """
        return self.kernels.attention(self.traits(like, dropout=dropout), self.scale)

    @property
    def is_standard(self) -> bool:
        """Whether `kernel` is one of the framework's: softmax attention, with a softcap at most."""
        return type(self).kernel is ParallelAttention.kernel

    def _attend_rows(
        self, q: Tensor, k: Tensor, v: Tensor, dropout: AttentionDropout | None, context: Context
    ) -> Tensor:
        """[s, b, heads, d] of this rank's queries on all keys that they see, by intervals of places."""
        sinks = self.sinks.weight if self.sinks is not None else None
        if context.cache is not None:
            return context.cache.attend(self, q, k, v, sinks)
        kernel = self.kernel(q, dropout.p if dropout is not None else 0.0)
        if context.cut.axis.size > 1:
            return self.across(q, k, v, context.cut, kernel, window=self.window, dropout=dropout, sinks=sinks)
        return attend(q, k, v, context.mask(self.window), kernel, dropout=dropout, sinks=sinks)

    def _causal_backend(
        self, device: torch.device, dtype: torch.dtype, dropout: float, seq_len: int
    ) -> CausalBackend | None:
        """The backend for whole rows of one document; None where it is more than causal attention."""
        if not self.is_standard or 0 < self.window < seq_len or not self.is_plain:
            return None
        return self.kernels.causal_attention(Traits(device=device, dtype=dtype, dropout=dropout, seq_len=seq_len))

    def describe(self, device: torch.device, dtype: torch.dtype, seq_len: int, *, documents: bool) -> str:
        """What this layer trains with, for the log; `documents`: rows may hold several, or padding."""
        cut = self.across.num_ranks > 1
        backend = None if cut or documents else self._causal_backend(device, dtype, self.dropout, seq_len)
        found: str = backend or self.kernel(torch.empty(0, device=device, dtype=dtype), self.dropout).name
        window = f" in a window of {self.window}" if self.window else ""
        return found + window + (f" by {self.across.mode}" if cut else "")

    def saved(self, shape: BatchShape) -> Saved:
        """What the projections and attention between them keep."""
        return chain(
            column_saved(self.qkv, shape.tokens, shape.dtype),
            self._attention_saved(shape),
            row_saved(self.proj, shape.tokens, shape.dtype),
        )

    def _attention_saved(self, shape: BatchShape) -> Saved:
        backend = None
        if self.across.num_ranks == 1 and not shape.has_documents:
            backend = self._causal_backend(shape.device, shape.dtype, self.dropout, shape.seq_len)
        # Whole rows are turned in one piece; heads one by one, beside the values' that keep q, k and v as they enter.
        remade = shape.rotary and self.turns and backend is None
        heads = self._heads_saved(shape)
        if heads.output:
            remade = True
        kept = context_attention_saved(
            self.across, shape.tokens, num_heads=self.qkv.sizes[0] // self.head_size, num_kv_heads=self.num_kv_heads,
            head_dim=self.head_size, dtype=shape.dtype, remade=remade, dropout=self.dropout > 0.0,
        )  # fmt: skip
        together = beside(replace(heads, output=0), replace(kept, output=0))
        return replace(together, output=kept.output)

    def _heads_saved(self, shape: BatchShape) -> Saved:
        """What `heads` keeps of q, k and v side by side; output: of q and k, if it makes them anew."""
        return Saved()

    def _mix(self, qkv: Tensor, backend: CausalBackend, dropout: AttentionDropout | None, context: Context) -> Tensor:
        """Causal attention within rows that are whole here and one document each."""
        heads = qkv.unflatten(-1, (-1, self.head_size))
        turned = self._turn(heads, context, heads.shape[2] - self.num_kv_heads)
        return packed_attention(
            turned.flatten(2), head_dim=self.head_size, num_kv_heads=self.num_kv_heads, backend=backend,
            scale=self.scale, dropout=dropout,
        )  # fmt: skip


class BiasedAttention(ParallelAttention):
    """Attention whose linears have biases; with model.attention_sinks, a window and its layers, that of gpt-oss."""

    bias = True
    output_bias = True


class QKVBiasAttention(ParallelAttention):
    """Attention with biases on queries, keys and values alone (Qwen2, arXiv:2407.10671)."""

    bias = True


class HeadNorm(ShardedModule):
    """RMSNorm over the features of a head, [.., heads, head_dim], with one weight for all heads of a layer.

    A tp rank sees its own heads only, so that the gradient of the weight is a partial sum over tp.
    """

    def __init__(self, config: ModelConfig, mpu: ParallelState, kernels: Kernels | None = None):
        super().__init__()
        self.kernels = kernels if kernels is not None else Kernels()
        self.eps = config.norm_eps
        shape, partial = (config.head_size,), (mpu.tp,) if mpu.tp.size > 1 else ()
        self.weight = set_shard(nn.Parameter(torch.ones(shape)), Shard("weight", shape, partial=partial, decay=False))

    def init_parameters(self, seed: int) -> None:
        """Weight one."""
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """[.., heads, head_dim] -> the same."""
        return self.kernels.rms_norm(x, self.weight, self.eps)

    def saved_bytes(self, dtype: torch.dtype) -> int:
        """What is kept whatever the number of tokens."""
        return 0


class OffsetHeadNorm(HeadNorm):
    """The same with 1 + weight in the place of the weight, which begins at 0 (Gemma 3, arXiv:2503.19786)."""

    def init_parameters(self, seed: int) -> None:
        """Weight zero."""
        nn.init.zeros_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """[.., heads, head_dim] -> the same."""
        return self.kernels.rms_norm(x, plus_one(self.weight), self.eps)

    def saved_bytes(self, dtype: torch.dtype) -> int:
        """The sum."""
        return size_of(self.weight.shape, wide(dtype))


class QKNormAttention(ParallelAttention):
    """Attention with an RMSNorm over each query and key head, before rotary positions (Qwen3, LFM2).

    Henry et al. (2020, arXiv:2010.04245) and Dehghani et al. (2023, arXiv:2302.05442): logits cannot grow without end.
    """

    head_norm_cls: type[HeadNorm] = HeadNorm

    def __init__(self, config: ModelConfig, mpu: ParallelState, layer: int, kernels: Kernels | None = None):
        super().__init__(config, mpu, layer, kernels)
        self.q_norm = self.head_norm_cls(config, mpu, self.kernels)
        self.k_norm = self.head_norm_cls(config, mpu, self.kernels)

    def heads(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The same, with q and k normed."""
        q, k, v = super().heads(qkv)
        return self.q_norm(q), self.k_norm(k), v

    def _mix(self, qkv: Tensor, backend: CausalBackend, dropout: AttentionDropout | None, context: Context) -> Tensor:
        q, k, v = self.heads(qkv)
        q, k = self._turn(q, context), self._turn(k, context)
        return attention(q, k, v, backend=backend, scale=self.scale, dropout=dropout).flatten(2)

    def _heads_saved(self, shape: BatchShape) -> Saved:
        """The heads before their norms are views of q, k and v as they enter, which are kept whole."""
        heads = sum(self.qkv.sizes[:2]) // self.head_size
        norms = rms_norm_saved((shape.tokens, heads, self.head_size), shape.dtype)
        own = norms.own + self.q_norm.saved_bytes(shape.dtype) + self.k_norm.saved_bytes(shape.dtype)
        return Saved(input=size_of((shape.tokens, sum(self.qkv.sizes)), shape.dtype), own=own, output=norms.input)


class HeadSinks(ShardedModule):
    """A learned logit of each head that takes part in the softmax and has no value (gpt-oss, arXiv:2508.10925).

    A tp rank holds those of its own heads. They begin at 0, as if each query saw one more key, orthogonal to it.
    """

    def __init__(self, config: ModelConfig, mpu: ParallelState):
        super().__init__()
        cut = Cut(mpu.tp, 0, even_cut(config.num_heads, mpu.tp))
        shard = Shard("weight", (config.num_heads,), (cut,), decay=False)
        self.weight = set_shard(nn.Parameter(torch.zeros(shard.local_shape)), shard)

    def init_parameters(self, seed: int) -> None:
        """Zero."""
        nn.init.zeros_(self.weight)


def _kv_replicas(mpu: ParallelState, kv_heads: int) -> Axis | None:
    """The tp ranks that share this rank's KV head, when there are fewer heads than ranks."""
    return mpu.blocks(mpu.tp, mpu.tp.size // kv_heads) if mpu.tp.size > kv_heads else None
