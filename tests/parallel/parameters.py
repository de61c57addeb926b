"""Bare parameters with shards, for tests that set gradients by hand."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from megalite.mpu import ParallelState
from megalite.parallel.data import DataParallel, Unit, main_grad
from megalite.parallel.shard import Cut, Shard, even_cut, set_shard
from megalite.parallel.wgrad import WeightGradQueue


def whole(name: str, value: Tensor, **fields: Any) -> nn.Parameter:
    """A parameter that every model-parallel rank holds whole."""
    fields.setdefault("decay", value.dim() > 1)
    return set_shard(nn.Parameter(value.clone()), Shard(name, tuple(value.shape), **fields))


def cut_rows(name: str, value: Tensor, mpu: ParallelState, **fields: Any) -> nn.Parameter:
    """This rank's rows of the global `value`, cut over tp."""
    segments = even_cut(value.shape[0], mpu.tp)
    ((start, length),) = segments
    fields.setdefault("decay", value.dim() > 1)
    shard = Shard(name, tuple(value.shape), (Cut(mpu.tp, 0, segments),), **fields)
    return set_shard(nn.Parameter(value[start : start + length].clone()), shard)


def cut_experts(name: str, value: Tensor, mpu: ParallelState, dim: int | None = None, **fields: Any) -> nn.Parameter:
    """This rank's experts of the stacked `value` [E, ...], cut over ep; `dim` of each is cut over etp."""
    cuts = [Cut(mpu.ep, 0, even_cut(value.shape[0], mpu.ep))]
    if dim is not None:
        cuts.append(Cut(mpu.etp, dim, even_cut(value.shape[dim], mpu.etp)))
    local = value
    for cut in cuts:
        ((start, length),) = cut.segments
        local = local.narrow(cut.dim, start, length)
    fields.setdefault("decay", value.dim() > 2)
    return set_shard(
        nn.Parameter(local.clone()), Shard(name, tuple(value.shape), tuple(cuts), group="expert", **fields)
    )


def adopt(mpu: ParallelState, *parameters: nn.Parameter, **options: Any) -> DataParallel:
    """One unit for all `parameters`."""
    return DataParallel([Unit("unit", parameters)], mpu, queue=WeightGradQueue(), **options)


def set_grads(values: dict[nn.Parameter, Tensor | float]) -> None:
    """Main gradients by hand, as if backward had made them."""
    for parameter, value in values.items():
        main_grad(parameter).copy_(torch.as_tensor(value, dtype=torch.float64))
