"""Rank grids (pure, up to 16,384 ranks), and axes and their collectives on living ranks."""

import dataclasses
import itertools
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from megalite import mpu as mpu_module
from megalite.grid import DENSE_AXES, EXPERT_AXES, ORDER_NAMES
from megalite.mpu import LastCall, ParallelConfig, ParallelState, RankGrid
from megalite.testing.world import World

COMBINED = [("dp", "cp"), ("tp", "cp"), ("tp", "dp", "cp"), ("tp", "pp"), ("etp", "ep")]

GRIDS = [
    (1, ParallelConfig()),
    (6, ParallelConfig(tp=3)),
    (8, ParallelConfig(tp=2, pp=2)),
    (16, ParallelConfig(tp=2, cp=2, pp=2, ep=4)),
    (48, ParallelConfig(tp=4, cp=3, pp=2, ep=6, etp=2)),
    (60, ParallelConfig(tp=5, pp=3, ep=4)),
    (64, ParallelConfig(tp=4, pp=4, order="tp-pp-cp-ep-dp")),
    (96, ParallelConfig(tp=2, cp=4, pp=3, order="cp-tp-dp-ep-pp", ep=8)),
    (96, ParallelConfig(tp=2, cp=4, pp=3, order="dp-pp-ep-tp-cp")),
    (96, ParallelConfig(tp=2, cp=2, pp=3, ep=4, etp=2, order="tp-pp-ep-dp-cp")),
    (96, ParallelConfig(tp=2, cp=2, pp=3, ep=16, order="pp-ep-tp-dp-cp")),
    (4096, ParallelConfig(tp=8, cp=2, pp=16, ep=8)),
    (16384, ParallelConfig(tp=8, cp=16, pp=16, ep=64, etp=2)),
]


def _names(world_size: int, config: ParallelConfig) -> str:
    return f"{world_size}-tp{config.tp}cp{config.cp}pp{config.pp}ep{config.ep}-{config.order}"


grids = pytest.mark.parametrize(("world_size", "config"), GRIDS, ids=[_names(*grid) for grid in GRIDS])


def _oracle(grid: RankGrid, axes: tuple[str, ...]) -> set[tuple[int, ...]]:
    """The groups along `axes`, by slicing an array of all ranks, the slowest axis first."""
    dense = [name for name in reversed(grid.order) if name != "ep"]
    ranks = np.arange(grid.world_size).reshape([grid.sizes[axis] for axis in dense])
    if set(axes) <= {"ep", "etp", "edp"}:
        # The ranks of a stage, in order, fall into the expert axes.
        stages = np.moveaxis(ranks, dense.index("pp"), 0)
        names = {"tp": "etp", "dp": "edp", "ep": "ep"}
        dense = ["pp", *(names[name] for name in reversed(grid.order) if name in names)]
        ranks = stages.reshape([grid.sizes[axis] for axis in dense])
    last = [dense.index(axis) for axis in axes]
    rows = np.moveaxis(ranks, last, range(-len(last), 0)).reshape(-1, math.prod(grid.sizes[a] for a in axes))
    return {tuple(sorted(row)) for row in rows.tolist()}


@grids
@pytest.mark.parametrize("axes", [(a,) for a in ("tp", "cp", "dp", "pp", "ep", "etp", "edp")] + COMBINED, ids="-".join)
def test_groups_partition_the_world(world_size: int, config: ParallelConfig, axes: tuple[str, ...]) -> None:
    grid = config.grid(world_size)
    groups = grid.groups(axes)
    assert sorted(itertools.chain(*groups)) == list(range(world_size))
    assert {len(group) for group in groups} == {math.prod(grid.sizes[axis] for axis in axes)}
    assert set(groups) == _oracle(grid, axes)


@grids
def test_coordinates_are_a_bijection_and_agree_with_members(world_size: int, config: ParallelConfig) -> None:
    grid = config.grid(world_size)
    for expert, axes in ((False, DENSE_AXES), (True, EXPERT_AXES)):
        places = [grid.coordinates(rank, expert=expert) for rank in range(world_size)]
        assert len({tuple(place[axis] for axis in axes) for place in places}) == world_size
        for rank in range(0, world_size, max(1, world_size // 37)):
            for axis in axes:
                members = grid.members(rank, (axis,))
                assert members[places[rank][axis]] == rank, "the index in the group is the coordinate"
                assert all(places[m] | {axis: 0} == places[rank] | {axis: 0} for m in members)


@grids
def test_both_factorings_share_the_pipelines(world_size: int, config: ParallelConfig) -> None:
    grid = config.grid(world_size)
    for rank in range(0, world_size, max(1, world_size // 97)):
        assert grid.coordinates(rank)["pp"] == grid.coordinates(rank, expert=True)["pp"]


@grids
def test_embedding_groups(world_size: int, config: ParallelConfig) -> None:
    grid = config.grid(world_size)
    for rank in range(0, world_size, max(1, world_size // 97)):
        members, stage = grid.embedding_members(rank), grid.coordinates(rank)["pp"]
        if stage in (0, config.pp - 1):
            assert [grid.coordinates(m)["pp"] for m in members] == sorted({0, config.pp - 1})
            assert all(grid.embedding_members(m) == members for m in members)
        else:
            assert members == (rank,)


def test_sixteen_ranks_by_hand() -> None:
    """The example of the literature: 16 GPUs, tp 2, pp 4."""
    grid = ParallelConfig(tp=2, pp=4).grid(16)
    assert grid.groups(("tp",)) == [(i, i + 1) for i in range(0, 16, 2)]
    assert grid.groups(("dp",)) == [(0, 2), (1, 3), (4, 6), (5, 7), (8, 10), (9, 11), (12, 14), (13, 15)]
    assert grid.groups(("pp",)) == [(i, i + 4, i + 8, i + 12) for i in range(4)]
    assert grid.groups(("tp", "pp"))[0] == (0, 1, 4, 5, 8, 9, 12, 13)
    assert grid.embedding_members(1) == (1, 13) and grid.embedding_members(5) == (5,)
    assert [grid.mirror_members(rank) for rank in (1, 5, 9, 13)] == [(1, 13), (5, 9), (5, 9), (1, 13)]


@pytest.mark.parametrize("order", ["-".join(order) for order in itertools.permutations(ORDER_NAMES)])
def test_the_first_axis_of_the_order_is_fastest(order: str) -> None:
    grid = ParallelConfig(tp=2, cp=2, pp=2, order=order).grid(16)
    names = [name for name in order.split("-") if name != "ep"]
    for place, name in enumerate(names):
        assert grid.members(0, (name,)) == (0, 2**place)


def test_experts_are_numbered_inside_a_stage() -> None:
    grid = ParallelConfig(tp=2, pp=2, ep=4).grid(16)
    assert grid.sizes["edp"] == 2
    assert grid.groups(("ep",))[:2] == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert grid.groups(("edp",))[:2] == [(0, 4), (1, 5)]
    assert all(max(group) < 8 or min(group) >= 8 for group in grid.groups(("ep",)))


@pytest.mark.parametrize(
    ("world_size", "config", "messages"),
    [
        (8, ParallelConfig(tp=3), ["world size 8", "tp * cp * pp = 3 * 1 * 1 = 3", "can be 1, 2, 4, 8"]),
        (8, ParallelConfig(tp=4, pp=4), ["4 * 1 * 4 = 16", "can be 1, 2, 4, 8"]),
        (12, ParallelConfig(pp=2, ep=4), ["ep * etp = 4 * 1", "6 ranks of a pipeline stage", "can be 1, 2, 3, 6"]),
        (8, ParallelConfig(tp=0, pp=-1), ["parallel.tp=0 must be at least 1", "parallel.pp=-1 must be at least 1"]),
        (8, ParallelConfig(order="tp-dp-pp"), ["'tp-dp-pp' must name each of tp-cp-ep-dp-pp once"]),
    ],
)
def test_impossible_layouts_name_the_numbers_and_the_legal_ones(
    world_size: int, config: ParallelConfig, messages: list[str]
) -> None:
    with pytest.raises(ValueError) as caught:
        config.grid(world_size)
    for message in messages:
        assert message in str(caught.value)


# Living ranks.


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
    first = mpu_module._process_group.cache_info().currsize
    states += [ParallelState.build(config) for config in configs]
    for state in states:
        total = state.tp.all_reduce(torch.tensor([state.rank]))
        assert total.item() == sum(state.tp.ranks)
        assert state.embd.all_reduce(torch.ones(1)).item() == state.embd.size
        if state.dp.ranks == state.dp_cp.ranks:
            assert state.dp.group is state.dp_cp.group, "axes with equal ranks share a group"
    return len(states), first, mpu_module._process_group.cache_info().currsize


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


def _collectives(mpu: ParallelState) -> dict[str, Tensor | object]:
    axis, rank = mpu.tp, float(mpu.tp.rank)
    row = torch.arange(6.0).view(2, 3) + 10 * rank
    received = torch.empty(2)
    left, right = (axis.rank - 1) % axis.size, (axis.rank + 1) % axis.size
    sending = axis.send(torch.tensor([rank, rank]), right)
    axis.receive(received, left).wait()
    sending.wait()
    return {
        "sum": axis.all_reduce(row.clone()),
        "max": axis.all_reduce(row.clone(), "max"),
        "min": axis.all_reduce(row.clone(), "min"),
        "gather0": axis.all_gather(row),
        "gather1": axis.all_gather(row, 1),
        "scatter0": axis.reduce_scatter(torch.arange(8.0) + rank),
        "scatter1": axis.reduce_scatter((torch.arange(8.0) + rank).view(1, 8), 1),
        "exchange": axis.all_to_all(torch.arange(4.0) + 10 * rank),
        "uneven": axis.all_to_all(
            torch.full((10,), rank), [1, 2, 3, 4], [axis.rank + 1] * 4
        ),
        "broadcast": axis.broadcast(torch.tensor([rank]), 2),
        "received": received,
        "objects": axis.gather_objects({"rank": axis.rank}),
    }  # fmt: skip


def test_what_collectives_return(world: World) -> None:
    for rank, found in enumerate(world.run(_collectives, layout=ParallelConfig(tp=4))):
        rows = [torch.arange(6.0).view(2, 3) + 10 * r for r in range(4)]
        expected = {
            "sum": sum(rows),
            "max": rows[3],
            "min": rows[0],
            "gather0": torch.cat(rows),
            "gather1": torch.cat(rows, 1),
            "scatter0": (4 * torch.arange(8.0) + 6)[2 * rank : 2 * rank + 2],
            "scatter1": (4 * torch.arange(8.0) + 6)[None, 2 * rank : 2 * rank + 2],
            "exchange": torch.tensor([rank + 10.0 * r for r in range(4)]),
            "uneven": torch.arange(4.0).repeat_interleave(rank + 1),
            "broadcast": torch.tensor([2.0]),
            "received": torch.tensor([(rank - 1.0) % 4] * 2),
        }
        for name, value in expected.items():
            assert torch.equal(found[name], value), (rank, name, found[name])
        assert found["objects"] == [{"rank": r} for r in range(4)]


def _count(mpu: ParallelState) -> dict[str, tuple[int, int]]:
    axis, x = mpu.tp, torch.zeros(8, 3, dtype=torch.float64)
    axis.all_reduce(x)
    axis.all_gather(x)
    axis.reduce_scatter(x)
    axis.all_to_all(x)
    axis.all_to_all(torch.zeros(10, dtype=torch.float64), [1, 2, 3, 4], [axis.rank + 1] * 4)
    axis.broadcast(x, 1)
    mpu.dp.all_reduce(x)  # of size 1: counts nothing
    axis.all_reduce(x)
    sent = {site.rpartition(":")[2]: (entry.calls, entry.bytes_sent) for site, entry in axis.stats.by_site.items()}
    assert all(site.startswith("tests.test_mpu._count:") for site in axis.stats.by_site), axis.stats.by_site
    assert axis.stats.calls == 7 and axis.stats.bytes_sent == sum(size for _, size in sent.values())
    assert mpu.dp.stats.calls == 0 and mpu.dp.stats.bytes_sent == 0
    mpu.reset_stats()
    assert axis.stats.calls == 0
    return sent


def test_bytes_are_those_of_the_optimal_algorithms(world: World) -> None:
    """Of a tensor of S bytes over n ranks; in the uneven exchange a rank keeps rank + 1 of 10 rows."""
    size, n = 8 * 3 * 8, 4
    for rank, sent in enumerate(world.run(_count, layout=ParallelConfig(tp=n))):
        assert sent == {
            "all_reduce": (2, 2 * (2 * (n - 1) * size // n)),
            "all_gather": (1, (n - 1) * size),
            "reduce_scatter": (1, (n - 1) * size // n),
            "all_to_all": (2, (n - 1) * size // n + (10 - (rank + 1)) * 8),
            "broadcast": (1, size if rank == 1 else 0),
        }


def _last_calls(mpu: ParallelState) -> list[tuple[str, str, bool]]:
    call, seen = mpu.last_call, []

    def note() -> None:
        seen.append((call.axis, call.operation, call.finished))

    note()
    pending = mpu.tp.start_all_reduce(torch.ones(1))
    note()
    mpu.dp.all_gather(torch.ones(1))
    note()
    pending.wait()
    note()
    return seen


def test_the_last_call_follows_what_a_rank_waits_for(world: World) -> None:
    for seen in world.run(_last_calls, layout=ParallelConfig(tp=2), ranks=4):
        assert seen == [
            ("none", "none", True),
            ("tp", "all_reduce", False),
            ("dp", "all_gather", True),
            ("tp", "all_reduce", True),
        ]


def test_last_call_says_how_long() -> None:
    call = LastCall()
    call.enter("tp", "all_gather", "nn.mlp.ParallelMLP.forward")
    assert str(call) == "all_gather on axis tp from nn.mlp.ParallelMLP.forward (waiting for 0 s)"
    call.finished = True
    assert str(call).endswith("(finished)")


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


def test_the_last_part_that_names_a_layer_says_how_it_crosses_the_cut() -> None:
    config = ParallelConfig(cp=4, cp_mode="ring,every:2=ulysses_ring,0,3=all_gather,from:6=ulysses")
    modes = [config.cp_mode_of(layer) for layer in range(8)]
    assert modes == ["all_gather", "ulysses_ring", "ring", "all_gather", "ring", "ulysses_ring", "ulysses", "ulysses"]
    assert config.cp_modes == ("ring", "ulysses_ring", "all_gather", "ulysses")
    assert [config.head_exchange_size(mode) for mode in config.cp_modes] == [1, 2, 1, 4]
    assert {ParallelConfig(cp_mode="ulysses").cp_mode_of(layer) for layer in range(3)} == {"ulysses"}


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
