"""A checkpoint in other files, or in another precision, or its weights alone."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from megalite.checkpoint.errors import CheckpointError
from megalite.checkpoint.rewrite import NewTensor
from megalite.checkpoint.stored import StoredCheckpoint, dtype_of, kind_of, name_of


def resharded(
    source: StoredCheckpoint, *, dtype: torch.dtype | None = None, weights_only: bool = False
) -> list[NewTensor]:
    """The tensors of `source`, to be written again.

    dtype: of the parameters, for a run in another precision. They are rounded from float32 masters, which stay where
    the new dtype is narrower, begin as the parameters where there were none, and go where it is not. Other state is
    in at least float32 and follows a change to or from float64.
    """
    found: list[NewTensor] = []
    for key in source.select(weights_only=weights_only):
        kind, here = kind_of(key), dtype_of(source.tensors[key])
        if dtype is None or not here.is_floating_point:
            make = partial(source.read, key)
            found.append(NewTensor(key=key, shape=source.tensors[key].shape, dtype=here, make=make))
        elif kind == "parameter":
            found += _parameters(source, key, dtype)
        elif kind == "master":
            if f"parameter/{name_of(key)}" not in source.tensors:
                raise CheckpointError(f"{source}: {key} is there, but not the parameter that it belongs to")
        else:
            found.append(_copy(source, key, key, _state_dtype(here, dtype)))
    return found


def weights_state(state: dict[str, Any]) -> dict[str, Any]:
    """Of a run's state what belongs to its weights: the settings. The optimizer begins anew."""
    return {"updates": 0} | {name: state[name] for name in ("config",) if name in state}


def state_in_precision(state: dict[str, Any], precision: str) -> dict[str, Any]:
    """A run's state for `train.precision` of that name: fingerprints were of the tensors before they were rounded."""
    kept = {name: value for name, value in state.items() if name != "fingerprints"}
    return kept | {"config": state["config"] | {"train.precision": precision}} if "config" in state else kept


def _parameters(source: StoredCheckpoint, key: str, dtype: torch.dtype) -> list[NewTensor]:
    """A parameter in `dtype` and its master, if it is to have one."""
    master = f"master/{name_of(key)}"
    exact = master if master in source.tensors else key
    wide = _wide(dtype)
    parameter = _copy(source, exact, key, dtype)
    # Rounded weights without a master stay without one: it would hold nothing that they do not.
    needs_master = wide != dtype and dtype_of(source.tensors[exact]).itemsize >= wide.itemsize
    return [_copy(source, exact, master, wide), parameter] if needs_master else [parameter]


def _copy(source: StoredCheckpoint, old: str, new: str, dtype: torch.dtype) -> NewTensor:
    make = partial(_read, source, old, dtype)
    return NewTensor(key=new, shape=source.tensors[old].shape, dtype=dtype, make=make)


def _read(source: StoredCheckpoint, key: str, dtype: torch.dtype) -> Tensor:
    return source.read(key).to(_wide(dtype)).to(dtype)  # a parameter is its rounded master


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _state_dtype(here: torch.dtype, parameters: torch.dtype) -> torch.dtype:
    """Moments that are narrower than float32 are so by choice."""
    return here if here.itemsize < torch.float32.itemsize else _wide(parameters)
