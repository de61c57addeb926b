"""Frozen parameters: the same run on every layout, without gradients, optimizer state or a change."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megalite.config import Config, ConfigError, check
from megalite.layout import parse_layout
from megalite.mpu import ParallelState
from megalite.testing.layouts import prove_layouts
from megalite.testing.step_memory import beside_predicted, measure
from megalite.testing.world import World
from megalite.train.build import build_training
from megalite.train.checkpoints import RunCheckpoints, state_tensors
from megalite.train.memory import STATE
from megalite.train.resume import ResumeError
from megalite.train.step import train_step
from tests.tiny import config_for

CPU = torch.device("cpu")
FREEZE = {
    "tied-llama": ("embedding.*", "layers.0.*", "*.qkv.k.*"),
    "gpt2": ("layers.[01].*", "positions.*", "embedding.*"),
    "moe": ("*.router.*", "layers.3.mlp.experts.*", "*norm*"),
}


def frozen(model: str, tokens: str, folder: Path, **train: object) -> Config:
    """A run in which some parameters do not learn."""
    return config_for(model, tokens, folder, freeze=FREEZE[model], global_batch_size=8, **train)


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ("tied-llama", "tp2+sp+pp2:zb_h1+mbs1"),
        ("gpt2", "dp2+pp2+zero3+mbs1+recompute:full"),
        pytest.param("gpt2", "pp4+mbs1", marks=pytest.mark.full),
        pytest.param("tied-llama", "pp2:dualpipe+mbs1", marks=pytest.mark.full),
        pytest.param("moe", "ep2+tp2+sp+mbs1", marks=pytest.mark.full),
        pytest.param("moe", "ep2+dp2+zero2+mbs1", marks=pytest.mark.full),
    ],
)
def test_layout_is_a_deployment_detail(model: str, layout: str, tokens: str, references: Path, world: World) -> None:
    (difference,) = prove_layouts(
        frozen(model, tokens, references), [parse_layout(layout)], world, references, num_steps=1, timeout=120.0
    )
    assert difference.passed, difference.first_diff
    assert max(difference.loss, difference.grads, difference.grad_norm, difference.weights) < 1e-10


def test_what_is_frozen_has_no_state_and_stays(tokens: str, tmp_path: Path) -> None:
    training = build_training(frozen("tied-llama", tokens, tmp_path), ParallelState.single(), CPU)
    before = {name: p.clone() for name, p in training.stages[0].named_parameters()}
    train_step(training, 0)
    moved = {name for name, p in training.stages[0].named_parameters() if not torch.equal(p, before[name])}
    tensors = state_tensors(training)
    assert moved == {shard.name for shard, _ in tensors["exp_avg"]}
    assert {shard.name for shard, _ in tensors["parameter"]} == set(before)
    assert moved == {
        name for name in before if not name.startswith(("embedding.", "layers.0.")) and ".qkv.k." not in name
    }


@pytest.mark.parametrize("layout", ["pp2", pytest.param("dp2+zero3", marks=pytest.mark.full)])
def test_its_memory_is_predicted(layout: str, tokens: str, tmp_path: Path, world: World) -> None:
    place = parse_layout(layout)
    config = place.apply(frozen("gpt2", tokens, tmp_path, precision="bf16"))
    found = world.run(measure, config, layout=config.parallel, ranks=place.num_ranks)
    for rank, counted in beside_predicted(config, place.num_ranks, found):
        assert {kind: rank.kinds[kind] for kind in STATE} == counted.state


def test_a_full_checkpoint_starts_a_run_with_frozen_parameters(tokens: str, tmp_path: Path) -> None:
    config = config_for("tied-llama", tokens, tmp_path)
    training = build_training(config, ParallelState.single(), CPU)
    train_step(training, 0)
    RunCheckpoints(config, training, tmp_path / "whole").save(1)
    some = replace(
        config,
        train=replace(config.train, freeze=FREEZE["tied-llama"]),
        checkpoint=replace(config.checkpoint, load=str(tmp_path / "whole")),
    )
    other = build_training(some, ParallelState.single(), CPU)
    checkpoints = RunCheckpoints(some, other, tmp_path / "some")
    checkpoints.load_start()
    for mine, theirs in zip(other.stages[0].parameters(), training.stages[0].parameters(), strict=True):
        assert torch.equal(mine, theirs)
    with pytest.raises(ResumeError, match=r"train.freeze=\[\] there, \[.*here"):
        checkpoints.load(tmp_path / "whole")


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        (("head.weight",), r"freeze=head.weight: no parameter has such a name; they look like embedding.weight, lay"),
        (("layers.*", "*"), r"freeze=layers.\*, \* freezes every parameter"),
    ],
)
def test_patterns_must_mean_something(patterns: tuple[str, ...], message: str, tokens: str, tmp_path: Path) -> None:
    config = config_for("tied-llama", tokens, tmp_path, freeze=patterns)
    with pytest.raises(ConfigError, match=message):
        check(config, 1)
