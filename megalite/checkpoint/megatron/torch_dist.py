"""The format of Megatron Core's distributed checkpoints (`--ckpt-format torch_dist`), which is torch's own.

iter_0000100/common.pt           arguments and counters
iter_0000100/.metadata           a pickle: which chunk of which global tensor is where
iter_0000100/__0_1.distcp        chunks, each a small file of torch.save, one after another
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megalite.checkpoint.errors import CheckpointError
from megalite.checkpoint.folder import Folder
from megalite.checkpoint.manifest import Entry, Piece
from megalite.checkpoint.megatron.pickles import Inert, TensorRef, load_pickle
from megalite.checkpoint.megatron.source import Source, SourceTensor, arguments_of, canonical, iteration_of
from megalite.checkpoint.megatron.torch_file import Range, TorchFile

METADATA, COMMON = ".metadata", "common.pt"
_STACKED = re.compile(r"decoder\.layers\.(?!\d)")


def is_torch_dist(folder: Folder) -> bool:
    """Whether `folder` is of this format."""
    return folder.size(METADATA) is not None


def read_torch_dist(folder: Folder) -> Source:
    """Reads what says where things are; no tensor is read yet."""
    if folder.size(COMMON) is None:
        raise CheckpointError(f"{folder} has no {COMMON}, which says what the model is: Megatron-LM writes it")
    with TorchFile(folder, COMMON) as file:
        common = file.content()
    args = arguments_of(common, f"{folder}/{COMMON}")
    metadata = _metadata(folder)
    chunks = _Chunks(folder, dict(_places(folder, metadata)))
    tensors: dict[str, SourceTensor] = {}
    for key, entry in _entries(folder, metadata).items():
        name = canonical(key)
        if name is None:
            continue
        if _STACKED.match(name) is None:
            tensors[name] = _source(chunks, key, entry, (0,) * len(entry.shape), entry.shape, len(entry.shape))
            continue
        for layer in range(entry.shape[0]):
            offset, sizes = (layer, *(0 for _ in entry.shape[1:])), (1, *entry.shape[1:])
            numbered = f"decoder.layers.{layer}.{name.removeprefix('decoder.layers.')}"
            tensors[numbered] = _source(chunks, key, entry, offset, sizes, len(entry.shape) - 1)
    return Source(iteration=iteration_of(common), args=args, tensors=tensors)


def _source(
    chunks: _Chunks, key: str, entry: Entry, offset: tuple[int, ...], sizes: tuple[int, ...], num_dims: int
) -> SourceTensor:
    shape = sizes[len(sizes) - num_dims :]
    return SourceTensor(
        shape=shape, dtype=getattr(torch, entry.dtype), read=partial(chunks.read, key, entry, offset, sizes, shape)
    )


@dataclass(frozen=True)
class _Place:
    """Where a chunk is."""

    file: str
    begin: int
    length: int


@dataclass
class _Chunks:
    """Reads chunks; keeps the last one, which may hold several layers."""

    folder: Folder
    places: dict[tuple[str, tuple[int, ...]], _Place]
    _last: tuple[tuple[str, tuple[int, ...]], Tensor] | None = field(default=None, init=False)

    def read(
        self, key: str, entry: Entry, offset: tuple[int, ...], sizes: tuple[int, ...], shape: tuple[int, ...]
    ) -> Tensor:
        """The rectangle of `key` at `offset`, as a tensor of `shape`."""
        whole = torch.empty(sizes, dtype=getattr(torch, entry.dtype))
        try:
            for overlap in entry.overlaps(offset, sizes):
                whole[overlap.here].copy_(self._chunk(key, entry, overlap.piece)[overlap.stored])
        except CheckpointError as error:
            raise CheckpointError(f"{self.folder}: {key}: {error}") from error
        return whole.view(shape)

    def _chunk(self, key: str, entry: Entry, piece: Piece) -> Tensor:
        if self._last is not None and self._last[0] == (key, piece.offset):
            return self._last[1]
        self._last = None
        place = self.places.get((key, piece.offset))
        if place is None:
            raise CheckpointError(f"{METADATA} does not say where the chunk at {list(piece.offset)} is")
        with TorchFile(self.folder, place.file, place.begin, place.length) as file:
            ref = file.content()
            if not isinstance(ref, TensorRef):
                raise CheckpointError(f"{place.file} at {place.begin} is no tensor")
            tensor = file.read(ref)
        if tensor.numel() != torch.Size(piece.sizes).numel() or str(tensor.dtype) != f"torch.{entry.dtype}":
            raise CheckpointError(f"{place.file} at {place.begin} is {tensor.dtype} {list(tensor.shape)}")
        self._last = (key, piece.offset), tensor.view(piece.sizes)
        return self._last[1]


def _metadata(folder: Folder) -> Inert:
    reader = folder.reader(METADATA)
    try:
        # A copy in memory: it is small, and the C unpickler peeks.
        content = Range(reader, 0, reader.size).readall()
    finally:
        reader.close()
    found = load_pickle(io.BytesIO(content), f"{folder}/{METADATA}")
    if not isinstance(found, Inert):
        raise CheckpointError(f"{folder}/{METADATA} is not the metadata of a distributed checkpoint")
    return found


def _entries(folder: Folder, metadata: Inert) -> dict[str, Entry]:
    """The tensors by their names, with their chunks; other things (random states, extra states) are left out."""
    described = metadata.field("state_dict_metadata")
    if not isinstance(described, dict):
        raise CheckpointError(f"{folder}/{METADATA} has no table of tensors")
    return {
        name: _entry(name, value)
        for name, value in described.items()
        if isinstance(value, Inert) and value.origin.endswith(".TensorStorageMetadata") and canonical(name) is not None
    }


def _entry(name: str, value: Inert) -> Entry:
    properties, chunks = value.field("properties"), value.field("chunks")
    dtypes = properties.state if isinstance(properties.state, tuple) else tuple(properties.state.values())
    dtype = next(found for found in dtypes if isinstance(found, torch.dtype))
    pieces = tuple(
        Piece(_sizes(chunk, "offsets"), _sizes(chunk, "sizes"), "", name, 0) for chunk in _chunk_list(chunks)
    )
    return Entry(_sizes(value, "size"), str(dtype).removeprefix("torch."), pieces)


def _chunk_list(chunks: Any) -> Sequence[Inert]:
    return [chunk for chunk in chunks if isinstance(chunk, Inert)]


def _sizes(value: Inert, name: str) -> tuple[int, ...]:
    found = value.field(name)
    if not isinstance(found, tuple) or not all(type(size) is int and size >= 0 for size in found):
        raise CheckpointError(f"{value.origin}.{name} is {found!r}, not sizes")
    return found


def _places(folder: Folder, metadata: Inert) -> Iterator[tuple[tuple[str, tuple[int, ...]], _Place]]:
    for index, info in metadata.field("storage_data").items():
        offset = index.state.get("offset")
        if offset is None:
            continue
        if isinstance(info.state, dict) and info.state.get("transform_descriptors"):
            raise CheckpointError(
                f"{folder} is compressed ({', '.join(info.state['transform_descriptors'])}): save it without"
            )
        place = _Place(info.field("relative_path"), info.field("offset"), info.field("length"))
        if "/" in place.file or place.file in ("", ".", ".."):
            raise CheckpointError(f"{folder}/{METADATA} points to {place.file!r}, outside of its folder")
        yield (index.field("fqn"), tuple(offset)), place
