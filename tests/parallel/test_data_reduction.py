"""Reduction over data-parallel ranks: sums equal to one rank's gradients, and when they start."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megalite.mpu import ParallelConfig, ParallelState
from megalite.parallel.data import DataParallel, Unit, main_grad
from megalite.parallel.shard import shard_of
from megalite.parallel.wgrad import WeightGradQueue
from megalite.testing.world import World
from tests.parallel.net import Net, accumulate, assert_close, autograd_sums, token_ids
from tests.parallel.parameters import adopt, whole


def _parity(mpu: ParallelState, num_microbatches: int, deferred: bool, reduce_dtype: torch.dtype | None) -> Any:
    net = Net(mpu)
    data_parallel = DataParallel(net.units(), mpu, queue=net.queue, reduce_dtype=reduce_dtype)
    mpu.reset_stats()
    mine = token_ids().chunk(mpu.dp.size)[mpu.dp.rank]
    grads = accumulate(net, data_parallel, mine, num_microbatches, deferred=deferred)
    buffers = sum(s.main_grad.nbytes for s in data_parallel.segments)
    return grads, mpu.dp_cp.stats.calls, mpu.dp_cp.stats.bytes_sent, buffers


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("dp", [2, 4])
def test_data_parallel_sums_equal_one_rank(world: World, dp: int, deferred: bool) -> None:
    results = world.run(_parity, 2, deferred, None, ranks=dp)
    for grads, calls, sent, buffers in results:
        assert_close(grads, autograd_sums(token_ids()))
        assert calls == 3 and sent == 2 * (dp - 1) * buffers // dp  # one all-reduce for each unit
    for grads, *_ in results[1:]:
        assert all(torch.equal(g, results[0][0][n]) for n, g in grads.items())


def test_deferred_weight_gradients_are_in_the_reduction_bit_for_bit(world: World) -> None:
    plain, deferred = (world.run(_parity, 2, flag, None, ranks=2) for flag in (False, True))
    for (a, *_), (b, *_) in zip(plain, deferred, strict=True):
        assert all(torch.equal(b[name], value) for name, value in a.items())


def test_reduce_dtype_is_what_travels(world: World) -> None:
    for grads, _, sent, buffers in world.run(_parity, 1, False, torch.float32, ranks=2):
        assert sent == buffers // 2
        assert_close(grads, autograd_sums(token_ids()), tolerance=1e-5)
        exact = autograd_sums(token_ids())
        assert any(not torch.equal(grads[n], exact[n]) for n in exact)


def _start_times(mpu: ParallelState) -> list[int]:
    """All-reduces started after: arm, the last I, arm again, each W; a step that ends in W. Then one that ends in B."""
    net = Net(mpu)
    net.unused.requires_grad_(False)
    data_parallel = DataParallel(net.units(), mpu, queue=net.queue)
    started = []
    mpu.reset_stats()
    net.queue.deferring = True
    net(token_ids()).backward()
    started.append(mpu.dp_cp.stats.calls)  # hooks have fired, with None where a linear has deferred its work
    data_parallel.arm()
    started.append(mpu.dp_cp.stats.calls)
    net.queue.drain(0)
    started.append(mpu.dp_cp.stats.calls)
    data_parallel.finish()
    net.queue.deferring = False
    data_parallel.zero_grad()
    net(token_ids()).backward()
    started.append(mpu.dp_cp.stats.calls)
    data_parallel.arm()
    net(token_ids()).backward()
    started.append(mpu.dp_cp.stats.calls)
    data_parallel.finish()
    started.append(mpu.dp_cp.stats.calls)
    return started


def test_reductions_start_with_the_last_contribution(world: World) -> None:
    for started in world.run(_start_times, ranks=2):
        assert started == [0, 0, 3, 3, 6, 6]


def _other_order(mpu: ParallelState) -> list[Tensor]:
    """Units whose last contributions come in another order on each rank; one rank does not use the last unit."""
    sizes = {"a": 3, "b": 70, "c": 200}
    parameters = {name: whole(name, torch.ones(size, dtype=torch.float64)) for name, size in sizes.items()}
    units = [Unit(name, [p]) for name, p in parameters.items()]
    data_parallel = DataParallel(units, mpu, queue=WeightGradQueue())
    x = torch.ones((), dtype=torch.float64)
    for name in ("a", "b", "c") if mpu.rank else ("b", "a"):
        x = x + parameters[name].sum() * x.detach()
    data_parallel.arm()
    x.backward()
    data_parallel.finish()
    return [main_grad(p).clone() for p in parameters.values()]


def test_ranks_may_finish_units_in_different_orders(world: World) -> None:
    # A parameter's gradient is the running sum before its use: rank 0 adds b (70) first, rank 1 adds a (3).
    factors = {"a": 71.0 + 1.0, "b": 1.0 + 4.0, "c": 0.0 + 284.0}
    for a, b, c in world.run(_other_order, ranks=2):
        for found, name in ((a, "a"), (b, "b"), (c, "c")):
            assert torch.equal(found, torch.full_like(found, factors[name])), name


def _tensor_parallel(mpu: ParallelState, deferred: bool) -> dict[str, Tensor]:
    """Gradients of the cut model as global tensors; the ranks of a tensor-parallel group each fill in their part."""
    net = Net(mpu)
    data_parallel = DataParallel(net.units(), mpu, queue=net.queue)
    mine = token_ids().chunk(mpu.dp.size)[mpu.dp.rank]
    data_parallel.zero_grad()
    net.queue.deferring = deferred
    if not deferred:
        data_parallel.arm()
    (net.attend(mine) * net.scale).tanh().square().sum().backward()
    if deferred:
        data_parallel.arm()
        net.queue.drain(0)
    data_parallel.finish()
    grads = {}
    for name, parameter in net.named_parameters():
        shard = shard_of(parameter)
        full = torch.zeros(shard.shape, dtype=torch.float64)
        if shard.is_owner(mpu):
            for offset, sizes, view in shard.pieces(main_grad(parameter)):
                full[tuple(slice(o, o + n) for o, n in zip(offset, sizes, strict=True))] = view
        grads[name] = mpu.tp.all_reduce(full)
    return grads


@pytest.mark.parametrize("deferred", [False, True])
def test_tensor_and_data_parallel_together_equal_one_rank(world: World, deferred: bool) -> None:
    expected = _tensor_parallel(ParallelState.single(), False)
    for grads in world.run(_tensor_parallel, deferred, layout=ParallelConfig(tp=2), ranks=4):
        assert_close(grads, expected)


def _bf16_total(mpu: ParallelState) -> list[float]:
    """What this rank keeps of the sum of 512 micro-gradients a rank."""
    weight = whole("w", torch.ones(2, 64, dtype=torch.bfloat16))
    data_parallel = adopt(mpu, weight)
    data_parallel.zero_grad()
    for i in range(512):
        is_reduced = data_parallel.reduces_each_pass or i == 511
        if is_reduced:
            data_parallel.arm()
        (weight.sum() / 1024).backward()
        if is_reduced:
            data_parallel.complete()
    data_parallel.finish()
    return [value for _, grad in data_parallel.gradients() for value in grad.unique().tolist()]


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_bf16_gradients_accumulate_in_float32_under_every_stage(world: World, zero: int) -> None:
    for total in world.run(_bf16_total, layout=ParallelConfig(zero=zero), ranks=2):
        assert total == [1.0], "a bf16 sum stops at 0.25"
