"""The loss scale: when it moves, that it changes no bit, and how a run ends at its floor."""

from __future__ import annotations

import logging
import math

import pytest
import torch

from megalite.mpu import ParallelConfig, ParallelState
from megalite.optim.config import OptimConfig
from megalite.optim.optimizer import NonFiniteGradient, Optimizer
from megalite.optim.scaler import LossScaler
from megalite.testing.world import World
from tests.parallel.parameters import adopt, cut_rows, set_grads, whole

SINGLE = ParallelState.single()


def _scaler(**settings: float) -> LossScaler:
    return LossScaler.fresh(OptimConfig(**settings))  # pyright: ignore[reportArgumentType]


def _scales(scaler: LossScaler, steps: str) -> list[float]:
    """The scale after each step: `.` is a good one, `x` an overflow."""
    found = []
    for step in steps:
        scaler.update(overflow=step == "x")
        found.append(scaler.scale)
    return found


def test_it_grows_after_good_steps_in_a_row() -> None:
    assert _scaler().scale == 2**16
    assert _scales(_scaler(loss_scale_growth_interval=3), ".......") == [2.0**e for e in (16, 16, 17, 17, 17, 18, 18)]
    scales = _scales(_scaler(loss_scale_growth_interval=3, loss_scale_growth=4.0), "..x...")
    assert scales == [2.0**e for e in (16, 16, 16, 16, 16, 18)], "an overflow begins the count again"


def test_it_shrinks_once_no_overflow_is_left_to_forgive() -> None:
    assert _scales(_scaler(loss_scale_hysteresis=1), "xx") == [2.0**15, 2.0**14]
    assert _scales(_scaler(loss_scale_hysteresis=2), "x.xx") == [2.0**16, 2.0**16, 2.0**15, 2.0**14]
    again = _scaler(loss_scale_hysteresis=2, loss_scale_growth_interval=2)
    assert _scales(again, "xx..x.x") == [2.0**e for e in (16, 15, 15, 16, 16, 16, 15)], "growth forgives again"


def test_it_stays_within_its_limits() -> None:
    low = _scaler(loss_scale_hysteresis=1, min_loss_scale=2.0**14)
    assert _scales(low, "xxx") == [2.0**15, 2.0**14, 2.0**14] and low.at_floor
    high = _scaler(loss_scale_growth_interval=1, loss_scale_growth=2.0**40)
    assert _scales(high, "....")[-1] == 2.0**64


def test_its_state_comes_back() -> None:
    first = _scaler(loss_scale_growth_interval=4)
    _scales(first, "..x.")
    second = _scaler(loss_scale_growth_interval=4)
    second.restore(first.state())
    assert second == first and _scales(second, "...xx") == _scales(first, "...xx")


@pytest.mark.parametrize("clip", [0.0, 0.3])
@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_scales_that_are_powers_of_two_change_no_bit(name: str, clip: float) -> None:
    found = []
    for scale in (None, 2.0**10, 2.0**16):
        config = OptimConfig(name=name, clip_grad=clip, initial_loss_scale=scale or 1.0)  # pyright: ignore
        weight = whole("w", torch.linspace(-1, 1, 35).view(5, 7).half())
        scaler = LossScaler.fresh(config) if scale is not None else None
        optimizer = Optimizer(config, [adopt(SINGLE, weight)], SINGLE, scaler=scaler)
        norms = []
        for step in range(3):
            gradient = torch.randn(5, 7, generator=torch.Generator().manual_seed(step))
            set_grads({weight: gradient * (scale or 1.0)})
            norms.append(optimizer.step(0.1).grad_norm)
        ((_, master),) = optimizer.state_tensors()["master"]
        found.append((norms, master.clone(), weight.detach().clone()))
    for norms, master, weight in found[1:]:
        assert norms == found[0][0], "the norm is that of the gradient itself"
        assert torch.equal(master, found[0][1]) and torch.equal(weight, found[0][2])


@pytest.mark.parametrize("post_validation", [False, True])
def test_an_overflow_changes_nothing_but_the_scale(post_validation: bool, caplog: pytest.LogCaptureFixture) -> None:
    config = OptimConfig(loss_scale_hysteresis=1, clip_grad=0.0, post_validation=post_validation)
    weight = whole("w", torch.ones(3, 3).half())
    optimizer = Optimizer(config, [adopt(SINGLE, weight)], SINGLE, scaler=LossScaler.fresh(config))
    set_grads({weight: math.inf})
    with caplog.at_level(logging.WARNING, "megalite"):
        assert optimizer.step(0.1).skipped
    assert "overflowed at loss scale 65536; the next step uses 32768" in caplog.text
    assert optimizer.steps == 0 and weight.eq(1).all() and optimizer.loss_scale == 2**15
    assert not any(moment.any() for _, moment in optimizer.state_tensors()["exp_avg"])
    set_grads({weight: 1.0})
    assert not optimizer.step(0.1).skipped and optimizer.steps == 1


def _until_the_floor(mpu: ParallelState) -> tuple[list[float], str]:
    """Overflows of one rank's part for ever."""
    config = OptimConfig(loss_scale_hysteresis=1, min_loss_scale=2.0**13)
    fine = cut_rows("fine.weight", torch.ones(4, 3).half(), mpu)
    broken = cut_rows("broken.weight", torch.ones(4, 3).half(), mpu)
    optimizer = Optimizer(config, [adopt(mpu, fine, broken)], mpu, scaler=LossScaler.fresh(config))
    scales = []
    for _ in range(40):
        set_grads({fine: 1.0, broken: math.nan if mpu.tp.rank == 1 else 1.0})
        scales.append(optimizer.loss_scale)
        try:
            assert optimizer.step(0.1).skipped
        except NonFiniteGradient as error:
            return scales, str(error)
    return scales, "never"


def test_an_overflow_at_the_floor_ends_the_run_on_all_ranks(world: World) -> None:
    for scales, message in world.run(_until_the_floor, layout=ParallelConfig(tp=2), ranks=2):
        assert scales == [2.0**16, 2.0**15, 2.0**14, 2.0**13]
        assert "first in broken.weight on rank 1 (update 1)" in message and "optim.min_loss_scale=8192" in message
