"""Qwen2 (Yang et al., 2024, arXiv:2407.10671): Llama with biases on queries, keys and values."""

from __future__ import annotations

from megalite.models.hf.family import Family
from megalite.models.hf.fields import SILU, Windows, decoder
from megalite.models.hf.rope import Rope
from megalite.models.llama import LAYER, OUTSIDE
from megalite.models.qwen3 import has_window
from megalite.models.transformer import Transformer, TransformerLayer
from megalite.nn.attention import QKVBiasAttention


class Qwen2Layer(TransformerLayer):
    """Pre-norm layer with biases on queries, keys and values."""

    attention_cls = QKVBiasAttention


class Qwen2(Transformer):
    """Qwen2 at any size."""

    layer_cls = Qwen2Layer


QWEN2 = Family(
    model_type="qwen2", architecture="Qwen2ForCausalLM", name="qwen2", model_cls=Qwen2, outside=OUTSIDE, layer=LAYER,
    fields=(*decoder(eps=1e-6, kv=32), Rope(), Windows(default=4096, switch=True, local=has_window), SILU),
)  # fmt: skip
