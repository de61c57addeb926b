"""Settings of mixture-of-experts families that `families` does not have, against Hugging Face; what they refuse."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from megalite.config import load_config
from megalite.models import FAMILIES
from megalite.models.hf.canonical import differences
from megalite.models.hf.fields import Refused
from tests.hugging_face import assert_equal
from tests.models.families import reference
from tests.models.family_ranks import assert_gradients, batch, one_rank, read

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "queries without a latent, halves of a head turned, one group": (
        "deepseek_v3",
        {"q_lora_rank": None, "rope_interleave": False, "norm_topk_prob": False, "n_group": 1, "topk_group": 1},
    ),
    "no groups": ("deepseek_v2", {"topk_method": "greedy", "q_lora_rank": None, "first_k_dense_replace": 0}),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_variants(name: str) -> None:
    family, changes = VARIANTS[name]
    there = reference(family, **changes)
    network = one_rank(there.folder / "weights")
    assert_equal(network.logits(batch()), there.logits, "logits")
    loss = network(None, batch())
    assert_equal(loss, there.loss, "loss")
    loss.backward()
    assert_gradients(network, read(there.folder / "grads")[1], network.mpu)


def content(family: str) -> dict[str, Any]:
    return json.loads((reference(family).folder / "weights" / "config.json").read_text())


@pytest.mark.parametrize(
    ("family", "key", "value"),
    [
        ("gpt_oss", "attention_bias", False),
        ("gpt_oss", "hidden_act", "gelu"),
        ("qwen2_moe", "qkv_bias", False),
        ("deepseek_v2", "topk_method", "noaux_tc"),
        ("deepseek_v2", "norm_topk_prob", True),
        ("deepseek_v2", "mlp_bias", True),
        ("deepseek_v3", "topk_method", "greedy"),
        ("deepseek_v3", "scoring_func", "softmax"),
        ("deepseek_v3", "n_shared_experts", None),
        ("deepseek_v3", "moe_layer_freq", 2),
        ("deepseek_v3", "attention_bias", True),
        ("deepseek_v3", "index_topk", 64),
    ],
)
def test_what_is_not_built_is_refused_by_name(family: str, key: str, value: Any) -> None:
    with pytest.raises(Refused, match=f"{key}={value!r}"):
        FAMILIES[family].read(content(family) | {key: value})


def test_older_files() -> None:
    """Keys of the published files, and what they leave out."""
    old = content("deepseek_v3") | {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1}
    assert FAMILIES["deepseek_v3"].read(old) == FAMILIES["deepseek_v3"].read(content("deepseek_v3"))
    bare = {k: v for k, v in content("gpt_oss").items() if k not in ("rope_parameters", "layer_types", "swiglu_limit")}
    model = FAMILIES["gpt_oss"].read(bare)
    assert (model.rope_scaling, model.rope_factor, model.rope_truncate, model.rope_theta) == ("yarn", 32, False, 15e4)
    assert [model.window_of(layer) for layer in range(3)] == [5, 0, 5] and model.swiglu_limit == 7.0


@pytest.mark.parametrize(
    ("family", "changes", "said"),
    [
        ("deepseek_v3", {"window": 8}, "model.window=8"),
        ("deepseek_v3", {"group_top_k": 1}, "model.group_top_k=1"),
        ("deepseek_v3", {"shared_ffn_hidden_size": 20}, "model.shared_ffn_hidden_size=20"),
        ("deepseek_v2", {"rope_interleaved": False}, "model.rope_interleaved=False"),
        ("qwen2_moe", {"shared_expert_gate": False}, "model.shared_expert_gate=False"),
        ("gpt_oss", {"attention_sinks": False}, "model.attention_sinks=False"),
    ],
)
def test_what_a_file_cannot_say_is_not_exported(family: str, changes: dict[str, Any], said: str) -> None:
    model = dataclasses.replace(FAMILIES[family].read(content(family)), **changes)
    with pytest.raises(Refused, match=f"{said} cannot be said"):
        FAMILIES[family].write(model)


PUBLISHED: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt_oss_20b": ("gpt_oss", {"num_hidden_layers": 24, "num_local_experts": 32}),
    "qwen2_57b_a14b": (
        "qwen2_moe",
        {
            "num_hidden_layers": 28, "hidden_size": 3584, "num_attention_heads": 28, "num_key_value_heads": 4,
            "num_experts": 64, "num_experts_per_tok": 8, "moe_intermediate_size": 2560,
            "shared_expert_intermediate_size": 20480, "rope_theta": 1e6,
        },
    ),
    "deepseek_v2_lite": (
        "deepseek_v2",
        {
            "num_hidden_layers": 27, "hidden_size": 2048, "num_attention_heads": 16, "intermediate_size": 10944,
            "moe_intermediate_size": 1408, "q_lora_rank": None, "num_experts_per_tok": 6, "first_k_dense_replace": 1,
        },
    ),
    "deepseek_v3": ("deepseek_v3", {}),
}  # fmt: skip


@pytest.mark.parametrize("preset", PUBLISHED)
def test_presets_are_the_published_models(preset: str) -> None:
    """Without yarn for the DeepSeek models, which came after their pre-training."""
    family, sizes = PUBLISHED[preset]
    theirs = AutoConfig.for_model(family, **sizes).to_dict()
    model = load_config(["--config", str(Path(__file__).parents[2] / "configs" / f"{preset}.yaml")]).model
    assert differences(FAMILIES[family].read(theirs), model) == []
