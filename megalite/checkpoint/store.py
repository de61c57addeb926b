"""Saving and loading checkpoints of a run, so that a crash at any moment leaves the previous one loadable.

    checkpoints/step_00000010/manifest.json           what is stored where, checksums, and the run's counters
    checkpoints/step_00000010/rank_00000.safetensors  the tensors that rank 0 stored
    checkpoints/latest                                the name of the newest complete one, moved last

Keys and places are free of the layout (global names, rectangles of global tensors), so any layout reads what another
one has written. `folder.py` knows how a checkpoint comes to be there at once.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from torch import Tensor

from megalite.checkpoint.agree import on_first, together
from megalite.checkpoint.errors import CheckpointError
from megalite.checkpoint.folder import MANIFEST, Draft, Folder, folder_at
from megalite.checkpoint.manifest import Entry, Held, Manifest, Piece, Tensors, held, layout_of
from megalite.checkpoint.reading import Instead, check_complete, check_files, find, read_tensors, verify_files
from megalite.checkpoint.tensors import FileMark, write_tensors
from megalite.mpu import ParallelState

logger = logging.getLogger("megalite")

LATEST = "latest"
_STEP = re.compile(r"step_(\d{8,})")


@dataclass(frozen=True, kw_only=True)
class Retention:
    """Which checkpoints stay. The one that `latest` names always does."""

    keep_last: int = 0
    """How many of the newest; 0 keeps all."""
    keep_every: int = 0
    """Those of steps divisible by it stay for good; 0 for none."""

    def removes(self, names: Sequence[str]) -> list[str]:
        """Of checkpoints in the order in which they were written, those that go."""
        old = names[: -self.keep_last] if self.keep_last > 0 else []
        return [name for name in old if not (self.keep_every and step_of(name) % self.keep_every == 0)]


def checkpoints_folder(run_dir: str | Path) -> Folder:
    """Where the checkpoints of a run are."""
    return folder_at(run_dir).child("checkpoints")


def step_name(step: int) -> str:
    """The folder name of a step's checkpoint."""
    return f"step_{step:08d}"


def step_of(name: str) -> int:
    """The step that the folder `name` of a checkpoint says."""
    found = _STEP.fullmatch(name)
    assert found is not None, f"{name} is not the name of a checkpoint"
    return int(found[1])


def save(
    run_dir: str | Path,
    step: int,
    tensors: Tensors,
    state: Mapping[str, Any],
    mpu: ParallelState,
    *,
    keep_last: int = 0,
    keep_every: int = 0,
) -> Path | str:
    """Writes the checkpoint of `step` and makes it the latest; every rank calls it with its own tensors.

    run_dir: a path, or a URL of fsspec. state: JSON-like counters and configuration, the same on every rank (rank 0's
    is stored). Returns the folder. Raises CheckpointError on all ranks when any rank cannot write; the previous
    checkpoint is then untouched.
    """
    pending = PendingSave(run_dir, step, tensors, state, mpu, Retention(keep_last=keep_last, keep_every=keep_every))
    return pending.complete(pending.write(pending.views))


class PendingSave:
    """A checkpoint in the making: prepared by all ranks, written by each for itself, then completed by all.

    Between the two no rank waits for another, so that the middle part may happen while something else goes on.
    """

    def __init__(
        self,
        run_dir: str | Path,
        step: int,
        tensors: Tensors,
        state: Mapping[str, Any],
        mpu: ParallelState,
        retention: Retention,
    ):
        """Every rank at the same time; raises CheckpointError on all when there is no room, or no place."""
        self.step, self._state, self._mpu, self._retention = step, dict(state), mpu, retention
        self._root, self._name = checkpoints_folder(run_dir), step_name(step)
        self._mine = [piece for piece in held(tensors) if piece.shard.is_saver(mpu)]
        self._lock = ExitStack()
        what = f"cannot save {self._root}/{self._name}"
        sizes = together(mpu, what, lambda: sum(view.nbytes for view in self.views.values()))
        self._draft = on_first(mpu, what, lambda: self._begin(sum(sizes)))

    @property
    def views(self) -> dict[str, Tensor]:
        """What this rank stores: views of the live state, by their names in its file."""
        views = {_name_of(piece): piece.view for piece in self._mine}
        assert len(views) == len(self._mine), "a rectangle is held twice"
        return views

    def write(self, views: Mapping[str, Tensor]) -> _Stored | Exception:
        """Writes this rank's file, with the values in `views`; what went wrong is returned, for `complete`."""
        try:
            return self._write(views)
        except (OSError, ValueError, CheckpointError) as error:
            return error

    def complete(self, mine: _Stored | Exception) -> Path | str:
        """Makes the checkpoint the latest, when every rank has written; every rank at the same time.

        Returns its folder. Raises CheckpointError on all ranks when one has failed; nothing is then left of it.
        """
        final, what = self._root.child(self._name), f"cannot save {self._root}/{self._name}"
        with self._lock:
            try:
                stored = together(self._mpu, what, lambda: _or_raise(mine))
                on_first(self._mpu, what, lambda: self._finish(stored))
            except CheckpointError:
                if self._mpu.world.rank == 0:
                    self._root.discard(self._draft)
                raise
            what = f"{final} is saved, but old checkpoints cannot be removed"
            on_first(self._mpu, what, lambda: _clean(self._root, self._retention))
        return final.address

    def _begin(self, size: int) -> Draft:
        with ExitStack() as stack:
            stack.enter_context(self._root.lock())
            draft = self._root.draft(self._name, size)
            self._lock = stack.pop_all()
        return draft

    def _write(self, views: Mapping[str, Tensor]) -> _Stored:
        file = f"rank_{self._mpu.world.rank:05d}.safetensors"
        if not views:
            return _Stored(file, FileMark(0, 0), ())
        with self._root.writer(self._draft.path + file) as opened:
            written = write_tensors(opened, views)
        pieces: list[tuple[str, Entry]] = []
        for piece in self._mine:
            name = _name_of(piece)
            stored = Piece(piece.offset, piece.sizes, self._draft.prefix + file, name, written.crc32[name])
            pieces.append((piece.key, Entry(piece.shard.shape, piece.dtype, (stored,))))
        return _Stored(self._draft.prefix + file, written.mark, tuple(pieces))

    def _finish(self, stored: Sequence[_Stored]) -> None:
        manifest = _manifest(self.step, self._state, stored, self._mpu)
        self._root.publish(self._draft, self._name, manifest.to_json())
        self._root.replace_text(LATEST, self._name + "\n")


@dataclass(frozen=True)
class _Stored:
    """The file of one rank: its mark, and by key the shape, dtype and one piece of each tensor in it."""

    file: str
    mark: FileMark
    pieces: tuple[tuple[str, Entry], ...]


def _name_of(piece: Held) -> str:
    return f"{piece.key}@{','.join(map(str, piece.offset))}"


def _or_raise(result: _Stored | Exception) -> _Stored:
    if isinstance(result, Exception):
        raise result
    return result


def _manifest(step: int, state: Mapping[str, Any], stored: Sequence[_Stored], mpu: ParallelState) -> Manifest:
    tensors: dict[str, Entry] = {}
    for of_rank in stored:
        for key, entry in of_rank.pieces:
            before = tensors[key].pieces if key in tensors else ()
            tensors[key] = replace(entry, pieces=(*before, *entry.pieces))
    files = {of_rank.file: of_rank.mark for of_rank in stored if of_rank.pieces}
    return Manifest(step, layout_of(mpu), dict(state), files, tensors)


def _clean(root: Folder, retention: Retention) -> None:
    """Removes what retention does not keep, and leftovers; never the latest."""
    current = root.read_text(LATEST).strip()
    root.sweep()
    for name in retention.removes(_complete(root)):
        if name != current:
            root.remove(name)


def load_latest(run_dir: str | Path, tensors: Tensors, mpu: ParallelState) -> Manifest | None:
    """Loads the latest checkpoint of a run into `tensors`, in place; None when the run has none.

    Returns its manifest: `step`, and `state` as it was given to `save`. Kinds that `tensors` does not ask for are left
    out (weights alone may be loaded). Raises CheckpointError on all ranks when it cannot be used here; tensors may
    then hold a part of it.
    """
    found = on_first(mpu, f"cannot read {run_dir}", lambda: latest(run_dir))
    return load(run_dir, tensors, mpu) if found is not None else None


def load(
    folder: str | Path,
    tensors: Tensors,
    mpu: ParallelState,
    *,
    optional: Sequence[str] = (),
    instead: Instead | None = None,
    apart: Sequence[str] = (),
    frozen: Collection[str] = (),
) -> Manifest:
    """Loads the checkpoint in `folder` (a checkpoint, or a run whose latest is meant) into `tensors`, in place.

    As `load_latest`, but a checkpoint that is not there is an error. optional: kinds that it need not have (see
    `Manifest.kinds`); their tensors are then left as they are. instead: see `find`; a dtype may then be another. apart:
    patterns of global names, as in a shell, of tensors that may be here alone (and are then left as they are) or there
    alone (and are then not read). frozen: global names of which the parameter alone is read, whatever there is beside.
    """
    what = f"cannot load {folder}"
    while True:
        place = on_first(mpu, what, lambda: find_checkpoint(folder))
        before = on_first(mpu, what, lambda place=place: _manifest_of(place))
        try:
            return _load(folder_at(place), what, tensors, mpu, optional, instead, apart, frozen)
        except CheckpointError:
            if not on_first(mpu, what, lambda place=place, before=before: _has_moved_on(folder, place, before)):
                raise
            logger.info("%s has a newer checkpoint, and that of before is gone: reading the new one", folder)


def _load(
    place: Folder,
    what: str,
    tensors: Tensors,
    mpu: ParallelState,
    optional: Sequence[str],
    instead: Instead | None,
    apart: Sequence[str],
    frozen: Collection[str],
) -> Manifest:
    # Read once: a run may save the same step again in the meantime.
    manifest = on_first(mpu, what, lambda: _checked(place))
    names = {_name(key) for key in manifest.tensors}

    def read() -> set[str]:
        asked = {kind: of_kind for kind, of_kind in tensors.items() if kind not in optional or kind in manifest.kinds}
        pieces = [piece for piece in held(asked) if _name(piece.key) in names or not _is_like(piece.key, apart)]
        read_tensors(
            place, manifest, [(piece, overlap) for piece in pieces for overlap in find(manifest, piece, instead)]
        )
        of_asked = [key for key in manifest.tensors if key.partition("/")[0] in tensors]
        beside = {key for key in of_asked if _name(key) in frozen and not key.startswith("parameter/")}
        return {piece.key for piece in pieces} | beside | {key for key in of_asked if _is_like(key, apart)}

    keys = set().union(*together(mpu, what, read))
    on_first(mpu, what, lambda: check_complete(manifest, keys))
    return manifest


def _name(key: str) -> str:
    return key.partition("/")[2]


def _is_like(key: str, patterns: Sequence[str]) -> bool:
    """Whether the global name in a key is like one of `patterns`."""
    return any(fnmatchcase(_name(key), pattern) for pattern in patterns)


def _checked(place: Folder) -> Manifest:
    manifest = Manifest.read(place)
    check_files(place, manifest)
    return manifest


def _manifest_of(place: Path | str) -> Manifest | None:
    with contextlib.suppress(CheckpointError):
        return Manifest.read(folder_at(place))
    return None


def _has_moved_on(folder: str | Path, place: Path | str, before: Manifest | None) -> bool:
    """Whether the latest checkpoint of a run is another one by now, or the same step saved again."""
    with contextlib.suppress(CheckpointError):
        return find_checkpoint(folder) != place or _manifest_of(place) != before
    return False


def verify(folder: str | Path, mpu: ParallelState) -> Manifest:
    """Reads a whole checkpoint and compares it with its checksums; every rank calls it and reads its share of files.

    Returns the manifest. Raises CheckpointError on all ranks, with the file that is not what was written.
    """
    place, what = folder_at(folder), f"{folder} is not intact"
    manifest = on_first(mpu, what, lambda: Manifest.read(place))
    mine = sorted(manifest.files)[mpu.world.rank :: mpu.world.size]
    together(mpu, what, lambda: verify_files(place, manifest, mine))
    return manifest


def newest_intact(run_dir: str | Path, mpu: ParallelState) -> Path | str | None:
    """The latest checkpoint of a run or, where that is damaged, the newest before it that is not; None without any.

    Every rank calls it. Each that is passed over is logged; raises CheckpointError when none is intact.
    """
    candidates = on_first(mpu, f"cannot read {run_dir}", lambda: _newest_first(run_dir))
    for place in candidates:
        try:
            verify(place, mpu)
            return place
        except CheckpointError as error:
            logger.warning("passing over %s: %s", place, error)
    if candidates:
        raise CheckpointError(f"{run_dir} has {len(candidates)} checkpoints, and none is intact (see above)")
    return None


def _newest_first(run_dir: str | Path) -> list[Path | str]:
    """The one that `latest` names, then the others."""
    root = checkpoints_folder(run_dir)
    others: list[Path | str] = [root.child(name).address for name in reversed(_complete(root))]
    try:
        first = latest(run_dir)
    except CheckpointError as error:
        logger.warning("%s", error)
        first = None
    return others if first is None else [first, *(place for place in others if place != first)]


def find_checkpoint(folder: str | Path) -> Path | str:
    """`folder` itself where that is a checkpoint, or the latest of the run in it; CheckpointError if it is neither."""
    place = folder_at(folder)
    if place.size(MANIFEST) is not None:
        return place.address
    if (found := latest(folder)) is not None:
        return found
    raise CheckpointError(f"{folder} is neither a checkpoint ({MANIFEST}) nor a run with one (checkpoints/{LATEST})")


def latest(run_dir: str | Path) -> Path | str | None:
    """The folder of a run's latest complete checkpoint, or None. Raises CheckpointError when `latest` names nothing."""
    root = checkpoints_folder(run_dir)
    if root.size(LATEST) is None:
        return None
    missed = ""
    while True:
        name = root.read_text(LATEST).strip()
        if not _STEP.fullmatch(name):
            raise CheckpointError(
                f"{root}/{LATEST} holds {name!r}, not the name of a checkpoint such as {step_name(10)}"
            )
        # A save of the same step moves the old folder aside for a moment; a crash just then leaves it there.
        for place in (name, root.set_aside(name)):
            if root.size(f"{place}/{MANIFEST}") is not None:
                return root.child(place).address
        if name == missed:
            others = ", ".join(_complete(root)) or "none"
            raise CheckpointError(f"{root}/{LATEST} names {name}, which is not there; complete checkpoints: {others}")
        # A run that saves meanwhile may have moved `latest` on, or the folder back, since we looked: look again.
        missed = name


def complete(run_dir: str | Path) -> list[str]:
    """The names of a run's complete checkpoints, in the order in which they were written.

    Not by step: a run that went on from an earlier checkpoint leaves later steps of the branch that it gave up.
    """
    return _complete(checkpoints_folder(run_dir))


def _complete(root: Folder) -> list[str]:
    manifests = {name: f"{name}/{MANIFEST}" for name in root.names() if _STEP.fullmatch(name)}
    found = [name for name, manifest in manifests.items() if root.size(manifest) is not None]
    return sorted(found, key=lambda name: (root.written(manifests[name]), name))
