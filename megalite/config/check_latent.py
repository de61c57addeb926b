"""The rules of multi-head latent attention."""

from __future__ import annotations

from megalite.models import MODELS
from megalite.nn.config import ModelConfig
from megalite.nn.latent_attention import LatentAttention

_FIELDS = ("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "rope_interleaved")


def latent_problems(model: ModelConfig) -> list[str]:
    """Whether the widths of latents and heads are those of an architecture that has them."""
    if not issubclass(MODELS[model.name].layer_cls.attention_cls, LatentAttention):
        return [
            f"model.{name}={getattr(model, name)}: {model.name} has no latent attention; leave it out, or use"
            " name=deepseek"
            for name in _FIELDS
            if getattr(model, name) != getattr(ModelConfig, name)
        ]
    found = [
        f"model.{name}={getattr(model, name)} must be at least 1: {model.name} has latent attention"
        for name in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        if getattr(model, name) < 1
    ]
    if model.q_lora_rank < 0:
        found.append(f"model.q_lora_rank={model.q_lora_rank} must be at least 1, or 0 for queries without a latent")
    if found:
        return found
    if model.kv_heads != model.num_heads:
        found.append(
            f"model.num_kv_heads={model.kv_heads}: each of num_heads={model.num_heads} makes its own keys and values"
            " from the latent; leave it out"
        )
    if model.head_dim not in (None, model.head_size):
        found.append(
            f"model.head_dim={model.head_dim}: a head is qk_nope_head_dim + qk_rope_head_dim = {model.head_size} wide;"
            " leave it out"
        )
    if model.rope_percent != 1:
        found.append(f"model.rope_percent={model.rope_percent}: qk_rope_head_dim says what is turned; leave it out")
    return found
