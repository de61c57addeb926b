"""Qwen2-MoE (Yang et al., 2024, arXiv:2407.10671): Llama with q, k and v biases, experts beside a gated shared one."""

from __future__ import annotations

from megalite.models.hf.experts import shared_expert
from megalite.models.hf.family import Family
from megalite.models.hf.fields import SILU, Content, Only, Ours, Same, SparseLayers, Windows, decoder, experts
from megalite.models.hf.rope import Rope
from megalite.models.llama import LAYER, OUTSIDE
from megalite.models.transformer import Transformer, TransformerLayer
from megalite.nn.attention import QKVBiasAttention


class Qwen2MoeLayer(TransformerLayer):
    """Pre-norm layer with biases on queries, keys and values; the shared expert is that of the configuration."""

    attention_cls = QKVBiasAttention


class Qwen2Moe(Transformer):
    """Qwen2-MoE at any size."""

    layer_cls = Qwen2MoeLayer


def has_window(content: Content, layer: int) -> bool:
    """Whether a layer has the window, where layer_types do not say: every second one below max_window_layers."""
    return layer % 2 == 0 and layer < content.get("max_window_layers", 28)


QWEN2_MOE = Family(
    model_type="qwen2_moe", architecture="Qwen2MoeForCausalLM", name="qwen2_moe", model_cls=Qwen2Moe, outside=OUTSIDE,
    layer={**LAYER, **shared_expert("shared_expert"), "mlp.shared_gate": "mlp.shared_expert_gate"},
    fields=(
        *decoder(eps=1e-6, kv=16), Rope(), Windows(default=4096, switch=True, local=has_window), SILU, SparseLayers(),
        *experts(count=("num_experts",), width="moe_intermediate_size", coeff=0.001, per_token=4),
        Same("norm_topk_prob", "router_normalize", default=False), Ours(shared_expert_gate=True),
        Same("shared_expert_intermediate_size", "shared_ffn_hidden_size", default=5632),
        Only("qkv_bias", True, "queries, keys and values have biases"),
    ),
)  # fmt: skip
