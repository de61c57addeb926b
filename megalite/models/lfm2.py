"""LFM2 (Liquid AI, 2025, arXiv:2511.23404): gated short convolutions, with attention in a few layers; dense or MoE."""

from __future__ import annotations

from torch import nn

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
