"""The shape of a model: what every block reads."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from megalite.kernels.rope import RopeKind, RopeScaling
from megalite.pattern import in_pattern

AuxLoss = Literal["none", "sequence", "global", "global_exact", "micro_batch"]
Routing = Literal["top_k", "sinkhorn", "expert_choice"]


@dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """The mixture of experts of a model (num_experts = 0: a dense one)."""

    num_experts: int = 0
    """Experts of an MoE layer; 0 makes every layer dense."""
    top_k: int = 2
    """Experts of a token."""
    expert_ffn_hidden_size: int | None = None
    """Width of one expert; the dense layers' ffn_hidden_size by default."""
    moe_layers: str = "all"
    """Which layers hold experts: all, every:N (the last of every N layers), but_every:N (the others), from:N (all but
    the first N), or numbers such as 1,3,5, counted from 0."""
    routing: Routing = "top_k"
    """Who chooses: tokens their best experts (top_k), tokens after balancing the scores of a row (sinkhorn), or
    experts their best tokens of a row (expert_choice)."""
    router_score: Literal["softmax", "sigmoid"] = "softmax"
    """From router logits to scores."""
    router_normalize: bool = True
    """Divide the scores of a token's experts by their sum; for softmax scores this is top-k before softmax."""
    router_norm_eps: float = 1e-20
    """Added to that sum (sigmoid scores only)."""
    router_scale: float = 1.0
    """Factor on the probabilities of the chosen experts."""
    router_bias: bool = False
    """Whether the router's linear has a learned bias."""
    router_jitter: float = 0.0
    """Router input times uniform noise in [1 - jitter, 1 + jitter] while training (Switch)."""
    num_expert_groups: int = 1
    """Groups of experts (nodes, for example) of which a token may use top_k_groups."""
    top_k_groups: int = 1
    """Groups that a token's experts may come from."""
    group_top_k: int = 0
    """Experts of a group whose scores add up to that of the group; 0: top_k / top_k_groups."""
    aux_loss: AuxLoss = "sequence"
    """Balancing loss over: each row of tokens, the global batch (with the fractions of the step before, or exact ones
    from a forward of their own), or a micro-batch (the one kind that depends on micro_batch_size)."""
    aux_loss_coeff: float = 0.01
    """Weight of the balancing loss; 0 switches it off."""
    router_z_loss: float = 0.0
    """Weight of the mean squared log-sum-exp of router logits (ST-MoE, arXiv:2202.08906)."""
    expert_bias: bool = False
    """Balance without a loss: a bias on the selection scores, moved once a step (arXiv:2408.15664)."""
    expert_bias_rate: float = 1e-3
    """What expert_bias moves by in a step; 0 freezes it."""
    capacity_factor: float = 0.0
    """Places of an expert in each row, as a multiple of the even share seq_len x top_k / num_experts; 0: no limit."""
    drop_policy: Literal["probability", "position"] = "probability"
    """Which tokens a full expert keeps: the most probable or the first."""
    pad_to_capacity: bool = False
    """Fill the unused places of experts with zeros, so that every expert has the same number of tokens."""
    swiglu_alpha: float = 1.702
    """Factor on the gate inside the sigmoid of clamped experts (gpt_oss)."""
    swiglu_limit: float = 7.0
    """What they clamp at: the gate above, the other factor on both sides (gpt_oss)."""
    shared_ffn_hidden_size: int = 0
    """Width of the expert that every token uses; 0: none."""
    shared_expert_gate: bool = False
    """Multiply the shared expert's output by sigmoid of a learned projection (Qwen2-MoE)."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig(MoEConfig):
    """A transformer's architecture and sizes."""

    name: str = "llama"
    """Architecture: a key of megalite.models.MODELS (gpt2, llama, qwen3, lfm2, gpt_oss, qwen2_moe, deepseek)."""
    from_hf: str | None = None
    """A folder of Hugging Face (config.json, safetensors) to take all that follows from, and at step 0 the weights; a
    path, or a URL. What is set beside it must agree, but for dropout, losses, routing in training and rope_."""
    num_layers: int = 8
    """Transformer layers."""
    hidden_size: int = 256
    """Width of the residual stream."""
    num_heads: int = 8
    """Query heads."""
    num_kv_heads: int | None = None
    """Key and value heads (grouped-query attention); num_heads by default."""
    head_dim: int | None = None
    """Width of a head; hidden_size / num_heads by default."""
    attention_layers: str = "all"
    """Which layers of lfm2 hold attention, in the patterns of moe_layers; the others hold a short convolution."""
    window: int = 0
    """Tokens that a token attends to at most, its own included (sliding window); 0 is no limit."""
    window_layers: str = "all"
    """Which layers have that window, in the patterns of moe_layers: but_every:2 for alternate layers, the first one
    local (Gemma 2, gpt-oss)."""
    attention_scale: float = 0.0
    """Factor on attention scores; 0 is 1 / sqrt(head_dim)."""
    attention_softcap: float = 0.0
    """Attention scores x become c tanh(x / c) with this c (Gemma 2, arXiv:2408.00118); 0 leaves them."""
    attention_bias: bool = False
    """Learned biases on all linears of attention (llama, qwen3, olmo2 and others that have none of their own)."""
    attention_sinks: bool = False
    """A learned logit of each head for attending to nothing (gpt-oss, arXiv:2508.10925)."""
    kv_lora_rank: int = 0
    """Width of the latent that keys and values are made from (deepseek: multi-head latent attention)."""
    q_lora_rank: int = 0
    """Width of the latent that queries are made from; 0: they are made from the residual stream (deepseek)."""
    qk_nope_head_dim: int = 0
    """Features of a query and key head that positions do not turn (deepseek)."""
    qk_rope_head_dim: int = 0
    """Further ones that they turn; all heads share those of the key (deepseek)."""
    v_head_dim: int = 0
    """Width of a value head (deepseek)."""
    conv_kernel_size: int = 3
    """Positions that a short convolution sees, its own included (lfm2)."""
    ffn_hidden_size: int | None = None
    """Width of the feed-forward layer; by default 4 x hidden (gpt2) or 8/3 x hidden rounded up to 64 (others)."""
    vocab_size: int = 4093
    """Vocabulary entries, without padding; need not divide by anything."""
    max_positions: int = 1024
    """Longest sequence that learned position embeddings cover."""
    tie_embeddings: bool = False
    """Use the word embedding as output head."""
    norm_eps: float = 1e-5
    """Epsilon inside the square root of a norm."""
    rope_theta: float = 10000.0
    """Base of the rotary position frequencies."""
    rope_percent: float = 1.0
    """Share of a head's features that rotary positions turn, the first ones (partial_rotary_factor)."""
    rope_interleaved: bool = False
    """Turn features 2i and 2i + 1 together, not i and i + half (deepseek)."""
    parallel_residual: bool = False
    """Attention and feed-forward read the same input and are added to it together (gpt_neox)."""
    rope_layers: str = "all"
    """Which layers turn queries and keys by rotary positions, in the patterns of moe_layers (SmolLM3)."""
    rope_local_theta: float = 0.0
    """Base in the layers that have a window, which then have no rope_scaling (Gemma 3, arXiv:2503.19786); 0: they are
    as the others."""
    rope_scaling: RopeKind = "none"
    """How rotary frequencies are changed for rows longer than a model was trained on, as in Hugging Face's configs:
    none, linear, ntk (their dynamic, for one fixed length), yarn or llama3."""
    rope_factor: float = 1.0
    """How much longer the rows may be (rope_scaling)."""
    rope_original_positions: int = 0
    """Row length that the model was trained on (ntk, yarn, llama3)."""
    rope_length: int | None = None
    """Row length that ntk is set for; by default rope_factor x rope_original_positions."""
    rope_low_freq_factor: float = 1.0
    """Frequencies that turn fewer times in an original row are divided by rope_factor (llama3)."""
    rope_high_freq_factor: float = 4.0
    """Frequencies that turn more times in an original row stay as they are (llama3)."""
    rope_beta_fast: float = 32.0
    """Frequencies that turn more times in an original row stay as they are (yarn)."""
    rope_beta_slow: float = 1.0
    """Frequencies that turn fewer times in an original row are divided by rope_factor (yarn)."""
    rope_mscale: float = 0.0
    """Numerator of the factor on cos and sin, with rope_mscale_all_dim (yarn; 0: 1 + 0.1 ln rope_factor, no ratio)."""
    rope_mscale_all_dim: float = 0.0
    """Its denominator (yarn)."""
    rope_attention_factor: float | None = None
    """That factor itself (yarn)."""
    rope_truncate: bool = True
    """Round the ends of the ramp between kept and divided frequencies to whole features (yarn)."""
    hidden_dropout: float = 0.0
    """Dropout probability on the embedding and on each residual branch."""
    attention_dropout: float = 0.0
    """Dropout probability on attention probabilities (the block attention backend only)."""
    init_std: float = 0.02
    """Standard deviation of initial weights; output projections use init_std / sqrt(2 x num_layers)."""
    label_smoothing: float = 0.0
    """Probability mass spread over the other vocabulary entries in the loss."""
    z_loss: float = 0.0
    """Weight of the squared log-partition term in the loss (PaLM, arXiv:2204.02311)."""
    mtp_layers: int = 0
    """Layers that learn to predict further tokens, one each (multi-token prediction, arXiv:2412.19437)."""
    mtp_loss_factor: float = 0.3
    """Weight of the mean of their losses."""
    logit_softcap: float = 0.0
    """Logits x become c tanh(x / c) with this c (Gemma 2, arXiv:2408.00118); 0 leaves them."""

    @property
    def all_layers(self) -> range:
        """The layers, and after them those of multi-token prediction."""
        return range(self.num_layers + self.mtp_layers)

    @property
    def shares_embedding(self) -> bool:
        """Whether the last stage of a pipeline needs the embedding, too."""
        return self.tie_embeddings or self.mtp_layers > 0

    @property
    def kv_heads(self) -> int:
        """Key and value heads."""
        return self.num_kv_heads if self.num_kv_heads is not None else self.num_heads

    @property
    def head_size(self) -> int:
        """Width of a query or key head."""
        if self.is_latent:
            return self.qk_nope_head_dim + self.qk_rope_head_dim
        return self.head_dim if self.head_dim is not None else self.hidden_size // self.num_heads

    @property
    def is_latent(self) -> bool:
        """Whether attention is multi-head latent attention."""
        return self.kv_lora_rank > 0

    @property
    def value_size(self) -> int:
        """Width of a value head."""
        return self.v_head_dim if self.is_latent else self.head_size

    @property
    def rotary_dim(self) -> int:
        """Features of a head that rotary positions turn."""
        return self.qk_rope_head_dim if self.is_latent else int(self.head_size * self.rope_percent)

    @property
    def rope(self) -> RopeScaling:
        """What the rope_ fields say of the frequencies."""
        length = (
            self.rope_length if self.rope_length is not None else round(self.rope_factor * self.rope_original_positions)
        )
        return RopeScaling(
            kind=self.rope_scaling,
            factor=self.rope_factor,
            original_positions=self.rope_original_positions,
            length=max(length, self.rope_original_positions),
            low_freq_factor=self.rope_low_freq_factor,
            high_freq_factor=self.rope_high_freq_factor,
            beta_fast=self.rope_beta_fast,
            beta_slow=self.rope_beta_slow,
            mscale=self.rope_mscale,
            mscale_all_dim=self.rope_mscale_all_dim,
            attention_factor=self.rope_attention_factor,
            truncate=self.rope_truncate,
        )

    @property
    def ffn_size(self) -> int:
        """Width of the feed-forward layer."""
        if self.ffn_hidden_size is not None:
            return self.ffn_hidden_size
        return (
            4 * self.hidden_size if self.name in ("gpt2", "gpt_neox") else (8 * self.hidden_size // 3 + 63) // 64 * 64
        )

    @property
    def expert_ffn_size(self) -> int:
        """Width of one expert."""
        return self.expert_ffn_hidden_size if self.expert_ffn_hidden_size is not None else self.ffn_size

    def is_moe_layer(self, layer: int) -> bool:
        """Whether global layer number `layer` holds experts."""
        return self.num_experts > 0 and in_pattern(layer, self.moe_layers)

    @property
    def score_scale(self) -> float:
        """Factor on attention scores; with latent attention, yarn's factor is here, not on cos and sin alone."""
        if self.attention_scale:
            return self.attention_scale
        return self.head_size**-0.5 * (self.rope.score_factor if self.is_latent else 1.0)

    def window_of(self, layer: int) -> int:
        """The sliding window of global layer number `layer`; 0 for none."""
        return self.window if in_pattern(layer, self.window_layers) else 0

    @property
    def common_window(self) -> int:
        """The sliding window that all attention layers have; 0 where one has none."""
        layers = (layer for layer in self.all_layers if self.is_attention_layer(layer))
        return min((self.window_of(layer) for layer in layers), default=0)

    def turns(self, layer: int) -> bool:
        """Whether global layer number `layer` has rotary positions."""
        return in_pattern(layer, self.rope_layers)

    def is_attention_layer(self, layer: int) -> bool:
        """Whether global layer number `layer` of an architecture with other layers mixes positions by attention."""
        return in_pattern(layer, self.attention_layers)


def rope_problems(model: ModelConfig) -> list[str]:
    """Everything about the rope_ fields that cannot work."""
    found = []
    if not 0 <= model.rope_local_theta < math.inf:
        found.append(f"model.rope_local_theta={model.rope_local_theta} must be finite and above 0, or 0 for none")
    if model.rope_local_theta and not model.window:
        found.append(f"model.rope_local_theta={model.rope_local_theta} is for layers with a window; set model.window")
    if not 0 < model.rope_theta < math.inf:
        found.append(f"model.rope_theta={model.rope_theta} must be finite and above 0")
    if not 0 < model.rope_percent <= 1:
        return [*found, f"model.rope_percent={model.rope_percent} must be above 0, and at most 1 (all features)"]
    dim, kind = model.rotary_dim, model.rope_scaling
    if model.rope_percent == 1 and dim % 2:
        name = "qk_rope_head_dim" if model.is_latent else "head_dim"
        found.append(f"model.{name}={dim} must be even: rotary positions turn pairs of features")
    elif dim < 2 or dim % 2:
        found.append(
            f"model.rope_percent={model.rope_percent} of a head of {model.head_size} features is {dim};"
            " rotary positions turn pairs: it must be an even number above 0"
        )
    unused = {"rope_factor": 1.0, "rope_original_positions": 0, "rope_length": None}
    if kind == "none":
        return found + [
            f"model.{name}={getattr(model, name)} needs rope_scaling, one of linear, ntk, yarn, llama3"
            for name, default in unused.items()
            if getattr(model, name) != default
        ]
    if not 1 <= model.rope_factor < math.inf:
        found.append(f"model.rope_factor={model.rope_factor} must be finite and at least 1")
    if kind != "linear" and model.rope_original_positions < 1:
        found.append(
            f"model.rope_scaling={kind} needs the row length that the model was trained on: set rope_original_positions"
        )
    if model.rope_length is not None and model.rope_length < 1:
        found.append(f"model.rope_length={model.rope_length} must be at least 1")
    for low, high in (("rope_low_freq_factor", "rope_high_freq_factor"), ("rope_beta_slow", "rope_beta_fast")):
        below, above = getattr(model, low), getattr(model, high)
        if not 0 < below < above < math.inf:
            found.append(f"model.{low}={below} must be above 0 and below {high}={above}, which must be finite")
    return found + (_yarn_problems(model) if kind == "yarn" else [])


def _yarn_problems(model: ModelConfig) -> list[str]:
    """What is wrong with the ramp of yarn, and with its factor on cos and sin."""
    found = [
        f"model.{name}={getattr(model, name)} must be finite and at least 0"
        for name in ("rope_mscale", "rope_mscale_all_dim")
        if not 0 <= getattr(model, name) < math.inf
    ]
    factor = model.rope_attention_factor
    if factor is not None and not 0 < factor < math.inf:
        found.append(f"model.rope_attention_factor={factor} must be finite and above 0; leave it out for yarn's own")
    if 0 < model.rope_theta <= 1:
        found.append(f"model.rope_theta={model.rope_theta} must be above 1 under yarn: later features turn more slowly")
    return found
