"""A checkpoint opened to read whole tensors, one after another, by one process."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import ExitStack
from fnmatch import fnmatchcase
from pathlib import Path

import torch
from torch import Tensor

from megalite.checkpoint.errors import CheckpointError
from megalite.checkpoint.folder import Folder, folder_at
from megalite.checkpoint.manifest import Entry, Manifest, Overlap
from megalite.checkpoint.store import find_checkpoint
from megalite.checkpoint.tensors import TensorFile

WEIGHTS = ("parameter", "master", "buffer")
"""Kinds of tensors that are what a model is; the others are those of the optimizer."""
_OPEN = 64
"""Files that are open at a time: a checkpoint may have thousands."""


class StoredCheckpoint:
    """A checkpoint (a folder, or a run whose latest is meant; a path or a URL), opened for reading. A context manager.

    Every stored rectangle that is read is verified. Memory: the tensor, and one of its rectangles.
    """

    def __init__(self, folder: str | Path):
        self.address = find_checkpoint(folder)
        self.folder: Folder = folder_at(self.address)
        self.manifest = Manifest.read(self.folder)
        self._files: OrderedDict[str, TensorFile] = OrderedDict()

    def __enter__(self) -> StoredCheckpoint:
        return self

    def __exit__(self, *exc: object) -> None:
        with ExitStack() as stack:
            for file in self._files.values():
                stack.enter_context(file)
        self._files.clear()

    def __str__(self) -> str:
        return str(self.address)

    @property
    def tensors(self) -> dict[str, Entry]:
        """What there is, by `kind/global name`."""
        return self.manifest.tensors

    def select(self, *, weights_only: bool = False, pattern: str = "*") -> list[str]:
        """Of all tensors those whose key, or name without the kind, is like `pattern` (as in a shell), by layer.

        What belongs together lies together: all kinds of a layer, then those of the next one.
        """
        found = [key for key in self.tensors if not weights_only or kind_of(key) in WEIGHTS]
        return sorted((key for key in found if matches(key, pattern)), key=_by_layer)

    def read(self, key: str) -> Tensor:
        """The whole tensor `key`; raises CheckpointError when it is not stored, or not as it was written."""
        entry = self.tensors[key]
        whole: Tensor | None = None
        for overlap in self._overlaps(key, entry):
            stored = self._file(overlap.piece.file).read(overlap.piece.name, overlap.piece.crc32)
            if stored.shape != overlap.piece.sizes or stored.dtype != dtype_of(entry):
                raise CheckpointError(
                    f"{self.address}/{overlap.piece.file}: {overlap.piece.name} is {stored.dtype}"
                    f" {list(stored.shape)}, not {entry.dtype} {list(overlap.piece.sizes)}"
                )
            if stored.shape == entry.shape:
                return stored
            whole = whole if whole is not None else torch.empty(entry.shape, dtype=stored.dtype)
            whole[overlap.here].copy_(stored[overlap.stored])
        return whole if whole is not None else torch.empty(entry.shape, dtype=dtype_of(entry))

    def _overlaps(self, key: str, entry: Entry) -> Iterator[Overlap]:
        try:
            yield from entry.overlaps((0,) * len(entry.shape), entry.shape)
        except CheckpointError as error:
            raise CheckpointError(f"{self.address}: {key}: {error}") from error

    def _file(self, name: str) -> TensorFile:
        if name not in self._files:
            if len(self._files) == _OPEN:
                with self._files.popitem(last=False)[1]:
                    pass  # the one that was used least lately is closed
            try:
                self._files[name] = TensorFile(self.folder, name, self.manifest.files[name])
            except OSError as error:
                raise CheckpointError(f"{self.folder}/{name} cannot be read: {error.strerror or error}") from error
        self._files.move_to_end(name)
        return self._files[name]


def kind_of(key: str) -> str:
    """parameter, master, exp_avg, ...: what stands before the name."""
    return key.partition("/")[0]


def name_of(key: str) -> str:
    """The global name, without the kind."""
    return key.partition("/")[2]


def matches(key: str, pattern: str) -> bool:
    """Whether a key, or the name in it, is like `pattern`."""
    return fnmatchcase(key, pattern) or fnmatchcase(name_of(key), pattern)


def dtype_of(entry: Entry) -> torch.dtype:
    """torch's dtype of a stored tensor; raises CheckpointError for one that torch does not know."""
    dtype = getattr(torch, entry.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(f"{entry.dtype} is not a dtype")
    return dtype


def _by_layer(key: str) -> tuple[int, int, str, str]:
    """Embeddings, the layers in their order, then the rest; within a layer by name, then by kind."""
    name = name_of(key)
    parts = name.split(".")
    if parts[0] == "layers" and len(parts) > 1 and parts[1].isdigit():
        return 1, int(parts[1]), name, kind_of(key)
    return (0 if parts[0] in ("embedding", "positions") else 2), 0, name, kind_of(key)
