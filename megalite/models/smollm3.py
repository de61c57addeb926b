"""SmolLM3 (Bakouch et al., 2025): Llama in which every fourth layer has no rotary positions (arXiv:2501.18795)."""

from __future__ import annotations

from megalite.models.hf.family import Family
from megalite.models.hf.fields import ATTENTION_BIAS, NO_MLP_BIAS, SILU, Unused, Windows, decoder
from megalite.models.hf.rope import Rope, RopeLayers, has_rope
from megalite.models.llama import LAYER, OUTSIDE, Llama

SMOLLM3 = Family(
    model_type="smollm3", architecture="SmolLM3ForCausalLM", name="llama", model_cls=Llama, outside=OUTSIDE,
    layer=LAYER,
    fields=(
        *decoder(eps=1e-6, kv=4, tied=True), Rope(theta=2e6), RopeLayers(), SILU, ATTENTION_BIAS, NO_MLP_BIAS,
        Windows(switch=True, local=lambda content, layer: not has_rope(content, layer)), Unused("max_window_layers"),
    ),
)  # fmt: skip
