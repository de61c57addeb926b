"""The rope_ fields: what they mean, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from megalite.kernels.rope import RopeScaling, rope_tables
from megalite.nn.config import ModelConfig, rope_problems

PLAIN = ModelConfig(hidden_size=64, num_heads=4)


def test_fields_reach_the_tables() -> None:
    config = replace(PLAIN, rope_scaling="yarn", rope_factor=4.0, rope_original_positions=32, rope_beta_slow=2.0)
    assert rope_problems(config) == [] == rope_problems(PLAIN) and PLAIN.rope.kind == "none"
    assert config.rope == RopeScaling(kind="yarn", factor=4.0, original_positions=32, length=128, beta_slow=2.0)
    assert replace(config, rope_length=77).rope.length == 77 and replace(config, rope_length=7).rope.length == 32


@pytest.mark.parametrize("percent", [0.25, 0.5, 1.0])
def test_part_of_a_head_turns(percent: float) -> None:
    config = replace(PLAIN, rope_percent=percent)
    cos, _ = rope_tables(torch.arange(3)[:, None], config.rotary_dim, config.rope_theta)
    assert cos.shape == (3, 1, 16 * percent / 2) and rope_problems(config) == []


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rope_theta": -1.0}, "rope_theta=-1.0 must be finite"),
        ({"head_dim": 7}, "head_dim=7 must be even"),
        ({"rope_percent": 0.3, "head_dim": 10}, "rope_percent=0.3 of a head of 10 features is 3;"),
        ({"rope_percent": 0.0}, "is 0;"),
        ({"rope_percent": 1.5}, "is 24;"),
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
    ],
)
def test_what_cannot_work_is_refused(fields: dict[str, Any], message: str) -> None:
    (problem,) = rope_problems(replace(PLAIN, **fields))
    assert message in problem
