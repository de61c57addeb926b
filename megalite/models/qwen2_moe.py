"""Qwen2-MoE (Yang et al., 2024, arXiv:2407.10671): Llama with q, k and v biases, experts beside a gated shared one."""

from __future__ import annotations

from megalite.models.transformer import Transformer, TransformerLayer
from megalite.nn.attention import QKVBiasAttention


class Qwen2MoeLayer(TransformerLayer):
    """Pre-norm layer with biases on queries, keys and values; the shared expert is that of the configuration."""

    attention_cls = QKVBiasAttention


class Qwen2Moe(Transformer):
    """Qwen2-MoE at any size."""

    layer_cls = Qwen2MoeLayer
