"""Gradient buckets of experts: buffers of their own, summed over the ranks that hold the same experts."""

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
from tests.parallel.parameters import adopt, cut_experts, set_grads, whole


def test_experts_get_buffers_of_their_own_in_their_unit() -> None:
    mpu = ParallelState.single()
    router, norm = whole("router", torch.ones(4, 3)), whole("norm", torch.ones(3))
    fc1, bias = cut_experts("fc1", torch.ones(4, 6, 3), mpu), cut_experts("bias", torch.ones(4, 3), mpu)
    data_parallel = adopt(mpu, norm, fc1, router, bias)
    found = [(s.group, s.decay, [shard_of(span.parameter).name for span in s.spans]) for s in data_parallel.segments]
    assert found == [
        ("dense", True, ["router"]), ("dense", False, ["norm"]), ("expert", True, ["fc1"]), ("expert", False, ["bias"]),
    ]  # fmt: skip
    for parameter in (router, norm, fc1, bias):
        assert torch.equal(parameter, torch.ones_like(parameter))


def _experts(mpu: ParallelState) -> Any:
    """A dense weight, and four experts of which each rank uses those of its own number alone, in two units."""
    dense = [whole(f"dense.{i}", torch.ones(2, dtype=torch.float64)) for i in range(2)]
    experts = [cut_experts(f"experts.{i}", torch.ones(4, 3, dtype=torch.float64), mpu) for i in range(2)]
    units = [Unit(f"layers.{i}", [dense[i], experts[i]]) for i in range(2)]
    data_parallel = DataParallel(units, mpu, queue=WeightGradQueue())
    mpu.reset_stats()
    data_parallel.zero_grad()
    data_parallel.arm()
    share = 10.0**mpu.world.rank
    used = [e[mpu.world.rank % e.shape[0]].sum() for e in experts]
    (share * (dense[0].sum() + dense[1].sum() + used[0] + 2 * used[1])).backward()
    started = (mpu.dp_cp.stats.calls, mpu.edp.stats.calls)
    data_parallel.finish()
    sent = (mpu.dp_cp.stats.bytes_sent, mpu.edp.stats.bytes_sent)
    return [main_grad(p).clone() for p in (*dense, *experts)], started, sent


@pytest.mark.parametrize(
    ("layout", "ranks"), [(ParallelConfig(ep=2), 4), (ParallelConfig(ep=4), 4), (ParallelConfig(), 4)]
)
def test_experts_are_summed_over_edp_and_the_rest_over_dp(world: World, layout: ParallelConfig, ranks: int) -> None:
    edp, local = ranks // layout.ep, 4 // layout.ep
    for rank, (grads, started, sent) in enumerate(world.run(_experts, layout=layout, ranks=ranks)):
        for dense in grads[:2]:
            assert torch.equal(dense, torch.full((2,), 1111.0, dtype=torch.float64))
        expected = torch.zeros(local, 3, dtype=torch.float64)
        for other in range(rank % layout.ep, ranks, layout.ep):
            expected[other % local] += 10.0**other
        assert torch.equal(grads[2], expected) and torch.equal(grads[3], 2 * expected)
        dense_bytes, expert_bytes = (2 * 2 * (n - 1) * 64 * 8 // n for n in (ranks, edp))
        if layout.ep == 1:  # the two axes have the same ranks, but count apart
            assert sent == (dense_bytes, dense_bytes)
        assert started == (2, 2 if edp > 1 else 0)
        assert sent == (dense_bytes, expert_bytes)


def _idle_experts(mpu: ParallelState) -> Any:
    """Experts without a token: in the graph with no row on rank 0, out of it on rank 1, used on the others."""
    dense, experts = whole("dense", torch.ones(2, dtype=torch.float64)), cut_experts("e", torch.ones(4, 3, 5), mpu)
    data_parallel = DataParallel([Unit("a", [dense]), Unit("b", [experts])], mpu, queue=WeightGradQueue())
    mpu.reset_stats()
    data_parallel.zero_grad()
    data_parallel.arm()
    rows = torch.ones(0 if mpu.world.rank == 0 else mpu.world.rank, 5)
    y = dense.sum() if mpu.world.rank == 1 else dense.sum() + (rows @ experts[0].t()).sum()
    y.backward()
    started = mpu.edp.stats.calls
    data_parallel.finish()
    return started, main_grad(experts).clone()


def test_experts_without_a_token_have_a_gradient_of_zeros(world: World) -> None:
    results = world.run(_idle_experts, layout=ParallelConfig(ep=2), ranks=4)
    assert [started for started, _ in results] == [1, 0, 1, 1], "with no row the reduction starts at once all the same"
    for rank, (_, grad) in enumerate(results):
        of_first = {0: 2.0, 1: 3.0}[rank % 2]  # rows of ranks 0 and 2, or of 3 alone
        assert torch.equal(grad[0], torch.full((3, 5), of_first)) and grad[1].count_nonzero() == 0


def _mirrored_experts(mpu: ParallelState) -> tuple[list[Tensor], tuple[int, int]]:
    stages = sorted((mpu.pp.rank, mpu.pp.size - 1 - mpu.pp.rank))
    zeros = torch.zeros(2, 3, dtype=torch.float64)
    experts = [cut_experts(f"{stage}.experts", zeros, mpu) for stage in stages]
    norms = [whole(f"{i}.norm", zeros[0]) for i in range(len(experts))]
    data_parallels = [adopt(mpu, *pair, copied=True) for pair in zip(experts, norms, strict=True)]
    for stage, parameter in zip(stages, experts, strict=True):
        set_grads({parameter: (stage + 1) * 10.0**mpu.world.rank})
    for data_parallel in data_parallels:
        data_parallel.finish()
    return [main_grad(parameter).flatten()[0].clone() for parameter in experts], (mpu.pp.rank, mpu.ep.rank)


def test_experts_of_a_bidirectional_pipeline_get_the_sum_of_both_copies(world: World) -> None:
    results = world.run(_mirrored_experts, layout=ParallelConfig(pp=2, ep=2, schedule="dualpipe"), ranks=8)
    for grads, (_, ep) in results:
        same_experts = [10.0**rank for rank, (_, place) in enumerate(place for _, place in results) if place == ep]
        assert grads == [stage * sum(same_experts) for stage in (1, 2)]


def _expert_partial(mpu: ParallelState) -> Tensor:
    bias = cut_experts("bias", torch.zeros(2, 3, dtype=torch.float64), mpu, partial=(mpu.etp,))
    data_parallel = adopt(mpu, bias)
    data_parallel.zero_grad()
    set_grads({bias: 10.0**mpu.world.rank})
    data_parallel.finish()
    return main_grad(bias)[0, 0].clone()


def test_partial_sums_of_experts_are_completed_over_etp(world: World) -> None:
    layout = ParallelConfig(tp=2, ep=2, etp=2)
    values = world.run(_expert_partial, layout=layout, ranks=8)
    assert values == [110011.0, 110011.0, 11001100.0, 11001100.0] * 2
