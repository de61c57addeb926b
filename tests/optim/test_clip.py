"""The gradient norm: every element of the global model once, the same bits on every rank."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from megalite.mpu import ParallelConfig, ParallelState
from megalite.optim.clip import clip_coefficient, grad_norm
from megalite.parallel.data import DataParallel, Unit
from megalite.parallel.wgrad import WeightGradQueue
from megalite.testing.world import World
from tests.parallel.parameters import adopt, cut_rows, set_grads, whole


def _norm(values: Tensor) -> float:
    weight = whole("w", torch.zeros_like(values))
    data_parallel = adopt(ParallelState.single(), weight)
    set_grads({weight: values})
    return float(grad_norm([data_parallel], ParallelState.single()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1, 63, 64, 1000, 70_000])
def test_against_torch(dtype: torch.dtype, size: int) -> None:
    values = torch.randn(size, dtype=dtype, generator=torch.Generator().manual_seed(size))
    assert _norm(values) == pytest.approx(float(values.double().norm()), rel=1e-12)


def test_decay_and_other_dtypes_and_stages_are_all_counted() -> None:
    mpu = ParallelState.single()
    parameters = [whole(f"w{i}", torch.zeros(2, 2)) for i in range(2)]
    parameters += [whole("bias", torch.zeros(4)), whole("wide", torch.zeros(2, 2, dtype=torch.float64))]
    first, second = adopt(mpu, *parameters[:2]), adopt(mpu, *parameters[2:])
    set_grads(dict.fromkeys(parameters, 1.5))
    assert float(grad_norm([first, second], mpu)) == 6.0


def test_finite_gradients_whose_squares_overflow_float32() -> None:
    assert _norm(torch.full((4, 4), 1e20)) == pytest.approx(4e20, rel=1e-6)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_not_finite_is_seen(bad: float) -> None:
    values = torch.ones(1000)
    values[617] = bad
    assert not math.isfinite(_norm(values))


def test_no_parameters() -> None:
    mpu = ParallelState.single()
    assert float(grad_norm([adopt(mpu)], mpu)) == 0.0
    assert float(grad_norm([], mpu)) == 0.0


def _sharded_and_replicated(mpu: ParallelState) -> float:
    """A cut vector with local norm 4 on each tp rank (attention sinks, say) and a whole one of norm 3."""
    sink, norm = torch.zeros(2 * mpu.tp.size, dtype=torch.float64), torch.zeros(9, dtype=torch.float64)
    cut, every = cut_rows("sink", sink, mpu), whole("norm", norm)
    data_parallel = adopt(mpu, every, cut)
    set_grads({cut: math.sqrt(8.0), every: 1.0})
    return float(grad_norm([data_parallel], mpu))


@pytest.mark.parametrize("tp", [2, 4])
def test_cut_parameters_count_everywhere_and_whole_ones_once(world: World, tp: int) -> None:
    for norm in world.run(_sharded_and_replicated, layout=ParallelConfig(tp=tp)):
        assert norm == pytest.approx(math.sqrt(9 + 16 * tp), rel=1e-14)


def _bad_in_a_copy(mpu: ParallelState) -> float:
    """A whole vector that is not a number on the rank that does not count it."""
    norm = whole("norm", torch.zeros(9, dtype=torch.float64))
    data_parallel = adopt(mpu, norm)
    set_grads({norm: math.nan if mpu.tp.rank == 1 else 1.0})
    return float(grad_norm([data_parallel], mpu))


def test_not_finite_is_seen_in_a_copy_that_does_not_count(world: World) -> None:
    assert all(math.isnan(norm) for norm in world.run(_bad_in_a_copy, layout=ParallelConfig(tp=2)))


def _different_ranks(mpu: ParallelState) -> float:
    """Squares of 20 and 100 on the two stages: the norm is that of the sum, not a mean of two norms."""
    weight = whole(f"layers.{mpu.pp.rank}", torch.zeros(4, dtype=torch.float64))
    data_parallel = adopt(mpu, weight)
    set_grads({weight: math.sqrt((20.0, 100.0)[mpu.pp.rank] / 4)})
    return float(grad_norm([data_parallel], mpu))


def test_ranks_with_different_parameters_add_their_squares(world: World) -> None:
    for norm in world.run(_different_ranks, layout=ParallelConfig(pp=2)):
        assert norm == pytest.approx(math.sqrt(120), rel=1e-14)


def _model(mpu: ParallelState) -> float:
    """Cut, whole, shared by pairs of ranks and tied parameters, the gradient of each element given by its place."""
    g = torch.Generator().manual_seed(0)
    table, shared, norm = (torch.randn(*s, dtype=torch.float64, generator=g) for s in ((7, 3), (4, 3), (3,)))
    pair = mpu.blocks(mpu.tp, 2) if mpu.tp.size > 1 else mpu.tp
    words = cut_rows("words", table, mpu, tied_to=None if mpu.pp.is_first else "words")
    kv = cut_rows("kv", shared, mpu, partial=(pair,)) if mpu.tp.size == 1 else whole("kv", shared, partial=(pair,))
    scale = whole(f"norm.{mpu.pp.rank}", norm, partial=(mpu.tp,))
    own = [scale, kv] if mpu.pp.is_first else [scale]
    units = [Unit("tied", [words], tied=True), Unit("own", own)]
    data_parallel = DataParallel(units, mpu, queue=WeightGradQueue())
    set_grads({words: words.data, scale: norm * (1 + mpu.pp.rank)})
    if mpu.pp.is_first:
        set_grads({kv: shared})
    return float(grad_norm([data_parallel], mpu))


@pytest.mark.parametrize("layout", [ParallelConfig(tp=2, pp=2), ParallelConfig(pp=2)])
def test_the_norm_is_bit_equal_on_every_rank_and_that_of_the_whole_model(world: World, layout: ParallelConfig) -> None:
    norms = world.run(_model, layout=layout, ranks=8)
    assert len(set(norms)) == 1
    g = torch.Generator().manual_seed(0)
    table, shared, norm = (torch.randn(*s, dtype=torch.float64, generator=g) for s in ((7, 3), (4, 3), (3,)))
    expected = torch.cat([table.flatten(), shared.flatten(), norm, 2 * norm]).norm()
    assert norms[0] == pytest.approx(float(expected), rel=1e-13)


def test_clip_coefficient() -> None:
    assert clip_coefficient(5.0, 1.0) == 0.2
    assert clip_coefficient(0.5, 1.0) == clip_coefficient(0.0, 1.0) == clip_coefficient(1e9, 0.0) == 1.0
