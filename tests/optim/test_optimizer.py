"""Updates against torch.optim, master weights, clipping, and steps that are left out."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megalite.mpu import ParallelConfig, ParallelState
from megalite.optim.config import OptimConfig
from megalite.optim.lr import lr_at
from megalite.optim.optimizer import NonFiniteGradient, Optimizer
from megalite.parallel.data import DataParallel, Unit, main_grad
from megalite.parallel.shard import shard_of
from megalite.parallel.wgrad import WeightGradQueue
from megalite.testing.world import RankFailure, World
from tests.parallel.parameters import adopt, cut_rows, set_grads, whole

SINGLE = ParallelState.single()


def _random(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def _model(dtype: torch.dtype) -> list[nn.Parameter]:
    """Two matrices, one of them larger than an update chunk, and a bias without decay."""
    shapes = [(5, 7), (9,), (600, 501)]
    return [whole(f"p{i}", _random(*shape, seed=i, dtype=dtype)) for i, shape in enumerate(shapes)]


def _torch_optimizer(config: OptimConfig, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0},
    ]
    if config.name == "sgd":
        return torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum)
    return torch.optim.AdamW(groups, lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps, foreach=False)


CONFIGS = {
    "adamw": OptimConfig(lr=0.02, weight_decay=0.1, beta2=0.95, clip_grad=0.0),
    "adamw clipped": OptimConfig(lr=0.02, weight_decay=0.1, clip_grad=1.0),
    "sgd": OptimConfig(name="sgd", lr=0.02, weight_decay=0.1, clip_grad=0.0),
    "sgd momentum clipped": OptimConfig(name="sgd", lr=0.02, weight_decay=0.1, momentum=0.9, clip_grad=1.0),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", CONFIGS)
def test_twenty_steps_equal_torch(name: str, dtype: torch.dtype) -> None:
    config = CONFIGS[name]
    ours, theirs = _model(dtype), [nn.Parameter(p.detach().clone()) for p in _model(dtype)]
    data_parallel = adopt(SINGLE, *ours)
    optimizer, reference = Optimizer(config, [data_parallel], SINGLE), _torch_optimizer(config, theirs)
    for step in range(20):
        lr = lr_at(OptimConfig(lr=0.02, warmup_steps=5), step + 1, 20)
        for i, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
            other.grad = _random(*mine.shape, seed=100 * step + i, dtype=dtype)
            set_grads({mine: other.grad})
        norm = torch.nn.utils.clip_grad_norm_(theirs, config.clip_grad or math.inf)
        for group in reference.param_groups:
            group["lr"] = lr
        reference.step()
        assert optimizer.step(lr).grad_norm == pytest.approx(float(norm), rel=1e-5)
    tolerance = 2e-6 if config.clip_grad else (1e-6 if dtype == torch.float32 else 1e-12)  # torch adds 1e-6 to the norm
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", CONFIGS)
def test_main_gradients_and_padding_are_left_alone(name: str) -> None:
    parameters = _model(torch.float32)
    data_parallel = adopt(SINGLE, *parameters)
    optimizer = Optimizer(CONFIGS[name], [data_parallel], SINGLE)
    set_grads({p: _random(*p.shape, seed=i) for i, p in enumerate(parameters)})
    before = [main_grad(p).clone() for p in parameters]
    optimizer.step(0.1)
    assert all(torch.equal(main_grad(p), g) for p, g in zip(parameters, before, strict=True))
    for segment in data_parallel.segments:
        outside = torch.ones_like(segment.param, dtype=torch.bool)
        for span in segment.spans:
            outside[span.start : span.end] = False
        assert outside.any() and segment.param[outside].count_nonzero() == 0


def test_clipping_does_not_change_the_direction_of_sgd() -> None:
    weight = whole("w", torch.zeros(2, 2))
    optimizer = Optimizer(OptimConfig(name="sgd", weight_decay=0.0, clip_grad=1.0), [adopt(SINGLE, weight)], SINGLE)
    set_grads({weight: torch.tensor([[3.0, 0.0], [4.0, 0.0]])})
    assert optimizer.step(1.0).grad_norm == 5.0
    torch.testing.assert_close(weight.detach(), -torch.tensor([[0.6, 0.0], [0.8, 0.0]]))


def test_gradients_of_1e20_are_clipped_to_the_limit() -> None:
    weight = whole("w", torch.zeros(2, 2))
    optimizer = Optimizer(OptimConfig(name="sgd", weight_decay=0.0, clip_grad=1.0), [adopt(SINGLE, weight)], SINGLE)
    set_grads({weight: 1e20})
    assert optimizer.step(1.0).grad_norm == pytest.approx(2e20, rel=1e-6)
    torch.testing.assert_close(weight.detach(), torch.full((2, 2), -0.5))


def test_bf16_weights_move_by_less_than_they_can_hold() -> None:
    weight = whole("norm", torch.ones(3, dtype=torch.bfloat16))
    config = OptimConfig(name="sgd", weight_decay=0.0, clip_grad=0.0)
    optimizer = Optimizer(config, [adopt(SINGLE, weight)], SINGLE)
    set_grads({weight: 1.0})
    ((_, master),) = optimizer.state_tensors()["master"]
    for step in range(1000):
        optimizer.step(0.001)
        assert master.dtype == torch.float32 and torch.equal(weight.detach(), master.bfloat16()), step
    torch.testing.assert_close(master, torch.zeros(3), atol=2e-5, rtol=0)


def test_bf16_masters_follow_the_float32_run_bit_for_bit() -> None:
    values = [p.detach() for p in _model(torch.bfloat16)]
    narrow = [whole(f"p{i}", v) for i, v in enumerate(values)]
    wide = [whole(f"p{i}", v.float()) for i, v in enumerate(values)]
    optimizers = [Optimizer(CONFIGS["adamw clipped"], [adopt(SINGLE, *ps)], SINGLE) for ps in (narrow, wide)]
    for step in range(3):
        for i, (a, b) in enumerate(zip(narrow, wide, strict=True)):
            set_grads(dict.fromkeys((a, b), _random(*a.shape, seed=10 * step + i)))
        for optimizer in optimizers:
            optimizer.step(0.1)
    for a, b in zip(narrow, wide, strict=True):
        assert torch.equal(a.detach(), b.detach().bfloat16())


def test_a_fresh_step_starts_from_zero_gradients() -> None:
    weight = whole("w", torch.ones(2, 2, dtype=torch.bfloat16))
    data_parallel = adopt(SINGLE, weight)
    norms = []
    optimizer = Optimizer(OptimConfig(lr=0.0, weight_decay=0.0), [data_parallel], SINGLE)
    for _ in range(3):
        data_parallel.zero_grad()
        data_parallel.arm()
        (3 * weight).sum().backward()
        data_parallel.finish()
        norms.append(optimizer.step(0.0).grad_norm)
    assert norms == [6.0, 6.0, 6.0]


def test_refresh_master_takes_the_parameters_again() -> None:
    weight = whole("w", torch.ones(2, 2, dtype=torch.bfloat16))
    optimizer = Optimizer(OptimConfig(), [adopt(SINGLE, weight)], SINGLE)
    with torch.no_grad():
        weight.fill_(3.0)
    optimizer.refresh_master()
    assert optimizer.state_tensors()["master"][0][1].eq(3.0).all()


def _snapshot(optimizer: Optimizer) -> list[Tensor]:
    tensors = [p.detach().clone() for dp in optimizer.data_parallels for p in dp.parameters]
    return tensors + [t.clone() for of_kind in optimizer.state_tensors().values() for _, t in of_kind]


def _poisoned(mpu: ParallelState, config: OptimConfig, bad: float) -> dict[str, Any]:
    """A good step, one with a bad gradient element on global rank 3 alone before the reduction, a good one."""
    weight = whole(f"layers.{mpu.pp.rank}.w", _random(3, 3, seed=mpu.pp.rank, dtype=torch.bfloat16))
    data_parallel = adopt(mpu, weight)
    optimizer = Optimizer(config, [data_parallel], mpu)
    results, snapshots = [], []
    for poisoned in (False, True, False):
        data_parallel.zero_grad()
        grads = torch.ones(3, 3)
        if poisoned and mpu.world.rank == 3:
            grads[1, 1] = bad
        set_grads({weight: grads})
        data_parallel.finish()
        results.append(optimizer.step(0.01))
        snapshots.append(_snapshot(optimizer))
    same = [all(map(torch.equal, a, b)) for a, b in itertools.pairwise(snapshots)]
    return {"skipped": [r.skipped for r in results], "same": same, "steps": optimizer.steps}


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_bad_gradient_on_one_rank_skips_the_step_on_all(world: World, bad: float) -> None:
    config = OptimConfig(nonfinite="skip")
    for result in world.run(_poisoned, config, bad, layout=ParallelConfig(pp=2), ranks=4):
        assert result == {"skipped": [False, True, False], "same": [True, False], "steps": 2}


def _stopped(mpu: ParallelState) -> str:
    try:
        _poisoned(mpu, OptimConfig(nonfinite="stop"), math.inf)
    except NonFiniteGradient as error:
        return str(error)
    return ""


def test_a_bad_gradient_stops_all_ranks_with_one_message(world: World) -> None:
    (message,) = set(world.run(_stopped, layout=ParallelConfig(pp=2), ranks=4))
    assert "first in layers.1.w on rank 2" in message and "update 2" in message


def test_a_norm_beyond_float64_is_not_finite() -> None:
    weight = whole("w", torch.zeros(2, 2, dtype=torch.float64))
    optimizer = Optimizer(OptimConfig(), [adopt(SINGLE, weight)], SINGLE)
    set_grads({weight: 1e200})
    with pytest.raises(NonFiniteGradient, match="the gradient norm overflows"):
        optimizer.step(0.1)


def _lopsided(mpu: ParallelState) -> tuple[int, list[str]]:
    """The first stage has no parameter without decay, the last no parameter with it."""
    weight = whole("w", torch.ones(2, 2)) if mpu.pp.is_first else whole("bias", torch.ones(2))
    optimizer = Optimizer(OptimConfig(), [adopt(mpu, weight)], mpu)
    for _ in range(3):
        set_grads({weight: 1.0})
        optimizer.step(0.1)
    return optimizer.steps, sorted(optimizer.state_tensors())


def test_the_step_count_is_one_number_whatever_a_rank_holds(world: World) -> None:
    for steps, kinds in world.run(_lopsided, layout=ParallelConfig(pp=2)):
        assert steps == 3 and kinds == ["exp_avg", "exp_avg_sq"]


def _tied_run(mpu: ParallelState, dtype: torch.dtype, config: OptimConfig) -> list[tuple[Tensor, float]]:
    """Ten steps of a tied table of 7 rows; gradients depend on the place in the model, the data rank and the step."""
    table = _random(7, 3, seed=5, dtype=dtype)
    # On one stage it is one parameter, used twice.
    copy = cut_rows("words", table, mpu) if mpu.pp.is_first else cut_rows("head", table, mpu, tied_to="words")
    other = whole(f"norm.{mpu.pp.rank}", torch.ones(3, dtype=dtype))
    data_parallel = DataParallel([Unit("tied", [copy], tied=True), Unit("own", [other])], mpu, queue=WeightGradQueue())
    optimizer = Optimizer(config, [data_parallel], mpu)
    ((start, rows),) = shard_of(copy).cuts[0].segments
    history = []
    for step in range(10):
        data_parallel.zero_grad()
        for replica in range(2) if mpu.dp.size == 1 else [mpu.dp.rank]:
            for end in range(2) if mpu.pp.size == 1 else [mpu.pp.rank]:
                grad = _random(7, 3, seed=1000 * step + 10 * replica + end, dtype=torch.float64)
                main_grad(copy).add_(grad[start : start + rows])
        data_parallel.finish()
        norm = optimizer.step(0.05).grad_norm
        history.append((copy.detach().clone(), norm))
    return history


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize(("layout", "ranks"), [(ParallelConfig(pp=2), 4), (ParallelConfig(tp=2, pp=2), 8)])
def test_tied_copies_never_drift_and_equal_one_rank(
    world: World, layout: ParallelConfig, ranks: int, dtype: torch.dtype
) -> None:
    config = OptimConfig(weight_decay=0.1, clip_grad=1.0)
    expected = _tied_run(SINGLE, dtype, config)
    results = world.run(_tied_run, dtype, config, layout=layout, ranks=ranks)
    for step, (table, norm) in enumerate(expected):
        for tp in range(layout.tp):
            copies = [results[r][step][0] for r in range(ranks) if r % layout.tp == tp]
            assert all(torch.equal(copies[0], copy) for copy in copies)
        parts = torch.cat([results[tp][step][0] for tp in range(layout.tp)])
        close = 1e-12 if dtype == torch.float64 else 1e-2
        torch.testing.assert_close(parts, table, rtol=close, atol=close)
        tolerance = 1e-12 if dtype == torch.float64 else 1e-5
        assert all(result[step][1] == pytest.approx(norm, rel=tolerance) for result in results)  # counted once


def _raise_in_one(mpu: ParallelState) -> None:
    weight = whole("w", torch.ones(2, 2))
    optimizer = Optimizer(OptimConfig(), [adopt(mpu, weight)], mpu)
    set_grads({weight: math.nan})
    optimizer.step(0.1)


def test_the_error_reaches_the_caller(world: World) -> None:
    with pytest.raises(RankFailure, match="first in w on rank 0"):
        world.run(_raise_in_one, ranks=2)


def _steps_of_all_kinds(mpu: ParallelState, dtype: torch.dtype, config: OptimConfig) -> tuple[list[Tensor], int, int]:
    """(everything that an optimizer changes and reports, updates made, updates tried) over six steps.

    In turn: a plain step; one clipped although no rank alone has a norm to be clipped; one that a single rank clips; a
    nan on the last rank only; one on the first only; a plain step.
    """
    weight = whole(f"w.{mpu.pp.rank}", _random(5, 7, seed=mpu.pp.rank, dtype=dtype))
    bias = whole(f"b.{mpu.pp.rank}", torch.ones(3, dtype=dtype))
    data_parallel = adopt(mpu, weight, bias)
    optimizer = Optimizer(config, [data_parallel], mpu)
    tried, update_all = [], optimizer._update_all
    optimizer._update_all = lambda *args: (tried.append(args), update_all(*args))[1]  # type: ignore
    last = mpu.pp.size - 1
    scales = [(0.1,) * 4, (0.9,) * 4, (0.1, 0.1, 3.0, 0.1), (0.1,) * 4, (0.1,) * 4, (0.2,) * 4]
    history: list[Tensor] = []
    for step, by_rank in enumerate(scales):
        grad = _random(5, 7, seed=10 * step + mpu.pp.rank, dtype=torch.float64)
        set_grads({weight: 0.0, bias: 0.0})
        main_grad(weight).copy_(grad / grad.norm() * by_rank[mpu.pp.rank])
        if (step, mpu.pp.rank) in ((3, last), (4, 0)):
            main_grad(bias)[1] = math.nan
        result = optimizer.step(0.05)
        history += [torch.tensor([result.grad_norm, result.skipped]), weight.detach().clone(), bias.detach().clone()]
        history += [t.clone() for of_kind in optimizer.state_tensors().values() for _, t in of_kind]
    return history, optimizer.steps, len(tried)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_an_update_before_the_global_norm_gives_the_same_bits(world: World, name: str, dtype: torch.dtype) -> None:
    config = OptimConfig(name=name, momentum=0.9, clip_grad=1.0, weight_decay=0.1, nonfinite="skip")  # type: ignore
    layout = ParallelConfig(pp=4)
    plain = world.run(_steps_of_all_kinds, dtype, config, layout=layout)
    early = world.run(_steps_of_all_kinds, dtype, replace(config, post_validation=True), layout=layout)
    for rank, ((want, steps, _), (found, early_steps, tried)) in enumerate(zip(plain, early, strict=True)):
        assert early_steps == steps == 4
        assert len(found) == len(want)
        assert all(torch.equal(a.nan_to_num(nan=-1), b.nan_to_num(nan=-1)) for a, b in zip(found, want, strict=True))
        # Undone: step 2 everywhere, 3 where the rank's own norm was harmless, 4 and 5 where the rank had no nan.
        undone = 1 + (rank != 2) + (rank != 3) + (rank != 0)
        assert tried == 4 + undone


def _stopped_early(mpu: ParallelState) -> tuple[str, bool, int]:
    """The error of a nan on the last rank alone, whether all is as it was before, and the updates made."""
    weight = whole(f"w.{mpu.pp.rank}", _random(5, 7, seed=mpu.pp.rank))
    optimizer = Optimizer(OptimConfig(post_validation=True), [adopt(mpu, weight)], mpu)
    set_grads({weight: 0.01})
    optimizer.step(0.1)
    before = _snapshot(optimizer)
    set_grads({weight: math.nan if mpu.pp.rank == mpu.pp.size - 1 else 0.01})
    with pytest.raises(NonFiniteGradient) as error:
        optimizer.step(0.1)
    same = all(torch.equal(a, b) for a, b in zip(before, _snapshot(optimizer), strict=True))
    return str(error.value), same, optimizer.steps


def test_an_update_before_a_bad_norm_is_undone_and_stops_all_ranks(world: World) -> None:
    found = world.run(_stopped_early, layout=ParallelConfig(pp=2))
    message = found[0][0]
    assert "first in w.1 on rank 1 (update 2); nothing was changed" in message
    assert found == [(message, True, 1)] * 2
