"""DeepSeek-V2 and V3 (arXiv:2405.04434, arXiv:2412.19437): latent attention, experts beside a shared one."""

from __future__ import annotations

from megalite.models.hf.experts import Groups, SharedExperts, shared_expert
from megalite.models.hf.family import Family
from megalite.models.hf.fields import (
    NO_ATTENTION_BIAS,
    NO_MLP_BIAS,
    SILU,
    DenseFirst,
    Needed,
    Only,
    Ours,
    Same,
    Unused,
    decoder,
)
from megalite.models.hf.rope import Rope
from megalite.models.hf.weights import Table
from megalite.models.llama import LAYER, OUTSIDE
from megalite.models.transformer import Transformer, TransformerLayer
from megalite.nn.config import ModelConfig
from megalite.nn.latent_attention import LatentAttention


class DeepSeekLayer(TransformerLayer):
    """Pre-norm layer with latent attention; router, groups and dense first layers are those of the configuration."""

    attention_cls = LatentAttention


class DeepSeek(Transformer):
    """DeepSeek-V2 or V3 at any size."""

    layer_cls = DeepSeekLayer


class QueryLatent(Same):
    """q_lora_rank, where null is none."""

    def write(self, model: ModelConfig) -> dict[str, int | None]:
        """Null for 0."""
        return {"q_lora_rank": model.q_lora_rank or None}


TABLE: Table = {
    **LAYER, **shared_expert("shared_experts"),
    "attention.q": "self_attn.q_proj", "attention.down.q": "self_attn.q_a_proj",
    "attention.q_norm": "self_attn.q_a_layernorm", "attention.q_up": "self_attn.q_b_proj",
    "attention.down.kv": "self_attn.kv_a_proj_with_mqa", "attention.kv_norm": "self_attn.kv_a_layernorm",
    "attention.kv_up": "self_attn.kv_b_proj", "mlp.router.expert_bias": "mlp.gate.e_score_correction_bias",
}  # fmt: skip
COMMON = (
    *(field for field in decoder(eps=1e-6) if "head_dim" not in field.keys), Rope(), SILU, NO_ATTENTION_BIAS,
    Same("kv_lora_rank", "kv_lora_rank", default=512), QueryLatent("q_lora_rank", "q_lora_rank", default=1536),
    Same("qk_nope_head_dim", "qk_nope_head_dim", default=128), Same("qk_rope_head_dim", "qk_rope_head_dim", default=64),
    Same("v_head_dim", "v_head_dim", default=128),
    Needed("moe_intermediate_size", "expert_ffn_hidden_size", of="expert_ffn_size"),
    Only("moe_layer_freq", 1, "all layers after the first ones hold experts"),
    Unused("head_dim", "qk_head_dim", "ep_size", "aux_loss_alpha", "seq_aux"),
)  # fmt: skip
DEEPSEEK_V2 = Family(
    model_type="deepseek_v2", architecture="DeepseekV2ForCausalLM", name="deepseek", model_cls=DeepSeek,
    outside=OUTSIDE, layer=TABLE,
    fields=(
        *COMMON, NO_MLP_BIAS, Needed(("n_routed_experts", "num_experts"), "num_experts"),
        Needed("num_experts_per_tok", "top_k"), DenseFirst("first_k_dense_replace", default=0), SharedExperts(2),
        Groups(1, groups=1, kept=1, method="group_limited_greedy", plain="greedy"),
        Same("routed_scaling_factor", "router_scale", default=1.0), Ours(rope_interleaved=True, router_normalize=False),
        Only("norm_topk_prob", False, "transformers does not divide the weights of experts by their sum"),
        Only("scoring_func", "softmax", "scores are a softmax"),
    ),
)  # fmt: skip
DEEPSEEK_V3 = Family(
    model_type="deepseek_v3", architecture="DeepseekV3ForCausalLM", name="deepseek", model_cls=DeepSeek,
    outside=OUTSIDE, layer=TABLE,
    fields=(
        *COMMON, Needed(("n_routed_experts", "num_local_experts"), "num_experts"),
        Same("num_experts_per_tok", "top_k", default=8), DenseFirst("first_k_dense_replace", default=3),
        SharedExperts(1), Groups(2, groups=8, kept=4, method="noaux_tc"),
        Same("routed_scaling_factor", "router_scale", default=2.5),
        Same("norm_topk_prob", "router_normalize", default=True),
        Same("rope_interleave", "rope_interleaved", default=True), Ours(router_score="sigmoid", expert_bias=True),
        Only("scoring_func", "sigmoid", "scores are sigmoids"),
        Unused("num_nextn_predict_layers", "num_mtp_layers"),
    ),
    buffers=r"model\.layers\.61\..*",
)  # fmt: skip
