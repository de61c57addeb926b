"""Architectures with parts of their own over layouts: loss, gradients, norm and stepped weights equal one rank's."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from megalite.layout import parse_layout
from megalite.nn.config import ModelConfig
from megalite.testing.layouts import prove_layouts
from megalite.testing.world import World
from tests.tiny import VOCAB, config_for

QWEN3 = ModelConfig(
    name="qwen3", num_layers=4, hidden_size=24, num_heads=4, num_kv_heads=2, head_dim=10, ffn_hidden_size=32,
    vocab_size=VOCAB, init_std=0.2,
)  # fmt: skip
LFM2 = ModelConfig(
    name="lfm2", num_layers=5, hidden_size=24, num_heads=4, num_kv_heads=2, ffn_hidden_size=32, vocab_size=VOCAB,
    attention_layers="2,4", tie_embeddings=True, init_std=0.2, hidden_dropout=0.1,
)  # fmt: skip
QWEN3_MOE = dataclasses.replace(
    QWEN3, num_experts=8, top_k=3, expert_ffn_hidden_size=16, moe_layers="every:2", aux_loss="global",
    aux_loss_coeff=0.1, router_z_loss=0.01,
)  # fmt: skip
LFM2_MOE = dataclasses.replace(
    LFM2, num_experts=8, top_k=2, expert_ffn_hidden_size=16, moe_layers="from:2", router_score="sigmoid",
    router_norm_eps=1e-6, aux_loss="none", expert_bias=True, expert_bias_rate=0.02,
)  # fmt: skip
GEMMA2 = dataclasses.replace(
    QWEN3, name="gemma2", tie_embeddings=True, window=9, window_layers="but_every:2", attention_softcap=3.0,
    logit_softcap=2.0, hidden_dropout=0.1, z_loss=1e-3,
)  # fmt: skip
GEMMA3 = dataclasses.replace(
    GEMMA2, name="gemma3", attention_softcap=0.0, logit_softcap=0.0, rope_local_theta=100.0, rope_layers="from:1"
)
OLMO2 = dataclasses.replace(QWEN3, name="olmo2", head_dim=6, attention_bias=True)
NEOX = dataclasses.replace(
    QWEN3, name="gpt_neox", num_kv_heads=4, head_dim=6, rope_percent=0.34, parallel_residual=True, hidden_dropout=0.1
)
MODELS = {
    "qwen3": QWEN3, "lfm2": LFM2, "qwen3-moe": QWEN3_MOE, "lfm2-moe": LFM2_MOE, "gemma2": GEMMA2,
    "gemma3": GEMMA3, "olmo2": OLMO2, "gpt_neox": NEOX,
}  # fmt: skip

COVER = [
    ("olmo2", "tp2+sp+pp2:zb_h1"),
    ("qwen3", "tp2+pp2:zb_h1+dp2"),
    ("lfm2", "tp2+pp2v2:zb_v"),
    ("qwen3-moe", "pp2:zb_h1+ep2"),
    ("lfm2-moe", "tp2+sp+ep2+pp2:zb_h1+recompute:full"),
    ("gemma2", "tp2+sp+pp2:zb_h1"),
    ("gemma3", "cp2+pp2+recompute:full"),
    ("gpt_neox", "tp2+sp+pp2v2:zb_v"),
]
FULL = [
    ("lfm2", "tp2+sp+pp2:zb_h1"),
    ("qwen3-moe", "tp2+sp+ep2"),
    ("lfm2", "pp2+dp2+mbs1+recompute:full"),
    ("olmo2", "tp4+recompute:full"),
    ("qwen3", "tp2"),
    ("qwen3", "tp4+sp+recompute:full"),
    ("lfm2", "tp2+mbs4"),
    ("lfm2", "tp4+sp"),
    ("lfm2-moe", "tp2+ep2+mbs1"),
    ("gemma2", "cp2+tp2"),
    ("gemma2", "pp2+recompute:full"),
    ("gemma3", "tp2+sp"),
    ("olmo2", "cp2:ulysses+tp2+sp"),
    ("gpt_neox", "cp2+dp2"),
    ("gpt_neox", "tp2+recompute:full"),
]
ROWS = [*COVER, *(pytest.param(*row, marks=pytest.mark.full) for row in FULL)]


@pytest.mark.parametrize(("model", "layout"), ROWS, ids=[f"{m}-{lay}" for m, lay in (*COVER, *FULL)])
def test_layout_is_a_deployment_detail(model: str, layout: str, tokens: str, references: Path, world: World) -> None:
    config = dataclasses.replace(config_for("llama", tokens, references), model=MODELS[model])
    (difference,) = prove_layouts(config, [parse_layout(layout)], world, references, timeout=120.0)
    assert difference.passed, difference.first_diff
    assert max(difference.loss, difference.grads, difference.grad_norm, difference.weights) < 1e-10
