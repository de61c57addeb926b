"""gpt-oss (OpenAI, 2025, arXiv:2508.10925): attention with biases, sinks and alternate windows, clamped experts."""

from __future__ import annotations

from megalite.models.transformer import Transformer, TransformerLayer
from megalite.nn.attention import BiasedAttention
from megalite.nn.experts import ClampedSwigluExperts
from megalite.nn.moe import MoELayer


class GptOssMoE(MoELayer):
    """A mixture of experts with biases and a clamped SwiGLU."""

    experts_cls = ClampedSwigluExperts


class GptOssLayer(TransformerLayer):
    """Pre-norm layer of these; sinks and windows are those of the configuration."""

    attention_cls = BiasedAttention
    moe_cls = GptOssMoE


class GptOss(Transformer):
    """gpt-oss at any size."""

    layer_cls = GptOssLayer
