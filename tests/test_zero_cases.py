"""Known faults of other frameworks under ZeRO: combinations of options that reach a half-configured run."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Literal

import pytest
import torch
from torch import nn

from megalite.config import Config
from megalite.mpu import ParallelConfig, ParallelState
from megalite.parallel.data import DataParallel, Unit, main_grad
from megalite.parallel.shard import name_parameters
from megalite.parallel.wgrad import WeightGradQueue
from megalite.testing.world import World
from megalite.train.build import build_training
from megalite.train.step import train_step
from tests.tiny import config_for

CPU = torch.device("cpu")
STAGES = (0, 1, 2, 3)


def _curves(mpu: ParallelState, config: Config) -> list[tuple[list[float], list[float]]]:
    """Losses and gradient norms of four steps, for every stage and 1 or 2 micro-batches of a step."""
    found = []
    for zero in STAGES:
        for micro_batch_size in (8, 4):
            train = dataclasses.replace(config.train, micro_batch_size=micro_batch_size)
            place = ParallelState.build(ParallelConfig(zero=zero), mpu.world.ranks)
            training = build_training(dataclasses.replace(config, train=train, parallel=place.config), place, CPU)
            results = [train_step(training, step) for step in range(4)]
            assert not any(result.skipped for result in results)
            found.append(([r.loss for r in results], [r.grad_norm for r in results]))
    return found


@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-4), ("bf16", 2e-2), ("fp16", 2e-2)])
def test_all_stages_train_alike_in_every_precision(
    precision: Literal["fp32", "bf16", "fp16"], tolerance: float, tokens: str, tmp_path: Path, world: World
) -> None:
    config = config_for("llama", tokens, tmp_path, precision=precision, num_steps=4, global_batch_size=16)
    config = dataclasses.replace(config, optim=dataclasses.replace(config.optim, lr=0.01, initial_loss_scale=1024.0))
    first, *others = world.run(_curves, config, ranks=2, layout=ParallelConfig())[0]
    assert first[0][-1] < first[0][0]
    for losses, norms in others:
        assert losses == pytest.approx(first[0], rel=tolerance)
        assert norms == pytest.approx(first[1], rel=4 * tolerance), "no loss scale is left in them"


def _schedules(mpu: ParallelState, config: Config) -> list[tuple[float, float]]:
    """Loss and gradient norm of a step, schedule after schedule in one process."""
    found = []
    for zero in STAGES:
        for schedule in ("zb_h1", "1f1b", "zb_h1", "gpipe"):
            place = ParallelState.build(ParallelConfig(pp=2, schedule=schedule, zero=zero), mpu.world.ranks)
            training = build_training(dataclasses.replace(config, parallel=place.config), place, CPU)
            result = train_step(training, 0)
            for stage in training.stages.values():
                assert stage.queue.num_waiting == 0 and not stage.queue.deferring
            for part in training.data_parallels.values():
                assert all(grad.any() for _, grad in part.gradients()), "a weight gradient was never made"
            found.append((result.loss, result.grad_norm))
    return found


def test_deferred_weight_gradients_are_made_whatever_ran_before(tokens: str, tmp_path: Path, world: World) -> None:
    config = config_for("llama", tokens, tmp_path, precision="fp64")
    (loss, norm), *others = world.run(_schedules, config, layout=ParallelConfig(pp=2), ranks=4)[0]
    for other in others:
        assert other == pytest.approx((loss, norm), rel=1e-11)


def _small(mpu: ParallelState) -> list[float]:
    """What a gradient of 1 and 32 of 1 / 512 on each of two ranks add up to."""
    found = []
    for zero in STAGES:
        place = ParallelState.build(ParallelConfig(zero=zero), mpu.world.ranks)
        layer = nn.Module()
        layer.weight = nn.Parameter(torch.ones(128, dtype=torch.bfloat16))
        name_parameters(layer)
        part = DataParallel([Unit("layer", [layer.weight])], place, queue=WeightGradQueue())
        part.zero_grad()
        for number in range(33):
            if part.reduces_each_pass or number == 32:
                part.arm()
            (layer.weight * (2.0**-9 if number else 1.0)).sum().backward()
            if part.reduces_each_pass:
                part.complete()
        part.finish()
        assert main_grad(layer.weight).dtype == torch.float32
        found += [float(value) for _, grad in part.gradients() for value in (grad.min(), grad.max())]
    return found


def test_gradients_of_many_micro_batches_are_summed_in_float32(world: World) -> None:
    for found in world.run(_small, layout=ParallelConfig(), ranks=2):
        assert found == [2.125] * 8, "a sum in bf16 would stay at 2"
