"""From the tensors of Megatron-LM to those of megalite.

Megatron keeps q, k and v of a query group together, [groups, heads of a group + 2, head_dim] rows, and gate and up as
two halves; here each is a tensor of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megalite.checkpoint.errors import CheckpointError
from megalite.checkpoint.folder import Folder, folder_at
from megalite.checkpoint.megatron.arguments import ModelSettings, model_settings
from megalite.checkpoint.megatron.legacy import is_legacy, read_legacy
from megalite.checkpoint.megatron.source import Source, SourceTensor
from megalite.checkpoint.megatron.torch_dist import is_torch_dist, read_torch_dist
from megalite.checkpoint.rewrite import NewTensor

TRACKER = "latest_checkpointed_iteration.txt"
_WORDS = "embedding.word_embeddings.weight"


@dataclass(frozen=True, kw_only=True)
class Imported:
    """A model that was found, to be written."""

    step: int
    """Steps that it was trained."""
    settings: ModelSettings
    """What it is."""
    tensors: list[NewTensor]
    """Its parameters."""


def import_megatron(
    address: str | Path, *, vocab_size: int | None = None, dtype: torch.dtype | None = None
) -> Imported:
    """Finds the weights of a Megatron-LM checkpoint: a folder with `latest_checkpointed_iteration.txt`, or one inside.

    dtype: of the parameters; as they are stored by default. Raises CheckpointError with every reason why the model
    cannot be read. Memory, while it is written: the largest of Megatron's tensors or stored chunks, twice.
    """
    source = read_source(folder_at(address))
    words = source.tensors.get(_WORDS)
    if words is None:
        raise CheckpointError(f"{address} has no {_WORDS}: it is not a GPT of Megatron-LM")
    settings = model_settings(source.args, padded_vocab=words.shape[0], vocab_size=vocab_size)
    return Imported(step=source.iteration, settings=settings, tensors=list(_tensors(source, settings.model, dtype)))


def read_source(folder: Folder) -> Source:
    """The checkpoint in `folder`, in either format."""
    place = folder
    if folder.size(TRACKER) is not None:
        name = folder.read_text(TRACKER).strip()
        place = folder.child("release" if name == "release" else f"iter_{_iteration(name, folder):07d}")
    if is_torch_dist(place):
        return read_torch_dist(place)
    if is_legacy(place):
        return read_legacy(place)
    raise CheckpointError(
        f"{place} is no checkpoint of Megatron-LM: it has neither .metadata (torch_dist) nor folders mp_rank_00... with"
        f" model_optim_rng.pt, and no {TRACKER} that names another folder"
    )


def _iteration(text: str, folder: Folder) -> int:
    if not text.isdecimal():
        raise CheckpointError(f"{folder}/{TRACKER} holds {text!r}, which is no number of a checkpoint")
    return int(text)


@dataclass(frozen=True)
class _Part:
    """A tensor of ours: part of a tensor of theirs, in its own shape."""

    source: str
    shape: tuple[int, ...]
    take: Callable[[Tensor], Tensor]


def _tensors(source: Source, model: Mapping[str, Any], dtype: torch.dtype | None) -> Iterator[NewTensor]:
    last = _Last(source)
    used: set[str] = set()
    for name, part in _parts(model, source.tensors):
        found = source.tensors.get(part.source)
        if found is None:
            raise CheckpointError(f"it has no {part.source}, which the model that its args describe has")
        used.add(part.source)
        _check(name, part, found)
        made = partial(last.take, part, dtype or found.dtype)
        yield NewTensor(key=f"parameter/{name}", shape=part.shape, dtype=dtype or found.dtype, make=made)
    if model["tie_embeddings"]:
        used.add("output_layer.weight")  # a copy, on the last stage
    if left := sorted(set(source.tensors) - used):
        listed = ", ".join(left[:3]) + (f" and {len(left) - 3} more" if len(left) > 3 else "")
        raise CheckpointError(f"it holds {listed}, which the model that its args describe has not")


def _check(name: str, part: _Part, found: SourceTensor) -> None:
    """Their shape must be the one that the arguments say; what is taken of it is tried on a tensor without memory."""
    try:
        shape = tuple(part.take(torch.empty(found.shape, device="meta")).shape)
    except RuntimeError:
        shape = None
    if shape != part.shape or not found.dtype.is_floating_point or found.dtype.itemsize < 2:
        raise CheckpointError(
            f"{part.source} is {found.dtype} {list(found.shape)}: with its args, {name} {list(part.shape)} is no part"
            " of that"
        )


@dataclass
class _Last:
    """The tensor of theirs that was read last: q, k and v are taken from the same one."""

    source: Source
    name: str = ""
    tensor: Tensor | None = None

    def take(self, part: _Part, dtype: torch.dtype) -> Tensor:
        if self.tensor is None or self.name != part.source:
            self.tensor = None  # before the next one is read
            self.name, self.tensor = part.source, self.source.tensors[part.source].read()
        return part.take(self.tensor).to(dtype)


def _parts(model: Mapping[str, Any], theirs: Mapping[str, SourceTensor]) -> Iterator[tuple[str, _Part]]:
    hidden, vocab = model["hidden_size"], model["vocab_size"]
    norm = ("weight", "bias") if model["name"] == "gpt2" else ("weight",)
    yield "embedding.weight", _Part(_WORDS, (vocab, hidden), partial(_first_rows, vocab))
    if model["name"] == "gpt2":
        positions = model["max_positions"]
        yield "positions.weight", _whole("embedding.position_embeddings.weight", positions, hidden)
    for layer in range(model["num_layers"]):
        for name, part in _layer_parts(model, norm, f"decoder.layers.{layer}", theirs):
            yield f"layers.{layer}.{name}", part
    for kind in norm:
        yield f"final_norm.{kind}", _whole(f"decoder.final_layernorm.{kind}", hidden)
    if not model["tie_embeddings"]:
        yield "head.weight", _Part("output_layer.weight", (vocab, hidden), partial(_first_rows, vocab))


def _layer_parts(
    model: Mapping[str, Any], norm: tuple[str, ...], layer: str, theirs: Mapping[str, SourceTensor]
) -> Iterator[tuple[str, _Part]]:
    hidden, heads, ffn = model["hidden_size"], model["num_heads"], model["ffn_hidden_size"]
    groups, size = model.get("num_kv_heads", heads), model.get("head_dim", hidden // heads)
    for kind in norm:
        yield f"attention_norm.{kind}", _whole(f"{layer}.input_layernorm.{kind}", hidden)
        yield f"mlp_norm.{kind}", _whole(f"{layer}.pre_mlp_layernorm.{kind}", hidden)
    for kind in norm:  # linears have biases where norms have
        columns = (hidden,) if kind == "weight" else ()
        for name, rows in (("q", heads), ("k", groups), ("v", groups)):
            take = partial(_of_groups, name, groups, heads // groups + 2, size)
            part = _Part(f"{layer}.self_attention.linear_qkv.{kind}", (rows * size, *columns), take)
            yield f"attention.qkv.{name}.{kind}", part
        if model["name"] == "gpt2":
            yield f"mlp.fc1.up.{kind}", _whole(f"{layer}.mlp.linear_fc1.{kind}", ffn, *columns)
        else:
            yield from _gate_and_up(f"{layer}.mlp.linear_fc1.{kind}", (ffn, *columns), theirs)
    yield "attention.proj.weight", _whole(f"{layer}.self_attention.linear_proj.weight", hidden, heads * size)
    yield "mlp.fc2.weight", _whole(f"{layer}.mlp.linear_fc2.weight", hidden, ffn)
    if "bias" in norm:
        yield "attention.proj.bias", _whole(f"{layer}.self_attention.linear_proj.bias", hidden)
        yield "mlp.fc2.bias", _whole(f"{layer}.mlp.linear_fc2.bias", hidden)
    if model["name"] == "qwen3":
        for name in ("q", "k"):
            yield f"attention.{name}_norm.weight", _whole(f"{layer}.self_attention.{name}_layernorm.weight", size)


def _gate_and_up(name: str, shape: tuple[int, ...], theirs: Mapping[str, SourceTensor]) -> Iterator[tuple[str, _Part]]:
    """Halves of one tensor or, in a checkpoint with single local shards, tensors of their own (w and v)."""
    for number, (ours, suffix) in enumerate((("gate", "_w"), ("up", "_v"))):
        alone = f"{name}{suffix}" in theirs
        part = _whole(f"{name}{suffix}", *shape) if alone else _Part(name, shape, partial(_half, number, shape[0]))
        yield f"mlp.fc1.{ours}.weight", part


def _whole(source: str, *shape: int) -> _Part:
    return _Part(source, shape, lambda tensor: tensor)


def _first_rows(count: int, tensor: Tensor) -> Tensor:
    """What is above is padding."""
    return tensor[:count]


def _half(number: int, rows: int, tensor: Tensor) -> Tensor:
    if tensor.shape[0] != 2 * rows:
        raise RuntimeError(f"{tensor.shape[0]} rows are not twice {rows}")
    return tensor[number * rows : (number + 1) * rows]


def _of_groups(name: str, groups: int, heads: int, size: int, tensor: Tensor) -> Tensor:
    """The rows of q, k or v out of [groups * heads * size, ..]; of a group's heads the last two are k and v."""
    of_groups = tensor.view(groups, heads, size, *tensor.shape[1:])
    part = {"q": of_groups[:, :-2], "k": of_groups[:, -2], "v": of_groups[:, -1]}[name]
    return part.reshape(-1, *tensor.shape[1:])
