"""The promise over a table of layouts: loss, pre-clip gradients, gradient norm and stepped weights equal one rank's."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path

import pytest

import megalite.testing.layouts as layouts_module
import megalite.train.step as step_module
from megalite.config import check
from megalite.kernels.config import KernelConfig
from megalite.layout import parse_layout
from megalite.mpu import ParallelConfig
from megalite.optim.optimizer import Optimizer
from megalite.testing.layouts import LayoutDifference, proof_config, prove_layouts
from megalite.testing.world import World
from megalite.train.step import StepResult, Training
from tests.tiny import config_for

# Every pair of (tensor cut, pipeline, data parallel, recompute, micro-batch size) values occurs with some model.
COVER = [
    ("llama", "tp2+sp+mbs4"),
    ("llama", "tp2+sp+recompute:every:2"),
    ("llama", "pp2:zb_v+recompute:block:1"),
    ("gpt2", "tp2+sp+pp2:zb_v+recompute:selective"),
    ("gpt2", "tp2+dp2+recompute:selective:attention,mlp,norm"),
    ("llama", "pp2+mbs2"),
    ("llama", "pp4:gpipe"),
    ("llama", "dp4+mbs1+recompute:full"),
    ("llama", "tp2+pp2+mbs2"),
    ("llama", "tp2+sp+pp2+dp2"),
    ("gpt2", "pp2+recompute:full"),
    ("gpt2", "pp3+mbs1"),
    ("gpt2", "dp2+pp2:gpipe+mbs4"),
    ("gpt2", "tp2+sp+pp2+dp2+mbs2+recompute:full"),
    ("tied-llama", "tp2+pp4:gpipe+mbs1"),
    ("tied-llama", "tp2+dp2+pp2+recompute:full"),
]
FULL = [
    ("llama", "tp2"),
    ("llama", "tp4+mbs4"),
    ("llama", "tp8"),
    ("llama", "tp4+sp+recompute:full"),
    ("llama", "dp2+mbs4"),
    ("gpt2", "tp2+mbs1"),
    ("gpt2", "tp4+sp"),
    ("gpt2", "dp4+mbs2"),
    ("tied-llama", "pp4+mbs2"),
    ("tied-llama", "tp2+sp+dp4"),
]
ROWS = [*COVER, *(pytest.param(*row, marks=pytest.mark.full) for row in FULL)]


def prove(model: str, layout: str, tokens: str, folder: Path, world: World) -> LayoutDifference:
    """The largest differences of one layout from one rank."""
    (difference,) = prove_layouts(
        config_for(model, tokens, folder), [parse_layout(layout)], world, folder, timeout=120.0
    )
    return difference


@pytest.mark.parametrize(("model", "layout"), ROWS, ids=[f"{m}-{lay}" for m, lay in (*COVER, *FULL)])
def test_layout_is_a_deployment_detail(model: str, layout: str, tokens: str, references: Path, world: World) -> None:
    difference = prove(model, layout, tokens, references, world)
    assert difference.passed, difference.first_diff
    assert max(difference.loss, difference.grads, difference.grad_norm, difference.weights) < 1e-10


@pytest.mark.full
@pytest.mark.parametrize(("model", "layout"), [("llama", "tp2+sp+pp2+recompute:full"), ("gpt2", "tp2+dp2+mbs4")])
def test_compiled_kernels_change_nothing(model: str, layout: str, tokens: str, tmp_path: Path, world: World) -> None:
    """The first run compiles for minutes."""
    config = dataclasses.replace(config_for(model, tokens, tmp_path), kernels=KernelConfig(backend="compiled"))
    (difference,) = prove_layouts(config, [parse_layout(layout)], world, tmp_path, num_steps=1, timeout=900.0)
    assert difference.passed, difference.first_diff


def test_explicit_uneven_stages(tokens: str, references: Path, world: World) -> None:
    config = config_for("gpt2", tokens, references)
    layout = parse_layout("pp3")
    layout = dataclasses.replace(layout, parallel=ParallelConfig(pp=3, layers_per_stage=(0, 3, 1)))
    (difference,) = prove_layouts(config, [layout], world, references)
    assert difference.passed, difference.first_diff


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ("llama", "dp2+mbs1"),
        ("llama", "pp2"),
        pytest.param("moe", "dp2+ep2+zero3+mbs1", marks=pytest.mark.full),
        pytest.param("gpt2", "pp2v2:interleaved+dp2+mbs1", marks=pytest.mark.full),
        pytest.param("gpt2", "pp2:zb_v+tp2+mbs1", marks=pytest.mark.full),
        pytest.param("llama", "pp2:dualpipe+mbs1", marks=pytest.mark.full),
    ],
)
def test_a_growing_batch(model: str, layout: str, tokens: str, references: Path, world: World) -> None:
    """Steps of 4, 4, 10 and 16 rows: another number of micro-batches, and so another plan, from step to step."""
    ramp = (8, 4, 40) if layout == "pp2:dualpipe+mbs1" else (4, 6, 15)
    config = config_for(model, tokens, references, batch_ramp=ramp, global_batch_size=16)
    parsed = parse_layout(layout)
    check(proof_config(parsed.apply(config), 4), parsed.num_ranks)
    (difference,) = prove_layouts(config, [parsed], world, references, num_steps=4, timeout=120.0)
    assert difference.passed, difference.first_diff
    assert max(difference.loss, difference.grads, difference.grad_norm, difference.weights) < 1e-10


def test_the_order_of_the_axes_is_a_deployment_detail(tokens: str, references: Path, world: World) -> None:
    config = config_for("llama", tokens, references)
    config = dataclasses.replace(config, parallel=ParallelConfig(order="dp-pp-ep-cp-tp"))
    (difference,) = prove_layouts(config, [parse_layout("tp2+pp2+dp2")], world, references)
    assert difference.passed, difference.first_diff


def _nan_loss_on_two_ranks() -> None:
    """A fault: the loss is not a number wherever there is tensor parallelism."""
    plain = step_module.train_step

    def faulty(training: Training, step: int) -> StepResult:
        result = plain(training, step)
        return dataclasses.replace(result, loss=math.nan) if training.mpu.tp.size > 1 else result

    layouts_module.train_step = faulty


def _update_count_stuck_on_several_ranks() -> None:
    """A fault: AdamW's step count stays at 1 wherever there are several ranks."""
    plain = Optimizer.step

    def faulty(self: Optimizer, lr: float) -> object:
        self.steps = 0 if self.mpu.world.size > 1 else self.steps
        return plain(self, lr)

    Optimizer.step = faulty  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(
    ("fault", "first"),
    [(_nan_loss_on_two_ranks, "sgd step 1/loss"), (_update_count_stuck_on_several_ranks, "adamw step 2/weights")],
)
def test_a_planted_fault_is_found(fault: Callable[[], None], first: str, tokens: str, tmp_path: Path) -> None:
    config = config_for("llama", tokens, tmp_path)
    with World() as world:  # the fault must not outlive the test
        (difference,) = prove_layouts(config, [parse_layout("tp2")], world, tmp_path, setup=fault)
    assert not difference.passed and difference.first_diff is not None
    assert difference.first_diff.startswith(first), difference.first_diff
