"""Phi-3 (Abdin et al., 2024, arXiv:2404.14219): Llama whose files have q, k, v and gate, up in one tensor each."""

from __future__ import annotations

from megalite.models.hf.family import Family
from megalite.models.hf.fields import SILU, Same, Unused, Windows, decoder
from megalite.models.hf.rope import Rope
from megalite.models.llama import LAYER, OUTSIDE, Llama

PHI3 = Family(
    model_type="phi3", architecture="Phi3ForCausalLM", name="llama", model_cls=Llama, outside=OUTSIDE,
    layer=LAYER | {
        "attention.qkv.q": "self_attn.qkv_proj", "attention.qkv.k": "self_attn.qkv_proj",
        "attention.qkv.v": "self_attn.qkv_proj", "mlp.fc1.gate": "mlp.gate_up_proj", "mlp.fc1.up": "mlp.gate_up_proj",
    },
    fields=(
        *decoder(eps=1e-5), Rope(percent=1.0, kinds=("default",)), Windows(by_layer=False), SILU,
        Same("embd_pdrop", "hidden_dropout", default=0.0), Same("resid_pdrop", "hidden_dropout", default=0.0),
        Unused("original_max_position_embeddings"),
    ),
)  # fmt: skip
