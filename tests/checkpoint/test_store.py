"""Checkpoints: exact round trips, refusals, and the previous checkpoint whatever goes wrong."""

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
from safetensors.torch import load_file
from torch import Tensor

from megalite.checkpoint import store
from megalite.checkpoint.errors import CheckpointError
from megalite.checkpoint.folder import MANIFEST, LocalFolder
from megalite.checkpoint.manifest import Manifest, held
from megalite.checkpoint.tensors import TensorFile, write_tensors
from megalite.mpu import ParallelConfig, ParallelState
from megalite.optim.config import OptimConfig
from megalite.optim.lr import lr_at
from megalite.optim.optimizer import Optimizer
from megalite.parallel.data import DataParallel, Unit, main_grad
from megalite.parallel.shard import Cut, Shard, set_shard, shard_of
from megalite.parallel.wgrad import WeightGradQueue
from megalite.testing.world import World
from tests.checkpoint.state import cut_state
from tests.parallel.parameters import cut_experts, cut_rows, whole

SINGLE = ParallelState.single()


class Run:
    """A small training state: a tied table, a matrix cut in two runs of rows, a norm, experts, a buffer.

    Gradients are made by step number.
    """

    def __init__(self, mpu: ParallelState, dtype: torch.dtype = torch.bfloat16, width: int = 3, seed: int = 0):
        g = torch.Generator().manual_seed(seed)
        table, matrix = (torch.randn(n, width, generator=g).to(dtype) for n in (7, 8))
        self.mpu = mpu
        words = cut_rows("words", table, mpu) if mpu.pp.is_first else cut_rows("head", table, mpu, tied_to="words")
        # gate and up, each cut over tp: a rank holds two runs of rows
        rows = 4 // mpu.tp.size
        runs = tuple((half + mpu.tp.rank * rows, rows) for half in (0, 4))
        local = torch.cat([matrix[start : start + n] for start, n in runs])
        shard = Shard(f"layers.{mpu.pp.rank}.fused", (8, width), (Cut(mpu.tp, 0, runs),))
        fused = set_shard(torch.nn.Parameter(local), shard)
        norm = whole(f"layers.{mpu.pp.rank}.norm", torch.ones(width, dtype=dtype), partial=(mpu.tp,))
        experts = torch.randn(4, 6, width, generator=g).to(dtype)
        fc1 = cut_experts(f"layers.{mpu.pp.rank}.experts", experts, mpu, dim=1)
        self.fractions = set_shard(torch.zeros(4), Shard(f"layers.{mpu.pp.rank}.fractions", (4,)))
        modules = [torch.nn.Identity()]  # so that ZeRO-3 may divide the parameters
        units = [Unit("tied", [words], tied=True, modules=modules), Unit("layer", [fused, norm, fc1], modules=modules)]
        self.data_parallel = DataParallel(units, mpu, queue=WeightGradQueue())
        self.config = OptimConfig(lr=0.1, warmup_steps=4, clip_grad=1.0)
        self.optimizer = Optimizer(self.config, [self.data_parallel], mpu)

    def train(self, first: int, last: int) -> list[float]:
        """Steps first .. last; the learning rates used."""
        rates = []
        for step in range(first, last + 1):
            self.data_parallel.zero_grad()
            for bucket in self.data_parallel.buckets:
                bucket.open_grad()
            for i, parameter in enumerate(self.data_parallel.parameters):
                g = torch.Generator().manual_seed(100 * step + 10 * self.mpu.rank + i)
                main_grad(parameter).add_(torch.randn(parameter.shape, generator=g))
            self.data_parallel.finish()
            rates.append(lr_at(self.config, step, 12))
            self.optimizer.step(rates[-1])
            self.fractions += step / 3
        return rates

    def tensors(self) -> dict[str, list[tuple[Shard, Tensor]]]:
        """Everything that a checkpoint keeps."""
        buffers = {"buffer": [(shard_of(self.fractions), self.fractions)]}
        return self.data_parallel.state_tensors() | self.optimizer.state_tensors() | buffers

    def save(self, folder: Path, step: int, **options: Any) -> Path:
        """Saves, with the number of updates in the state."""
        state = {"updates": self.optimizer.steps, "samples": 32 * step}
        return Path(store.save(folder, step, self.tensors(), state, self.mpu, **options))

    def load(self, folder: Path) -> Manifest | None:
        """Loads the latest checkpoint."""
        manifest = store.load_latest(folder, self.tensors(), self.mpu)
        if manifest is not None:
            self.optimizer.steps = manifest.state["updates"]
        return manifest

    def values(self) -> list[Tensor]:
        """Copies of all state."""
        return [t.clone() for of_kind in self.tensors().values() for _, t in of_kind]


def _equal(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(map(torch.equal, a, b))


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
    assert _equal(resumed.values(), begun.values())
    assert resumed.train(7, 10) == rates[6:]  # the rate is a function of the step: nothing to restore twice
    assert resumed.optimizer.steps == 10
    assert _equal(resumed.values(), straight.values())


def _resume_in_ranks(mpu: ParallelState, folder: str) -> bool:
    straight, begun, resumed = Run(mpu), Run(mpu), Run(mpu, seed=9)
    straight.train(1, 6)
    begun.train(1, 3)
    begun.save(Path(folder), 3)
    resumed.load(Path(folder))
    resumed.train(4, 6)
    return _equal(resumed.values(), straight.values())


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
    assert _equal(other.values(), run.values())
    assert store.load(tmp_path / "b" / "checkpoints" / "step_00000001", other.tensors(), SINGLE).step == 1
    assert not _equal(other.values(), run.values())


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
    assert _equal(other.values(), run.values())
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
    return message, _equal(run.values(), before)


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
