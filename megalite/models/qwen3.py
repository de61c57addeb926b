"""Qwen3 (Yang et al., 2025, arXiv:2505.09388): Llama with normed queries and keys; dense, or with experts."""

from __future__ import annotations

from megalite.models.hf.family import Family
from megalite.models.hf.fields import ATTENTION_BIAS, SILU, Content, Same, SparseLayers, Windows, decoder, experts
from megalite.models.hf.rope import Rope
from megalite.models.llama import LAYER, OUTSIDE
from megalite.models.transformer import Transformer, TransformerLayer
from megalite.nn.attention import QKNormAttention


class Qwen3Layer(TransformerLayer):
    """Pre-norm layer whose query and key heads are normed."""

    attention_cls = QKNormAttention


class Qwen3(Transformer):
    """Qwen3 at any size."""

    layer_cls = Qwen3Layer


def has_window(content: Content, layer: int) -> bool:
    """Whether a layer has the window, where layer_types do not say: those from max_window_layers on."""
    return layer >= content.get("max_window_layers", 28)


QWEN3 = Family(
    model_type="qwen3", architecture="Qwen3ForCausalLM", name="qwen3", model_cls=Qwen3, outside=OUTSIDE, layer=LAYER,
    fields=(
        *decoder(eps=1e-6, kv=32, head=128), Rope(), Windows(default=4096, switch=True, local=has_window), SILU,
        ATTENTION_BIAS,
    ),
)  # fmt: skip
QWEN3_MOE = Family(
    model_type="qwen3_moe", architecture="Qwen3MoeForCausalLM", name="qwen3", model_cls=Qwen3, outside=OUTSIDE,
    layer=LAYER,
    fields=(
        *decoder(eps=1e-6, kv=4), Rope(), Windows(default=4096, switch=True, by_layer=False), SILU,
        ATTENTION_BIAS, SparseLayers(),
        *experts(count=("num_experts", "num_local_experts"), width="moe_intermediate_size", coeff=0.001, per_token=8),
        Same("norm_topk_prob", "router_normalize", default=False),
    ),
)  # fmt: skip
