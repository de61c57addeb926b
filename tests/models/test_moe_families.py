"""Mixture-of-experts families, whole tiny models against Hugging Face's: logits, loss and every gradient."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
)

from megalite.batch import MicroBatch
from megalite.models import MODELS
from megalite.models.transformer import Transformer
from megalite.mpu import ParallelState
from megalite.nn.config import ModelConfig
from tests.hugging_face import assert_equal, fill, float64

S, B, V = 13, 2, 37
EAGER: dict[str, Any] = {
    "vocab_size": V, "attn_implementation": "eager", "experts_implementation": "eager", "pad_token_id": None,
}  # fmt: skip
Tensors = Mapping[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Family:
    """Our settings, their model, and their tensor that is ours called so, by name or as a function of a layer's."""

    ours: ModelConfig
    theirs: Callable[[], nn.Module]
    names: Mapping[str, str | Callable[[Tensors], Tensor]] = field(default_factory=dict)


def _halves(gate_up: Tensor) -> Tensor:
    """Gate, then up, from features of both in turns."""
    return torch.cat((gate_up[..., ::2], gate_up[..., 1::2]), -1)


COMMON: dict[str, str | Callable[[Tensors], Tensor]] = {
    "embedding.weight": "model.embed_tokens.weight", "final_norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight", "attention_norm.weight": "input_layernorm.weight",
    "mlp_norm.weight": "post_attention_layernorm.weight", "attention.proj.weight": "self_attn.o_proj.weight",
    "attention.proj.bias": "self_attn.o_proj.bias",
    **{f"attention.qkv.{p}.{kind}": f"self_attn.{p}_proj.{kind}" for p in "qkv" for kind in ("weight", "bias")},
    "mlp.fc1.gate.weight": "mlp.gate_proj.weight", "mlp.fc1.up.weight": "mlp.up_proj.weight",
    "mlp.fc2.weight": "mlp.down_proj.weight", "mlp.router.weight": "mlp.gate.weight",
    "mlp.experts.fc1": "mlp.experts.gate_up_proj", "mlp.experts.fc2": "mlp.experts.down_proj",
}  # fmt: skip


def _shared(name: str) -> dict[str, str | Callable[[Tensors], Tensor]]:
    parts = {"fc1.gate": "gate_proj", "fc1.up": "up_proj", "fc2": "down_proj"}
    return {f"mlp.shared.{ours}.weight": f"mlp.{name}.{theirs}.weight" for ours, theirs in parts.items()}


LATENT = {
    f"attention.{ours}.weight": f"self_attn.{theirs}.weight"
    for ours, theirs in {
        "q": "q_proj", "down.q": "q_a_proj", "q_norm": "q_a_layernorm", "q_up": "q_b_proj",
        "down.kv": "kv_a_proj_with_mqa", "kv_norm": "kv_a_layernorm", "kv_up": "kv_b_proj",
    }.items()
}  # fmt: skip
DEEPSEEK: dict[str, Any] = {
    "name": "deepseek", "num_layers": 3, "hidden_size": 21, "num_heads": 3, "ffn_hidden_size": 22, "vocab_size": V,
    "kv_lora_rank": 7, "qk_nope_head_dim": 5, "qk_rope_head_dim": 4, "v_head_dim": 6, "num_experts": 12, "top_k": 3,
    "num_expert_groups": 4, "top_k_groups": 2, "moe_layers": "from:1", "expert_ffn_hidden_size": 14,
    "shared_ffn_hidden_size": 28, "aux_loss": "none", "norm_eps": 1e-4,
}  # fmt: skip
DEEPSEEK_HF: dict[str, Any] = {
    "num_hidden_layers": 3, "hidden_size": 21, "num_attention_heads": 3, "num_key_value_heads": 3,
    "intermediate_size": 22, "kv_lora_rank": 7, "qk_nope_head_dim": 5, "qk_rope_head_dim": 4, "v_head_dim": 6,
    "n_routed_experts": 12, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1,
    "moe_intermediate_size": 14, "n_shared_experts": 2, "rms_norm_eps": 1e-4,
}  # fmt: skip
EVEN: dict[str, Any] = {"kv_lora_rank": 6, "qk_nope_head_dim": 8}
YARN: dict[str, Any] = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 40.0, "original_max_position_embeddings": 16, "mscale": 0.9,
    "mscale_all_dim": 0.6,
}  # fmt: skip

FAMILIES = {
    "gpt-oss": Family(
        ours=ModelConfig(
            name="gpt_oss", num_layers=3, hidden_size=20, num_heads=6, num_kv_heads=2, head_dim=10, vocab_size=V,
            window=5, window_layers="but_every:2", attention_sinks=True, num_experts=5, top_k=3,
            expert_ffn_hidden_size=14, router_bias=True, swiglu_alpha=1.5, swiglu_limit=0.6, aux_loss="none",
            rope_theta=150000.0, rope_scaling="yarn", rope_factor=32.0, rope_original_positions=24,
            rope_truncate=False,
        ),
        theirs=lambda: GptOssForCausalLM(
            GptOssConfig(
                num_hidden_layers=3, hidden_size=20, num_attention_heads=6, num_key_value_heads=2, head_dim=10,
                sliding_window=5, num_local_experts=5, num_experts_per_tok=3, intermediate_size=14, swiglu_alpha=1.5,
                swiglu_limit=0.6,
                rope_parameters={
                    "rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
                    "truncate": False, "original_max_position_embeddings": 24,
                },
                **EAGER,
            )
        ),
        names={
            "attention.sinks.weight": "self_attn.sinks", "mlp.router.weight": "mlp.router.weight",
            "mlp.router.bias": "mlp.router.bias",
            "mlp.experts.fc1": lambda layer: _halves(layer["mlp.experts.gate_up_proj"]).mT,
            "mlp.experts.fc2": lambda layer: layer["mlp.experts.down_proj"].mT,
            "mlp.experts.fc1_bias": lambda layer: _halves(layer["mlp.experts.gate_up_proj_bias"]),
            "mlp.experts.fc2_bias": "mlp.experts.down_proj_bias",
        },
    ),
    "qwen2-moe": Family(  # layer 1 is dense by its number, the even ones by the step between experts
        ours=ModelConfig(
            name="qwen2_moe", num_layers=5, hidden_size=20, num_heads=10, num_kv_heads=5, ffn_hidden_size=22,
            vocab_size=V, num_experts=7, top_k=3, moe_layers="3", expert_ffn_hidden_size=14, router_normalize=False,
            shared_ffn_hidden_size=18, shared_expert_gate=True, aux_loss="none", rope_theta=1e6, norm_eps=1e-6,
            tie_embeddings=True, window=4, window_layers="0,2",
        ),
        theirs=lambda: Qwen2MoeForCausalLM(
            Qwen2MoeConfig(
                num_hidden_layers=5, hidden_size=20, num_attention_heads=10, num_key_value_heads=5,
                intermediate_size=22, num_experts=7, num_experts_per_tok=3, decoder_sparse_step=2,
                mlp_only_layers=[1], moe_intermediate_size=14, shared_expert_intermediate_size=18,
                norm_topk_prob=False, tie_word_embeddings=True, use_sliding_window=True, sliding_window=4,
                max_window_layers=3, rope_parameters={"rope_type": "default", "rope_theta": 1e6}, **EAGER,
            )
        ),
        names=_shared("shared_expert") | {"mlp.shared_gate.weight": "mlp.shared_expert_gate.weight"},
    ),
    "deepseek-v2": Family(  # a group is as good as its best expert; their complex numbers need even widths
        ours=ModelConfig(
            **DEEPSEEK | EVEN, q_lora_rank=8, rope_interleaved=True, router_normalize=False, group_top_k=1,
            router_scale=1.5,
        ),
        theirs=lambda: DeepseekV2ForCausalLM(
            DeepseekV2Config(
                q_lora_rank=8, topk_method="group_limited_greedy", routed_scaling_factor=1.5, **DEEPSEEK_HF | EVEN,
                **EAGER,
            )
        ),
        names=_shared("shared_experts") | LATENT,
    ),
    "deepseek-v3": Family(  # as the sum of its best two, bias included
        ours=ModelConfig(
            **DEEPSEEK, q_lora_rank=8, rope_interleaved=True, group_top_k=2, router_score="sigmoid", expert_bias=True,
            router_scale=2.5, rope_scaling="yarn", rope_factor=40.0, rope_original_positions=16, rope_mscale=0.9,
            rope_mscale_all_dim=0.6,
        ),
        theirs=lambda: DeepseekV3ForCausalLM(
            DeepseekV3Config(q_lora_rank=8, rope_parameters=YARN, num_mtp_layers=0, **DEEPSEEK_HF, **EAGER)
        ),
        names=_shared("shared_experts") | LATENT,
    ),
    "deepseek-v3-direct": Family(  # queries without a latent, features turned half a head apart, plain weights
        ours=ModelConfig(
            **DEEPSEEK, group_top_k=2, router_score="sigmoid", expert_bias=True, router_normalize=False
        ),
        theirs=lambda: DeepseekV3ForCausalLM(
            DeepseekV3Config(
                q_lora_rank=None, rope_interleave=False, norm_topk_prob=False, routed_scaling_factor=1.0,
                num_mtp_layers=0, **DEEPSEEK_HF, **EAGER,
            )
        ),
        names=_shared("shared_experts") | LATENT,
    ),
}  # fmt: skip


def theirs(family: Family, name: str, tensors: Tensors) -> Tensor:
    """Their tensor, or gradient, that is our parameter `name`."""
    match = re.fullmatch(r"(?:layers\.(\d+)\.)?(.+)", name)
    assert match is not None
    if match[1]:
        prefix = f"model.layers.{match[1]}."
        tensors = {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}
    found = {**COMMON, **family.names}[match[2]]
    return tensors[found] if isinstance(found, str) else found(tensors)


def ours_like(family: Family, reference: nn.Module) -> Transformer:
    """Our model with the weights of theirs."""
    ours = MODELS[family.ours.name](family.ours, ParallelState.single()).double()
    tensors = dict(reference.named_parameters())
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            parameter.copy_(theirs(family, name, tensors))
        for layer in range(family.ours.num_layers):
            if family.ours.expert_bias and family.ours.is_moe_layer(layer):
                bias = torch.linspace(-0.5, 0.5, family.ours.num_experts, dtype=torch.float64).roll(5 * layer)
                ours.get_buffer(f"layers.{layer}.mlp.router.expert_bias").copy_(bias)
                reference.get_buffer(f"model.layers.{layer}.mlp.gate.e_score_correction_bias").copy_(bias)
    assert sum(p.numel() for p in ours.parameters()) == sum(p.numel() for p in tensors.values())
    return ours


@pytest.mark.parametrize("name", FAMILIES)
def test_equals_the_model_of_hugging_face(name: str) -> None:
    family = FAMILIES[name]
    with float64():
        reference = family.theirs().double()
    fill(reference)
    ours = ours_like(family, reference)
    ids, labels = torch.randint(V, (2, S, B), generator=torch.Generator().manual_seed(4))
    batch = MicroBatch(
        tokens=ids, labels=labels, loss_mask=torch.ones(S, B), positions=torch.arange(S)[:, None].expand(S, B),
        samples=torch.arange(B), step=0,
    )  # fmt: skip
    with float64():
        logits = reference(input_ids=ids.t()).logits
    assert_equal(ours.logits(batch), logits.transpose(0, 1), "logits")
    loss = ours(None, batch)
    wanted = F.cross_entropy(logits.flatten(0, 1), labels.t().flatten(), reduction="sum")
    assert_equal(loss, wanted, "loss")
    loss.backward()
    wanted.backward()
    grads = {name: p.grad for name, p in reference.named_parameters() if p.grad is not None}
    for name, parameter in ours.named_parameters():
        assert_equal(parameter.grad, theirs(family, name, grads), name)
