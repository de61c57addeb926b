"""The mean of the weights of several checkpoints (Izmailov et al., 2018, arXiv:1803.05407), for one that is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from megalite.checkpoint.errors import CheckpointError
from megalite.checkpoint.rewrite import NewTensor
from megalite.checkpoint.stored import StoredCheckpoint, dtype_of, kind_of, name_of

_BLOCK = 1 << 20
"""Elements that are added at a time."""


@dataclass
class _Last:
    """The mean that was made last: a parameter is rounded from that of its masters."""

    name: str = ""
    mean: Tensor | None = None


def averaged(sources: Sequence[StoredCheckpoint], weights: Sequence[float] | None = None) -> list[NewTensor]:
    """The weighted mean of the weights of `sources`, added up in float64; `weights` are divided by their sum.

    Masters are averaged where all have them, and parameters are rounded from their mean. Integer buffers are those of
    the last; optimizer state is left out. Raises CheckpointError when the checkpoints are not of one model, ValueError
    for weights that have no mean. Memory: a tensor in float64, and as it is stored.
    """
    weights = list(weights) if weights is not None else [1.0] * len(sources)
    if len(weights) != len(sources):
        raise ValueError(f"{len(weights)} weights for {len(sources)} checkpoints: give one for each")
    if not all(0 <= weight < float("inf") for weight in weights) or not sum(weights):
        raise ValueError(f"weights {' '.join(map(str, weights))}: they are 0 or more, and not all 0")
    last, memo = sources[-1], _Last()
    has_masters = all("master" in source.manifest.kinds for source in sources)
    shares = [weight / sum(weights) for weight in weights]
    found = []
    for key in last.select(weights_only=True):
        kind, entry = kind_of(key), last.tensors[key]
        if kind == "master" and not has_masters:
            continue
        dtype = dtype_of(entry)
        exact = f"master/{name_of(key)}" if kind == "parameter" and has_masters else key
        if dtype.is_floating_point:
            _check_one_model(sources, exact if exact in last.tensors else key)
            make = partial(_mean, sources, shares, exact if exact in last.tensors else key, dtype, memo)
        else:
            make = partial(last.read, key)
        found.append(NewTensor(key=key, shape=entry.shape, dtype=dtype, make=make))
    for source in sources[:-1]:
        if missing := [key for key in source.select(weights_only=True) if _is_missing(key, last, has_masters)]:
            raise CheckpointError(f"{source} has {missing[0]}, which {last} has not: they are of different models")
    return found


def _is_missing(key: str, last: StoredCheckpoint, has_masters: bool) -> bool:
    return key not in last.tensors and (kind_of(key) != "master" or has_masters)


def _add(total: Tensor, tensor: Tensor, share: float) -> None:
    """total += share * tensor, without a copy of the tensor in float64."""
    for into, part in zip(total.flatten().split(_BLOCK), tensor.flatten().split(_BLOCK), strict=True):
        into.add_(part, alpha=share)


def _check_one_model(sources: Sequence[StoredCheckpoint], key: str) -> None:
    shape = sources[-1].tensors[key].shape
    for source in sources:
        entry = source.tensors.get(key)
        if entry is None or entry.shape != shape:
            there = "is missing" if entry is None else f"is {list(entry.shape)}"
            raise CheckpointError(
                f"{key} {there} in {source}, and {list(shape)} in {sources[-1]}: they are of different models"
            )


def _mean(
    sources: Sequence[StoredCheckpoint], shares: Sequence[float], key: str, dtype: torch.dtype, memo: _Last
) -> Tensor:
    if memo.mean is None or memo.name != key:
        memo.mean = None  # before the next one is made
        mean = torch.zeros(sources[-1].tensors[key].shape, dtype=torch.float64)
        for source, share in zip(sources, shares, strict=True):
            if share:  # an infinity that does not count must not become a nan
                _add(mean, source.read(key), share)
        memo.name, memo.mean = key, mean
    return memo.mean.to(torch.promote_types(dtype, torch.float32)).to(dtype)  # a parameter is its rounded master
