"""The rank grid: which rank stands where on every axis. Pure arithmetic, no process and no tensor.

The grid and its two factorings (dense and expert) follow Megatron-LM (Narayanan et al., 2021, arXiv:2104.04473).
"""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from megalite.pattern import PATTERN, in_pattern

DENSE_AXES = ("tp", "cp", "dp", "pp")
EXPERT_AXES = ("etp", "ep", "edp", "pp")
ORDER_NAMES = ("tp", "cp", "ep", "dp", "pp")
ContextMode = Literal["ring", "all_gather", "ulysses", "ulysses_ring"]
CONTEXT_MODES: tuple[ContextMode, ...] = get_args(ContextMode)
_EXCEPTION = re.compile(rf",({PATTERN})=(\w*)")


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """How the work is cut. The data-parallel size is what remains of the world."""

    tp: int = 1
    """Tensor-parallel size: heads, feed-forward width and vocabulary are cut."""
    pp: int = 1
    """Pipeline-parallel size: the layers are cut into stages."""
    cp: int = 1
    """Context-parallel size: the sequence is cut."""
    ep: int = 1
    """Expert-parallel size: the experts are distributed."""
    etp: int = 1
    """Tensor-parallel size inside an expert."""
    vpp: int = 1
    """Virtual pipeline stages (model chunks) on each pipeline rank; schedules in a V always have 2."""
    cut_expert_tokens: bool = True
    """Give each tensor-parallel rank its own part of the tokens before they go to experts (the duplicate-token drop of
    DeepSpeed-TED); false sends them from every rank, to compare, and needs etp = tp."""
    expert_dispatch: Literal["all_to_all", "all_gather", "hierarchical"] = "all_to_all"
    """How tokens reach their experts: only those that are needed, all of them, or first between the ranks of a node."""
    expert_node_size: int | None = None
    """Expert-parallel ranks of a node, for the hierarchical dispatch."""
    sequence_parallel: bool = False
    """Cut the sequence over the tensor-parallel ranks between the parallel layers."""
    schedule: str = "1f1b"
    """Pipeline schedule: gpipe, 1f1b, interleaved, looped_bfs, zb_h1, zb_h2, interleaved_zb, zb_v, v_half, v_min,
    dualpipe_v, dualpipe, or csv:FILE with a plan of your own."""
    group_size: int | None = None
    """Micro-batches that the interleaved schedule sends through one model chunk before the next; by default pp."""
    zero: int = 0
    """What data-parallel ranks keep as a slice only between uses (ZeRO): 0 nothing, 1 optimizer state, 2 gradients
    too, 3 parameters too."""
    zero_persistent: int = 0
    """ZeRO-3: parameters of at most so many elements on a rank (norms, biases) stay whole."""
    cp_mode: str = "ring"
    """How attention crosses the sequence cut: keys and values travel round a ring or are gathered (all_gather), each
    rank takes all tokens of some heads (ulysses), or that within blocks of cp_ulysses ranks and a ring across them
    (ulysses_ring). Layers may differ, in the patterns of model.moe_layers: ring,but_every:2=all_gather is all_gather
    for those that but_every:2 names and ring for the others; of several such parts the last that fits counts."""
    cp_ulysses: int = 2
    """Consecutive context-parallel ranks of a block of ulysses_ring: those of a node, for example."""
    order: str = "tp-cp-ep-dp-pp"
    """Order of the axes in the rank numbering, the fastest first; the axis with the most traffic belongs first."""
    layers_per_stage: tuple[int, ...] | None = None
    """Layers of each pipeline stage; by default stages are balanced, as partition says."""
    partition: str = "cost"
    """What is balanced over the stages: cost (of their matmuls), parameters, or measured:RUN_DIR, the times that a run
    of this model with train.trace_pipeline took."""

    @property
    def may_hold_copies(self) -> bool:
        """Whether ranks r and pp - 1 - r of a pipeline may hold the same stages: of a plan in a file, it says which."""
        return self.schedule == "dualpipe" or self.schedule.startswith("csv:")

    @property
    def cp_exceptions(self) -> tuple[tuple[str, str], ...]:
        """(pattern of layers, mode) of each part of cp_mode after the first."""
        return tuple(_EXCEPTION.findall(self.cp_mode))

    @property
    def cp_modes(self) -> tuple[str, ...]:
        """Every mode that cp_mode names."""
        return tuple(dict.fromkeys((self.cp_mode.partition(",")[0], *(mode for _, mode in self.cp_exceptions))))

    def cp_mode_of(self, layer: int) -> str:
        """How attention of global layer number `layer` crosses the sequence cut."""
        fitting = [mode for pattern, mode in self.cp_exceptions if in_pattern(layer, pattern)]
        return fitting[-1] if fitting else self.cp_modes[0]

    def head_exchange_size(self, mode: str) -> int:
        """Context-parallel ranks that exchange sequence for heads under `mode`; 1 where none do."""
        return {"ulysses": self.cp, "ulysses_ring": self.cp_ulysses}.get(mode, 1) if self.cp > 1 else 1

    def data_parallel_size(self, world_size: int) -> int:
        """The number of model replicas among `world_size` ranks; raises ValueError when it is not whole."""
        return self.grid(world_size).sizes["dp"]

    def grid(self, world_size: int) -> RankGrid:
        """The rank grid of this layout over `world_size` ranks."""
        return RankGrid.for_world(world_size, self)


def context_mode_problem(cp_mode: str) -> str | None:
    """Why `cp_mode` names no way for attention to cross the sequence cut, or None."""
    first, _, _ = cp_mode.partition(",")
    exceptions = cp_mode.removeprefix(first)
    for mode in (first, *(mode for _, mode in _EXCEPTION.findall(exceptions))):
        if mode not in CONTEXT_MODES:
            close = difflib.get_close_matches(mode, CONTEXT_MODES, n=1)
            hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(CONTEXT_MODES)}"
            return f"parallel.cp_mode={cp_mode!r}: {mode!r} is not a mode; {hint}"
    if _EXCEPTION.sub("", exceptions):
        return (
            f"parallel.cp_mode={cp_mode!r}: after the mode of all layers come parts such as but_every:2=all_gather or"
            " 0,3=ulysses: layers (all, every:N, but_every:N, from:N or their numbers), =, and their mode"
        )
    return None


def _divisors(n: int) -> str:
    return ", ".join(str(d) for d in range(1, n + 1) if n % d == 0)


@dataclass(frozen=True)
class RankGrid:
    """The numbering of ranks: a pure function of the axis sizes and their order.

    `sizes` holds every axis of both factorings; ranks are numbered with the first axis of the order fastest.
    The expert factoring (etp, ep, edp) numbers the ranks of a pipeline stage a second time.
    """

    sizes: dict[str, int]
    order: tuple[str, ...]

    @staticmethod
    def for_world(world_size: int, config: ParallelConfig) -> RankGrid:
        """The grid of `config` over `world_size` ranks; raises ValueError listing everything that does not fit."""
        problems = RankGrid.problems(world_size, config)
        if problems:
            raise ValueError("\n".join(problems))
        stage_ranks = world_size // config.pp
        sizes = {
            "tp": config.tp, "cp": config.cp, "pp": config.pp, "dp": stage_ranks // (config.tp * config.cp),
            "ep": config.ep, "etp": config.etp, "edp": stage_ranks // (config.ep * config.etp),
        }  # fmt: skip
        return RankGrid(sizes, tuple(config.order.split("-")))

    @staticmethod
    def problems(world_size: int, config: ParallelConfig) -> list[str]:
        """Why `config` cannot be laid over `world_size` ranks (empty when it can)."""
        found = [
            f"parallel.{name}={getattr(config, name)} must be at least 1"
            for name in ("tp", "pp", "cp", "ep", "etp", "vpp")
            if getattr(config, name) < 1
        ]
        if sorted(config.order.split("-")) != sorted(ORDER_NAMES):
            found.append(f"parallel.order={config.order!r} must name each of {'-'.join(ORDER_NAMES)} once")
        if (problem := context_mode_problem(config.cp_mode)) is not None:
            found.append(problem)
        if found:
            return found
        model = config.tp * config.cp * config.pp
        if world_size % model:
            found.append(
                f"world size {world_size} is not divisible by tp * cp * pp = {config.tp} * {config.cp} * {config.pp}"
                f" = {model}; their product can be {_divisors(world_size)}, or start more ranks with torchrun"
            )
            return found
        block = config.head_exchange_size("ulysses_ring")
        if "ulysses_ring" in config.cp_modes and (block < 1 or config.cp % block):
            found.append(
                f"parallel.cp_ulysses={config.cp_ulysses} does not divide parallel.cp={config.cp};"
                f" it can be {_divisors(config.cp)}"
            )
        stage_ranks = world_size // config.pp
        if stage_ranks % (config.ep * config.etp):
            found.append(
                f"ep * etp = {config.ep} * {config.etp} does not divide the {stage_ranks} ranks of a pipeline stage"
                f" (tp * cp * dp); their product can be {_divisors(stage_ranks)}"
            )
        return found

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.sizes["tp"] * self.sizes["cp"] * self.sizes["dp"] * self.sizes["pp"]

    def _strides(self, axes: Iterable[str]) -> dict[str, int]:
        """The stride of each of `axes`, the fastest first."""
        strides, stride = {}, 1
        for axis in axes:
            strides[axis] = stride
            stride *= self.sizes[axis]
        return strides

    @functools.cached_property
    def _dense(self) -> dict[str, int]:
        return self._strides(name for name in self.order if name != "ep")

    @functools.cached_property
    def _expert(self) -> dict[str, int]:
        """Strides inside a stage, over the number that `_in_stage` gives."""
        rename = {"tp": "etp", "dp": "edp", "ep": "ep"}
        return self._strides(rename[name] for name in self.order if name in rename)

    def _in_stage(self, rank: int) -> tuple[int, int]:
        """(pipeline rank, number of `rank` among the ranks of its stage)."""
        stride, stages = self._dense["pp"], self.sizes["pp"]
        return rank // stride % stages, rank // (stride * stages) * stride + rank % stride

    def _from_stage(self, stage: int, number: int) -> int:
        stride, stages = self._dense["pp"], self.sizes["pp"]
        return (number // stride * stages + stage) * stride + number % stride

    def coordinates(self, rank: int, *, expert: bool = False) -> dict[str, int]:
        """Where `rank` stands on each axis of the dense (or the expert) factoring."""
        if not expert:
            return {axis: rank // stride % self.sizes[axis] for axis, stride in self._dense.items()}
        stage, number = self._in_stage(rank)
        place = {axis: number // stride % self.sizes[axis] for axis, stride in self._expert.items()}
        return place | {"pp": stage}

    def members(self, rank: int, axes: Sequence[str]) -> tuple[int, ...]:
        """The ranks that agree with `rank` on every axis but `axes` (of one factoring), in ascending order."""
        if self._expert.keys().isdisjoint(axes):
            return self._vary(rank, axes, self._dense)
        assert self._expert.keys() >= set(axes), f"{axes} are not axes of the expert factoring inside a stage"
        stage, number = self._in_stage(rank)
        return tuple(self._from_stage(stage, other) for other in self._vary(number, axes, self._expert))

    def _vary(self, number: int, axes: Sequence[str], strides: Mapping[str, int]) -> tuple[int, ...]:
        numbers = [number]
        for axis in axes:
            mine = number // strides[axis] % self.sizes[axis]
            numbers = [n + (i - mine) * strides[axis] for n in numbers for i in range(self.sizes[axis])]
        return tuple(sorted(numbers))

    def groups(self, axes: Sequence[str]) -> list[tuple[int, ...]]:
        """All groups along `axes`: a partition of the world."""
        seen: dict[int, tuple[int, ...]] = {}
        for rank in range(self.world_size):
            if rank not in seen:
                seen.update(dict.fromkeys(members := self.members(rank, axes), members))
        return list(dict.fromkeys(seen.values()))

    def embedding_members(self, rank: int) -> tuple[int, ...]:
        """The ranks of the first and the last pipeline stage on `rank`'s pipeline, or just `rank` between them."""
        pipeline = self.members(rank, ("pp",))
        ends = tuple(dict.fromkeys((pipeline[0], pipeline[-1])))
        return ends if rank in ends else (rank,)

    def mirror_members(self, rank: int) -> tuple[int, ...]:
        """`rank` and the rank as far from the other end of its pipeline, in ascending order."""
        pipeline = self.members(rank, ("pp",))
        return tuple(sorted({rank, pipeline[-1 - pipeline.index(rank)]}))
