"""gpt-oss (OpenAI, 2025, arXiv:2508.10925): attention with biases, sinks and alternate windows, clamped experts."""

from __future__ import annotations

from megalite.models.hf.experts import InputsFirst, InTurns, RopeOrYarn
from megalite.models.hf.family import Family
from megalite.models.hf.fields import SILU, Content, Only, Ours, Same, Unused, Windows, decoder, experts
from megalite.models.llama import LAYER, OUTSIDE
from megalite.models.transformer import Transformer, TransformerLayer
from megalite.nn.attention import BiasedAttention
from megalite.nn.experts import ClampedSwigluExperts
from megalite.nn.moe import MoELayer


class GptOssMoE(MoELayer):
    """A mixture of experts with biases and a clamped SwiGLU."""

    experts_cls = ClampedSwigluExperts


class GptOssLayer(TransformerLayer):
    """Pre-norm layer of these; sinks and windows are those of the configuration."""

    attention_cls = BiasedAttention
    moe_cls = GptOssMoE


class GptOss(Transformer):
    """gpt-oss at any size."""

    layer_cls = GptOssLayer


def has_window(content: Content, layer: int) -> bool:
    """Whether a layer has the window, where layer_types do not say: every second one, from the first on."""
    return layer % 2 == 0


GPT_OSS = Family(
    model_type="gpt_oss", architecture="GptOssForCausalLM", name="gpt_oss", model_cls=GptOss, outside=OUTSIDE,
    layer={
        **LAYER, "attention.sinks.weight": "self_attn.sinks", "mlp.router": "mlp.router",
        "mlp.experts.fc1": InTurns("mlp.experts.gate_up_proj"),
        "mlp.experts.fc1_bias": InTurns("mlp.experts.gate_up_proj_bias"),
        "mlp.experts.fc2": InputsFirst("mlp.experts.down_proj"),
        "mlp.experts.fc2_bias": "mlp.experts.down_proj_bias",
    },
    fields=(
        *decoder(eps=1e-5, kv=8, head=64, width=False), RopeOrYarn(theta=150000.0),
        Windows(default=128, local=has_window), SILU, Only("attention_bias", True, "attention has biases"),
        *experts(count=("num_local_experts", "num_experts"), width="intermediate_size", coeff=0.001, per_token=4),
        Same("swiglu_alpha", "swiglu_alpha", default=1.702), Same("swiglu_limit", "swiglu_limit", default=7.0),
        Ours(attention_sinks=True, router_bias=True), Unused("experts_per_token", "initial_context_length"),
    ),
)  # fmt: skip
