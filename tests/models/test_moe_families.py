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
from transformers import GptOssConfig, GptOssForCausalLM, Qwen2MoeConfig, Qwen2MoeForCausalLM

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

SHARED: dict[str, str | Callable[[Tensors], Tensor]] = {
    "mlp.shared.fc1.gate.weight": "mlp.shared_expert.gate_proj.weight",
    "mlp.shared.fc1.up.weight": "mlp.shared_expert.up_proj.weight",
    "mlp.shared.fc2.weight": "mlp.shared_expert.down_proj.weight",
    "mlp.shared_gate.weight": "mlp.shared_expert_gate.weight",
}

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
        names=SHARED,
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
