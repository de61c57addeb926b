"""Mixture-of-experts families over layouts: loss, gradients, norm and stepped weights equal one rank's."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from megalite.layout import parse_layout
from megalite.nn.config import ModelConfig
from megalite.testing.layouts import prove_layouts
from megalite.testing.world import World
from tests.tiny import VOCAB, config_for

GPT_OSS = ModelConfig(
    name="gpt_oss", num_layers=2, hidden_size=24, num_heads=4, num_kv_heads=2, head_dim=10, vocab_size=VOCAB, window=9,
    window_layers="but_every:2", attention_sinks=True, num_experts=4, top_k=2, expert_ffn_hidden_size=14,
    router_bias=True, swiglu_limit=0.8, aux_loss="global", aux_loss_coeff=0.05, init_std=0.2,
)  # fmt: skip
QWEN2_MOE = ModelConfig(
    name="qwen2_moe", num_layers=3, hidden_size=24, num_heads=4, num_kv_heads=2, ffn_hidden_size=32, vocab_size=VOCAB,
    moe_layers="from:1", num_experts=6, top_k=2, expert_ffn_hidden_size=14, router_normalize=False,
    shared_ffn_hidden_size=18, shared_expert_gate=True, aux_loss_coeff=0.05, tie_embeddings=True, init_std=0.2,
)  # fmt: skip
DEEPSEEK = ModelConfig(
    name="deepseek", num_layers=3, hidden_size=24, num_heads=4, ffn_hidden_size=32, vocab_size=VOCAB, kv_lora_rank=7,
    q_lora_rank=6, qk_nope_head_dim=5, qk_rope_head_dim=4, v_head_dim=6, rope_interleaved=True, num_experts=8, top_k=3,
    num_expert_groups=4, top_k_groups=2, group_top_k=2, moe_layers="from:1", expert_ffn_hidden_size=14,
    router_score="sigmoid", router_scale=2.5, expert_bias=True, expert_bias_rate=0.05, shared_ffn_hidden_size=28,
    aux_loss_coeff=0.05, init_std=0.2,
)  # fmt: skip
DEEPSEEK_AHEAD = dataclasses.replace(DEEPSEEK, num_layers=2, mtp_layers=1)
MODELS = {"gpt-oss": GPT_OSS, "qwen2-moe": QWEN2_MOE, "deepseek": DEEPSEEK, "deepseek-ahead": DEEPSEEK_AHEAD}

COVER = [
    ("gpt-oss", "tp2+sp+ep2"),
    ("gpt-oss", "cp2+etp2"),
    ("deepseek", "tp2+sp+ep2"),
    ("deepseek", "cp2+pp2:zb_h1"),
]
FULL = [
    ("gpt-oss", "tp2"),
    ("gpt-oss", "tp2+etp2+recompute:full"),
    ("gpt-oss", "pp2+ep2"),
    ("gpt-oss", "cp2:ulysses"),
    ("qwen2-moe", "tp2+ep2"),
    ("qwen2-moe", "tp2+sp"),
    ("qwen2-moe", "cp2+ep2"),
    ("qwen2-moe", "pp2:zb_h1"),
    ("deepseek", "tp2+etp2+recompute:full"),
    ("deepseek", "tp4+sp+zero3"),
    ("deepseek", "cp2:ulysses"),
    ("deepseek", "cp2:all_gather+tp2"),
    ("deepseek-ahead", "tp2+sp+pp2+ep2"),
    ("deepseek-ahead", "tp2+cp2"),
]
ROWS = [*COVER, *(pytest.param(*row, marks=pytest.mark.full) for row in FULL)]


@pytest.mark.parametrize(("model", "layout"), ROWS, ids=[f"{m}-{lay}" for m, lay in (*COVER, *FULL)])
def test_layout_is_a_deployment_detail(model: str, layout: str, tokens: str, references: Path, world: World) -> None:
    """Two steps of four rows each: the second one sees what the first has balanced."""
    config = config_for("llama", tokens, references, global_batch_size=4, micro_batch_size=1)
    config = dataclasses.replace(config, model=MODELS[model])
    (difference,) = prove_layouts(config, [parse_layout(layout)], world, references, timeout=120.0)
    assert difference.passed, difference.first_diff
    assert max(difference.loss, difference.grads, difference.grad_norm, difference.weights) < 1e-10
