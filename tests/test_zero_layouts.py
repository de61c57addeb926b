"""The promise under ZeRO: what ranks keep of optimizer state, gradients and parameters changes no number."""

from __future__ import annotations

from pathlib import Path

import pytest

from megalite.testing.world import World
from tests.test_layouts import prove

# The rest of the table is in FULL.
COVER = [
    ("gpt2", "dp2+zero2"),
    ("gpt2", "dp4+zero3+mbs1"),
    ("moe-bias", "ep2+zero2"),
    ("llama", "tp2+sp+dp2+zero1"),
    ("tied-llama", "tp2+sp+dp2+zero1"),
    ("tied-llama", "pp2+dp2+zero1"),
    ("llama", "pp2:zb_h1+dp2+zero1"),
    ("llama", "pp2:zb_h1+dp2+zero2"),
    ("tied-llama", "pp2:zb_v+dp2+zero1"),
    ("tied-llama", "pp2:zb_v+dp2+zero3"),
    ("llama", "pp2:dualpipe+dp2+zero1+mbs1"),
    ("gpt2", "dp2+zero3+recompute:full"),
    ("llama", "cp2+dp2+zero1"),
    ("moe", "cp2+ep2+dp2+zero3"),
    ("tied-llama", "tp2+sp+dp2+zero2+recompute:selective"),
    ("gpt2", "pp2:zb_h1+dp2+zero3+recompute:block:1"),
    ("moe", "ep2+dp4+zero2:shard2+mbs1"),
]
FULL = [
    ("llama", "dp2+zero1"),
    ("moe-gpt2", "tp2+sp+ep2+etp2+dp4+zero3"),
    ("llama", "dp2+zero3"),
    ("gpt2", "dp4+zero1+mbs1"),
    ("llama", "dp4+zero2+mbs1"),
    ("moe", "ep2+dp4+zero1+mbs1"),
    ("moe", "ep2+dp4+zero3"),
    ("gpt2", "tp2+sp+dp2+zero2"),
    ("llama", "tp4+sp+dp2+zero3"),
    ("gpt2", "pp2+dp2+zero2"),
    ("tied-llama", "pp2+dp2+zero3"),
    ("tied-llama", "pp3+dp2+zero1+mbs1"),
    ("gpt2", "pp2v2:interleaved+dp2+zero1+mbs1"),
    ("gpt2", "pp2:zb_h1+dp2+zero3"),
    ("gpt2", "pp2:zb_v+dp2+zero2"),
    ("moe-bias", "ep2+pp2:zb_v+dp4+zero3"),
    ("llama", "pp2:dualpipe+dp2+zero3+mbs1"),
    ("llama", "dp2+zero1+recompute:full"),
    ("tied-llama", "dp2+zero2+recompute:full"),
    ("moe", "ep2+dp4+zero3+recompute:full"),
    ("llama", "dp2+zero3+recompute:every:2"),
    ("lfm2", "cp2+tp2+sp+zero3"),
    *[("llama", f"cp2:ulysses+zero{level}") for level in (1, 2, 3)],
    ("llama", "dp4+zero1:shard2+mbs1"),
    ("gpt2", "dp4+zero3:shard2+mbs1"),
    ("tied-llama", "pp2:zb_v+dp4+zero3:shard2+mbs1"),
    ("llama", "cp2+dp2+zero3:shard2"),
    ("moe-gpt2", "tp2+sp+ep2+etp2+dp4+zero3:shard2+mbs1"),
    ("llama", "pp2:zb_v+dp4+zero2:shard2+mbs1"),
    ("gpt2", "dp2+zero2:shard1"),
    ("moe-bias", "ep4+dp4+zero3:shard2+mbs1"),
]
ROWS = [*COVER, *(pytest.param(*row, marks=pytest.mark.full) for row in FULL)]


@pytest.mark.parametrize(("model", "layout"), ROWS, ids=[f"{m}-{lay}" for m, lay in (*COVER, *FULL)])
def test_zero_is_a_deployment_detail(model: str, layout: str, tokens: str, references: Path, world: World) -> None:
    difference = prove(model, layout, tokens, references, world)
    assert difference.passed, difference.first_diff
    assert max(difference.loss, difference.grads, difference.grad_norm, difference.weights) < 1e-10
