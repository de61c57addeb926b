"""The manifest of a checkpoint: what is in it and where, as JSON."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from megalite.checkpoint.errors import CheckpointError
from megalite.checkpoint.folder import MANIFEST, Folder, folder_at
from megalite.checkpoint.tensors import FileMark
from megalite.mpu import ParallelState
from megalite.parallel.shard import Shard

T = TypeVar("T")

FORMAT = 2

Tensors = Mapping[str, Sequence[tuple[Shard, Tensor]]]
"""Kind (parameter, master, exp_avg, ...) -> this rank's tensors and their places in the global model."""


@dataclass(frozen=True)
class Piece:
    """A rectangle of a global tensor: where it is there, as which tensor of which file it is stored, its checksum."""

    offset: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    name: str
    crc32: int


@dataclass(frozen=True)
class Entry:
    """A global tensor and the rectangles that make it up."""

    shape: tuple[int, ...]
    dtype: str
    pieces: tuple[Piece, ...]

    def overlaps(self, offset: tuple[int, ...], sizes: tuple[int, ...]) -> Iterator[Overlap]:
        """What is stored of the rectangle at `offset`; raises CheckpointError when that is not all of it."""
        missing = math.prod(sizes)
        for piece in self.pieces:
            begins = [max(a, b) for a, b in zip(offset, piece.offset, strict=True)]
            ends = [min(a + n, b + m) for a, n, b, m in zip(offset, sizes, piece.offset, piece.sizes, strict=True)]
            if all(begin < end for begin, end in zip(begins, ends, strict=True)):
                place = list(zip(begins, ends, strict=True))
                missing -= math.prod(end - begin for begin, end in place)
                yield Overlap(
                    piece,
                    tuple(slice(begin - at, end - at) for (begin, end), at in zip(place, piece.offset, strict=True)),
                    tuple(slice(begin - at, end - at) for (begin, end), at in zip(place, offset, strict=True)),
                )
        if missing:
            raise CheckpointError(
                f"{missing} of the {math.prod(sizes)} elements at {list(offset)} of sizes {list(sizes)} are not stored"
            )


@dataclass(frozen=True)
class Overlap:
    """Where a stored rectangle and one in memory meet: the same elements, counted from either's first."""

    piece: Piece
    stored: tuple[slice, ...]
    here: tuple[slice, ...]


@dataclass(frozen=True)
class Manifest:
    """step: optimizer steps done. layout: of the run, for people. state: the run's own counters and config.

    files: the mark of each tensor file. tensors: by key, `kind/global name`.
    """

    step: int
    layout: dict[str, Any]
    state: dict[str, Any]
    files: dict[str, FileMark]
    tensors: dict[str, Entry]

    @property
    def kinds(self) -> set[str]:
        """The kinds of tensors in it."""
        return {key.partition("/")[0] for key in self.tensors}

    def to_json(self) -> str:
        """The text of manifest.json."""
        return json.dumps({"format": FORMAT, **dataclasses.asdict(self)}, indent=1, sort_keys=True)

    @staticmethod
    def read(folder: Path | str | Folder) -> Manifest:
        """The manifest in `folder`; raises CheckpointError when it is missing, damaged or from another version."""
        folder = folder if isinstance(folder, Folder) else folder_at(folder)
        path = f"{folder}/{MANIFEST}"
        try:
            content = json.loads(folder.read_text(MANIFEST))
        except OSError as error:
            raise CheckpointError(f"{folder} is not a checkpoint: {MANIFEST}: {error.strerror or error}") from error
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{path} is damaged: {error}") from error
        found = content.get("format") if isinstance(content, dict) else None
        if isinstance(found, int) and found != FORMAT:
            raise CheckpointError(f"{path} has format {found}; this version reads format {FORMAT}")
        try:
            return _manifest(content)
        except _Malformed as error:
            raise CheckpointError(f"{path} is damaged: {error}") from error


class _Malformed(Exception):
    """JSON that is not a manifest; says what is wrong where."""


def _manifest(content: Any) -> Manifest:
    _field(content, "format", int, "it")
    files = {
        name: FileMark(_size(mark, "size", f"files.{name}"), _size(mark, "crc32", f"files.{name}"))
        for name, mark in _field(content, "files", dict, "it").items()
    }
    tensors = {key: _entry(entry, key) for key, entry in _field(content, "tensors", dict, "it").items()}
    for key, entry in tensors.items():
        for piece in entry.pieces:
            if piece.file not in files:
                raise _Malformed(f"{key} is in {piece.file}, which is not among its files")
    step, layout, state = _size(content, "step", "it"), *(_field(content, n, dict, "it") for n in ("layout", "state"))
    return Manifest(step, layout, state, files, tensors)


def _entry(content: Any, key: str) -> Entry:
    pieces = tuple(_piece(piece, key) for piece in _field(content, "pieces", list, key))
    return Entry(_sizes(content, "shape", key), _field(content, "dtype", str, key), pieces)


def _piece(content: Any, key: str) -> Piece:
    return Piece(
        _sizes(content, "offset", key),
        _sizes(content, "sizes", key),
        _field(content, "file", str, key),
        _field(content, "name", str, key),
        _size(content, "crc32", key),
    )


def _field(content: Any, name: str, kind: type[T], where: str) -> T:
    """A field of a JSON object; `where` names the object."""
    value = content.get(name) if isinstance(content, dict) else None
    if type(value) is not kind:
        raise _Malformed(f"{where} has no {name} of type {kind.__name__}")
    return value


def _size(content: Any, name: str, where: str) -> int:
    value = _field(content, name, int, where)
    if value < 0:
        raise _Malformed(f"{where} has {name} {value}")
    return value


def _sizes(content: Any, name: str, where: str) -> tuple[int, ...]:
    values = _field(content, name, list, where)
    if not all(type(value) is int and value >= 0 for value in values):
        raise _Malformed(f"{where} has no list of sizes as {name}")
    return tuple(values)


def layout_of(mpu: ParallelState) -> dict[str, Any]:
    """What decided which rank held which part of which tensor; loading asks for none of it."""
    split = mpu.config.layers_per_stage
    return {
        **{name: mpu.grid.sizes[name] for name in ("tp", "pp", "cp", "dp", "ep", "etp")},
        "vpp": mpu.config.vpp,
        "zero": mpu.config.zero,
        "zero_shard_size": mpu.config.zero_shard_size,
        "layers_per_stage": list(split) if split is not None else None,
    }


@dataclass(frozen=True)
class Held:
    """A rectangle of a global tensor that this rank has in memory, as a view of its part.

    key: `kind/global name`, free of the layout; a copy of a tied parameter goes by the name of the original.
    """

    key: str
    shard: Shard
    offset: tuple[int, ...]
    sizes: tuple[int, ...]
    view: Tensor

    @property
    def dtype(self) -> str:
        """The name of its dtype: float32, bfloat16, ..."""
        return str(self.view.dtype).removeprefix("torch.")


def held(tensors: Tensors) -> Iterator[Held]:
    """Every rectangle that this rank holds."""
    for kind, of_kind in tensors.items():
        for shard, local in of_kind:
            for offset, sizes, view in shard.pieces(local):
                yield Held(f"{kind}/{shard.tied_to or shard.name}", shard, offset, sizes, view)
