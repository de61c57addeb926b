"""Tiny random models of Hugging Face, one for each family: odd sizes, and every feature of it switched on."""

from __future__ import annotations

import functools
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor

from tests.hugging_face import fill, float64
from tests.models.family_ranks import V, batch

COMMON: dict[str, Any] = {
    "hidden_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 40, "vocab_size": V,
    "num_hidden_layers": 3, "pad_token_id": None, "bos_token_id": 3, "eos_token_id": 5, "initializer_range": 0.03,
    "max_position_embeddings": 4096,
}  # fmt: skip
EXPERTS: dict[str, Any] = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 18}
LLAMA3: dict[str, Any] = {
    "rope_type": "llama3", "rope_theta": 5e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
YARN: dict[str, Any] = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32,
}  # fmt: skip
LFM2: dict[str, Any] = {"layer_types": ["conv", "full_attention", "conv"], "conv_L_cache": 4}
DEEPSEEK: dict[str, Any] = {
    **COMMON, "num_key_value_heads": 4, "kv_lora_rank": 7, "q_lora_rank": 10, "qk_nope_head_dim": 5,
    "qk_rope_head_dim": 4, "v_head_dim": 6, "n_routed_experts": 12, "num_experts_per_tok": 3, "n_group": 4,
    "topk_group": 2, "first_k_dense_replace": 1, "moe_intermediate_size": 18, "n_shared_experts": 2,
    "rms_norm_eps": 1e-4,
}  # fmt: skip

CONFIGS: dict[str, dict[str, Any]] = {
    "gpt2": {
        "n_embd": 24, "n_head": 4, "n_layer": 3, "n_inner": 40, "n_positions": 19, "vocab_size": V, "bos_token_id": 3,
        "eos_token_id": 5, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
    },
    "llama": {**COMMON, "head_dim": 10, "rope_parameters": LLAMA3},
    "mistral": {**COMMON, "head_dim": 10, "sliding_window": 5},
    "qwen3": {**COMMON, "head_dim": 10, "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    "lfm2": {**COMMON, **LFM2, "block_multiple_of": 8},
    "qwen2": {**COMMON, "num_attention_heads": 8, "head_dim": 6},
    "phi3": {**COMMON, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.67},
             "sliding_window": 6},
    "smollm3": {**COMMON, "no_rope_layers": [1, 0, 1], "use_sliding_window": True, "sliding_window": 5},
    "gemma2": {**COMMON, "head_dim": 10, "query_pre_attn_scalar": 7, "sliding_window": 4,
               "attn_logit_softcapping": 3.0, "final_logit_softcapping": 2.0},
    "gemma3_text": {
        **COMMON, "head_dim": 10, "query_pre_attn_scalar": 7, "sliding_window": 4, "final_logit_softcapping": 2.5,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 5e3},
        },
    },
    "gpt_neox": {k: v for k, v in COMMON.items() if k != "num_key_value_heads"} | {
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.67},
    },
    "olmo2": {**COMMON},
    "olmoe": {**COMMON, "num_experts": 6, "num_experts_per_tok": 3, "intermediate_size": 18},
    "mixtral": {**COMMON, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 7},
    "qwen3_moe": {
        **COMMON, **EXPERTS, "head_dim": 10, "mlp_only_layers": [1], "norm_topk_prob": True, "rope_parameters": YARN,
    },
    "lfm2_moe": {**COMMON, **EXPERTS, **LFM2, "num_dense_layers": 1, "routed_scaling_factor": 1.5},
    "gpt_oss": {
        **COMMON, "head_dim": 10, "num_local_experts": 6, "num_experts_per_tok": 3, "intermediate_size": 18,
        "sliding_window": 5, "swiglu_alpha": 1.5, "swiglu_limit": 0.6,
        "rope_parameters": {**YARN, "factor": 32.0, "truncate": False, "original_max_position_embeddings": 24},
    },
    "qwen2_moe": {
        **COMMON, **EXPERTS, "mlp_only_layers": [1], "shared_expert_intermediate_size": 14, "norm_topk_prob": False,
        "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 2,
    },
    "deepseek_v2": {
        **DEEPSEEK, "topk_method": "group_limited_greedy", "routed_scaling_factor": 1.5, "kv_lora_rank": 6,
        "qk_nope_head_dim": 8,
    },
    "deepseek_v3": {
        **DEEPSEEK, "num_mtp_layers": 0,
        "rope_parameters": {**YARN, "factor": 40.0, "mscale": 0.9, "mscale_all_dim": 0.6},
    },
}  # fmt: skip
"""model_type -> its config."""
TIED = ("gpt2", "lfm2", "lfm2_moe", "smollm3", "gemma2", "gemma3_text")
"""Whose defaults tie the embeddings; the others do not."""
FAMILY_IDS = tuple(CONFIGS)


@dataclass(frozen=True, kw_only=True)
class Reference:
    """A model of theirs in float64, and what it says of a batch."""

    folder: Path
    """As it saves itself: `weights`, and `grads`, with the gradients in the places of the weights."""
    logits: Tensor
    """[s, b, vocab]."""
    loss: Tensor


def config_of(family: str, **changes: Any) -> transformers.PreTrainedConfig:
    """The config of a family, with some keys changed."""
    content = CONFIGS[family] | {"attn_implementation": "eager", "experts_implementation": "eager"} | changes
    return transformers.AutoConfig.for_model(family, **content)


def build(family: str, **changes: Any) -> Any:
    """A model with random weights, buffers that are learned included; float64."""
    with float64():
        config = config_of(family, **changes)
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float64)
    model = model.double()
    fill(model)
    for name, buffer in model.named_buffers():
        if name.endswith(("expert_bias", "correction_bias")):
            buffer.copy_(torch.linspace(-0.3, 0.3, buffer.numel(), dtype=torch.float64).roll(len(name)))
    return model.eval()


@functools.cache
def reference(family: str, *, tied: bool | None = None, **changes: Any) -> Reference:
    """Built once a session. changes: of the config."""
    tied = family in TIED if tied is None else tied
    folder = Path(tempfile.mkdtemp(prefix="megalite_families_"))
    model = build(family, tie_word_embeddings=tied, **changes)
    model.save_pretrained(folder / "weights")
    with float64():
        logits = model(input_ids=batch().tokens.t()).logits
        loss = F.cross_entropy(logits.flatten(0, 1), batch().labels.t().flatten(), reduction="sum")
        loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.grad if parameter.grad is not None else torch.zeros_like(parameter))
    model.save_pretrained(folder / "grads")
    return Reference(folder=folder, logits=logits.detach().transpose(0, 1), loss=loss.detach())
