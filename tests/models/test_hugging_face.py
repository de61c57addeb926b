"""Whole tiny models against Hugging Face's on equal weights: logits, and the gradient of the loss for every weight."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    Lfm2Config,
    Lfm2ForCausalLM,
    Lfm2MoeConfig,
    Lfm2MoeForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from megalite.batch import MicroBatch
from megalite.models import MODELS
from megalite.models.transformer import Transformer
from megalite.mpu import ParallelState
from megalite.nn.config import ModelConfig
from tests.hugging_face import assert_equal, fill, float64

S, B, V = 11, 2, 37
SIZES: dict[str, Any] = {"hidden_size": 24, "num_heads": 4, "num_kv_heads": 2, "ffn_hidden_size": 40, "vocab_size": V}
EXPERTS: dict[str, Any] = {"num_experts": 8, "top_k": 3, "expert_ffn_hidden_size": 16, "aux_loss": "none"}
LFM2_SIZES: dict[str, Any] = SIZES | {"name": "lfm2", "tie_embeddings": True, "rope_theta": 1e6}
OURS = {
    "qwen3": ModelConfig(name="qwen3", num_layers=3, head_dim=10, norm_eps=1e-6, **SIZES),
    "qwen3-yarn": ModelConfig(
        name="qwen3", num_layers=2, head_dim=10, norm_eps=1e-6, rope_scaling="yarn", rope_factor=4.0,
        rope_original_positions=32, **SIZES,
    ),
    "lfm2": ModelConfig(num_layers=5, attention_layers="2,4", **LFM2_SIZES),
    "qwen3-moe": ModelConfig(
        name="qwen3", num_layers=3, head_dim=10, norm_eps=1e-6, moe_layers="every:2", **SIZES, **EXPERTS
    ),
    "lfm2-moe": ModelConfig(
        num_layers=4, attention_layers="2", moe_layers="from:2", router_score="sigmoid", router_norm_eps=1e-6,
        expert_bias=True, **LFM2_SIZES, **EXPERTS,
    ),
}  # fmt: skip


def peer(name: str) -> nn.Module:
    """The same architecture, from its own configuration."""
    model = OURS[name]
    common: dict[str, Any] = {
        "hidden_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 40, "vocab_size": V,
        "num_hidden_layers": model.num_layers, "attn_implementation": "eager", "pad_token_id": None,
    }  # fmt: skip
    experts: dict[str, Any] = {
        "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 16, "experts_implementation": "eager",
        "norm_topk_prob": True,
    }  # fmt: skip
    qwen3: dict[str, Any] = {"head_dim": 10}
    kinds = ["full_attention" if model.is_attention_layer(i) else "conv" for i in range(model.num_layers)]
    yarn = {
        "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32,
    }  # fmt: skip
    with float64():
        if name == "qwen3-yarn":
            return Qwen3ForCausalLM(Qwen3Config(rope_parameters=yarn, **qwen3, **common))
        if name == "qwen3":
            return Qwen3ForCausalLM(Qwen3Config(**qwen3, **common))
        if name == "lfm2":
            return Lfm2ForCausalLM(Lfm2Config(block_auto_adjust_ff_dim=False, layer_types=kinds, **common))
        if name == "qwen3-moe":
            return Qwen3MoeForCausalLM(Qwen3MoeConfig(decoder_sparse_step=2, **qwen3, **common, **experts))
        return Lfm2MoeForCausalLM(Lfm2MoeConfig(num_dense_layers=2, layer_types=kinds, **common, **experts))


NAMES = {
    "qwen3": {
        "embedding": "model.embed_tokens", "final_norm": "model.norm", "head": "lm_head",
        "attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm",
        "attention.qkv.q": "self_attn.q_proj", "attention.qkv.k": "self_attn.k_proj",
        "attention.qkv.v": "self_attn.v_proj", "attention.proj": "self_attn.o_proj",
        "attention.q_norm": "self_attn.q_norm", "attention.k_norm": "self_attn.k_norm",
        "mlp.fc1.gate": "mlp.gate_proj", "mlp.fc1.up": "mlp.up_proj", "mlp.fc2": "mlp.down_proj",
        "mlp.router": "mlp.gate", "mlp.experts.fc1": "mlp.experts.gate_up_proj",
        "mlp.experts.fc2": "mlp.experts.down_proj",
    },
    "lfm2": {
        "embedding": "model.embed_tokens", "final_norm": "model.embedding_norm", "head": "lm_head",
        "attention_norm": "operator_norm", "mlp_norm": "ffn_norm",
        "attention.qkv.q": "self_attn.q_proj", "attention.qkv.k": "self_attn.k_proj",
        "attention.qkv.v": "self_attn.v_proj", "attention.proj": "self_attn.out_proj",
        "attention.q_norm": "self_attn.q_layernorm", "attention.k_norm": "self_attn.k_layernorm",
        "attention.in_proj.b": "conv.in_proj", "attention.in_proj.c": "conv.in_proj",
        "attention.in_proj.x": "conv.in_proj", "attention.conv": "conv.conv",
        "mlp.fc1.gate": "feed_forward.w1", "mlp.fc1.up": "feed_forward.w3", "mlp.fc2": "feed_forward.w2",
        "mlp.router": "feed_forward.gate", "mlp.experts.fc1": "feed_forward.experts.gate_up_proj",
        "mlp.experts.fc2": "feed_forward.experts.down_proj",
    },
}  # fmt: skip


def theirs(name: str, model: ModelConfig, tensors: Mapping[str, Tensor]) -> Tensor:
    """The part of `tensors`, by their names, that is our parameter `name`."""
    match = re.fullmatch(r"(layers\.(\d+)\.)?(.+?)(\.weight)?", name)
    assert match is not None
    prefix = f"model.layers.{match[2]}." if match[1] else ""
    other = NAMES[model.name][match[3]]
    if match[3] == "attention.proj" and not model.is_attention_layer(int(match[2])):
        other = "conv.out_proj"
    weight = ".weight" if match[4] or match[3] == "attention.conv" else ""
    found = tensors[f"{prefix}{other}{weight}"]
    if match[3] == "attention.conv":
        return found.squeeze(1)
    parts = {"attention.in_proj.b": 0, "attention.in_proj.c": 1, "attention.in_proj.x": 2}
    return found if match[3] not in parts else found.chunk(3)[parts[match[3]]]


def ours_like(model: ModelConfig, reference: nn.Module) -> Transformer:
    """Our model with the weights of theirs."""
    ours = MODELS[model.name](model, ParallelState.single()).double()
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            parameter.copy_(theirs(name, model, dict(reference.named_parameters())))
        for i in range(model.num_layers):
            if model.expert_bias and model.is_moe_layer(i):
                bias = torch.linspace(-0.3, 0.3, model.num_experts, dtype=torch.float64).roll(i)
                ours.get_buffer(f"layers.{i}.mlp.router.expert_bias").copy_(bias)
                reference.get_buffer(f"model.layers.{i}.feed_forward.expert_bias").copy_(bias)
    return ours


@pytest.mark.parametrize("name", OURS)
def test_equals_the_model_of_hugging_face(name: str) -> None:
    model, reference = OURS[name], peer(name).double()
    fill(reference)
    ours = ours_like(model, reference)
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
        assert_equal(parameter.grad, theirs(name, model, grads), name)
