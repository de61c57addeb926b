"""GPT-2 (Radford et al., 2019): LayerNorm, learned positions, GELU, biases, dropout; usually with tied embeddings."""

from __future__ import annotations

from megalite.models.transformer import Transformer, TransformerLayer
from megalite.nn.attention import BiasedAttention
from megalite.nn.experts import GeluExperts
from megalite.nn.mlp import GeluMLP
from megalite.nn.moe import MoELayer
from megalite.nn.norm import LayerNorm


class GPT2MoE(MoELayer):
    """Experts with GELU and biases, too."""

    experts_cls = GeluExperts
    shared_cls = GeluMLP


class GPT2Layer(TransformerLayer):
    """Pre-norm layer with LayerNorm, biases and GELU."""

    norm_cls = LayerNorm
    attention_cls = BiasedAttention
    mlp_cls = GeluMLP
    moe_cls = GPT2MoE


class GPT2(Transformer):
    """GPT-2 at any size."""

    layer_cls = GPT2Layer
    norm_cls = LayerNorm
    learned_positions = True
    rotary_positions = False
