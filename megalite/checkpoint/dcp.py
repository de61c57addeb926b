"""Our files through `torch.distributed.checkpoint`, in both directions.

    dcp.load(state, storage_reader=MegaliteReader("runs/x"))            # keys as stored: parameter/layers.0...
    dcp.load(model.state_dict(), storage_reader=MegaliteReader("runs/x", kind="parameter"))
    dcp.save(state, storage_writer=MegaliteWriter("runs/y", step=10))

For code that has plain or DTensor state dicts: torch's planner decides who reads and writes what; files and manifest
are those of `store.py`. So nothing is ever unpickled, and nothing that would have to be pickled is taken. Runs of
megalite do not come through here: their shards are not all DTensors (a flat slice of a matrix is up to three
rectangles), and `manifest.py` finds what overlaps in a few lines.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from megalite.checkpoint.errors import CheckpointError
from megalite.checkpoint.folder import Draft, Folder, folder_at
from megalite.checkpoint.manifest import Entry, Manifest, Piece
from megalite.checkpoint.reading import check_files
from megalite.checkpoint.store import LATEST, checkpoints_folder, find_checkpoint, step_name
from megalite.checkpoint.tensors import FileMark, TensorFile, write_tensors


class MegaliteReader(StorageReader):
    """Reads a checkpoint (a folder, or a run whose latest is meant; a path or a URL) for `dcp.load`.

    kind: take the tensors of one kind (parameter, master, exp_avg, ...) by their names alone. Raises CheckpointError
    for a file that is not what was written.
    """

    def __init__(self, folder: str | Path, *, kind: str | None = None):
        self._folder, self._prefix = folder, f"{kind}/" if kind is not None else ""
        self._place: Folder | None = None
        self._manifest: Manifest | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Another checkpoint, if one is given."""
        self._folder = os.fspath(checkpoint_id) if checkpoint_id is not None else self._folder
        self._place = self._manifest = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The manifest, in torch's terms."""
        self._place = folder_at(find_checkpoint(self._folder))
        self._manifest = Manifest.read(self._place)
        check_files(self._place, self._manifest)
        return Metadata(
            {
                key.removeprefix(self._prefix): _in_torch_s_terms(entry)
                for key, entry in self._manifest.tensors.items()
                if key.startswith(self._prefix)
            }
        )

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to do."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """As it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """As they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Reads each stored rectangle once, verifies it and hands the parts to the planner."""
        place, manifest = self._place, self._manifest
        assert place is not None and manifest is not None, "read_metadata comes first"
        wanted: dict[Piece, list[ReadItem]] = {}
        for item in plan.items:
            wanted.setdefault(self._piece(manifest, item), []).append(item)
        with ExitStack() as stack:
            opened: dict[str, TensorFile] = {}
            for piece in sorted(wanted, key=lambda piece: piece.file):
                if piece.file not in opened:
                    stack.close()  # one file at a time
                    opened = {
                        piece.file: stack.enter_context(TensorFile(place, piece.file, manifest.files[piece.file]))
                    }
                tensor = opened[piece.file].read(piece.name, piece.crc32)
                for item in wanted[piece]:
                    _hand_over(tensor, item, planner)
        return _done(None)

    def _piece(self, manifest: Manifest, item: ReadItem) -> Piece:
        key, offset = self._prefix + item.storage_index.fqn, tuple(item.storage_index.offset or ())
        return next(piece for piece in manifest.tensors[key].pieces if piece.offset == offset)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Any path and any URL may be one."""
        return True


class MegaliteWriter(StorageWriter):
    """Writes the checkpoint of `step` into <run_dir>/checkpoints for `dcp.save`, and makes it the latest.

    kind: the tensors are of this kind, and the state dict has their names alone. state: JSON-like counters. Anything in
    the state dict that is not a tensor is refused (CheckpointError): torch would pickle it.
    """

    def __init__(
        self, run_dir: str | Path, *, step: int, kind: str | None = None, state: Mapping[str, Any] | None = None
    ):
        self._root, self._step, self._state = checkpoints_folder(run_dir), step, dict(state or {})
        self._prefix = f"{kind}/" if kind is not None else ""
        self._lock = ExitStack()
        self._draft: Draft | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Another run folder, if one is given."""
        if checkpoint_id is not None:
            self._root = checkpoints_folder(os.fspath(checkpoint_id))

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to do."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """As it is, if it is of tensors only."""
        if others := [item.index.fqn for item in plan.items if item.type == WriteItemType.BYTE_IO]:
            raise CheckpointError(
                f"{', '.join(others[:4])}: only tensors are stored, as torch would pickle the rest;"
                " give counters to MegaliteWriter as state"
            )
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Makes the place that all ranks write to."""
        size = sum(_nbytes(plan) for plan in plans)
        with ExitStack() as stack:
            stack.enter_context(self._root.lock())
            self._draft = self._root.draft(step_name(self._step), size)
            self._lock = stack.pop_all()
        parts = [_Part(self._draft, f"rank_{rank:05d}.safetensors") for rank in range(len(plans))]
        return [replace(plan, storage_data=part) for plan, part in zip(plans, parts, strict=True)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Writes this rank's file."""
        if not plan.items:
            return _done([])
        part: _Part = plan.storage_data
        tensors: dict[str, Tensor] = {}
        for item in plan.items:
            data = planner.resolve_data(item)
            assert isinstance(data, Tensor)
            tensors[self._name(item.index)] = data
        with self._root.writer(part.draft.path + part.file) as file:
            written = write_tensors(file, tensors)
        file_name = part.draft.prefix + part.file
        results = []
        for item, (name, tensor) in zip(plan.items, tensors.items(), strict=True):
            piece = Piece(
                tuple(item.index.offset or (0,) * tensor.dim()), tuple(tensor.shape), file_name, name,
                written.crc32[name],
            )  # fmt: skip
            results.append(WriteResult(item.index, tensor.nbytes, (written.mark, piece)))
        return _done(results)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Writes the manifest and moves `latest`."""
        assert self._draft is not None, "prepare_global_plan comes first"
        pieces: dict[str, list[Piece]] = {}
        files: dict[str, FileMark] = {}
        for result in (result for of_rank in results for result in of_rank):
            mark, piece = result.storage_data
            files[piece.file] = mark
            pieces.setdefault(result.index.fqn, []).append(piece)
        tensors: dict[str, Entry] = {}
        for name, found in pieces.items():
            of = metadata.state_dict_metadata[name]
            assert isinstance(of, TensorStorageMetadata)
            dtype = str(of.properties.dtype).removeprefix("torch.")
            tensors[self._prefix + name] = Entry(tuple(of.size), dtype, tuple(found))
        with self._lock:
            manifest = Manifest(self._step, {}, self._state, files, tensors)
            self._root.publish(self._draft, step_name(self._step), manifest.to_json())
            self._root.replace_text(LATEST, step_name(self._step) + "\n")
            self._root.sweep()

    def _name(self, index: Any) -> str:
        offset = ",".join(map(str, index.offset or ()))
        return f"{self._prefix}{index.fqn}@{offset}"

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Any path and any URL may be a run folder."""
        return True


@dataclass(frozen=True)
class _Part:
    """Where a rank writes."""

    draft: Draft
    file: str


def _in_torch_s_terms(entry: Entry) -> TensorStorageMetadata:
    return TensorStorageMetadata(
        TensorProperties(dtype=getattr(torch, entry.dtype)),
        torch.Size(entry.shape),
        [ChunkStorageMetadata(torch.Size(piece.offset), torch.Size(piece.sizes)) for piece in entry.pieces],
    )


def _hand_over(tensor: Tensor, item: ReadItem, planner: LoadPlanner) -> None:
    """The part of a stored rectangle that `item` asks for."""
    part = tensor
    for dim, (begin, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
        part = part.narrow(dim, begin, length)
    target = planner.resolve_tensor(item).detach()
    target.copy_(part)
    planner.commit_tensor(item, target)


def _nbytes(plan: SavePlan) -> int:
    """What a rank will write."""
    total = 0
    for item in plan.items:
        if item.tensor_data is not None:
            total += item.tensor_data.chunk.sizes.numel() * item.tensor_data.properties.dtype.itemsize
    return total


def _done(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future
