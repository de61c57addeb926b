"""Parameters that several ranks or stages hold: partial sums, tied weights, shared units, mirrored stages."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megalite.mpu import ParallelConfig, ParallelState
from megalite.parallel.data import DataParallel, Unit, main_grad
from megalite.parallel.wgrad import WeightGradQueue
from megalite.testing.world import World
from tests.parallel.parameters import adopt, cut_rows, set_grads, whole


def _partial(mpu: ParallelState) -> list[Tensor]:
    """A norm weight under sequence parallelism, a KV weight shared by pairs of ranks, a bias of neither kind."""
    pair = mpu.blocks(mpu.tp, 2)
    norm = whole("norm", torch.zeros(3, dtype=torch.float64), partial=(mpu.tp,))
    shared = whole("kv", torch.zeros(2, 2, dtype=torch.float64), partial=(pair,))
    bias = whole("bias", torch.zeros(5, dtype=torch.float64))
    data_parallel = adopt(mpu, norm, shared, bias)
    data_parallel.zero_grad()
    share = 10.0**mpu.rank
    set_grads({norm: share, shared: share, bias: share})
    data_parallel.finish()
    return [main_grad(p).flatten()[0].clone() for p in (norm, shared, bias)]


def test_partial_sums_are_completed_over_their_axis_and_over_data_parallel_ranks(world: World) -> None:
    results = world.run(_partial, layout=ParallelConfig(tp=4), ranks=8)
    for rank, (norm, shared, bias) in enumerate(results):
        tp = rank % 4
        assert norm == 11111111.0
        assert shared == (11.0 if tp < 2 else 1100.0) * 10001.0
        assert bias == 10.0**tp * 10001.0


def _tied(mpu: ParallelState) -> tuple[Tensor, Tensor]:
    table = torch.zeros(5, 2, dtype=torch.float64)
    tied_to = None if mpu.pp.is_first else "words"
    copy = cut_rows("words" if mpu.pp.is_first else "head", table, mpu, tied_to=tied_to)
    other = whole("norm", torch.zeros(3, dtype=torch.float64))
    units = [Unit("tied", [copy], tied=True), Unit("other", [other])]
    data_parallel = DataParallel(units, mpu, queue=WeightGradQueue())
    data_parallel.zero_grad()
    set_grads({copy: 10.0**mpu.rank / 3, other: 10.0**mpu.rank})
    data_parallel.finish()
    return main_grad(copy).clone(), main_grad(other).clone()


@pytest.mark.parametrize(("layout", "ranks"), [(ParallelConfig(pp=2), 4), (ParallelConfig(tp=2, pp=2), 8)])
def test_tied_copies_get_the_sum_over_stages_and_data_parallel_ranks(
    world: World, layout: ParallelConfig, ranks: int
) -> None:
    results = world.run(_tied, layout=layout, ranks=ranks)
    for rank in range(ranks):
        t = rank % layout.tp
        same_tp = [r for r in range(ranks) if r % layout.tp == t]
        stage = [r for r in same_tp if r // (ranks // 2) == rank // (ranks // 2)]
        torch.testing.assert_close(results[rank][0].max(), torch.tensor(sum(10.0**r / 3 for r in same_tp)).double())
        assert torch.equal(results[rank][0], results[same_tp[0]][0])  # the copies agree bit for bit
        assert results[rank][1][0] == sum(10.0**r for r in stage)


def _freeze(mpu: ParallelState, ends: tuple[bool, bool]) -> str:
    """What is said of a tied weight that is frozen at these ends."""
    name, tied_to, frozen = ("words", None, ends[0]) if mpu.pp.is_first else ("head", "words", ends[1])
    copy = cut_rows(name, torch.zeros(5, 2, dtype=torch.float64), mpu, tied_to=tied_to)
    copy.requires_grad_(not frozen)
    try:
        DataParallel([Unit("tied", [copy], tied=True)], mpu, queue=WeightGradQueue()).finish()
    except ValueError as error:
        return str(error)
    return ""


def test_a_tied_weight_is_frozen_at_both_ends_or_at_none(world: World) -> None:
    layout = ParallelConfig(pp=2)
    assert world.run(_freeze, (True, True), layout=layout) == ["", ""]
    said = world.run(_freeze, (True, False), layout=layout, timeout=20.0)
    assert said[0] == said[1] and "words is frozen, head learns; freeze it on both stages" in said[0]


def _shared(mpu: ParallelState) -> Tensor:
    """An embedding that the last stage on this rank uses as well, its contribution the last to come."""
    table = whole("words", torch.zeros(5, 2, dtype=torch.float64))
    first, last = WeightGradQueue(), WeightGradQueue()
    other = whole("norm", torch.zeros(3, dtype=torch.float64))
    owner = DataParallel([Unit("shared", [table], shared=True), Unit("other", [other])], mpu, queue=first)
    user = DataParallel([Unit("head", [whole("head", torch.zeros(2, dtype=torch.float64))])], mpu, queue=last)
    last.deferring = True

    def late() -> None:
        main_grad(table).add_(10.0**mpu.rank)

    last.put(late, [table])
    owner.arm()
    (table.sum() * 3 + other.sum()).backward()
    owner.complete()
    user.arm()
    (table.sum() * 4).backward()
    last.drain(0)
    user.complete()
    owner.finish()
    user.finish()
    return main_grad(table).clone()


def test_a_unit_shared_with_another_stage_waits_for_both(world: World) -> None:
    for grad in world.run(_shared, ranks=2):
        assert torch.equal(grad, torch.full((5, 2), 2 * 7.0 + 11.0, dtype=torch.float64))


def _mirrored(mpu: ParallelState, copied: bool) -> list[Tensor]:
    """Each rank holds two stages, those of its mirror rank in the other order."""
    stages = sorted((mpu.pp.rank, mpu.pp.size - 1 - mpu.pp.rank))
    parameters = [whole(f"stage {stage}", torch.zeros(3, dtype=torch.float64)) for stage in stages]
    data_parallels = [adopt(mpu, parameter, copied=copied) for parameter in parameters]
    for stage, parameter in zip(stages, parameters, strict=True):
        set_grads({parameter: (stage + 1) * 10.0**mpu.rank})
    for data_parallel in data_parallels:
        data_parallel.finish()
    return [main_grad(parameter)[0].clone() for parameter in parameters]


def test_copies_of_a_bidirectional_pipeline_get_the_sum_of_both(world: World) -> None:
    layout = ParallelConfig(pp=4, schedule="dualpipe")
    for rank, grads in enumerate(world.run(_mirrored, True, layout=layout)):
        both = 10.0**rank + 10.0 ** (3 - rank)
        assert grads == [(stage + 1) * both for stage in sorted((rank, 3 - rank))]
    layout = ParallelConfig(pp=4, schedule="csv:a plan without copies")
    for rank, grads in enumerate(world.run(_mirrored, False, layout=layout)):
        assert grads == [(stage + 1) * 10.0**rank for stage in sorted((rank, 3 - rank))]
