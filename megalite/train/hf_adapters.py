"""Low-rank adapters of a run as the peft package has them: adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megalite.checkpoint.lora import pairs_of, rank_and_alpha
from megalite.checkpoint.rewrite import NewTensor
from megalite.checkpoint.stored import StoredCheckpoint, dtype_of
from megalite.models import FAMILIES
from megalite.models.hf.family import family_of
from megalite.models.hf.weights import Link, by_theirs
from megalite.train.hf import Kept, refusals_of, stored_model

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


@dataclass(frozen=True, kw_only=True)
class ExportedAdapters:
    """What is to be written."""

    config: dict[str, Any]
    tensors: list[NewTensor]


@dataclass(frozen=True, kw_only=True)
class _Module:
    """A linear of theirs, and the adapters of its parts.

    rows: its output features. transposed: its weight lies as [in, out].
    """

    name: str
    links: Sequence[Link]
    rows: int
    transposed: bool


def export_adapters(
    source: StoredCheckpoint, *, base: str, dtype: torch.dtype | None = None, kept: Kept | None = None
) -> ExportedAdapters:
    """The adapters of a checkpoint, while `source` is open.

    base: what peft is told of the model that they belong to. dtype: of all tensors; by default float32 masters, or
    parameters where there are none. kept: of the folder that the run began from. Where one linear of theirs is several
    of ours (q, k and v), its adapter has those of the parts side by side: rank and alpha are the sums of theirs, and B
    is zero outside of their blocks. Raises CheckpointError when there are no adapters, or the model is of no family.
    """
    model, (rank, alpha) = stored_model(source), rank_and_alpha(source)
    with refusals_of(source):
        links = family_of(FAMILIES, model, kept.config.get("model_type") if kept is not None else None).links(model)
    pairs = pairs_of(source)
    modules = [
        _module(name, links.shapes[name], used)
        for name, of_name in by_theirs(links)
        if (used := [link for link in of_name if link.ours in pairs])
    ]
    tensors = [tensor for module in modules for tensor in _tensors(source, module, pairs, rank, dtype)]
    return ExportedAdapters(config=_config(source, modules, rank, alpha, base), tensors=tensors)


def _module(name: str, shape: tuple[int, ...], links: Sequence[Link]) -> _Module:
    view = links[0].of_theirs(torch.empty(shape, device="meta"))
    transposed = view.dim() == 2 and view.stride(-1) != 1
    return _Module(
        name=name.removesuffix(".weight"), links=links, rows=shape[-1] if transposed else shape[0],
        transposed=transposed,
    )  # fmt: skip


def _tensors(
    source: StoredCheckpoint, module: _Module, pairs: Mapping[str, tuple[str, str]], rank: int,
    dtype: torch.dtype | None,
) -> list[NewTensor]:  # fmt: skip
    a_keys, b_keys = zip(*(pairs[link.ours] for link in module.links), strict=True)
    found, width = dtype or dtype_of(source.tensors[a_keys[0]]), rank * len(module.links)
    prefix = f"base_model.model.{module.name}"
    return [
        NewTensor(
            key=f"{prefix}.lora_A.weight", shape=(width, source.tensors[a_keys[0]].shape[1]), dtype=found,
            make=partial(_first, source, a_keys, found),
        ),
        NewTensor(
            key=f"{prefix}.lora_B.weight", shape=(module.rows, width), dtype=found,
            make=partial(_second, source, module, b_keys, rank, found),
        ),
    ]  # fmt: skip


def _first(source: StoredCheckpoint, keys: Sequence[str], dtype: torch.dtype) -> Tensor:
    """A of all parts, one below the other."""
    return torch.cat([source.read(key) for key in keys]).to(dtype)


def _second(source: StoredCheckpoint, module: _Module, keys: Sequence[str], rank: int, dtype: torch.dtype) -> Tensor:
    """B of all parts: each in the rows of its part, and in its columns."""
    width = rank * len(keys)
    made = torch.zeros((width, module.rows) if module.transposed else (module.rows, width), dtype=dtype)
    for number, (link, key) in enumerate(zip(module.links, keys, strict=True)):
        link.of_theirs(made).narrow(-1, number * rank, rank).copy_(link.of_ours(source.read(key)))
    return made.t().contiguous() if module.transposed else made


def _config(source: StoredCheckpoint, modules: Sequence[_Module], rank: int, alpha: float, base: str) -> dict[str, Any]:
    """adapter_config.json; peft multiplies by alpha / rank of the module."""
    several = {module.name: len(module.links) for module in modules if len(module.links) > 1}
    return {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base, "inference_mode": True,
        "r": rank, "lora_alpha": alpha, "rank_pattern": {name: rank * count for name, count in several.items()},
        "alpha_pattern": {name: alpha * count for name, count in several.items()},
        "lora_dropout": source.manifest.state["config"].get("lora.dropout", 0.0), "bias": "none",
        "fan_in_fan_out": any(module.transposed for module in modules),
        "target_modules": [module.name for module in modules],
    }  # fmt: skip
