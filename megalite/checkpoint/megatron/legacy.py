"""The format with one file of torch.save for each tensor- and pipeline-parallel rank (`--ckpt-format torch`).

iter_0000100/mp_rank_00_000/model_optim_rng.pt      tp rank 0, pp rank 0
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megalite.checkpoint.errors import CheckpointError
from megalite.checkpoint.folder import Folder
from megalite.checkpoint.megatron.pickles import TensorRef
from megalite.checkpoint.megatron.source import Source, SourceTensor, arguments_of, canonical, iteration_of
from megalite.checkpoint.megatron.torch_file import TorchFile

_RANK = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?(_\d{3,})?")
_FILES = ("model_optim_rng.pt", "model_rng.pt")
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")
_COLUMNS = re.compile(
    r"embedding\.word_embeddings\.weight|output_layer\.weight|.*\.(?:linear_qkv|linear_fc1)\.(?:weight|bias)"
)
"""What tensor-parallel ranks hold rows of; of the rest they hold columns (_ROWS), or all."""
_ROWS = re.compile(r".*\.(?:linear_proj|linear_fc2)\.weight")


def is_legacy(folder: Folder) -> bool:
    """Whether `folder` is of this format."""
    return any(_RANK.fullmatch(name) for name in folder.names())


def read_legacy(folder: Folder) -> Source:
    """Opens every rank's file and finds its tensors; none is read yet."""
    ranks = _ranks(folder)
    first: dict[str, Any] | None = None
    stages: dict[tuple[int, int], list[dict[str, _Part]]] = {}  # (chunk, pp rank) -> by tp rank
    for (pp, _), path in sorted(ranks.items()):
        with TorchFile(folder, path) as file:
            state = file.content()
        if not isinstance(state, dict):
            raise CheckpointError(f"{folder}/{path} does not hold what Megatron-LM saves")
        first = state if first is None else first
        for chunk, model in _chunks(state, f"{folder}/{path}"):
            stages.setdefault((chunk, pp), []).append({n: _Part(folder, path, r) for n, r in _flat(model)})
    assert first is not None
    args = arguments_of(first, str(folder))
    if (version := first.get("checkpoint_version", 0)) < 2:
        raise CheckpointError(
            f"{folder} is of checkpoint version {version}, in which q, k and v lie in another order; load and save it"
            " with a Megatron-LM of 2021 or later first"
        )
    gated = bool(args.get("swiglu"))
    tensors: dict[str, SourceTensor] = {}
    num_layers = 0
    # Virtual stages go round the ranks: all first chunks, then all second ones.
    for stage in (stages[place] for place in sorted(stages)):
        here = 0
        for name in stage[0]:
            renamed = canonical(name)
            if renamed is None:
                continue
            if found := _LAYER.match(renamed):
                here = max(here, int(found[1]) + 1)
                renamed = f"decoder.layers.{num_layers + int(found[1])}.{renamed[found.end() :]}"
            if renamed not in tensors:  # the last stage has a copy of a tied embedding, under another name
                tensors[renamed] = _joined(renamed, [part.get(name) for part in stage], gated)
        num_layers += here
    return Source(iteration=iteration_of(first), args=args, tensors=tensors)


def _ranks(folder: Folder) -> dict[tuple[int, int], str]:
    """(pp rank, tp rank) -> the path of its file; CheckpointError when some are missing."""
    found: dict[tuple[int, int], str] = {}
    for name in folder.names():
        if (rank := _RANK.fullmatch(name)) is None:
            continue
        if rank[3] is not None:
            raise CheckpointError(f"{folder}/{name} is a rank with experts: only dense models can be read")
        file = next((file for file in _FILES if folder.size(f"{name}/{file}") is not None), None)
        if file is None:
            raise CheckpointError(f"{folder}/{name} has neither {' nor '.join(_FILES)}")
        found[int(rank[2] or 0), int(rank[1])] = f"{name}/{file}"
    pp, tp = (1 + max(rank[axis] for rank in found) for axis in (0, 1))
    if missing := [(p, t) for p in range(pp) for t in range(tp) if (p, t) not in found]:
        p, t = missing[0]
        raise CheckpointError(
            f"{folder} has files of {tp} tensor-parallel by {pp} pipeline ranks, but none of mp_rank_{t:02d}_{p:03d}"
        )
    return found


def _chunks(state: Mapping[str, Any], place: str) -> Iterator[tuple[int, Any]]:
    """The models in a file: one, or those of virtual stages."""
    if isinstance(state.get("model"), dict):
        yield 0, state["model"]
        return
    found = sorted(int(name[5:]) for name in state if re.fullmatch(r"model\d+", str(name)))
    if not found:
        raise CheckpointError(f"{place} has no model")
    for number in found:
        yield number, state[f"model{number}"]


def _flat(model: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, TensorRef]]:
    for name, value in model.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        elif isinstance(value, TensorRef):
            yield f"{prefix}{name}", value


@dataclass(frozen=True)
class _Part:
    """A rank's part of a tensor."""

    folder: Folder
    path: str
    ref: TensorRef

    def read(self) -> Tensor:
        with TorchFile(self.folder, self.path) as file:
            return file.read(self.ref)


def _joined(name: str, parts: Sequence[_Part | None], gated: bool) -> SourceTensor:
    """The whole tensor of which the tensor-parallel ranks hold `parts`."""
    there = [part for part in parts if part is not None]
    if len(there) != len(parts):
        raise CheckpointError(f"{name} is not in the files of all {len(parts)} tensor-parallel ranks")
    shape, dtype = there[0].ref.shape, there[0].ref.dtype
    dim = 0 if _COLUMNS.fullmatch(name) else 1 if _ROWS.fullmatch(name) else None
    if dim is None or len(there) == 1:
        return SourceTensor(shape=shape, dtype=dtype, read=there[0].read)
    whole = list(shape)
    whole[dim] = sum(part.ref.shape[dim] for part in there)
    halves = 2 if gated and ".linear_fc1." in name else 1
    return SourceTensor(shape=tuple(whole), dtype=dtype, read=partial(_join, there, tuple(whole), dim, halves))


def _join(parts: Sequence[_Part], shape: tuple[int, ...], dim: int, halves: int) -> Tensor:
    """Puts parts one after another along `dim`; with two halves (gate, up) in each, first all first ones."""
    whole = torch.empty(shape, dtype=parts[0].ref.dtype)
    places = whole.chunk(halves, dim)
    begin = 0
    for part in parts:
        tensor = part.read()
        for place, piece in zip(places, tensor.chunk(halves, dim), strict=True):
            place.narrow(dim, begin, piece.shape[dim]).copy_(piece)
        begin += tensor.shape[dim] // halves
    return whole
