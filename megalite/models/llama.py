"""Llama (Touvron et al., 2023, arXiv:2302.13971): RMSNorm, rotary positions, grouped queries, SwiGLU, no biases."""

from __future__ import annotations

from megalite.models.hf.family import Family
from megalite.models.hf.fields import ATTENTION_BIAS, NO_MLP_BIAS, SILU, Same, Windows, decoder, experts
from megalite.models.hf.rope import Rope
from megalite.models.hf.weights import Experts, Spot, Table
from megalite.models.transformer import Transformer


class Llama(Transformer):
    """What `Transformer` is by default."""


OUTSIDE: Table = {"embedding": "model.embed_tokens", "final_norm": "model.norm", "head": "lm_head"}
LAYER: dict[str, Spot] = {
    "attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm",
    "attention.qkv.q": "self_attn.q_proj", "attention.qkv.k": "self_attn.k_proj",
    "attention.qkv.v": "self_attn.v_proj", "attention.proj": "self_attn.o_proj",
    "attention.q_norm": "self_attn.q_norm", "attention.k_norm": "self_attn.k_norm",
    "mlp.fc1.gate": "mlp.gate_proj", "mlp.fc1.up": "mlp.up_proj", "mlp.fc2": "mlp.down_proj",
    "mlp.router": "mlp.gate",
    "mlp.experts.fc1": Experts(
        ("mlp.experts.{}.gate_proj.weight", "mlp.experts.{}.up_proj.weight"), "mlp.experts.gate_up_proj"
    ),
    "mlp.experts.fc2": Experts(("mlp.experts.{}.down_proj.weight",), "mlp.experts.down_proj"),
}  # fmt: skip
"""Names that most later architectures kept."""

LLAMA = Family(
    model_type="llama", architecture="LlamaForCausalLM", name="llama", model_cls=Llama, outside=OUTSIDE, layer=LAYER,
    fields=(*decoder(eps=1e-6), Rope(), SILU, ATTENTION_BIAS, NO_MLP_BIAS),
)  # fmt: skip
MISTRAL = Family(
    model_type="mistral", architecture="MistralForCausalLM", name="llama", model_cls=Llama, outside=OUTSIDE,
    layer=LAYER, fields=(*decoder(eps=1e-6, kv=8), Rope(), Windows(default=4096, by_layer=False), SILU),
)  # fmt: skip
MIXTRAL = Family(
    model_type="mixtral", architecture="MixtralForCausalLM", name="llama", model_cls=Llama, outside=OUTSIDE,
    layer=LAYER | {
        "mlp.router": "block_sparse_moe.gate",
        "mlp.experts.fc1": Experts(
            ("block_sparse_moe.experts.{}.w1.weight", "block_sparse_moe.experts.{}.w3.weight"),
            "mlp.experts.gate_up_proj",
        ),
        "mlp.experts.fc2": Experts(("block_sparse_moe.experts.{}.w2.weight",), "mlp.experts.down_proj"),
    },
    fields=(
        *decoder(eps=1e-5, kv=8), Rope(theta=1e6), Windows(by_layer=False), SILU,
        *experts(count=("num_local_experts", "num_experts"), width=None, coeff=0.001, per_token=2),
        Same("router_jitter_noise", "router_jitter", default=0.0),
    ),
)  # fmt: skip
