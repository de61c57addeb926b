"""Axes and groups on living ranks."""

import dataclasses
import itertools
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megalite import mpu as mpu_module
from megalite.mpu import ParallelConfig, ParallelState
from megalite.testing.world import World

COMBINED = [("dp", "cp"), ("tp", "cp"), ("tp", "dp", "cp"), ("tp", "pp"), ("etp", "ep")]


def _axes_agree(mpu: ParallelState) -> None:
    for name, axis in mpu.axes().items():
        assert axis.ranks[axis.rank] == mpu.rank, axis
        rows = axis.all_gather(torch.tensor([mpu.rank]))
        assert tuple(rows.tolist()) == axis.ranks, axis
        assert axis.gather_objects(name) == [name] * axis.size
    for parts in (("tp",), ("cp",), ("dp",), ("pp",), ("ep",), ("etp",), ("edp",), *COMBINED):
        assert getattr(mpu, "_".join(parts)).ranks == mpu.grid.members(mpu.rank, parts)
    assert mpu.world.ranks == tuple(range(mpu.grid.world_size))


@pytest.mark.parametrize(
    "config",
    [
        ParallelConfig(tp=2, pp=2),
        ParallelConfig(tp=2, cp=2, pp=2),
        ParallelConfig(tp=2, ep=4),
        ParallelConfig(pp=4, ep=2),
        ParallelConfig(tp=2, pp=2, ep=2, etp=2, order="dp-tp-cp-ep-pp"),
        ParallelConfig(tp=2, pp=2, order="pp-cp-ep-dp-tp"),
        ParallelConfig(tp=2, pp=2, ep=4, order="tp-pp-cp-ep-dp"),
    ],
    ids=str,
)
def test_groups_on_eight_ranks(world: World, config: ParallelConfig) -> None:
    world.run(_axes_agree, layout=config, ranks=8)


def _many_layouts(mpu: ParallelState, configs: list[ParallelConfig]) -> tuple[int, int, int]:
    """Builds and uses every layout twice, all alive at once: (layouts, groups after the first round, at the end)."""
    states = [ParallelState.build(config) for config in configs]
    first = len(mpu_module._GROUPS)
    states += [ParallelState.build(config) for config in configs]
    for state in states:
        total = state.tp.all_reduce(torch.tensor([state.rank]))
        assert total.item() == sum(state.tp.ranks)
        assert state.embd.all_reduce(torch.ones(1)).item() == state.embd.size
        if state.dp.ranks == state.dp_cp.ranks:
            assert state.dp.group is state.dp_cp.group, "axes with equal ranks share a group"
    return len(states), first, len(mpu_module._GROUPS)


def test_many_layouts_live_in_one_process(world: World) -> None:
    sizes = [(tp, cp, pp) for tp, cp, pp in itertools.product((1, 2, 4, 8), repeat=3) if tp * cp * pp <= 8]
    orders = ("tp-cp-ep-dp-pp", "dp-tp-cp-ep-pp", "pp-dp-ep-cp-tp")
    configs = [ParallelConfig(tp=t, cp=c, pp=p, order=order) for (t, c, p) in sizes for order in orders]
    for layouts, first, last in world.run(_many_layouts, configs, ranks=8, timeout=120):
        assert layouts == 120
        assert first == last <= 60, "groups are made once per tuple of ranks"


def _build_beside(mpu: ParallelState) -> tuple[int, tuple[int, ...]]:
    """A layout over some of the ranks, in an order of its own."""
    if mpu.rank not in (1, 3):
        return -1, ()
    inner = ParallelState.build(ParallelConfig(tp=2), (1, 3))
    return inner.rank, tuple(inner.tp.all_gather(torch.tensor([mpu.rank])).tolist())


def test_a_layout_over_some_ranks(world: World) -> None:
    assert world.run(_build_beside, ranks=4) == [(-1, ()), (0, (1, 3)), (-1, ()), (1, (1, 3))]


def _blocks(mpu: ParallelState) -> tuple[int, ...]:
    axis = mpu.blocks(mpu.tp, 2)
    return tuple(axis.all_gather(torch.tensor([mpu.rank])).tolist())


def test_blocks_of_an_axis(world: World) -> None:
    assert world.run(_blocks, layout=ParallelConfig(tp=4)) == [(0, 1), (0, 1), (2, 3), (2, 3)]


def test_describe_names_what_crosses_nodes() -> None:
    state = ParallelState.single()
    assert state.describe() == []


def _describe(mpu: ParallelState) -> list[tuple[str, int, str, str]]:
    return mpu.describe(ranks_per_node=4)


def test_describe_on_eight_ranks(world: World) -> None:
    rows = {row[0]: row[1:] for row in world.run(_describe, layout=ParallelConfig(tp=2, pp=2), ranks=8)[1]}
    assert rows["tp"] == (2, "0 1", "yes")
    assert rows["dp"] == (2, "1 3", "yes")
    assert rows["pp"] == (2, "1 5", "no")
    assert rows["world"] == (8, "0..7", "no")
    assert "cp" not in rows


WITHOUT_DISTRIBUTED = """
import torch
from megalite.mpu import ParallelConfig, ParallelState
for state in (ParallelState.single(), ParallelState.build(ParallelConfig())):
    x = torch.ones(4, 3)
    for axis in state.axes().values():
        assert axis.all_reduce(x) is x and axis.all_gather(x, 1) is x and axis.reduce_scatter(x) is x
        assert axis.all_to_all(x) is x and axis.broadcast(x) is x and axis.start_all_reduce(x).wait() is x
        assert axis.gather_objects(3) == [3] and axis.is_first and axis.is_last and axis.stats.calls == 0
        axis.barrier()
    assert state.last_call.finished and state.last_call.operation == "none"
assert not torch.distributed.is_initialized()
try:
    ParallelState.build(ParallelConfig(tp=2))
except ValueError as error:
    assert "world size 1 is not divisible by tp * cp * pp = 2 * 1 * 1" in str(error)
else:
    raise AssertionError("tp=2 in one process")
"""


def test_single_needs_no_torch_distributed() -> None:
    root = Path(__file__).parents[1]
    subprocess.run([sys.executable, "-c", WITHOUT_DISTRIBUTED], cwd=root, check=True, timeout=120)


def _shards(mpu: ParallelState) -> list[tuple[int, ...]]:
    return [axis.ranks for axis in (mpu.shard, mpu.shard_replica, mpu.expert_shard, mpu.expert_shard_replica)]


def test_zero_divides_inside_blocks_of_consecutive_ranks(world: World) -> None:
    layout = ParallelConfig(tp=2, ep=2, zero=1, zero_shard_size=2)  # dp 4, edp 4
    assert world.run(_shards, layout=layout, ranks=8)[5] == [(5, 7), (1, 5), (5, 7), (1, 5)]
    assert world.run(_shards, layout=dataclasses.replace(layout, ep=8), ranks=8)[5][2:] == [(5,), (5,)]
    assert world.run(_shards, layout=dataclasses.replace(layout, zero_shard_size=None), ranks=8)[5][0] == (1, 3, 5, 7)
    assert world.run(_shards, layout=ParallelConfig(), ranks=4)[1] == [(1,), (0, 1, 2, 3)] * 2


def test_axes_are_listed_once(world: World) -> None:
    layout = ParallelConfig(zero=1, zero_shard_size=2)
    for names in world.run(_axis_names, layout=layout, ranks=4):
        assert {"shard", "shard_replica", "expert_shard"} <= set(names)
    assert "shard" not in world.run(_axis_names, layout=ParallelConfig(zero=1), ranks=2)[0]


def _axis_names(mpu: ParallelState) -> list[str]:
    return list(mpu.axes())


def _places(mpu: ParallelState) -> dict[str, tuple[tuple[int, ...], int]]:
    return {name: (axis.ranks, axis.rank) for name, axis in mpu.axes().items()}


def test_a_planned_place_is_that_of_a_rank_and_sends_nothing(world: World) -> None:
    layout = ParallelConfig(tp=2, pp=2, ep=2)
    for rank, places in enumerate(world.run(_places, layout=layout, ranks=8)):
        assert _places(ParallelState.planned(layout, 8, rank)) == places
    place = ParallelState.planned(layout, 8, 3)
    with pytest.raises(AssertionError, match=r"all_reduce on axis tp .* rank 3 is only planned"):
        place.tp.all_reduce(torch.ones(1))
