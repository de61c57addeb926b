"""Models that have the same logits from the same weights, told by their configurations."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from megalite.nn.config import ModelConfig, MoEConfig

TRAINING_ONLY = (
    "init_std", "hidden_dropout", "attention_dropout", "label_smoothing", "z_loss", "aux_loss", "aux_loss_coeff",
    "router_z_loss", "router_jitter", "expert_bias_rate",
)  # fmt: skip
"""Fields that change nothing of the logits: a config.json need not say them, and a run may set them as it likes."""
_PLAIN = ModelConfig()
MAY_DIFFER = (
    *TRAINING_ONLY, "from_hf", "capacity_factor", "drop_policy", "pad_to_capacity", "rope_theta", "rope_scaling",
    "rope_factor", "rope_original_positions", "rope_length", "rope_low_freq_factor", "rope_high_freq_factor",
    "rope_beta_fast", "rope_beta_slow", "rope_mscale", "rope_mscale_all_dim", "rope_attention_factor", "rope_truncate",
)  # fmt: skip
"""Fields that a run may set otherwise than the model that it goes on from: the weights fit all the same."""


def canonical(model: ModelConfig) -> ModelConfig:
    """An equal model with every default written out, patterns as numbers, and what has no effect as it is by default.

    Two models with the same logits from the same weights are then equal.
    """
    values = _defaults((*TRAINING_ONLY, "from_hf")) | {
        "num_kv_heads": model.kv_heads, "head_dim": model.head_size, "ffn_hidden_size": model.ffn_size,
        "attention_layers": _numbers(model, model.is_attention_layer), "attention_scale": model.score_scale,
    }  # fmt: skip
    values |= _experts(model) | _windows(model) | _positions(model)
    if model.name != "lfm2":
        values |= _defaults(["conv_kernel_size"])
    return replace(model, **values)


def differences(a: ModelConfig, b: ModelConfig) -> list[str]:
    """The fields by which they differ."""
    a, b = canonical(a), canonical(b)
    return [name for name in _names(ModelConfig) if getattr(a, name) != getattr(b, name)]


def contradictions(found: ModelConfig, model: ModelConfig) -> list[str]:
    """The fields that `model` has otherwise than the one it goes on from, and may not."""
    return [
        name for name in _names(ModelConfig) if name not in MAY_DIFFER and getattr(found, name) != getattr(model, name)
    ]


def _experts(model: ModelConfig) -> dict[str, Any]:
    if not model.num_experts:
        return _defaults(_names(MoEConfig))
    found: dict[str, Any] = {
        "moe_layers": _numbers(model, model.is_moe_layer), "expert_ffn_hidden_size": model.expert_ffn_size,
    }  # fmt: skip
    if model.router_score != "sigmoid" or not model.router_normalize:
        found |= _defaults(["router_norm_eps"])
    if model.num_expert_groups > 1:
        found["group_top_k"] = model.group_top_k or model.top_k // model.top_k_groups
    if all(model.is_moe_layer(layer) for layer in range(model.num_layers)):
        found["ffn_hidden_size"] = model.expert_ffn_size  # there are no dense layers
    return found


def _windows(model: ModelConfig) -> dict[str, Any]:
    windows = _numbers(model, lambda layer: bool(model.window_of(layer)))
    return {"window_layers": windows} if windows else _defaults(["window", "window_layers"])


def _positions(model: ModelConfig) -> dict[str, Any]:
    """Rotary ones, or learned ones."""
    names = [name for name in _names(ModelConfig) if name.startswith("rope_") and name != "rope_layers"]
    if model.name == "gpt2":
        return _defaults([*names, "rope_layers"])
    found = _defaults(["max_positions"]) | {"rope_layers": _numbers(model, model.turns)}
    local = [] if _numbers(model, lambda layer: bool(model.window_of(layer))) else ["rope_local_theta"]
    found |= _defaults(local)
    if model.rope_scaling in ("none", "linear"):
        used = {
            "rope_theta", "rope_percent", "rope_scaling", "rope_factor", "rope_interleaved", "rope_local_theta",
        }  # fmt: skip
        return found | _defaults([name for name in names if name not in used])
    if model.rope_scaling == "ntk":
        found["rope_length"] = model.rope.length
    if not model.rope_mscale or not model.rope_mscale_all_dim:  # a lone one means nothing
        found |= _defaults(["rope_mscale", "rope_mscale_all_dim"])
    return found


def _names(config: type) -> list[str]:
    return [field.name for field in dataclasses.fields(config)]


def _defaults(names: list[str] | tuple[str, ...]) -> dict[str, Any]:
    return {name: getattr(_PLAIN, name) for name in names}


def _numbers(model: ModelConfig, holds: Callable[[int], bool]) -> str:
    return ",".join(str(layer) for layer in range(model.num_layers) if holds(layer))
