"""Presets have the parameters of the published models; built without memory."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from megalite.config import load_config
from megalite.models import MODELS
from megalite.mpu import ParallelState
from megalite.nn.config import ModelConfig
from megalite.parallel.shard import shard_of

CONFIGS = Path(__file__).parents[2] / "configs"


def total(model: ModelConfig) -> int:
    """Elements of the global model, tied ones once."""
    with torch.device("meta"):
        network = MODELS[model.name](model, ParallelState.single())
    for parameter in network.parameters():
        assert math.prod(shard_of(parameter).shape) == parameter.numel()
    return sum(parameter.numel() for parameter in network.parameters())


@pytest.mark.parametrize(
    ("preset", "parameters"),
    [
        ("mixtral_8x7b", 46_702_792_704),
        ("qwen3_30b_a3b", 30_532_122_624),
        ("lfm2_8b_a1b", 8_339_929_856),
        ("gpt_oss_20b", 20_914_757_184),
        ("qwen2_57b_a14b", 57_408_658_944),
        ("deepseek_v2_lite", 15_706_484_224),
        ("deepseek_v3", 671_026_404_352),
        ("llama3_8b", 8_030_261_248),
    ],
)
def test_presets_have_the_published_number_of_parameters(preset: str, parameters: int) -> None:
    assert total(load_config(["--config", str(CONFIGS / f"{preset}.yaml")]).model) == parameters


@pytest.mark.parametrize(
    ("hidden", "heads", "layers", "attention", "ffn", "parameters"),
    [
        (1024, 16, 16, "2,5,8,10,12,14", 4608, 354_483_968),
        (2048, 32, 16, "2,5,8,10,12,14", 8192, 1_170_340_608),
    ],
    ids=["350M", "1.2B"],
)
def test_dense_lfm2(hidden: int, heads: int, layers: int, attention: str, ffn: int, parameters: int) -> None:
    model = ModelConfig(
        name="lfm2", num_layers=layers, hidden_size=hidden, num_heads=heads, num_kv_heads=8, ffn_hidden_size=ffn,
        attention_layers=attention, vocab_size=65536, tie_embeddings=True,
    )  # fmt: skip
    assert total(model) == parameters
