"""Checkpoints that are damaged, of another model, or cannot be written: told plainly, the one before untouched."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megalite.checkpoint import store
from megalite.checkpoint.errors import CheckpointError
from megalite.checkpoint.folder import MANIFEST
from megalite.mpu import ParallelConfig, ParallelState
from megalite.testing.world import World
from tests.checkpoint.run import Run, equal_states
from tests.parallel.parameters import whole

SINGLE = ParallelState.single()


def test_what_is_not_stored_whole_is_refused(tmp_path: Path) -> None:
    path = Run(SINGLE).save(tmp_path, 1) / MANIFEST
    content = json.loads(path.read_text())
    content["tensors"]["parameter/words"]["shape"] = [7, 3]
    (piece,) = content["tensors"]["parameter/words"]["pieces"]
    piece["sizes"] = [5, 3]
    path.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=r"parameter/words: 6 of the 21 elements at \[0, 0\] of sizes \[7, 3\]"):
        Run(SINGLE).load(tmp_path)


def test_another_model_or_precision_is_refused_by_name(tmp_path: Path) -> None:
    Run(SINGLE).save(tmp_path, 1)
    with pytest.raises(
        CheckpointError, match=r"parameter/words is bfloat16 \[7, 3\] in the checkpoint, bfloat16 \[7, 4\]"
    ):
        Run(SINGLE, width=4).load(tmp_path)
    with pytest.raises(CheckpointError, match="float32"):
        Run(SINGLE, torch.float32).load(tmp_path)
    extra = whole("extra", torch.ones(2, 2))
    with pytest.raises(CheckpointError, match="parameter/extra is not in the checkpoint"):
        store.load(tmp_path, {"parameter": [(extra.shard, extra.data)]}, SINGLE)  # pyright: ignore
    run = Run(SINGLE)
    with pytest.raises(CheckpointError, match=r"holds .*parameter/layers\.0\.norm, which this model does not have"):
        store.load(tmp_path, {"parameter": run.tensors()["parameter"][:2]}, SINGLE)


def _damage(folder: Path, how: str) -> None:
    file = folder / "rank_00000.safetensors"
    if how == "truncated":
        os.truncate(file, file.stat().st_size - 1)
    elif how == "missing":
        file.unlink()
    elif how == "header":
        data = bytearray(file.read_bytes())
        data[9] = 0
        file.write_bytes(data)
    elif how == "content":
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
    elif how == "manifest":
        (folder / MANIFEST).write_text("{")
    elif how == "format":
        content = json.loads((folder / MANIFEST).read_text())
        (folder / MANIFEST).write_text(json.dumps(content | {"format": 99}))
    elif how == "pointer":
        (folder.parent / "latest").write_text("../../elsewhere\n")
    elif how == "dangling":
        shutil.rmtree(folder)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("truncated", r"rank_00000.safetensors has \d+ bytes instead of \d+"),
        ("missing", "rank_00000.safetensors is missing"),
        ("header", "rank_00000.safetensors is damaged"),
        ("content", r"rank_00000.safetensors is damaged: .* is not what was written"),
        ("manifest", "manifest.json is damaged"),
        ("format", "format 99; this version reads format 2"),
        ("pointer", "not the name of a checkpoint such as step_00000010"),
        ("dangling", "names step_00000002, which is not there; complete checkpoints: step_00000001"),
    ],
)
def test_damage_is_named(tmp_path: Path, how: str, message: str) -> None:
    run = Run(SINGLE)
    run.save(tmp_path, 1)
    _damage(run.save(tmp_path, 2), how)
    with pytest.raises(CheckpointError, match=message):
        run.load(tmp_path)


Edit = Callable[[dict[str, Any]], Any]


def _piece(content: dict[str, Any]) -> dict[str, Any]:
    return content["tensors"]["parameter/words"]["pieces"][0]


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda m: m.pop("step"), "it has no step of type int"),
        (lambda m: m.pop("format"), "it has no format of type int"),
        (lambda m: m.update(step="2"), "it has no step of type int"),
        (lambda m: m.update(step=True), "it has no step of type int"),
        (lambda m: m.update(step=-2), "it has step -2"),
        (lambda m: m.update(layout=[1]), "it has no layout of type dict"),
        (lambda m: m.update(state=None), "it has no state of type dict"),
        (lambda m: m.update(files=[]), "it has no files of type dict"),
        (lambda m: m["files"].update({"rank_00000.safetensors": 3}), r"files\.rank_00000\.safetensors has no size"),
        (lambda m: m["files"]["rank_00000.safetensors"].pop("crc32"), "has no crc32 of type int"),
        (lambda m: _piece(m).pop("crc32"), "parameter/words has no crc32 of type int"),
        (lambda m: m.update(tensors=3), "it has no tensors of type dict"),
        (lambda m: m["tensors"].update({"parameter/words": []}), "parameter/words has no pieces of type list"),
        (lambda m: m["tensors"]["parameter/words"].update(shape="73"), "parameter/words has no shape of type list"),
        (lambda m: m["tensors"]["parameter/words"].update(pieces=[7]), "parameter/words has no offset of type list"),
        (lambda m: _piece(m).update(sizes=[7, "3"]), "parameter/words has no list of sizes as sizes"),
        (lambda m: _piece(m).update(offset=[-1, 0]), "parameter/words has no list of sizes as offset"),
        (lambda m: _piece(m).update(name=None), "parameter/words has no name of type str"),
        (lambda m: _piece(m).update(file="../a"), r"parameter/words is in \.\./a, which is not among its files"),
        (lambda m: _piece(m).update(name="elsewhere"), "rank_00000.safetensors is damaged: it has no elsewhere"),
        (lambda m: _piece(m).update(name="parameter/layers.0.norm@0"), r"norm@0 is \[3\], not \[7, 3\]"),
    ],
)
def test_a_malformed_manifest_is_told_plainly(tmp_path: Path, edit: Edit, message: str) -> None:
    run = Run(SINGLE)
    path = run.save(tmp_path, 2) / MANIFEST
    content = json.loads(path.read_text())
    edit(content)
    path.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=message):
        run.load(tmp_path)


@pytest.mark.parametrize("text", ["[]", "null", "3", '"x"', "[" * 100_000, '{"format": "1"}', "\udcff"])
def test_a_manifest_that_is_no_object_is_told_plainly(tmp_path: Path, text: str) -> None:
    run = Run(SINGLE)
    path = run.save(tmp_path, 2) / MANIFEST
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(CheckpointError, match=r"manifest\.json is damaged: "):
        run.load(tmp_path)


def _fail_on_rank_one(mpu: ParallelState, folder: str) -> tuple[str, bool]:
    """A save that fails on one rank, after one that did not."""
    run, path = Run(mpu), Path(folder)
    run.train(1, 1)
    run.save(path, 1)
    before = run.values()
    run.train(2, 2)
    message = ""
    real = store.write_tensors
    if mpu.rank == 1:

        def full(*_: object) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

        store.write_tensors = full
    try:
        run.save(path, 2)
    except CheckpointError as error:
        message = str(error)
    finally:
        store.write_tensors = real
    run.load(path)
    return message, equal_states(run.values(), before)


def test_a_save_that_fails_on_one_rank_fails_on_all_and_keeps_the_previous(world: World, tmp_path: Path) -> None:
    for message, kept in world.run(_fail_on_rank_one, str(tmp_path), layout=ParallelConfig(tp=2)):
        assert "rank 1: [Errno 28] No space left on device" in message and "step_00000002" in message and kept
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["latest", "step_00000001"]


def test_too_little_room_is_found_before_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=10 << 20))
    with pytest.raises(CheckpointError, match="10 MiB are free; make room"):
        Run(SINGLE).save(tmp_path, 1)
    assert not list((tmp_path / "checkpoints").iterdir())
