"""DeepSeek-V2 and V3 (arXiv:2405.04434, arXiv:2412.19437): latent attention, experts beside a shared one."""

from __future__ import annotations

from megalite.models.transformer import Transformer, TransformerLayer
from megalite.nn.latent_attention import LatentAttention


class DeepSeekLayer(TransformerLayer):
    """Pre-norm layer with latent attention; router, groups and dense first layers are those of the configuration."""

    attention_cls = LatentAttention


class DeepSeek(Transformer):
    """DeepSeek-V2 or V3 at any size."""

    layer_cls = DeepSeekLayer
