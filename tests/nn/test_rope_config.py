"""The rope_ fields: what they mean, and what is refused."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import GPTNeoXConfig
from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXRotaryEmbedding, apply_rotary_pos_emb

from megalite.kernels.rope import RopeScaling, apply_rope, rope_tables
from megalite.nn.config import ModelConfig, rope_problems
from tests.hugging_face import float64

PLAIN = ModelConfig(hidden_size=64, num_heads=4)
YARN = {"rope_scaling": "yarn", "rope_factor": 4.0, "rope_original_positions": 8}


def test_fields_reach_the_tables() -> None:
    config = replace(PLAIN, rope_scaling="yarn", rope_factor=4.0, rope_original_positions=32, rope_beta_slow=2.0)
    assert rope_problems(config) == [] == rope_problems(PLAIN) and PLAIN.rope.kind == "none"
    assert config.rope == RopeScaling(kind="yarn", factor=4.0, original_positions=32, length=128, beta_slow=2.0)
    assert replace(config, rope_length=77).rope.length == 77 and replace(config, rope_length=7).rope.length == 32


@pytest.mark.parametrize("percent", [0.25, 0.5, 1.0])
def test_part_of_a_head_turns_as_in_gpt_neox(percent: float) -> None:
    config = replace(PLAIN, rope_percent=percent, rope_theta=700.0)
    assert rope_problems(config) == []
    positions = torch.tensor([[0, 40], [1, 7], [2, 511]])
    generator = torch.Generator().manual_seed(3)
    q, k = torch.randn(2, 3, 2, 4, 16, generator=generator, dtype=torch.float64).unbind(0)
    tables = rope_tables(positions, config.rotary_dim, config.rope_theta, torch.float64)
    parameters = {"rope_type": "default", "rope_theta": 700.0, "partial_rotary_factor": percent}
    with float64():
        rotary = GPTNeoXRotaryEmbedding(
            GPTNeoXConfig(hidden_size=64, num_attention_heads=4, rope_parameters=parameters)
        )
        theirs = apply_rotary_pos_emb(
            q.permute(1, 2, 0, 3), k.permute(1, 2, 0, 3), *rotary(q, positions.t().contiguous())
        )
    for ours, wanted in zip((q, k), theirs, strict=True):
        torch.testing.assert_close(apply_rope(ours, *tables), wanted.permute(2, 0, 1, 3), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rope_theta": -1.0}, "rope_theta=-1.0 must be finite"),
        ({"head_dim": 7}, "head_dim=7 must be even"),
        ({"rope_percent": 0.3, "head_dim": 10}, "rope_percent=0.3 of a head of 10 features is 3;"),
        ({"rope_percent": 0.0}, "rope_percent=0.0 must be above 0, and at most 1"),
        ({"rope_percent": 1.5}, "rope_percent=1.5 must be above 0, and at most 1"),
        ({"rope_percent": math.nan}, "rope_percent=nan must be above 0"),
        ({"rope_percent": 0.05}, "is 0;"),
        ({"rope_factor": 2.0}, "rope_factor=2.0 needs rope_scaling, one of linear, ntk, yarn, llama3"),
        ({"rope_original_positions": 8}, "rope_original_positions=8 needs rope_scaling"),
        ({"rope_scaling": "linear", "rope_factor": 0.5}, "rope_factor=0.5 must be finite and at least 1"),
        ({"rope_scaling": "llama3", "rope_factor": 2.0}, "set rope_original_positions"),
        (
            {"rope_scaling": "llama3", "rope_original_positions": 8, "rope_low_freq_factor": 4.0},
            "rope_low_freq_factor=4.0 must be above 0 and below rope_high_freq_factor=4.0",
        ),
        (
            {"rope_scaling": "yarn", "rope_original_positions": 8, "rope_beta_slow": 40.0},
            "rope_beta_slow=40.0 must be above 0 and below rope_beta_fast=32.0",
        ),
        (
            {"rope_scaling": "llama3", "rope_original_positions": 8, "rope_low_freq_factor": math.nan},
            "rope_low_freq_factor=nan must be above 0",
        ),
        (
            {"rope_scaling": "llama3", "rope_original_positions": 8, "rope_high_freq_factor": math.inf},
            "rope_high_freq_factor=inf, which must be finite",
        ),
        ({"rope_scaling": "ntk", "rope_original_positions": 8, "rope_length": -3}, "rope_length=-3 must be at least 1"),
        ({**YARN, "rope_attention_factor": 0.0}, "rope_attention_factor=0.0 must be finite and above 0"),
        ({**YARN, "rope_attention_factor": math.nan}, "rope_attention_factor=nan must be finite"),
        ({**YARN, "rope_mscale": math.nan}, "rope_mscale=nan must be finite"),
        ({**YARN, "rope_mscale_all_dim": -7.0}, "rope_mscale_all_dim=-7.0 must be finite and at least 0"),
        ({**YARN, "rope_theta": 0.5}, "rope_theta=0.5 must be above 1 under yarn"),
    ],
)
def test_what_cannot_work_is_refused(fields: dict[str, Any], message: str) -> None:
    (problem,) = rope_problems(replace(PLAIN, **fields))
    assert message in problem
