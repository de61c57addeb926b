"""Reading what a rank holds out of the files that store it, verified on the way."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait

import torch

from megalite.checkpoint.errors import CheckpointError
from megalite.checkpoint.folder import Folder
from megalite.checkpoint.manifest import Entry, Held, Manifest, Overlap, Piece
from megalite.checkpoint.tensors import TensorFile, names_beyond_end

THREADS = 2
"""Stored rectangles read at once; each takes its own memory, unless it is put into place at once."""

_FLOATS = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
"""Dtypes that may be converted, and their bytes."""

Target = tuple[Held, Overlap]
"""A rectangle in memory, and where it meets a stored one."""


Instead = Mapping[str, Sequence[str]]
"""Kinds that hold the same values in another precision, by kind: a load that has it may convert."""


def find(manifest: Manifest, piece: Held, instead: Instead | None = None) -> list[Overlap]:
    """Where a rectangle is stored; raises CheckpointError when the checkpoint holds something else.

    instead: floating-point numbers may be of another dtype; of the kinds that have them, that with the dtype asked for
    is taken, or else the widest.
    """
    entry, shape = manifest.tensors.get(piece.key), piece.shard.shape
    if instead is not None:
        entry = _nearest(manifest, piece, instead)
    if entry is None:
        raise CheckpointError(f"{piece.key} is not in the checkpoint: the model or the optimizer is another")
    converts = instead is not None and {entry.dtype, piece.dtype} <= _FLOATS.keys()
    if entry.shape != shape or (entry.dtype != piece.dtype and not converts):
        there, here = f"{entry.dtype} {list(entry.shape)}", f"{piece.dtype} {list(shape)}"
        raise CheckpointError(
            f"{piece.key} is {there} in the checkpoint, {here} here: the model or precision is another"
            + (" (--checkpoint.allow train.precision converts)" if entry.shape == shape else "")
        )
    try:
        return list(entry.overlaps(piece.offset, piece.sizes))
    except CheckpointError as error:
        raise CheckpointError(f"{piece.key}: {error}") from error


def _nearest(manifest: Manifest, piece: Held, instead: Instead) -> Entry | None:
    """What holds the values of a rectangle, if not in its dtype then in the widest."""
    kind, _, name = piece.key.partition("/")
    kinds = (kind, *(other for other in instead.get(kind, ()) if other != kind))
    found = [entry for k in kinds if (entry := manifest.tensors.get(f"{k}/{name}")) is not None]
    return max(found, key=lambda e: (e.dtype == piece.dtype, _FLOATS.get(e.dtype, 0)), default=None)


def check_complete(manifest: Manifest, wanted: set[str]) -> None:
    """Of the kinds that were asked for, nothing may remain in the checkpoint."""
    kinds = {key.partition("/")[0] for key in wanted}
    left = sorted(key for key in manifest.tensors if key not in wanted and key.partition("/")[0] in kinds)
    if left:
        raise CheckpointError(
            f"the checkpoint holds {_listed(left)}, which this model does not have: the model is another"
        )


def check_files(folder: Folder, manifest: Manifest, files: Iterable[str] | None = None) -> None:
    """All files (or those named) are there, in full."""
    for file in manifest.files if files is None else files:
        size, mark = folder.size(file), manifest.files[file]
        if size is None:
            raise CheckpointError(f"{folder}/{file} is missing")
        if size != mark.size:
            raise CheckpointError(
                f"{folder}/{file} has {size} bytes instead of {mark.size}: it was cut short or altered"
            )


def read_tensors(folder: Folder, manifest: Manifest, targets: Iterable[Target]) -> None:
    """Copies what this rank holds out of the files that store it.

    A stored rectangle is read once and whole, even where only a part is needed: so its checksum tells.
    """
    by_file: dict[str, dict[str, list[Target]]] = {}
    for target in targets:
        stored = target[1].piece
        by_file.setdefault(stored.file, {}).setdefault(stored.name, []).append(target)
    with ThreadPoolExecutor(THREADS, thread_name_prefix="megalite reader") as pool:
        for file, pieces in by_file.items():
            with TensorFile(folder, file, manifest.files[file]) as opened:
                reads = [pool.submit(_read, opened, at_once) for at_once in pieces.values()]
                try:
                    for read in reads:
                        read.result()
                finally:
                    for read in reads:
                        read.cancel()
                    wait(reads)  # before the file is closed


def verify_files(folder: Folder, manifest: Manifest, files: Sequence[str]) -> None:
    """Reads `files` through; raises CheckpointError that names the first one that is not what was written."""
    check_files(folder, manifest, files)
    for damage in damages(folder, manifest, files):
        raise CheckpointError(damage)


def damages(
    folder: Folder, manifest: Manifest, files: Iterable[str], progress: Callable[[int], None] = lambda count: None
) -> Iterator[str]:
    """Reads `files` through; yields every file and tensor in it that is not what was written.

    `progress` is told the bytes of each file that is done.
    """
    by_file: dict[str, list[Piece]] = {file: [] for file in files}
    for entry in manifest.tensors.values():
        for piece in entry.pieces:
            if piece.file in by_file:
                by_file[piece.file].append(piece)
    for file, pieces in by_file.items():
        try:
            check_files(folder, manifest, [file])
            with TensorFile(folder, file, manifest.files[file]) as opened:
                for piece in pieces:
                    yield from _damage(opened, piece)
        except (CheckpointError, OSError) as error:
            what = str(error) if isinstance(error, CheckpointError) else f"{folder}/{file} cannot be read: {error}"
            yield f"{what}; {_lost(folder, file, pieces)}"
        progress(manifest.files[file].size)


def _damage(opened: TensorFile, piece: Piece) -> Iterator[str]:
    try:
        _check_sizes(opened, piece)
        opened.read(piece.name, piece.crc32)
    except (CheckpointError, OSError) as error:
        yield str(error)


def _lost(folder: Folder, file: str, pieces: Sequence[Piece]) -> str:
    """Which tensors of a file that cannot be opened are affected."""
    with contextlib.suppress(CheckpointError, OSError):
        beyond = set(names_beyond_end(folder, file))
        if cut := [piece for piece in pieces if piece.name in beyond]:
            return f"{_listed([piece.name for piece in cut])} of its {len(pieces)} tensors lie beyond its end"
    return f"it held {_listed([piece.name for piece in pieces])}"


def _listed(names: Sequence[str], most: int = 3) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _read(file: TensorFile, targets: Sequence[Target]) -> None:
    """One stored rectangle, into all the places that it belongs to."""
    stored = targets[0][1].piece
    _check_sizes(file, stored)
    if len(targets) == 1 and _is_whole(file, *targets[0]):
        file.read(stored.name, stored.crc32, into=targets[0][0].view.detach())
        return
    tensor = file.read(stored.name, stored.crc32)
    with torch.no_grad():
        for piece, overlap in targets:
            piece.view[overlap.here].copy_(tensor[overlap.stored])


def _is_whole(file: TensorFile, piece: Held, overlap: Overlap) -> bool:
    """Whether the stored rectangle is the one in memory, so that it can be read into its place."""
    view, stored = piece.view, overlap.piece
    return (
        piece.offset == stored.offset
        and piece.sizes == stored.sizes
        and view.dtype == file.find(stored.name).dtype
        and view.device.type == "cpu"
        and view.is_contiguous()
    )


def _check_sizes(file: TensorFile, piece: Piece) -> None:
    shape = file.find(piece.name).shape
    if shape != piece.sizes:
        raise CheckpointError(f"{file}: {piece.name} is {list(shape)}, not {list(piece.sizes)}")
