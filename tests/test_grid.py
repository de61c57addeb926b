"""Rank grids, pure: up to 16,384 ranks without a process."""

import itertools
import math

import numpy as np
import pytest

from megalite.grid import DENSE_AXES, EXPERT_AXES, ORDER_NAMES, ParallelConfig, RankGrid

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


def test_the_last_part_that_names_a_layer_says_how_it_crosses_the_cut() -> None:
    config = ParallelConfig(cp=4, cp_mode="ring,every:2=ulysses_ring,0,3=all_gather,from:6=ulysses")
    modes = [config.cp_mode_of(layer) for layer in range(8)]
    assert modes == ["all_gather", "ulysses_ring", "ring", "all_gather", "ring", "ulysses_ring", "ulysses", "ulysses"]
    assert config.cp_modes == ("ring", "ulysses_ring", "all_gather", "ulysses")
    assert [config.head_exchange_size(mode) for mode in config.cp_modes] == [1, 2, 1, 4]
    assert {ParallelConfig(cp_mode="ulysses").cp_mode_of(layer) for layer in range(3)} == {"ulysses"}
