"""The promise for mixtures of experts: expert parallelism beside every other axis gives one rank's run."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from megalite.grid import ParallelConfig
from megalite.layout import parse_layout
from megalite.testing.layouts import prove_layouts
from megalite.testing.world import World
from tests.test_layouts import prove
from tests.tiny import config_for

# Every axis, every kind of routing and balancing; the rest of the table is in FULL.
COVER = [
    ("moe", "ep2+etp2+tp2+dp2"),
    ("moe", "ep2+pp2v2:interleaved"),
    ("moe-bias", "ep4+mbs1"),
    ("moe-bias", "ep2+pp2:zb_v"),
    ("moe-bias", "ep2+pp2:dualpipe+mbs1"),
    ("moe-capacity", "ep2+tp2+sp+mbs4"),
    ("moe-exact", "ep4+mbs1+recompute:full"),
    ("moe-micro-batch", "ep2+tp2+sp"),
    ("moe-gpt2", "pp2:zb_h1+tp2+etp2"),
]
FULL = [
    ("moe", "tp2+sp+etp2+ep2+dp2+recompute:full"),
    ("moe-choice", "ep4+tp2+sp+mbs1"),
    ("moe-sinkhorn", "ep2+tp4+sp"),
    ("moe", "ep2"),
    ("moe", "ep4+tp2"),
    ("moe", "ep2+tp2+sp"),
    ("moe", "ep2+pp2"),
    ("moe", "ep2+dp4+mbs1"),
    ("moe", "ep4+tp4+mbs4+recompute:full"),
    ("moe", "ep2+recompute:every:2"),
    ("moe-bias", "ep2+pp2:zb_v+recompute:selective:mlp,norm"),
    ("moe-bias", "ep2+tp2+pp2:zb_h1"),
    ("moe-bias", "ep8+tp2+sp+mbs1"),
    ("moe-bias", "tp2+etp2"),
    ("moe-bias", "ep2+dp2+recompute:full"),
    ("moe-capacity", "ep4+mbs1"),
    ("moe-capacity", "tp4+ep2"),
    ("moe-exact", "ep2+tp2+dp2"),
    ("moe-exact", "ep2+pp2:zb_v"),
    ("moe-choice", "ep2+tp2"),
    ("moe-sinkhorn", "ep4+mbs2"),
    ("moe-gpt2", "tp2+sp+ep2"),
    ("moe-gpt2", "tp4+etp4+dp2+recompute:full"),
]
ROWS = [*COVER, *(pytest.param(*row, marks=pytest.mark.full) for row in FULL)]


@pytest.mark.parametrize(("model", "layout"), ROWS, ids=[f"{m}-{lay}" for m, lay in (*COVER, *FULL)])
def test_layout_is_a_deployment_detail(model: str, layout: str, tokens: str, references: Path, world: World) -> None:
    difference = prove(model, layout, tokens, references, world)
    assert difference.passed, difference.first_diff
    assert max(difference.loss, difference.grads, difference.grad_norm, difference.weights) < 1e-10


@pytest.mark.parametrize(
    "parallel",
    [
        pytest.param(ParallelConfig(ep=2, expert_dispatch="all_gather"), marks=pytest.mark.full),
        ParallelConfig(ep=4, expert_dispatch="hierarchical", expert_node_size=2),
        ParallelConfig(tp=2, ep=2, etp=2, cut_expert_tokens=False),
        ParallelConfig(tp=2, ep=2, etp=2, sequence_parallel=True, expert_dispatch="all_gather"),
        pytest.param(ParallelConfig(tp=2, ep=2, order="dp-pp-ep-cp-tp"), marks=pytest.mark.full),
    ],
    ids=["all_gather", "hierarchical", "whole_tokens", "all_gather_etp", "order"],
)
def test_dispatch_is_a_deployment_detail(parallel: ParallelConfig, tokens: str, references: Path, world: World) -> None:
    layout = parse_layout(f"ep{parallel.ep}+etp{parallel.etp}+tp{parallel.tp}")
    layout = dataclasses.replace(layout, parallel=parallel)
    config = dataclasses.replace(config_for("moe", tokens, references), parallel=parallel)  # its order is kept
    (difference,) = prove_layouts(config, [layout], world, references)
    assert difference.passed, difference.first_diff
