"""The model-parallel unit: which rank plays which part, and the communication groups that follow.

`ParallelState.build` turns the rows of the rank grid (`megalite.grid`) that this rank belongs to into `Axis`
objects (`megalite.axis`), and is the only place that makes process groups.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import math
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from megalite.axis import Axis, LastCall, compact_ranks
from megalite.grid import ParallelConfig, RankGrid

__all__ = ["ParallelConfig", "ParallelState", "RankGrid"]


_GROUPS: weakref.WeakValueDictionary[tuple[int, ...], dist.ProcessGroup] = weakref.WeakValueDictionary()
"""The groups of this process by their global ranks; torch.distributed keeps them, and lets go of them when it ends."""


def _process_group(ranks: tuple[int, ...]) -> dist.ProcessGroup:
    """The group of `ranks`, made once in a job.

    Recreating a destroyed group of the same ranks hangs (its store key is reused), and each living gloo group
    costs threads and file descriptors; so groups are shared by rank tuple.
    """
    if len(ranks) == dist.get_world_size():
        return dist.distributed_c10d._get_default_group()
    if (group := _GROUPS.get(ranks)) is None:
        with _named_by_ranks():
            group = dist.new_group(list(ranks), use_local_synchronization=True)
        assert isinstance(group, dist.ProcessGroup), f"new_group({ranks}) was called by a rank outside of it"
        _GROUPS[ranks] = group
    return group


@contextlib.contextmanager
def _named_by_ranks() -> Iterator[None]:
    """Names new groups by their ranks alone.

    torch hashes the ranks of a locally synchronised group together with the number of groups that the process has
    made, so that members with different pasts wait for each other under different names for ever. Here a rank tuple
    is used once per process, and needs no number.
    """
    plain = dist.distributed_c10d._hash_ranks_to_str
    dist.distributed_c10d._hash_ranks_to_str = lambda ranks: hashlib.sha256(str(ranks).encode()).hexdigest()
    try:
        yield
    finally:
        dist.distributed_c10d._hash_ranks_to_str = plain


# The order in which a rank makes its groups. Every member of a group reaches it at the same place of this list,
# so that creation cannot deadlock.
_AXES: dict[str, tuple[str, ...]] = {
    "tp": ("tp",), "cp": ("cp",), "pp": ("pp",), "dp": ("dp",), "ep": ("ep",), "etp": ("etp",), "edp": ("edp",),
    "dp_cp": ("dp", "cp"), "tp_cp": ("tp", "cp"), "tp_dp_cp": ("tp", "dp", "cp"), "tp_pp": ("tp", "pp"),
    "etp_ep": ("etp", "ep"),
}  # fmt: skip


_LEVELS = {
    "cp": ("cp_inner", "cp_outer"),
    "dp_cp": ("shard", "shard_replica"),
    "edp": ("expert_shard", "expert_shard_replica"),
}
"""Axes in two levels: blocks of consecutive ranks, and one rank of each block."""


def _level_names() -> tuple[str, ...]:
    return tuple(itertools.chain.from_iterable(_LEVELS.values()))


@dataclass(frozen=True)
class ParallelState:
    """This rank's place on every axis; built once and passed down.

    tp, cp, pp, dp, ep, etp, edp are mesh axes; dp_cp is where dense gradients are summed (experts': edp); tp_cp and
    tp_dp_cp cover the tokens of a micro-batch and of a step within a stage; tp_pp holds one copy of the dense model
    (with cp = 1), etp_ep one of a stage's experts; embd joins the first and the last stage; replica joins the two ranks
    of a pipeline that hold the same stages when its plan is bidirectional; world is everyone in the layout. Under
    ulysses_ring, attention exchanges sequence for heads over cp_inner, consecutive ranks of cp, and passes keys on over
    cp_outer, one rank of each such block; where one of them is all of cp, it is the very axis cp. ZeRO divides dense
    parameters over shard, consecutive ranks of dp_cp, whose slices have their replicas over shard_replica, and those of
    experts over expert_shard and expert_shard_replica, of edp.
    """

    config: ParallelConfig
    grid: RankGrid
    rank: int
    world: Axis
    tp: Axis
    cp: Axis
    pp: Axis
    dp: Axis
    ep: Axis
    etp: Axis
    edp: Axis
    dp_cp: Axis
    tp_cp: Axis
    tp_dp_cp: Axis
    tp_pp: Axis
    etp_ep: Axis
    embd: Axis
    replica: Axis
    cp_inner: Axis
    cp_outer: Axis
    shard: Axis
    shard_replica: Axis
    expert_shard: Axis
    expert_shard_replica: Axis
    last_call: LastCall = field(default_factory=LastCall, compare=False)

    def __deepcopy__(self, memo: dict[int, Any]) -> ParallelState:
        return self  # as its axes

    @staticmethod
    def single() -> ParallelState:
        """One rank, no process group: every layer works with it, without torch.distributed."""
        config = ParallelConfig()
        last_call = LastCall()
        names = ("world", *_AXES, "embd", "replica", *_level_names())
        axes = {name: Axis(name, last_call=last_call) for name in names}
        return ParallelState(config, config.grid(1), 0, **axes, last_call=last_call)

    @staticmethod
    def build(config: ParallelConfig, ranks: Sequence[int] | None = None) -> ParallelState:
        """The place of this process in `config` laid over `ranks` (all ranks by default).

        Every process in `ranks` must call it with the same arguments; only groups that this rank belongs to
        are made. Without torch.distributed, or for a single rank, the result needs no process group.
        """
        if not (dist.is_available() and dist.is_initialized()):
            config.grid(1)
            return ParallelState.single()
        layout = tuple(ranks) if ranks is not None else tuple(range(dist.get_world_size()))
        return ParallelState._build(config, layout, layout.index(dist.get_rank()), LastCall())

    @staticmethod
    def planned(config: ParallelConfig, num_ranks: int, rank: int) -> ParallelState:
        """The place of `rank` in `config` laid over `num_ranks` ranks that need not exist.

        A model can be built on it, on the meta device, to see what the rank would hold; collectives fail.
        """
        return ParallelState._build(config, tuple(range(num_ranks)), rank, LastCall(planned=rank))

    @staticmethod
    def _build(config: ParallelConfig, layout: tuple[int, ...], me: int, last_call: LastCall) -> ParallelState:
        grid = config.grid(len(layout))

        def axis(name: str, members: Iterable[int]) -> Axis:
            places = tuple(members)
            global_ranks = tuple(layout[i] for i in places)
            return make_axis(name, global_ranks, last_call)

        axes = {"world": axis("world", range(len(layout)))}
        axes |= {name: axis(name, grid.members(me, parts)) for name, parts in _AXES.items()}
        axes["embd"] = axis("embd", grid.embedding_members(me))
        axes["replica"] = axis("replica", grid.mirror_members(me) if config.may_hold_copies else (me,))
        dense, experts = _shard_sizes(config, axes["dp_cp"].size, axes["edp"].size)
        exchange = config.head_exchange_size("ulysses_ring") if "ulysses_ring" in config.cp_modes else 1
        for name, size in (("cp", exchange), ("dp_cp", dense), ("edp", experts)):
            inner, outer = _LEVELS[name]
            axes[inner], axes[outer] = _two_levels(axes[name], size, inner, outer)
        return ParallelState(config, grid, me, **axes, last_call=last_call)

    def context_levels(self, mode: str) -> tuple[Axis, Axis]:
        """(ranks that exchange sequence for heads, ranks among which keys travel) under a context-parallel mode."""
        if mode == "ulysses_ring":
            return self.cp_inner, self.cp_outer
        return _two_levels(self.cp, self.config.head_exchange_size(mode), *_LEVELS["cp"])

    def blocks(self, axis: Axis, size: int) -> Axis:
        """The sub-axis of `size` consecutive ranks of `axis` that this rank is in (KV heads shared by tp ranks).

        Every rank of `axis` must ask at the same time.
        """
        assert axis.size % size == 0, f"blocks of {size} on {axis}"
        start = axis.rank // size * size
        return make_axis(f"{axis.name}/{size}", axis.ranks[start : start + size], self.last_call)

    def axes(self) -> dict[str, Axis]:
        """All axes by name, each once."""
        found = {name: getattr(self, name) for name in ("world", *_AXES, "embd", "replica")}
        levels = {name: getattr(self, name) for name in _level_names()}
        return found | {name: axis for name, axis in levels.items() if axis not in (self.cp, self.dp_cp, self.edp)}

    def reset_stats(self) -> None:
        """Forgets what has been counted on every axis."""
        for axis in self.axes().values():
            axis.stats.reset()

    def describe(self, ranks_per_node: int | None = None) -> list[tuple[str, int, str, str]]:
        """Rows (axis, size, my ranks, inside a node) for the start-up table, of what is cut."""
        rows = []
        experts = ("ep", "etp", "edp") if self.config.ep * self.config.etp > 1 else ()
        blocks = ("shard", "shard_replica") if self.config.zero_shard_size is not None else ()
        for name in ("world", "tp", "cp", "dp", "pp", *experts, *blocks):
            axis: Axis = getattr(self, name)
            if axis.size > 1:
                nodes = {r // ranks_per_node for r in axis.ranks} if ranks_per_node else {0}
                rows.append((name, axis.size, compact_ranks(axis.ranks), "yes" if len(nodes) == 1 else "no"))
        return rows


def _two_levels(axis: Axis, size: int, inner: str, outer: str) -> tuple[Axis, Axis]:
    """(blocks of `size` consecutive ranks of `axis`, the ranks at the same place of each block), by these names."""
    block, place = axis.rank // size, axis.rank % size
    levels = ((inner, axis.ranks[block * size : (block + 1) * size]), (outer, axis.ranks[place::size]))
    found = [axis if part == axis.ranks else make_axis(name, part, axis.last_call) for name, part in levels]
    return found[0], found[1]


def _shard_sizes(config: ParallelConfig, copies: int, expert_copies: int) -> tuple[int, int]:
    """Over how many ranks ZeRO divides what is dense, and experts, with as many replicas of both if that is whole."""
    if not config.zero:
        return 1, 1
    size = config.zero_shard_size or copies
    return size, expert_copies // math.gcd(expert_copies, copies // size)


def make_axis(name: str, ranks: Sequence[int], last_call: LastCall | None = None) -> Axis:
    """An axis over global `ranks`, which must include this process; groups are shared by rank tuple."""
    if len(ranks) == 1:
        return Axis(name, ranks, 0, last_call=last_call)
    if last_call is not None and last_call.planned is not None:
        return Axis(name, ranks, tuple(ranks).index(last_call.planned), last_call=last_call)
    return Axis(name, ranks, tuple(ranks).index(dist.get_rank()), _process_group(tuple(ranks)), last_call)
