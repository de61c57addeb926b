"""Checkpoints written anew: other files, another precision, means; what differs, and what is damaged."""

from __future__ import annotations

import json
import math
import weakref
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megalite.checkpoint import store
from megalite.checkpoint.average import averaged
from megalite.checkpoint.compare import compare
from megalite.checkpoint.errors import CheckpointError
from megalite.checkpoint.folder import folder_at
from megalite.checkpoint.manifest import Manifest
from megalite.checkpoint.reading import damages
from megalite.checkpoint.reshard import resharded, weights_state
from megalite.checkpoint.rewrite import NewTensor, Rectangle, cut_by_rank, cut_evenly, split, write_checkpoint
from megalite.checkpoint.stored import StoredCheckpoint
from megalite.mpu import ParallelConfig, ParallelState
from megalite.parallel.shard import Shard
from megalite.testing.world import World
from tests.checkpoint.state import Tensors, cut_state, fill

SINGLE = ParallelState.single()


def _state(seed: int, dtype: torch.dtype = torch.bfloat16, *, master: bool = True, rows: int = 7) -> Tensors:
    """Parameters, masters, a moment, and a buffer of integers; odd sizes, a scalar, an empty tensor."""
    generator = torch.Generator().manual_seed(seed)
    shards = [
        Shard("embedding.weight", (rows, 5)), Shard("layers.0.w", (3, 4, 5)), Shard("layers.1.w", (3, 4, 5)),
        Shard("layers.10.b", (11,)), Shard("scale", ()), Shard("none", (0, 4)),
    ]  # fmt: skip
    exact = [(shard, torch.randn(shard.shape, generator=generator, dtype=torch.float64)) for shard in shards]
    wide = torch.promote_types(dtype, torch.float32)
    found: Tensors = {"parameter": [(shard, tensor.to(wide).to(dtype)) for shard, tensor in exact]}
    if master:
        found["master"] = [(shard, tensor.to(wide)) for shard, tensor in exact]
    found["exp_avg"] = [(shard, (tensor * 3).to(wide)) for shard, tensor in exact]
    found["buffer"] = [(Shard("layers.0.count", (2,)), torch.tensor([seed, 7]))]
    return found


def _save(folder: Path, state: Tensors, step: int = 4) -> Path:
    store.save(folder, step, state, {"updates": 3, "config": {"model.num_layers": 2}}, SINGLE)
    return folder


def _write(run_dir: Path, tensors: list[NewTensor], *, files: int = 1, largest: int = 1 << 30, step: int = 4) -> Path:
    write_checkpoint(run_dir, step, tensors, cut_evenly(tensors, files, largest), state={"updates": 3}, layout={})
    return run_dir


def _contents(folder: Path) -> dict[str, Tensor]:
    with StoredCheckpoint(folder) as found:
        return {key: found.read(key) for key in found.select()}


def _bits(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def _same(a: Tensor, b: Tensor) -> bool:
    """Bit by bit, nans included."""
    return a.dtype == b.dtype and a.shape == b.shape and _bits(a) == _bits(b)


@pytest.mark.parametrize(("files", "largest"), [(1, 1 << 30), (3, 1 << 30), (5, 48), (40, 1)])
def test_other_files_hold_the_same_bits(tmp_path: Path, files: int, largest: int) -> None:
    state = _state(1, torch.float32, master=False)
    state["parameter"][0][1][0] = torch.tensor([math.nan, -0.0, math.inf, -math.inf, 1e-45])
    with StoredCheckpoint(_save(tmp_path / "a", state)) as source:
        _write(tmp_path / "b", resharded(source), files=files, largest=largest)
    before, after = _contents(tmp_path / "a"), _contents(tmp_path / "b")
    assert before.keys() == after.keys() and all(_same(before[key], after[key]) for key in before)
    store.verify(tmp_path / "b/checkpoints/step_00000004", SINGLE)
    manifest = Manifest.read(tmp_path / "b/checkpoints/step_00000004")
    pieces = [piece for key, entry in manifest.tensors.items() for piece in entry.pieces if "count" not in key]
    assert all(math.prod(piece.sizes) * 4 <= max(largest, 4) for piece in pieces)
    if largest == 1 << 30:
        sizes = [mark.size for mark in manifest.files.values()]
        assert len(sizes) == files
    again = _state(2, torch.float32, master=False)
    found = store.load(tmp_path / "b", again, SINGLE)
    assert found.state["updates"] == 3 and found.step == 4
    mine = [tensor for of_kind in state.values() for _, tensor in of_kind]
    assert all(_same(a, b[1]) for a, b in zip(mine, [t for k in again.values() for t in k], strict=True))


def test_files_are_of_one_size(tmp_path: Path) -> None:
    tensors = [
        NewTensor(key=f"parameter/{i}", shape=(100, n), dtype=torch.float32, make=partial(torch.zeros, 100, n))
        for i, n in enumerate((1, 50, 3, 17, 9))
    ]
    cuts = cut_evenly(tensors, 4)
    sizes = [0] * 4
    for tensor in tensors:
        for box in cuts[tensor.key]:
            sizes[box.file] += math.prod(box.sizes) * 4
    assert sum(sizes) == 100 * 80 * 4 and max(sizes) - min(sizes) <= 200


def test_a_rectangle_is_split_where_it_must_be() -> None:
    boxes = list(split(((10, 0), (5, 6)), 4, 24))
    assert boxes == [((10 + i, 0), (1, 6)) for i in range(5)]
    assert list(split(((10, 0), (2, 6)), 4, 16)) == [
        ((10, 0), (1, 4)), ((10, 4), (1, 2)), ((11, 0), (1, 4)), ((11, 4), (1, 2)),
    ]  # fmt: skip
    assert list(split(((), ()), 4, 1)) == [((), ())] and list(split(((0,), (3,)), 8, 1)) == [
        ((i,), (1,)) for i in range(3)
    ]


def _save_cut(mpu: ParallelState, folder: str) -> None:
    state = cut_state(mpu, 0.0)
    tensor = state["parameter"][0][1]
    begin = mpu.tp.rank * 7 // mpu.tp.size * 3
    tensor.copy_(torch.arange(tensor.numel()).view(tensor.shape) + begin)
    store.save(folder, 4, state, {}, mpu)


def _load_cut(mpu: ParallelState, folder: str) -> list[float]:
    state = cut_state(mpu, -1.0)
    store.load(folder, state, mpu)
    return state["parameter"][0][1].flatten().tolist()


def test_what_some_ranks_have_written_others_read(world: World, tmp_path: Path) -> None:
    world.run(_save_cut, str(tmp_path / "a"), layout=ParallelConfig(tp=4))
    with StoredCheckpoint(tmp_path / "a") as source:
        assert len(source.tensors["parameter/words"].pieces) == 4
        _write(tmp_path / "b", resharded(source), files=2, largest=30)
    parts = world.run(_load_cut, str(tmp_path / "b"), layout=ParallelConfig(tp=2))
    assert [value for part in parts for value in part] == list(range(21))


def test_cuts_of_ranks_cover_each_tensor_once() -> None:
    tensor = NewTensor(key="exp_avg/w", shape=(4, 3), dtype=torch.float32, make=partial(torch.zeros, 4, 3))
    ranks = [{"w": [((0, 0), (4, 1))]}, {}, {"w": [((0, 1), (4, 2))]}]
    assert cut_by_rank([tensor], ranks) == {
        "exp_avg/w": [Rectangle(0, (0, 0), (4, 1)), Rectangle(2, (0, 1), (4, 2))]
    }  # fmt: skip
    with pytest.raises(CheckpointError, match=r"exp_avg/w \[4, 3\] is not a tensor of the model .* number of files"):
        cut_by_rank([tensor], ranks[:2])


def test_one_tensor_is_in_memory_at_a_time(tmp_path: Path) -> None:
    alive: list[weakref.ref[Tensor]] = []

    def make(number: int) -> Tensor:
        assert not [ref for ref in alive if ref() is not None], "the one before is still there"
        tensor = torch.full((50, 3), float(number))
        alive.append(weakref.ref(tensor))
        return tensor

    tensors = [
        NewTensor(key=f"parameter/{i}", shape=(50, 3), dtype=torch.float32, make=partial(make, i)) for i in range(6)
    ]
    _write(tmp_path, tensors, files=4, largest=100)
    assert len(alive) == 6 and all(bool((v == float(k[10:])).all()) for k, v in _contents(tmp_path).items())


def test_what_fails_leaves_nothing_and_a_step_is_not_replaced(tmp_path: Path) -> None:
    def broken() -> Tensor:
        raise CheckpointError("no")

    tensors = [
        NewTensor(key="parameter/a", shape=(3,), dtype=torch.float32, make=partial(torch.zeros, 3)),
        NewTensor(key="parameter/b", shape=(3,), dtype=torch.float32, make=broken),
    ]
    _write(tmp_path, tensors[:1], step=1)
    with pytest.raises(CheckpointError, match="no"):
        _write(tmp_path, tensors, step=2)
    root = tmp_path / "checkpoints"
    assert sorted(path.name for path in root.iterdir()) == ["latest", "step_00000001"]
    assert (root / "latest").read_text() == "step_00000001\n"
    with pytest.raises(CheckpointError, match="step_00000001 is there already; choose another folder"):
        _write(tmp_path, tensors[:1], step=1)


@pytest.mark.parametrize(
    ("there", "master", "dtype", "has_master", "moment"),
    [
        (torch.bfloat16, True, torch.float32, False, torch.float32),
        (torch.float32, False, torch.bfloat16, True, torch.float32),
        (torch.bfloat16, True, torch.float16, True, torch.float32),
        (torch.bfloat16, False, torch.float16, False, torch.float32),
        (torch.float32, False, torch.float64, False, torch.float64),
        (torch.float64, False, torch.bfloat16, True, torch.float32),
    ],
)
def test_another_precision(
    tmp_path: Path, there: torch.dtype, master: bool, dtype: torch.dtype, has_master: bool,
    moment: torch.dtype,
) -> None:  # fmt: skip
    state = _state(1, there, master=master)
    exact = {shard.name: tensor for shard, tensor in state["master" if master else "parameter"]}
    with StoredCheckpoint(_save(tmp_path / "a", state)) as source:
        _write(tmp_path / "b", resharded(source, dtype=dtype))
    found = _contents(tmp_path / "b")
    for name, tensor in exact.items():
        assert _same(found[f"parameter/{name}"], tensor.to(torch.promote_types(dtype, torch.float32)).to(dtype))
        assert (f"master/{name}" in found) == has_master
        if has_master:
            assert _same(found[f"master/{name}"], tensor.to(torch.float32))
        assert found[f"exp_avg/{name}"].dtype == moment
    assert found["buffer/layers.0.count"].tolist() == [1, 7]


def test_weights_alone(tmp_path: Path) -> None:
    with StoredCheckpoint(_save(tmp_path / "a", _state(1))) as source:
        tensors = resharded(source, weights_only=True)
        assert {tensor.key.partition("/")[0] for tensor in tensors} == {"parameter", "master", "buffer"}
        assert weights_state(source.manifest.state) == {"updates": 0, "config": {"model.num_layers": 2}}


def test_the_mean_of_weights(tmp_path: Path) -> None:
    states = [_state(seed) for seed in (1, 2, 3)]
    folders = [_save(tmp_path / str(i), state, step=i + 1) for i, state in enumerate(states)]
    sources = [StoredCheckpoint(folder) for folder in folders]
    _write(tmp_path / "mean", averaged(sources, [1, 0, 3]))
    found = _contents(tmp_path / "mean")
    assert {key.partition("/")[0] for key in found} == {"parameter", "master", "buffer"}
    for (shard, first), (_, third) in zip(states[0]["master"], states[2]["master"], strict=True):
        mean = first.double() * 0.25 + third.double() * 0.75
        assert _same(found[f"master/{shard.name}"], mean.float())
        assert _same(found[f"parameter/{shard.name}"], mean.float().to(torch.bfloat16))
    assert found["buffer/layers.0.count"].tolist() == [3, 7]  # of the last


def test_a_mean_without_masters_and_of_many_equal_ones(tmp_path: Path) -> None:
    """0.1 added up in bfloat16 would not be 0.1; in float64 it is."""
    folders = []
    for i in range(10):
        state = _state(1, master=i % 2 == 0)
        fill(state, 0.1)
        folders.append(_save(tmp_path / str(i), state))
    _write(tmp_path / "mean", averaged([StoredCheckpoint(folder) for folder in folders]))
    found = _contents(tmp_path / "mean")
    assert not [key for key in found if key.startswith("master")]
    assert torch.equal(found["parameter/layers.0.w"], torch.full((3, 4, 5), 0.1, dtype=torch.bfloat16))


def test_means_that_are_refused(tmp_path: Path) -> None:
    a, b = (
        StoredCheckpoint(_save(tmp_path / "a", _state(1))),
        StoredCheckpoint(_save(tmp_path / "b", _state(1, rows=8))),
    )
    with pytest.raises(
        CheckpointError, match=r"embedding.weight is \[7, 5\] in .*, and \[8, 5\] in .*different models"
    ):
        averaged([a, b])
    state = _state(1)
    del state["parameter"][1], state["master"][1]
    short = StoredCheckpoint(_save(tmp_path / "short", state))
    with pytest.raises(CheckpointError, match=r"has (parameter|master)/layers.0.w, which .* has not"):
        averaged([a, short])
    with pytest.raises(CheckpointError, match=r"layers.0.w is missing in"):
        averaged([short, a])
    for weights, said in (([1.0], "1 weights for 2"), ([0.0, 0.0], "not all 0"), ([1.0, -1.0], "0 or more")):
        with pytest.raises(ValueError, match=said):
            averaged([a, a], weights)


def test_what_differs(tmp_path: Path) -> None:
    state = _state(1, torch.float32, master=False)
    state["parameter"][3][1][2] = math.nan
    _save(tmp_path / "a", state)
    assert compare(StoredCheckpoint(tmp_path / "a"), StoredCheckpoint(tmp_path / "a")).is_equal
    other = _state(1, torch.float32, master=False)
    other["parameter"][3][1][2] = math.nan
    other["parameter"][1][1][0, 0, 0] += 1e-3
    other["parameter"][2][1][1] *= 2
    other["exp_avg"][3] = (Shard("layers.10.b", (5,)), torch.zeros(5))
    other["exp_avg"][2] = (other["exp_avg"][2][0], other["exp_avg"][2][1].double())
    del other["exp_avg"][0]
    other["exp_avg"].append((Shard("new", (1,)), torch.zeros(1)))
    store.save(tmp_path / "b", 5, other, {"updates": 4, "config": {"model.num_layers": 2}}, SINGLE)
    a, b = StoredCheckpoint(tmp_path / "a"), StoredCheckpoint(tmp_path / "b")
    found = compare(a, b)
    assert found.only_a == ["exp_avg/embedding.weight"] and found.only_b == ["exp_avg/new"]
    assert found.state == {"step": (4, 5), "updates": (3, 4)} and not found.is_equal
    assert [row.key for row in found.tensors] == [
        "exp_avg/layers.10.b", "parameter/layers.1.w", "parameter/layers.0.w", "exp_avg/layers.1.w",
    ]  # fmt: skip
    shape, doubled, moved, dtype = found.tensors
    assert shape.what == "[11] and [5]" and dtype.what == "float32 and float64" and dtype.count == 0
    assert (doubled.count, doubled.size, moved.count) == (20, 60, 1)
    before = state["parameter"][2][1]
    assert doubled.largest == float(before[1].abs().max()) and doubled.relative == doubled.largest / float(
        before.abs().max()
    )
    assert moved.largest == pytest.approx(1e-3, rel=1e-3) and 0 < moved.relative < 1e-2
    assert [row.key for row in compare(a, b, tolerance=0.01, pattern="parameter/*").tensors] == ["parameter/layers.1.w"]
    assert not compare(a, b, pattern="layers.0.*").only_a  # a name without its kind


def test_a_nan_on_one_side_is_infinitely_far(tmp_path: Path) -> None:
    for name, value in (("a", 1.0), ("b", math.nan)):
        state = {"parameter": [(Shard("w", (3,)), torch.tensor([0.5, value, 2.0]))]}
        store.save(tmp_path / name, 1, state, {}, SINGLE)
    (row,) = compare(StoredCheckpoint(tmp_path / "a"), StoredCheckpoint(tmp_path / "b"), tolerance=1e9).tensors
    assert row.largest == math.inf and row.relative == math.inf and row.count == 1


def test_every_damage_is_named(tmp_path: Path) -> None:
    with StoredCheckpoint(_save(tmp_path / "a", _state(1))) as source:
        _write(tmp_path / "b", resharded(source), files=3)
    place = tmp_path / "b/checkpoints/step_00000004"
    manifest = Manifest.read(place)

    def found() -> list[str]:
        return list(damages(folder_at(place), manifest, sorted(manifest.files)))

    assert found() == []
    for number in (0, 1):
        file = place / f"rank_{number:05d}.safetensors"
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
        header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
        size = len(content) - 8 - int.from_bytes(content[:8], "little")
        spans = {name: tensor["data_offsets"] for name, tensor in header.items()}
        (last,) = (name for name, (begin, end) in spans.items() if begin < end == size)
        assert f"rank_{number:05d}.safetensors is damaged: {last} is not what was written" in found()[number]
    assert len(found()) == 2
    file = place / "rank_00002.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:-1])
    assert "it was cut short" in found()[2] and "lie beyond its end" in found()[2]
    with pytest.raises(CheckpointError, match=r"rank_0000\d.* cut short|checksum"):
        _contents(tmp_path / "b")
    file.write_bytes(content[:100])
    assert "it held" in found()[2]
    file.unlink()
    assert "rank_00002.safetensors is missing; it held" in found()[2]


def test_tensors_come_by_layer(tmp_path: Path) -> None:
    with StoredCheckpoint(_save(tmp_path, _state(1))) as found:
        keys = [key for key in found.select() if key.startswith("master/")]
        assert [key.partition("/")[2] for key in keys] == [
            "embedding.weight", "layers.0.w", "layers.1.w", "layers.10.b", "none", "scale",
        ]  # fmt: skip
