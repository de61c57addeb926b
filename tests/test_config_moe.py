"""Rules of a mixture of experts."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest

from megalite.config import check
from megalite.config.check_moe import moe_problems
from megalite.layout import parse_layout
from tests import tiny
from tests.test_config_rules import Fields, config_with, problems

MOE: Fields = {"num_experts": 8, "top_k": 2, "expert_ffn_hidden_size": 96}


def moe(model: Fields | None = None, parallel: Fields | None = None) -> Any:
    return config_with(model=MOE | (model or {}), parallel=parallel)


@pytest.mark.parametrize(
    ("model", "parallel", "world_size"),
    [
        ({}, {}, 1),
        ({}, {"ep": 8}, 8),
        ({}, {"ep": 2, "etp": 2, "tp": 2}, 4),
        ({}, {"ep": 2, "tp": 2, "pp": 2, "sequence_parallel": True}, 8),
        ({}, {"ep": 4, "expert_dispatch": "hierarchical", "expert_node_size": 2}, 4),
        ({}, {"ep": 4, "expert_dispatch": "all_gather"}, 4),
        ({}, {"ep": 2, "etp": 2, "tp": 2, "cut_expert_tokens": False}, 4),
        ({"top_k": 1, "router_normalize": False}, {}, 1),
        ({"top_k": 8}, {}, 1),
        ({"num_experts": 1, "top_k": 1, "router_normalize": False}, {}, 1),
        ({"num_expert_groups": 4, "top_k_groups": 2}, {}, 1),
        ({"num_expert_groups": 4, "top_k_groups": 3, "top_k": 4, "group_top_k": 1}, {}, 1),
        ({"moe_layers": "0,7"}, {}, 1),
        ({"moe_layers": "every:8"}, {}, 1),
        ({"moe_layers": "from:7"}, {}, 1),
        ({"routing": "expert_choice", "router_normalize": False, "top_k": 1}, {}, 1),
        ({"routing": "sinkhorn", "aux_loss_coeff": 0.0}, {}, 1),
        ({"expert_bias": True, "expert_bias_rate": 0.0, "router_score": "sigmoid"}, {}, 1),
        ({"capacity_factor": 1.25, "pad_to_capacity": True, "drop_policy": "position"}, {}, 1),
        ({"shared_ffn_hidden_size": 64, "shared_expert_gate": True, "router_jitter": 0.99}, {"tp": 4}, 4),
        # With experts in every layer the width of the dense layers is not used.
        ({"ffn_hidden_size": 99}, {"tp": 4}, 4),
    ],
)
def test_sound_ones_pass(model: Fields, parallel: Fields, world_size: int) -> None:
    check(moe(model, parallel), world_size)


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ({"num_experts": -1}, "model.num_experts=-1 must be at least 0"),
        ({"top_k": 0}, "model.top_k=0 must be at least 1"),
        ({"expert_ffn_hidden_size": 0}, "model.expert_ffn_hidden_size=0 must be at least 1"),
        ({"num_expert_groups": 0}, "model.num_expert_groups=0 must be at least 1"),
        ({"top_k_groups": 0}, "model.top_k_groups=0 must be at least 1"),
        ({"shared_ffn_hidden_size": -8}, "model.shared_ffn_hidden_size=-8 must be at least 0"),
        ({"moe_layers": "odd"}, "model.moe_layers='odd' should be all, every:N"),
        ({"moe_layers": ""}, "model.moe_layers='' should be all, every:N"),
        ({"moe_layers": "every:0"}, "should be all, every:N (N >= 1)"),
        ({"moe_layers": "1,8,9"}, "model.moe_layers=1,8,9: no layer 8, 9 among num_layers=8; they are 0 to 7"),
        ({"moe_layers": "every:9"}, "names none of num_layers=8 layers, but num_experts=8; N can be at most 8"),
        ({"moe_layers": "from:8"}, "N can be at most 7, or num_experts=0 makes a dense model"),
        ({"top_k": 9}, "model.top_k=9 is more than num_experts=8; it can be 1 to 8"),
        ({"top_k": 1}, "gives every expert the weight 1, and the router no gradient"),
        ({"top_k": 1, "router_score": "sigmoid"}, "use router_normalize=false"),
        ({"routing": "expert_choice"}, "model.routing=expert_choice: a token may have any number of experts"),
        ({"routing": "sinkhorn"}, "model.routing=sinkhorn balances by itself; use aux_loss=none instead of sequence"),
        ({"routing": "sinkhorn", "expert_bias": True}, "use expert_bias=false"),
        ({"routing": "expert_choice", "expert_bias": True}, "use expert_bias=false"),
        ({"routing": "expert_choice", "drop_policy": "position"}, "use drop_policy=probability"),
        ({"routing": "sinkhorn", "num_expert_groups": 2}, "groups limit routing=top_k alone; use 1 with sinkhorn"),
        ({"shared_expert_gate": True}, "needs a shared expert: set shared_ffn_hidden_size"),
        (
            {"num_expert_groups": 3},
            "model.num_experts=8 is not divisible by num_expert_groups=3; num_expert_groups can be 1, 2, 4, 8",
        ),
        (
            {"num_expert_groups": 2, "top_k_groups": 4},
            "model.top_k_groups=4 is more than num_expert_groups=2; it can be 1 to 2",
        ),
        ({"top_k_groups": 2}, "model.top_k_groups=2 is more than num_expert_groups=1"),
        ({"num_expert_groups": 4, "top_k_groups": 3, "top_k": 4}, "model.top_k=4 is not divisible by top_k_groups=3"),
        ({"num_expert_groups": 4, "top_k_groups": 3, "top_k": 4}, "top_k_groups can be 1, 2, 4"),
        ({"num_expert_groups": 4, "group_top_k": 3}, "model.group_top_k=3 must be 1 to 2, the experts of a group"),
        ({"group_top_k": 1}, "model.group_top_k=1 needs num_expert_groups above 1; leave it out"),
        (
            {"num_expert_groups": 4, "top_k": 3},
            "is more than the 2 experts of top_k_groups=1 groups; use top_k_groups >= 2",
        ),
        ({"pad_to_capacity": True}, "model.pad_to_capacity=true needs a capacity: set capacity_factor above 0"),
        ({"capacity_factor": -0.5}, "model.capacity_factor=-0.5 must be finite and at least 0"),
        ({"aux_loss_coeff": -1.0}, "model.aux_loss_coeff=-1.0 must be finite and at least 0"),
        ({"router_z_loss": math.inf}, "model.router_z_loss=inf must be finite and at least 0"),
        ({"expert_bias_rate": math.nan}, "model.expert_bias_rate=nan must be finite and at least 0"),
        ({"router_norm_eps": -1e-9}, "model.router_norm_eps=-1e-09 must be finite and at least 0"),
        ({"router_scale": 0.0}, "model.router_scale=0.0 must be finite and above 0"),
        ({"router_jitter": 1.0}, "model.router_jitter=1.0 must be in [0, 1)"),
        ({"swiglu_limit": 0.0, "name": "gpt_oss"}, "model.swiglu_limit=0.0 must be finite and above 0"),
        ({"swiglu_alpha": 2.0}, "model.swiglu_alpha=2.0: only the experts of name=gpt_oss are clamped; leave it out"),
    ],
)
def test_routers_that_make_no_sense_are_refused(model: Fields, said: str) -> None:
    assert said in problems(moe(model), 1)


@pytest.mark.parametrize(
    ("parallel", "world_size", "said"),
    [
        ({"ep": 3}, 3, "model.num_experts=8 is not divisible by parallel.ep=3; ep can be 1, 2, 4, 8"),
        (
            {"tp": 64, "etp": 64},
            64,
            "model.expert_ffn_hidden_size=96 is not divisible by parallel.etp=64; etp can be 1, 2, 3",
        ),
        ({"ep": 4}, 2, "ep * etp = 4 * 1 does not divide the 2 ranks"),
        ({"tp": 2, "cut_expert_tokens": False}, 2, "so etp=1 must be tp=2; use etp=2, or cut_expert_tokens=true"),
        (
            {"tp": 2, "etp": 2, "sequence_parallel": True, "cut_expert_tokens": False},
            2,
            "sequence_parallel cuts the tokens already",
        ),
        ({"ep": 4, "expert_dispatch": "hierarchical"}, 4, "needs expert_node_size=None to divide ep=4"),
        (
            {"ep": 4, "expert_dispatch": "hierarchical", "expert_node_size": 3},
            4,
            "needs expert_node_size=3 to divide ep=4; expert_node_size can be 1, 2, 4",
        ),
        ({"ep": 4, "expert_dispatch": "hierarchical", "expert_node_size": 0}, 4, "expert_node_size can be 1, 2, 4"),
        (
            {"ep": 4, "expert_node_size": 2},
            4,
            "has a meaning for expert_dispatch=hierarchical only, not for all_to_all",
        ),
        ({"ep": 0}, 1, "parallel.ep=0 must be at least 1"),
        ({"tp": 2, "etp": 0}, 2, "parallel.etp=0 must be at least 1"),
    ],
)
def test_cuts_that_do_not_fit_are_refused(parallel: Fields, world_size: int, said: str) -> None:
    assert said in problems(moe(parallel=parallel), world_size)


@pytest.mark.parametrize("name", [name for name in tiny.MODELS if name.startswith("moe")])
def test_the_models_of_the_layout_tables_are_sound(name: str) -> None:
    config = tiny.config_for(name, "tokens", Path("cache"))
    check(config, 1)
    check(parse_layout("tp2+ep2+pp2:zb_v+sp+mbs1").apply(config), 4)


def test_the_shared_expert_and_dense_layers_are_cut_over_tp() -> None:
    shared = moe({"shared_ffn_hidden_size": 30}, {"tp": 4})
    assert "model.shared_ffn_hidden_size=30 is not divisible by parallel.tp=4; tp can be 1, 2, 3, 5, 6, 10" in problems(
        shared, 4
    )
    mixed = moe({"ffn_hidden_size": 99, "moe_layers": "from:1"}, {"tp": 4})
    assert "model.ffn_hidden_size=99 is not divisible by parallel.tp=4" in problems(mixed, 4)


def test_all_violations_come_at_once() -> None:
    config = moe(
        {"top_k": 9, "moe_layers": "8", "num_expert_groups": 3, "router_jitter": 2.0, "pad_to_capacity": True},
        {"ep": 3, "expert_node_size": 1},
    )
    text = problems(config, 3)
    for field in ("top_k=9", "moe_layers=8", "num_expert_groups=3", "router_jitter=2.0", "pad_to_capacity", "ep=3"):
        assert field in text
    assert "expert_node_size=1" in text


def test_a_dense_model_may_have_any_router() -> None:
    config = moe({"num_experts": 0, "top_k": 1, "moe_layers": "99"})
    check(config, 1)
    assert moe_problems(dataclasses.replace(config)) == []
