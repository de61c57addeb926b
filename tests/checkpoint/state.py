"""A little state for checkpoint tests: tensors by name, whole on one rank, or cut in rows."""

from __future__ import annotations

import torch
from torch import Tensor

from megalite.mpu import ParallelState
from megalite.parallel.shard import Cut, Shard, even_cut

Tensors = dict[str, list[tuple[Shard, Tensor]]]


def make_state(value: float, *, rows: int = 5, columns: int = 3, count: int = 2) -> Tensors:
    """Parameters and moments filled with `value`."""

    def of_kind(offset: float) -> list[tuple[Shard, Tensor]]:
        shards = [Shard(f"layers.{i}.weight", (rows, columns)) for i in range(count)]
        return [(shard, torch.full(shard.shape, value + offset)) for shard in shards]

    return {"parameter": of_kind(0.0), "exp_avg": of_kind(0.5)}


def cut_state(mpu: ParallelState, value: float, *, size: int = 7) -> Tensors:
    """One matrix, its rows cut over tp, filled with `value`."""
    shard = Shard("words", (size, 3), (Cut(mpu.tp, 0, even_cut(size, mpu.tp)),))
    return {"parameter": [(shard, torch.full(shard.local_shape, value))]}


def fill(state: Tensors, value: float) -> None:
    """Overwrites everything."""
    for of_kind in state.values():
        for _, tensor in of_kind:
            tensor.fill_(value)


def values_of(state: Tensors) -> set[float]:
    """All values that occur."""
    return {float(v) for of_kind in state.values() for _, tensor in of_kind for v in tensor.unique()}
