"""Gemma 2 and 3 (Gemma team, 2024, arXiv:2408.00118, and 2025, arXiv:2503.19786), text models.

GeGLU, norms of 1 + weight before and after each block, scaled embeddings, windows in most layers. Gemma 2 caps logits
and scores; Gemma 3 norms queries and keys, and has another rotary base in the layers with a window.
"""

from __future__ import annotations

from megalite.models.hf.family import Family
from megalite.models.hf.fields import ATTENTION_BIAS, Cap, Only, Scale, Windows, decoder
from megalite.models.hf.rope import Rope, TwoRopes
from megalite.models.layers import SandwichLayer
from megalite.models.llama import LAYER, OUTSIDE
from megalite.models.transformer import Transformer
from megalite.nn.attention import OffsetHeadNorm, QKNormAttention
from megalite.nn.mlp import GegluMLP
from megalite.nn.norm import OffsetRMSNorm


class Gemma2Layer(SandwichLayer):
    """Four norms and GeGLU."""

    norm_cls = OffsetRMSNorm
    mlp_cls = GegluMLP


class Gemma2(Transformer):
    """Gemma 2 at any size."""

    layer_cls = Gemma2Layer
    norm_cls = OffsetRMSNorm
    scaled_embeddings = True


class Gemma3Attention(QKNormAttention):
    """With norms of 1 + weight over queries and keys."""

    head_norm_cls = OffsetHeadNorm


class Gemma3Layer(Gemma2Layer):
    """With normed queries and keys."""

    attention_cls = Gemma3Attention


class Gemma3(Gemma2):
    """Gemma 3 at any size."""

    layer_cls = Gemma3Layer


NAMES = LAYER | {
    "attention_post_norm": "post_attention_layernorm", "mlp_norm": "pre_feedforward_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
}  # fmt: skip
FIELDS = (
    Only("hidden_activation", "gelu_pytorch_tanh", "the feed-forward is GeGLU in the tanh form"),
    Only("hidden_act", "gelu_pytorch_tanh", "hidden_activation is what counts", others=("gelu",)), ATTENTION_BIAS,
    Scale("query_pre_attn_scalar", default=256),
)  # fmt: skip
GEMMA2 = Family(
    model_type="gemma2", architecture="Gemma2ForCausalLM", name="gemma2", model_cls=Gemma2, outside=OUTSIDE,
    layer=NAMES,
    fields=(
        *decoder(eps=1e-6, kv=4, head=256, tied=True), Rope(), *FIELDS,
        Windows(default=4096, local=lambda content, layer: layer % 2 == 0),
        Cap("attn_logit_softcapping", "attention_softcap", default=50.0),
        Cap("final_logit_softcapping", "logit_softcap", default=30.0),
    ),
)  # fmt: skip
GEMMA3 = Family(
    model_type="gemma3_text", architecture="Gemma3ForCausalLM", name="gemma3", model_cls=Gemma3, outside=OUTSIDE,
    layer=NAMES,
    fields=(
        *decoder(eps=1e-6, kv=4, head=256, tied=True), TwoRopes(theta=1e6, local=1e4), *FIELDS,
        Windows(default=4096, local=lambda content, layer: (layer + 1) % content.get("sliding_window_pattern", 6) > 0),
        Only("attn_logit_softcapping", None, "attention of Gemma 3 caps no scores"),
        Cap("final_logit_softcapping", "logit_softcap"),
    ),
)  # fmt: skip
