"""Low-rank adapters of a checkpoint, and the weights with them put in: W + (alpha / r) B A."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from megalite.checkpoint.errors import CheckpointError
from megalite.checkpoint.rewrite import NewTensor
from megalite.checkpoint.stored import StoredCheckpoint, dtype_of, kind_of, name_of

_MARK = ".lora."


def merged(adapters: StoredCheckpoint, base: StoredCheckpoint | None = None) -> list[NewTensor]:
    """The weights of `base` (by default of the checkpoint with the adapters) as they are with the adapters in them.

    The sum is made in float64 from the most precise of what is stored, and rounded to the dtype that it is stored in.
    Optimizer state is left out. Raises CheckpointError when there are no adapters, or not of these weights. Memory: a
    weight in float64, twice.
    """
    base, (rank, alpha) = base if base is not None else adapters, rank_and_alpha(adapters)
    pairs = pairs_of(adapters)
    weights = [key for key in base.select(weights_only=True) if _MARK not in key]
    if missing := sorted(set(pairs) - {name_of(key) for key in weights}):
        raise CheckpointError(
            f"{base} has no {missing[0]}, beside which {adapters} has an adapter;"
            " the frozen weights of a run with lora.separate are in another checkpoint (--base)"
        )
    found = []
    for key in weights:
        entry, dtype, name = base.tensors[key], dtype_of(base.tensors[key]), name_of(key)
        make = partial(base.read, key)
        if name in pairs and kind_of(key) in ("parameter", "master"):
            exact = f"master/{name}" if f"master/{name}" in base.tensors else key
            _check_shapes(adapters, name, pairs[name], entry.shape)
            make = partial(_merge, base, exact, adapters, pairs[name], alpha / rank, dtype)
        found.append(NewTensor(key=key, shape=entry.shape, dtype=dtype, make=make))
    return found


def merged_state(adapters: StoredCheckpoint) -> dict[str, Any]:
    """The state of the merged checkpoint: the settings of the run, without adapters."""
    config = adapters.manifest.state.get("config", {})
    return {"updates": 0, "config": {name: value for name, value in config.items() if not name.startswith("lora.")}}


def rank_and_alpha(adapters: StoredCheckpoint) -> tuple[int, float]:
    """The settings that all adapters share; CheckpointError when there are none."""
    config = adapters.manifest.state.get("config", {})
    rank, alpha = config.get("lora.rank"), config.get("lora.alpha")
    if not rank or alpha is None:
        raise CheckpointError(f"{adapters} is not of a run with adapters (lora.rank)")
    return rank, alpha


def pairs_of(adapters: StoredCheckpoint) -> dict[str, tuple[str, str]]:
    """The keys of A and B by the name of the weight that they belong to, masters where there are any."""
    found: dict[str, tuple[str, str]] = {}
    for key in adapters.tensors:
        name = name_of(key)
        if kind_of(key) == "parameter" and _MARK in name and name.endswith(".A"):
            linear, _, part = name.removesuffix(".A").partition(_MARK)
            weight = f"{linear}.weight" if part == "weight" else f"{linear}.{part}.weight"
            stem = name.removesuffix(".A")
            kind = "master" if f"master/{name}" in adapters.tensors else "parameter"
            found[weight] = (f"{kind}/{stem}.A", f"{kind}/{stem}.B")
    return found


def _check_shapes(adapters: StoredCheckpoint, name: str, pair: tuple[str, str], shape: tuple[int, ...]) -> None:
    a, b = (adapters.tensors[key].shape for key in pair)
    if (b[0], a[1]) != shape or a[0] != b[1]:
        raise CheckpointError(f"{name} is {list(shape)}, but its adapter in {adapters} is {list(b)} x {list(a)}")


def _merge(
    base: StoredCheckpoint, key: str, adapters: StoredCheckpoint, pair: tuple[str, str], scale: float,
    dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    a, b = (adapters.read(name).to(torch.float64) for name in pair)
    whole = base.read(key).to(torch.float64).addmm_(b, a, alpha=scale)
    return whole.to(torch.promote_types(dtype, torch.float32)).to(dtype)  # a parameter is its rounded master
