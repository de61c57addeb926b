"""Qwen3 (Yang et al., 2025, arXiv:2505.09388): Llama with normed queries and keys; dense, or with experts."""

from __future__ import annotations

from megalite.models.transformer import Transformer, TransformerLayer
from megalite.nn.attention import QKNormAttention


class Qwen3Layer(TransformerLayer):
    """Pre-norm layer whose query and key heads are normed."""

    attention_cls = QKNormAttention


class Qwen3(Transformer):
    """Qwen3 at any size."""

    layer_cls = Qwen3Layer
