"""What a Megatron-LM checkpoint holds of a model: whole tensors under one set of names, whatever format they are in."""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megalite.checkpoint.errors import CheckpointError


@dataclass(frozen=True, kw_only=True)
class SourceTensor:
    """A tensor of the whole model that is read when it is asked for."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]


@dataclass(frozen=True, kw_only=True)
class Source:
    """The weights of a model, without its optimizer."""

    iteration: int
    """Steps that it was trained."""
    args: dict[str, Any]
    """Megatron's arguments."""
    tensors: Mapping[str, SourceTensor]
    """By the names of Megatron Core, layers numbered through the model (see `canonical`)."""


def canonical(name: str) -> str | None:
    """The name of a tensor in Megatron Core without fused norms; None for what is no weight.

    The older model classes call the same things otherwise; so does Transformer Engine the norms in front of a linear.
    """
    name = _WRAPPERS.sub("", name)
    if _NO_WEIGHT.search(name):
        return None
    for pattern, replacement in _RENAMED:
        name = pattern.sub(replacement, name)
    return name


def arguments_of(state: Any, place: str) -> dict[str, Any]:
    """Megatron's arguments in the content of a file; CheckpointError when there are none."""
    args = state.get("args") if isinstance(state, dict) else None
    if not isinstance(args, Namespace):
        raise CheckpointError(f"{place} has no args, which say what the model is: it is not written by Megatron-LM")
    return vars(args)


def iteration_of(state: dict[str, Any]) -> int:
    """Steps that were done, 0 where that is not known (a release)."""
    found = state.get("iteration")
    return found if type(found) is int and found >= 0 else 0


_WRAPPERS = re.compile(r"^(?:model\.|module\.)+")
_NO_WEIGHT = re.compile(
    r"_extra_state|\.inv_freq$|^(?:language_model\.)?word_embeddings_for_head\.|^optimizer\.|^rng_state|^rerun_state"
)
_RENAMED = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"^language_model\.embedding\.", "embedding."),
        (r"^language_model\.output_layer\.", "output_layer."),
        (r"^language_model\.(?:encoder|transformer)\.final_(?:norm|layernorm)\.", "decoder.final_layernorm."),
        (r"^language_model\.(?:encoder|transformer)\.layers\.", "decoder.layers."),
        (r"\.input_norm\.", ".input_layernorm."),
        (r"\.post_attention_(?:norm|layernorm)\.", ".pre_mlp_layernorm."),
        (r"\.(?:self_)?attention\.query_key_value\.", ".self_attention.linear_qkv."),
        (r"\.(?:self_)?attention\.dense\.", ".self_attention.linear_proj."),
        (r"\.mlp\.dense_h_to_4h\.", ".mlp.linear_fc1."),
        (r"\.mlp\.dense_4h_to_h\.", ".mlp.linear_fc2."),
        (r"\.self_attention\.linear_qkv\.layer_norm_", ".input_layernorm."),
        (r"\.mlp\.linear_fc1\.layer_norm_", ".pre_mlp_layernorm."),
        (r"^decoder\.final_norm\.", "decoder.final_layernorm."),
    )
)
