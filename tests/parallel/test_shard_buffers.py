"""Buffers as part of the model's state: named, given memory, marked and saved like parameters."""

from __future__ import annotations

import torch
from torch import nn

from megalite.mpu import ParallelConfig, ParallelState
from megalite.parallel.random import initialize
from megalite.parallel.shard import (
    Cut,
    Shard,
    buffer_tensors,
    copies_axis,
    even_cut,
    mark_copies,
    materialize,
    name_parameters,
    persistent_buffers,
    set_shard,
    shard_of,
)
from megalite.testing.world import World


class Counter(nn.Module):
    """A cut buffer, a plain one, one of integers, one that is no state; a submodule is used twice."""

    def __init__(self, mpu: ParallelState):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        segments = even_cut(8, mpu.tp)
        self.register_buffer("loads", torch.ones(segments[0][1]))
        set_shard(self.loads, Shard("loads", (8,), (Cut(mpu.tp, 0, segments),)))
        self.register_buffer("count", torch.zeros(2, dtype=torch.int64))
        self.register_buffer("table", torch.zeros(3), persistent=False)
        self.register_buffer("nothing", None)
        self.inner = nn.BatchNorm1d(3)
        self.again = self.inner

    def init_parameters(self, seed: int) -> None:
        """The buffers, too."""
        nn.init.ones_(self.weight)
        self.loads.fill_(0.5)


def _counter(mpu: ParallelState, dtype: torch.dtype = torch.bfloat16) -> Counter:
    with torch.device("meta"):
        counter = Counter(mpu)
        name_parameters(counter)
    materialize(counter, torch.device("cpu"), dtype)
    initialize(counter, seed=0)
    return counter


def test_persistent_buffers_are_named_by_their_path() -> None:
    counter = _counter(ParallelState.single())
    names = ["loads", "count", "inner.running_mean", "inner.running_var", "inner.num_batches_tracked"]
    assert [name for name, _ in persistent_buffers(counter)] == names
    assert [shard_of(buffer).name for _, buffer in persistent_buffers(counter)] == names
    assert getattr(counter.table, "shard", None) is None
    tensors = buffer_tensors(counter)
    assert [shard.name for shard, _ in tensors["buffer"]] == names
    assert tensors["buffer"][0][1] is counter.loads  # live, so that a checkpoint is loaded into it
    assert buffer_tensors(nn.Linear(2, 2)) == {}


def test_buffers_get_memory_in_float32_and_integers_stay_integers() -> None:
    counter = _counter(ParallelState.single())
    assert counter.weight.dtype == torch.bfloat16
    assert counter.loads.dtype == torch.float32 and counter.loads.eq(0.5).all()
    assert counter.count.dtype == torch.int64 and counter.table.dtype == torch.float32
    assert _counter(ParallelState.single(), torch.float64).loads.dtype == torch.float64


def test_a_copy_of_a_stage_marks_its_buffers_too() -> None:
    single = ParallelState.single()
    counter = _counter(single)
    mark_copies(counter)
    mark_copies(counter)
    for shard, _ in buffer_tensors(counter)["buffer"]:
        assert shard.tied_to == shard.name and not shard.is_owner(single) and not shard.is_saver(single)


def _cut(mpu: ParallelState) -> tuple[tuple[int, ...], list[tuple[int, ...]], bool]:
    counter = _counter(mpu)
    shard = shard_of(counter.loads)
    return shard.shape, [offset for offset, _, _ in shard.pieces(counter.loads)], shard.is_saver(mpu)


def test_a_cut_buffer_keeps_its_place_in_the_model(world: World) -> None:
    assert world.run(_cut, layout=ParallelConfig(tp=2), ranks=4) == [
        ((8,), [(0,)], True), ((8,), [(4,)], True), ((8,), [(0,)], False), ((8,), [(4,)], False),
    ]  # fmt: skip


def _copies(mpu: ParallelState) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return copies_axis("dense", mpu).ranks, copies_axis("expert", mpu).ranks


def test_which_ranks_hold_the_same_part(world: World) -> None:
    layout = ParallelConfig(tp=2, ep=2)
    assert world.run(_copies, layout=layout, ranks=4) == [
        ((0, 2), (0, 2)), ((1, 3), (1, 3)), ((0, 2), (0, 2)), ((1, 3), (1, 3)),
    ]  # fmt: skip
    whole_stage = ParallelConfig(tp=2, ep=4)
    assert world.run(_copies, layout=whole_stage, ranks=4) == [
        ((0, 2), (0,)), ((1, 3), (1,)), ((0, 2), (2,)), ((1, 3), (3,)),
    ]  # fmt: skip
