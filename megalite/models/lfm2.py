"""LFM2 (Liquid AI, 2025, arXiv:2511.23404): gated short convolutions, with attention in a few layers; dense or MoE."""

from __future__ import annotations

from torch import nn

from megalite.models.hf.family import Family
from megalite.models.hf.fields import DenseFirst, Needed, Only, Ours, Same, decoder, experts
from megalite.models.hf.lfm2 import UNREAD, AdjustedWidth, OldTie, Operators, layer_table
from megalite.models.hf.rope import Rope
from megalite.models.transformer import Transformer, TransformerLayer
from megalite.nn.attention import QKNormAttention
from megalite.nn.config import ModelConfig
from megalite.nn.short_conv import GatedShortConv


class LFM2Layer(TransformerLayer):
    """Pre-norm layer that mixes positions by attention where `model.attention_layers` says so, else by convolution."""

    attention_cls = QKNormAttention
    conv_cls: type[nn.Module] = GatedShortConv

    def operator_cls(self, config: ModelConfig, index: int) -> type[nn.Module]:
        """Attention or convolution."""
        return self.attention_cls if config.is_attention_layer(index) else self.conv_cls


class LFM2(Transformer):
    """LFM2 at any size; the published models tie their embeddings."""

    layer_cls = LFM2Layer


OUTSIDE = {"embedding": "model.embed_tokens", "final_norm": "model.embedding_norm", "head": "lm_head"}
COMMON = (
    *decoder(eps=1e-5, kv=8, tied=True, norm="norm_eps", width=False), Rope(theta=1e6), Operators(), UNREAD,
    OldTie("tie_embedding", "tie_embeddings"), Same("conv_L_cache", "conv_kernel_size", default=3),
    Only("conv_bias", False, "convolutions have no biases"),
)  # fmt: skip
LFM2_FAMILY = Family(
    model_type="lfm2", architecture="Lfm2ForCausalLM", name="lfm2", model_cls=LFM2, outside=OUTSIDE, layer=layer_table,
    fields=(*COMMON, AdjustedWidth()),
)  # fmt: skip
LFM2_MOE = Family(
    model_type="lfm2_moe", architecture="Lfm2MoeForCausalLM", name="lfm2", model_cls=LFM2, outside=OUTSIDE,
    layer=layer_table,
    fields=(
        *COMMON, Needed("intermediate_size", "ffn_hidden_size", of="ffn_size"),
        DenseFirst("num_dense_layers", default=2), Ours(router_score="sigmoid", router_norm_eps=1e-6),
        *experts(count=("num_experts",), width="moe_intermediate_size", coeff=0.0, per_token=4),
        Same("norm_topk_prob", "router_normalize", default=True), Same("use_expert_bias", "expert_bias", default=True),
        Same("routed_scaling_factor", "router_scale", default=1.0),
    ),
)  # fmt: skip
