"""Checkpoints: exact round trips in any layout, what is in the files, what is kept."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from megalite.checkpoint import store
from megalite.checkpoint.errors import CheckpointError
from megalite.checkpoint.folder import MANIFEST, LocalFolder
from megalite.checkpoint.manifest import Manifest, held
from megalite.checkpoint.tensors import TensorFile, write_tensors
from megalite.mpu import ParallelConfig, ParallelState
from megalite.testing.world import World
from tests.checkpoint.run import Run, equal_states
from tests.checkpoint.state import cut_state

SINGLE = ParallelState.single()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_resuming_continues_bit_for_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    straight = Run(SINGLE, dtype)
    rates = straight.train(1, 10)
    begun, resumed = Run(SINGLE, dtype), Run(SINGLE, dtype, seed=9)
    begun.train(1, 6)
    folder = begun.save(tmp_path, 6)
    manifest = resumed.load(tmp_path)
    assert manifest is not None and manifest.step == 6 and manifest.state == {"updates": 6, "samples": 192}
    assert folder == tmp_path / "checkpoints" / "step_00000006"
    assert equal_states(resumed.values(), begun.values())
    assert resumed.train(7, 10) == rates[6:]  # the rate is a function of the step: nothing to restore twice
    assert resumed.optimizer.steps == 10
    assert equal_states(resumed.values(), straight.values())


def _resume_in_ranks(mpu: ParallelState, folder: str) -> bool:
    straight, begun, resumed = Run(mpu), Run(mpu), Run(mpu, seed=9)
    straight.train(1, 6)
    begun.train(1, 3)
    begun.save(Path(folder), 3)
    resumed.load(Path(folder))
    resumed.train(4, 6)
    return equal_states(resumed.values(), straight.values())


LAYOUTS = [
    (ParallelConfig(), 2), (ParallelConfig(tp=2), 2), (ParallelConfig(pp=2), 2), (ParallelConfig(tp=2, pp=2), 8),
    (ParallelConfig(ep=2), 2), (ParallelConfig(ep=2), 4), (ParallelConfig(tp=2, ep=2, etp=2), 8),
    (ParallelConfig(tp=2, pp=2, ep=2), 8),
]  # fmt: skip


@pytest.mark.parametrize(("layout", "ranks"), LAYOUTS)
def test_every_layout_resumes_bit_for_bit_and_stores_each_element_once(
    world: World, tmp_path: Path, layout: ParallelConfig, ranks: int
) -> None:
    assert all(world.run(_resume_in_ranks, str(tmp_path), layout=layout, ranks=ranks))
    folder = tmp_path / "checkpoints" / "step_00000003"
    manifest = Manifest.read(folder)
    files = {path.name: load_file(path) for path in folder.glob("*.safetensors")}
    names = {f"layers.{stage}.{name}" for stage in range(layout.pp) for name in ("fused", "norm", "experts")} | {
        "words"
    }
    kinds = ("parameter", "master", "exp_avg", "exp_avg_sq")
    buffers = {f"buffer/layers.{stage}.fractions" for stage in range(layout.pp)}
    assert set(manifest.tensors) == {f"{kind}/{name}" for kind in kinds for name in names} | buffers
    assert {name: manifest.layout[name] for name in ("ep", "etp")} == {"ep": layout.ep, "etp": layout.etp}
    stored = 0
    for entry in manifest.tensors.values():
        count = torch.zeros(entry.shape)
        for piece in entry.pieces:
            count[tuple(slice(o, o + n) for o, n in zip(piece.offset, piece.sizes, strict=True))] += 1
            assert files[piece.file][piece.name].shape == piece.sizes
            stored += 1
        assert count.eq(1).all()
    assert stored == sum(map(len, files.values()))


def test_files_are_safetensors_and_json_and_nothing_else(tmp_path: Path) -> None:
    run = Run(SINGLE)
    folder = run.save(tmp_path, 1)
    assert sorted(p.name for p in folder.iterdir()) == [MANIFEST, "rank_00000.safetensors"]
    assert sorted(p.name for p in folder.parent.iterdir()) == ["latest", "step_00000001"]
    assert (folder.parent / "latest").read_text() == "step_00000001\n"
    stored = load_file(folder / "rank_00000.safetensors")
    words = run.data_parallel.parameters[0]
    assert (
        torch.equal(stored["parameter/words@0,0"], words.detach()) and stored["master/words@0,0"].dtype == torch.float32
    )


@pytest.mark.parametrize("shape", [(), (0, 3), (5,), (2, 3, 4)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64, torch.bool])
def test_tensor_files_hold_what_was_written(tmp_path: Path, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensors = {"a": (torch.randn(shape) * 9).to(dtype), "é": torch.arange(12).view(3, 4).t()}
    with (tmp_path / "file").open("wb") as file:
        written = write_tensors(file, tensors)
    assert written.mark.size == (tmp_path / "file").stat().st_size
    found = load_file(tmp_path / "file")
    assert found.keys() == tensors.keys() and all(torch.equal(found[name], t) for name, t in tensors.items())
    with TensorFile(LocalFolder(tmp_path), "file", written.mark) as ours:
        assert all(torch.equal(ours.read(name, written.crc32[name]), t) for name, t in tensors.items())


def test_no_checkpoint_yet(tmp_path: Path) -> None:
    assert Run(SINGLE).load(tmp_path) is None
    with pytest.raises(CheckpointError, match="neither a checkpoint"):
        store.load(tmp_path, {}, SINGLE)


def test_a_copied_run_folder_resumes_and_a_checkpoint_folder_can_be_named(tmp_path: Path) -> None:
    run = Run(SINGLE)
    run.save(tmp_path / "a", 1)
    run.train(1, 1)
    run.save(tmp_path / "a", 2)
    shutil.move(tmp_path / "a", tmp_path / "b")
    other = Run(SINGLE, seed=1)
    assert store.load(tmp_path / "b", other.tensors(), SINGLE).step == 2
    assert equal_states(other.values(), run.values())
    assert store.load(tmp_path / "b" / "checkpoints" / "step_00000001", other.tensors(), SINGLE).step == 1
    assert not equal_states(other.values(), run.values())


def test_weights_alone_can_be_loaded(tmp_path: Path) -> None:
    run, other = Run(SINGLE), Run(SINGLE, seed=1)
    run.train(1, 2)
    run.save(tmp_path, 2)
    store.load(tmp_path, other.data_parallel.state_tensors(), SINGLE)
    pairs = zip(other.data_parallel.parameters, run.data_parallel.parameters, strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_retention_keeps_the_newest(tmp_path: Path) -> None:
    run = Run(SINGLE)
    for step in (1, 2, 3, 10):
        run.save(tmp_path, step, keep_last=2)
    assert store.complete(tmp_path) == ["step_00000003", "step_00000010"]
    run.save(tmp_path, 5, keep_last=1)  # after going back: the latest is not the one with the highest number
    assert store.complete(tmp_path) == ["step_00000005"]
    run.save(tmp_path, 6, keep_last=2)
    assert store.complete(tmp_path) == ["step_00000005", "step_00000006"]
    run.save(tmp_path, 5, keep_last=2)
    manifest = run.load(tmp_path)
    assert manifest is not None and manifest.step == 5
    run.save(tmp_path, 11)
    assert len(store.complete(tmp_path)) == 3  # 0 keeps all


def test_steps_that_are_kept_for_good(tmp_path: Path) -> None:
    run = Run(SINGLE)
    for step in (2, 4, 6, 7, 8, 9):
        run.save(tmp_path, step, keep_last=2, keep_every=4)
    assert store.complete(tmp_path) == ["step_00000004", "step_00000008", "step_00000009"]
    run.save(tmp_path, 10, keep_last=1, keep_every=4)
    assert store.complete(tmp_path) == ["step_00000004", "step_00000008", "step_00000010"]


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    run = Run(SINGLE)
    run.save(tmp_path, 4)
    run.train(1, 1)
    run.save(tmp_path, 4)
    other = Run(SINGLE, seed=3)
    other.load(tmp_path)
    assert equal_states(other.values(), run.values())
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["latest", "step_00000004"]


def _assembled(run: Run) -> dict[str, list[tuple[tuple[int, ...], Tensor]]]:
    """Every rectangle that a rank holds, by key."""
    found: dict[str, list[tuple[tuple[int, ...], Tensor]]] = {}
    for piece in held(run.tensors()):
        found.setdefault(piece.key, []).append((piece.offset, piece.view.clone()))
    return found


def _whole(ranks: list[dict[str, list[tuple[tuple[int, ...], Tensor]]]]) -> dict[str, Tensor]:
    """The global tensors, from the rectangles of all ranks."""
    shapes = {
        "words": (7, 3), "layers.0.fused": (8, 3), "layers.0.norm": (3,), "layers.0.experts": (4, 6, 3),
        "layers.0.fractions": (4,),
    }  # fmt: skip
    whole: dict[str, Tensor] = {}
    for of_rank in ranks:
        for key, pieces in of_rank.items():
            for offset, view in pieces:
                target = whole.setdefault(key, torch.full(shapes[key.partition("/")[2]], torch.nan, dtype=view.dtype))
                target[tuple(slice(o, o + n) for o, n in zip(offset, view.shape, strict=True))] = view
    return whole


def _train_and_save(mpu: ParallelState, folder: str) -> Any:
    run = Run(mpu)
    run.train(1, 2)
    run.save(Path(folder), 2)
    return _assembled(run)


def _load_elsewhere(mpu: ParallelState, folder: str) -> Any:
    run = Run(mpu, seed=1)
    run.load(Path(folder))
    return _assembled(run)


@pytest.mark.parametrize("there", [1, 2, 4])
@pytest.mark.parametrize(("here", "ranks"), [(1, 1), (1, 2), (2, 2), (4, 4), (2, 4)])
def test_any_layout_loads_what_another_has_saved(
    world: World, tmp_path: Path, there: int, here: int, ranks: int
) -> None:
    saved = _whole(world.run(_train_and_save, str(tmp_path), layout=ParallelConfig(tp=there), ranks=there))
    loaded = _whole(world.run(_load_elsewhere, str(tmp_path), layout=ParallelConfig(tp=here), ranks=ranks))
    _assert_same(saved, loaded)


def _assert_same(saved: dict[str, Tensor], loaded: dict[str, Tensor]) -> None:
    assert saved.keys() == loaded.keys()
    assert len(saved) == 17  # parameter, master and two moments of four tensors, and a buffer
    for key, value in saved.items():
        assert not value.isnan().any() and torch.equal(loaded[key], value), key


@pytest.mark.parametrize(
    ("there", "here"),
    [
        ((1, 1, 0), (1, 2, 1)), ((1, 2, 1), (1, 1, 0)), ((1, 4, 2), (2, 4, 3)), ((2, 4, 3), (1, 3, 1)),
        ((2, 4, 1), (2, 2, 0)),
    ],
)  # fmt: skip
def test_any_stage_of_zero_loads_what_another_has_saved(
    world: World, tmp_path: Path, there: tuple[int, int, int], here: tuple[int, int, int]
) -> None:
    (tp, ranks, zero), (tp_here, ranks_here, zero_here) = there, here
    layout, other = ParallelConfig(tp=tp, zero=zero), ParallelConfig(tp=tp_here, zero=zero_here)
    saved = _whole(world.run(_train_and_save, str(tmp_path), layout=layout, ranks=ranks))
    loaded = _whole(world.run(_load_elsewhere, str(tmp_path), layout=other, ranks=ranks_here))
    _assert_same(saved, loaded)


def _save_rows(mpu: ParallelState, folder: str, size: int) -> int:
    """Saves `size` rows, numbered; returns how many this rank has."""
    state = cut_state(mpu, 0.0, size=size)
    ((shard, part),) = state["parameter"]
    for offset, _, view in shard.pieces(part):
        view.copy_(torch.arange(offset[0], offset[0] + len(view))[:, None].expand_as(view))
    store.save(folder, 1, state, {}, mpu)
    return len(part)


def _load_rows(mpu: ParallelState, folder: str, size: int) -> list[float]:
    state = cut_state(mpu, -1.0, size=size)
    store.load(folder, state, mpu)
    return state["parameter"][0][1][:, 0].tolist()


@pytest.mark.parametrize("size", [6, 2, 1])
def test_ranks_that_hold_nothing(tmp_path: Path, size: int, world: World) -> None:
    """Fewer rows than ranks: a part without elements is saved, and loaded by another number of ranks."""
    held_rows = world.run(_save_rows, str(tmp_path), size, layout=ParallelConfig(tp=4), ranks=4)
    assert sum(held_rows) == size and (size == 6 or 0 in held_rows)
    for ranks in (4, 3, 1):
        parts = world.run(_load_rows, str(tmp_path), size, layout=ParallelConfig(tp=ranks), ranks=ranks)
        assert [row for part in parts for row in part] == list(range(size))
