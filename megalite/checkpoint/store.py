"""Saving and loading checkpoints of a run, so that a crash at any moment leaves the previous one loadable.

    checkpoints/step_00000010/manifest.json           what is stored where, and the run's counters
    checkpoints/step_00000010/rank_00000.safetensors  the tensors that rank 0 stored
    checkpoints/latest                                the name of the newest complete one, moved last

A checkpoint is written into a hidden folder, brought to disk and renamed. Keys and places are free of the layout
(global names, rectangles of global tensors); this version reads a checkpoint in the layout that wrote it.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from megalite.checkpoint.agree import on_first, together
from megalite.checkpoint.manifest import (
    MANIFEST,
    CheckpointError,
    Entry,
    Held,
    Manifest,
    Overlap,
    Piece,
    Tensors,
    held,
    layout_of,
)
from megalite.checkpoint.tensors import FileMark, mark_of, write_tensors
from megalite.files import replace_text, sync_folder
from megalite.mpu import ParallelState

LATEST = "latest"
_STEP = re.compile(r"step_\d{8,}")
_SPARE = 64 << 20
"""Bytes that must stay free after a save, for the manifest and the run's logs."""


@dataclass(frozen=True)
class _Written:
    """The file of one rank: its mark, and by key the shape, dtype and one piece of each tensor in it."""

    file: str
    mark: FileMark
    pieces: tuple[tuple[str, Entry], ...]


def checkpoints_folder(run_dir: str | Path) -> Path:
    """Where the checkpoints of a run are."""
    return Path(run_dir) / "checkpoints"


def step_name(step: int) -> str:
    """The folder name of a step's checkpoint."""
    return f"step_{step:08d}"


def save(
    run_dir: str | Path,
    step: int,
    tensors: Tensors,
    state: Mapping[str, Any],
    mpu: ParallelState,
    *,
    keep_last: int = 0,
) -> Path:
    """Writes the checkpoint of `step` and makes it the latest; every rank calls it with its own tensors.

    state: JSON-like counters and configuration, the same on every rank (rank 0's is stored). keep_last: how many
    checkpoints stay (0: all); the latest always does. Returns the folder. Raises CheckpointError on all ranks when
    any rank cannot write; the previous checkpoint is then untouched.
    """
    root = checkpoints_folder(run_dir)
    fresh, final = root / f".writing_{step_name(step)}", root / step_name(step)
    what = f"cannot save {final}"
    mine = _to_store(tensors, mpu)
    sizes = together(mpu, what, lambda: sum(piece.view.nbytes for piece in mine))
    on_first(mpu, what, lambda: _prepare(root, fresh, sum(sizes)))
    try:
        written = together(mpu, what, lambda: _write_rank(fresh, mine, mpu.world.rank))
        on_first(mpu, what, lambda: _finish(root, fresh, final, _manifest(step, state, written, mpu)))
    except CheckpointError:
        if mpu.world.rank == 0:
            shutil.rmtree(fresh, ignore_errors=True)
        raise
    on_first(mpu, f"{final} is saved, but old checkpoints cannot be removed", lambda: _clean(root, keep_last))
    return final


def load_latest(run_dir: str | Path, tensors: Tensors, mpu: ParallelState) -> Manifest | None:
    """Loads the latest checkpoint of a run into `tensors`, in place; None when the run has none.

    Returns its manifest: `step`, and `state` as it was given to `save`. Kinds that `tensors` does not ask for are left
    out (weights alone may be loaded). Raises CheckpointError on all ranks when it cannot be used here; tensors may
    then hold a part of it.
    """
    root = checkpoints_folder(run_dir)
    found = on_first(mpu, f"cannot read {root}", lambda: latest(run_dir))
    return load(found, tensors, mpu) if found is not None else None


def load(folder: str | Path, tensors: Tensors, mpu: ParallelState, *, optional: Sequence[str] = ()) -> Manifest:
    """Loads the checkpoint in `folder` (a checkpoint, or a run whose latest is meant) into `tensors`, in place.

    As `load_latest`, but a checkpoint that is not there is an error. optional: kinds that it need not have (see
    `Manifest.kinds`); their tensors are then left as they are.
    """
    what = f"cannot load {folder}"
    loaded: list[Manifest] = []

    def read() -> set[str]:
        loaded.append(_read(Path(folder), tensors, optional))
        return {piece.key for piece in held(tensors)}

    keys = set().union(*together(mpu, what, read))
    together(mpu, what, lambda: _check_complete(loaded[0], keys))
    return loaded[0]


def latest(run_dir: str | Path) -> Path | None:
    """The folder of a run's latest complete checkpoint, or None. Raises CheckpointError when `latest` names nothing."""
    root = checkpoints_folder(run_dir)
    pointer = root / LATEST
    if not pointer.is_file():
        return None
    name = pointer.read_text(encoding="utf-8").strip()
    if not _STEP.fullmatch(name):
        raise CheckpointError(f"{pointer} holds {name!r}, not the name of a checkpoint such as {step_name(10)}")
    # A save of the same step moves the old folder aside for a moment; a crash just then leaves it there.
    for place in (root / name, root / f".old_{name}"):
        if (place / MANIFEST).is_file():
            return place
    others = ", ".join(folder.name for folder in complete(root)) or "none"
    raise CheckpointError(f"{pointer} names {name}, which is not there; complete checkpoints: {others}")


def complete(root: Path) -> list[Path]:
    """The complete checkpoints in a `checkpoints` folder, in the order in which they were written.

    Not by step: a run that went on from an earlier checkpoint leaves later steps of the branch that it gave up.
    """
    found = [folder for folder in root.glob("step_*") if _STEP.fullmatch(folder.name) and (folder / MANIFEST).is_file()]
    return sorted(found, key=lambda folder: ((folder / MANIFEST).stat().st_mtime_ns, folder.name))


def _to_store(tensors: Tensors, mpu: ParallelState) -> list[Held]:
    """The rectangles that this rank stores: each is stored once."""
    return [piece for piece in held(tensors) if piece.shard.is_saver(mpu)]


def _prepare(root: Path, fresh: Path, size: int) -> None:
    """Makes the folder to write into, when there is room for `size` bytes."""
    root.mkdir(parents=True, exist_ok=True)
    for leftover in root.glob(".writing_*"):
        shutil.rmtree(leftover)  # of a save that was cut short
    for leftover in root.glob(f".{LATEST}.*"):
        leftover.unlink()
    free = shutil.disk_usage(root).free
    if free < size + _SPARE:
        raise CheckpointError(
            f"the checkpoint takes {size / 2**20:.0f} MiB and {_SPARE >> 20} MiB must stay free,"
            f" but {free / 2**20:.0f} MiB are free; make room, or lower checkpoint.keep_last"
        )
    fresh.mkdir()


def _write_rank(fresh: Path, mine: Sequence[Held], rank: int) -> _Written:
    """Writes this rank's file, unless it has nothing to store."""
    file = f"rank_{rank:05d}.safetensors"
    views: dict[str, Tensor] = {}
    pieces: list[tuple[str, Entry]] = []
    for piece in mine:
        name = f"{piece.key}@{','.join(map(str, piece.offset))}"
        assert name not in views, f"{name} is held twice"
        views[name] = piece.view
        stored = Piece(piece.offset, piece.sizes, file, name)
        pieces.append((piece.key, Entry(piece.shard.shape, piece.dtype, (stored,))))
    mark = write_tensors(fresh / file, views) if views else FileMark(0, 0)
    return _Written(file, mark, tuple(pieces))


def _manifest(step: int, state: Mapping[str, Any], written: Sequence[_Written], mpu: ParallelState) -> Manifest:
    tensors: dict[str, Entry] = {}
    for of_rank in written:
        for key, entry in of_rank.pieces:
            before = tensors[key].pieces if key in tensors else ()
            tensors[key] = replace(entry, pieces=(*before, *entry.pieces))
    files = {of_rank.file: of_rank.mark for of_rank in written if of_rank.pieces}
    return Manifest(step, layout_of(mpu), dict(state), files, tensors)


def _finish(root: Path, fresh: Path, final: Path, manifest: Manifest) -> None:
    """Completes the folder, moves it into place, and then the pointer."""
    replace_text(fresh / MANIFEST, manifest.to_json())
    old = root / f".old_{final.name}"
    if (final / MANIFEST).is_file():
        shutil.rmtree(old, ignore_errors=True)
        os.rename(final, old)
    elif final.exists():
        shutil.rmtree(final)
    os.rename(fresh, final)
    sync_folder(root)
    replace_text(root / LATEST, final.name + "\n")
    shutil.rmtree(old, ignore_errors=True)


def _clean(root: Path, keep_last: int) -> None:
    """Removes what retention does not keep, and leftovers; never the latest."""
    kept = complete(root)
    current = (root / LATEST).read_text(encoding="utf-8").strip()
    for leftover in root.glob(".old_*"):
        shutil.rmtree(leftover)
    for folder in kept[:-keep_last] if keep_last > 0 else []:
        if folder.name != current:
            # Hidden first: a folder half removed must not look complete.
            hidden = folder.rename(folder.with_name(f".old_{folder.name}"))
            shutil.rmtree(hidden)


def _checkpoint_in(folder: Path) -> Path:
    if (folder / MANIFEST).is_file():
        return folder
    if (found := latest(folder)) is not None:
        return found
    raise CheckpointError(f"{folder} is neither a checkpoint ({MANIFEST}) nor a run with one (checkpoints/{LATEST})")


def _read(folder: Path, tensors: Tensors, optional: Sequence[str]) -> Manifest:
    place = _checkpoint_in(folder)
    manifest = Manifest.read(place)
    asked = {kind: of_kind for kind, of_kind in tensors.items() if kind not in optional or kind in manifest.kinds}
    wanted = [(piece, overlap) for piece in held(asked) for overlap in _find(manifest, piece)]
    _check_files(place, manifest, {overlap.piece.file for _, overlap in wanted})
    _read_tensors(place, wanted)
    return manifest


def _check_complete(manifest: Manifest, wanted: set[str]) -> None:
    """Of the kinds that were asked for, nothing may remain in the checkpoint."""
    kinds = {key.partition("/")[0] for key in wanted}
    left = sorted(key for key in manifest.tensors if key not in wanted and key.partition("/")[0] in kinds)
    if left:
        listed = ", ".join(left[:3]) + (f" and {len(left) - 3} more" if len(left) > 3 else "")
        raise CheckpointError(f"the checkpoint holds {listed}, which this model does not have: the model is another")


def _check_files(place: Path, manifest: Manifest, needed: set[str]) -> None:
    """All files are there, in full; those that this rank reads hold what was written."""
    for file, mark in manifest.files.items():
        path = place / file
        if not path.is_file():
            raise CheckpointError(f"{path} is missing")
        if (found := path.stat().st_size) != mark.size:
            raise CheckpointError(f"{path} has {found} bytes instead of {mark.size}: it was cut short or altered")
        if file in needed and mark_of(path) != mark:
            raise CheckpointError(f"{path} is damaged: its content is not what was written (checksum)")


def _read_tensors(place: Path, wanted: Sequence[tuple[Held, Overlap]]) -> None:
    """Copies what this rank holds out of the files that store it, no more of each than it needs."""
    with ExitStack() as stack:
        opened: dict[str, Any] = {}
        for piece, overlap in wanted:
            stored = overlap.piece
            try:
                if stored.file not in opened:
                    opened[stored.file] = stack.enter_context(safe_open(place / stored.file, framework="pt"))
                tensor = opened[stored.file].get_slice(stored.name)
                if (shape := tensor.get_shape()) != list(stored.sizes):
                    raise CheckpointError(f"{place / stored.file}: {stored.name} is {shape}, not {list(stored.sizes)}")
                piece.view[overlap.here].copy_(tensor[overlap.stored])
            except SafetensorError as error:
                raise CheckpointError(f"{place / stored.file} is damaged: {error}") from error


def _find(manifest: Manifest, piece: Held) -> list[Overlap]:
    """Where a rectangle is stored; raises CheckpointError when the checkpoint holds something else."""
    entry, shape = manifest.tensors.get(piece.key), piece.shard.shape
    if entry is None:
        raise CheckpointError(f"{piece.key} is not in the checkpoint: the model or the optimizer is another")
    if entry.shape != shape or entry.dtype != piece.dtype:
        there, here = f"{entry.dtype} {list(entry.shape)}", f"{piece.dtype} {list(shape)}"
        raise CheckpointError(
            f"{piece.key} is {there} in the checkpoint, {here} here: the model or precision is another"
        )
    try:
        return list(entry.overlaps(piece.offset, piece.sizes))
    except CheckpointError as error:
        raise CheckpointError(f"{piece.key}: {error}") from error
