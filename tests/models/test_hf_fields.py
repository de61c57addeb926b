"""What a config.json means where transformers has its own mind, and what ours must say to mean the same."""

from __future__ import annotations

from typing import Any

import pytest

from megalite.models import FAMILIES
from megalite.models.hf.family import family_of
from megalite.models.hf.fields import Refused
from megalite.nn.config import ModelConfig

SIZES: dict[str, Any] = {
    "vocab_size": 37, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 6, "intermediate_size": 40, "max_position_embeddings": 64,
}  # fmt: skip
OURS = ModelConfig(num_layers=2, hidden_size=24, num_heads=4, num_kv_heads=2, head_dim=6, ffn_hidden_size=40)


def read(model_type: str, **content: Any) -> ModelConfig:
    return FAMILIES[model_type].read(SIZES | {"model_type": model_type} | content)


def write(**fields: Any) -> dict[str, Any]:
    model = ModelConfig(**{**{name: getattr(OURS, name) for name in OURS.__dataclass_fields__}, **fields})
    return family_of(FAMILIES, model).write(model)


@pytest.mark.parametrize("name", ["gemma2", "gemma3"])
def test_no_cap_is_null(name: str) -> None:
    content = write(
        name=name, tie_embeddings=True, window=5, window_layers="0", rope_local_theta=1e4 * (name > "gemma2")
    )
    assert content["attn_logit_softcapping"] is None and content["final_logit_softcapping"] is None


def test_scores_of_gemma_3_are_not_capped() -> None:
    with pytest.raises(Refused, match="attn_logit_softcapping=50"):
        read("gemma3_text", attn_logit_softcapping=50.0)


@pytest.mark.parametrize("name", ["gemma2", "gemma3"])
def test_no_window_in_any_layer(name: str) -> None:
    content = write(name=name, tie_embeddings=True)
    assert content["sliding_window"] == 4096 and set(content["layer_types"]) == {"full_attention"}


def test_a_second_base_without_a_window_is_none() -> None:
    model = read("gemma3_text", layer_types=["full_attention"] * 2, rope_local_base_freq=5000.0)
    assert model.rope_local_theta == 0 and model.window == 0


def test_only_some_families_turn_a_part_of_a_head() -> None:
    with pytest.raises(Refused, match=r"partial_rotary_factor=0\.5"):
        read("llama", partial_rotary_factor=0.5)
    assert read("phi3", partial_rotary_factor=0.34).rope_percent == 0.34
    assert write(rope_percent=0.34)["model_type"] == "phi3"


def test_rope_scaling_goes_before_rope_parameters() -> None:
    both = {
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, "rope_theta": 1e4,
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    }  # fmt: skip
    model = read("llama", **both)
    assert (model.rope_scaling, model.rope_factor, model.rope_original_positions) == ("yarn", 4.0, 32)


def test_the_outer_original_length_goes_before_the_inner_one() -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    assert read("llama", rope_scaling=scaling, original_max_position_embeddings=16).rope_original_positions == 16
