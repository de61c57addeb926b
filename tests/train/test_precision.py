"""Whole steps in fp16 and pure bf16: they follow float32, and an overflow anywhere is left out everywhere."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megalite.config import Config
from megalite.config.check import check
from megalite.layout import parse_layout
from megalite.mpu import ParallelState
from megalite.optim.config import OptimConfig
from megalite.optim.scaler import LossScaler
from megalite.parallel.data import DataParallel, Unit, main_grad
from megalite.parallel.shard import shard_of
from megalite.parallel.wgrad import WeightGradQueue
from megalite.testing.world import World
from megalite.train.build import build_training
from megalite.train.checkpoints import RunCheckpoints
from megalite.train.step import StepResult, Training, train_step
from tests.parallel.parameters import whole
from tests.tiny import config_for

CPU = torch.device("cpu")
SINGLE = ParallelState.single()


def _config(model: str, tokens: str, folder: Path, optim: dict[str, Any] | None = None, **train: object) -> Config:
    config = config_for(model, tokens, folder, num_steps=8, **train)
    return replace(config, optim=replace(config.optim, lr=1e-2, **(optim or {})))


def _losses(config: Config, steps: int = 6) -> list[float]:
    check(config, 1)
    training = build_training(config, SINGLE, CPU)
    return [train_step(training, step).loss for step in range(steps)]


@pytest.mark.parametrize("model", [pytest.param("llama", marks=pytest.mark.full), "moe-gpt2"])
def test_narrow_runs_follow_float32_however_rows_are_grouped(model: str, tokens: str, tmp_path: Path) -> None:
    expected = _losses(_config(model, tokens, tmp_path, precision="fp32"))
    assert expected[-1] < expected[0] - 0.02
    for rows in (2, 8):
        fp16 = _losses(_config(model, tokens, tmp_path, precision="fp16", micro_batch_size=rows))
        np.testing.assert_allclose(fp16, expected, rtol=2e-3)
        none: dict[str, Any] = {"master_weights": "none"}
        pure = _config(model, tokens, tmp_path, none, precision="bf16", micro_batch_size=rows)
        np.testing.assert_allclose(_losses(pure), expected, rtol=2e-2)


def _with_scale(mpu: ParallelState, config: Config, scale: float | None) -> dict[str, Tensor]:
    """Weights after two steps, whose float32 gradients were multiplied by `scale` on their way."""
    training = build_training(config, mpu, CPU)
    if scale is not None:
        training.optimizer.scaler = LossScaler.fresh(replace(config.optim, initial_loss_scale=scale))
    for step in range(2):
        assert math.isfinite(train_step(training, step).grad_norm)
    return {shard_of(p).name: p.detach().clone() for dp in training.data_parallels.values() for p in dp.parameters}


@pytest.mark.parametrize("layout", ["single", "pp2:zb_h1"])
@pytest.mark.parametrize("model", ["gpt2", "moe"])
def test_everything_that_has_a_gradient_carries_the_scale(
    model: str, layout: str, tokens: str, tmp_path: Path, world: World
) -> None:
    """In float32 a power of two changes no bit, of balancing losses neither."""
    place = parse_layout(layout)
    config = place.apply(_config(model, tokens, tmp_path, precision="fp32"))
    runs = [
        world.run(_with_scale, config, scale, layout=place.parallel, ranks=place.num_ranks)
        for scale in (None, 2.0**12, 2.0**16)
    ]
    for run in runs[1:]:
        for plain, scaled in zip(runs[0], run, strict=True):
            assert not [name for name, weight in plain.items() if not torch.equal(weight, scaled[name])]


def _break(training: Training) -> torch.utils.hooks.RemovableHandle:
    """An infinite gradient of one norm of this rank."""
    stage = next(iter(training.stages.values()))
    weight = next(iter(stage.layers.values())).get_parameter("mlp_norm.weight")
    return weight.register_hook(lambda grad: grad * math.inf)


def _one_breaks(mpu: ParallelState, config: Config) -> list[tuple[StepResult, bool]]:
    """Step 1 overflows on the last rank; (result, whether this rank's weights moved) of each."""
    training, found = build_training(config, mpu, CPU), []
    for step in range(3):
        before = [p.detach().clone() for dp in training.data_parallels.values() for p in dp.parameters]
        breaks = step == 1 and mpu.world.is_last
        handle = _break(training) if breaks else None
        result = train_step(training, step)
        if handle is not None:
            handle.remove()
        after = [p for dp in training.data_parallels.values() for p in dp.parameters]
        found.append((result, not all(torch.equal(a, b) for a, b in zip(before, after, strict=True))))
    assert training.optimizer.steps == 2 and training.num_skipped == 1
    return found


@pytest.mark.parametrize("layout", ["dp2", "pp2", "pp2:zb_v", "tp2+sp"])
def test_an_overflow_on_one_rank_is_left_out_on_all(layout: str, tokens: str, tmp_path: Path, world: World) -> None:
    place = parse_layout(layout)
    optim = {"loss_scale_hysteresis": 1, "post_validation": layout == "pp2"}
    config = place.apply(_config("llama", tokens, tmp_path, optim, precision="fp16"))
    for found in world.run(_one_breaks, config, layout=place.parallel, ranks=place.num_ranks):
        (first, moved), (broken, broken_moved), (last, last_moved) = found
        assert moved and not broken_moved and last_moved
        assert [r.skipped for r, _ in found] == [False, True, False]
        assert [r.loss_scale for r, _ in found] == [2.0**16, 2.0**16, 2.0**15]
        assert broken.learning_rate == last.learning_rate < first.learning_rate, "the schedule waits"
        assert len({r.sample_fingerprint for r, _ in found}) == 3, "the samples do not"


def test_a_resumed_run_goes_on_with_its_scale(tokens: str, tmp_path: Path) -> None:
    optim = {"loss_scale_growth_interval": 2, "loss_scale_hysteresis": 2}
    config = _config("llama", tokens, tmp_path, optim, precision="fp16")

    def run(training: Training, steps: range) -> list[StepResult]:
        results = []
        for step in steps:
            handle = _break(training) if step in (1, 4) else None
            results.append(train_step(training, step))
            if handle is not None:
                handle.remove()
        return results

    whole_run = run(build_training(config, SINGLE, CPU), range(8))
    assert [r.loss_scale for r in whole_run] == [2.0**e for e in (16, 16, 16, 16, 17, 17, 17, 18)]
    first = build_training(config, SINGLE, CPU)
    run(first, range(3))
    path = RunCheckpoints(config, first, tmp_path / "run").save(3)
    second = build_training(config, SINGLE, CPU)
    assert RunCheckpoints(config, second, tmp_path / "run").load(path) == 3
    assert str(run(second, range(3, 8))) == str(whole_run[3:])  # a norm that is nan differs from itself


def test_small_gradients_are_summed_in_float32() -> None:
    """1024 micro-batches of 1/1024 each: a sum in bf16 would stop at 1/4."""
    for dtype in (torch.bfloat16, torch.float16):
        weight = whole("w", torch.ones(4, dtype=dtype))
        reducer = DataParallel([Unit("unit", [weight])], SINGLE, queue=WeightGradQueue())
        reducer.zero_grad()
        for _ in range(1024):
            (weight * 2.0**-10).sum().backward()
        assert main_grad(weight).dtype == torch.float32 and main_grad(weight).eq(1.0).all()


def test_what_is_refused(tokens: str, tmp_path: Path) -> None:
    for optim, train, said in (
        ({"master_weights": "none"}, {"precision": "fp16"}, "is for train.precision=bf16, not fp16"),
        ({"initial_loss_scale": 1000.0}, {}, "optim.initial_loss_scale=1000.0 must be a power of two"),
        ({"loss_scale_backoff": 1.0}, {}, "loss_scale_backoff=1.0 below 1"),
        ({"loss_scale_hysteresis": 0}, {}, "optim.loss_scale_hysteresis=0 must be at least 1"),
        ({"min_loss_scale": 2.0**20}, {}, "is above initial_loss_scale=65536.0"),
    ):
        with pytest.raises(ValueError, match=said):
            check(_config("llama", tokens, tmp_path, optim, **train), 1)
    assert not OptimConfig().problems()
