"""Our files through torch.distributed.checkpoint: plain and DTensor state dicts, from and to runs of megalite."""

from __future__ import annotations

import os
import pickle
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from megalite.checkpoint import store
from megalite.checkpoint.dcp import MegaliteReader, MegaliteWriter
from megalite.checkpoint.errors import CheckpointError
from megalite.checkpoint.manifest import Manifest
from megalite.mpu import ParallelConfig, ParallelState
from megalite.testing.world import World
from tests.checkpoint.state import cut_state, make_state, values_of

SINGLE = ParallelState.single()


@pytest.fixture(autouse=True)
def _one_process() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def test_torch_reads_what_we_have_written(tmp_path: Path) -> None:
    store.save(tmp_path, 3, make_state(1.0), {}, SINGLE)
    state = {f"layers.{i}.weight": torch.zeros(5, 3) for i in range(2)}
    load(state, storage_reader=MegaliteReader(tmp_path, kind="parameter"))
    assert all(tensor.eq(1.0).all() for tensor in state.values())
    moments = {"exp_avg/layers.1.weight": torch.zeros(5, 3)}
    load(moments, storage_reader=MegaliteReader(tmp_path / "checkpoints" / "step_00000003"))
    assert moments["exp_avg/layers.1.weight"].eq(1.5).all()
    with pytest.raises(CheckpointException, match=r"Missing key in checkpoint state_dict: layers\.7\.weight"):
        load({"layers.7.weight": torch.zeros(5, 3)}, storage_reader=MegaliteReader(tmp_path, kind="parameter"))


def test_we_read_what_torch_has_written(tmp_path: Path) -> None:
    sides = {f"layers.{i}.weight": torch.full((5, 3), 1.0) for i in range(2)}
    for step in (1, 2):
        save(sides, storage_writer=MegaliteWriter(tmp_path, step=step, kind="parameter", state={"updates": step}))
    state = make_state(0.0)
    manifest = store.load(tmp_path, {"parameter": state["parameter"]}, SINGLE)
    assert values_of(state) == {1.0, 0.5} and (manifest.step, manifest.state) == (2, {"updates": 2})
    assert store.verify(tmp_path / "checkpoints" / "step_00000002", SINGLE).step == 2
    store.save(tmp_path, 3, state, {}, SINGLE, keep_last=1)  # and it is one of the run's own
    assert store.complete(tmp_path) == ["step_00000003"]


def test_a_changed_byte_is_found(tmp_path: Path) -> None:
    file = Path(store.save(tmp_path, 1, make_state(1.0), {}, SINGLE)) / "rank_00000.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(CheckpointException, match=r"rank_00000.safetensors is damaged"):
        load({"exp_avg/layers.1.weight": torch.zeros(5, 3)}, storage_reader=MegaliteReader(tmp_path))


class _Payload:
    def __init__(self, mark: Path):
        self.mark = str(mark)

    def __reduce__(self) -> Any:
        return os.mkdir, (self.mark,)


def test_nothing_is_pickled_or_unpickled(tmp_path: Path) -> None:
    with pytest.raises(CheckpointException, match=r"step: only tensors are stored, as torch would pickle the rest"):
        save({"weight": torch.ones(2), "step": 3}, storage_writer=MegaliteWriter(tmp_path, step=1))
    assert store.latest(tmp_path) is None
    # torch's own reader runs what is planted in .metadata; ours does not look at it.
    save({"weight": torch.ones(2)}, storage_writer=MegaliteWriter(tmp_path, step=1))
    place = tmp_path / "checkpoints" / "step_00000001"
    (place / ".metadata").write_bytes(pickle.dumps(_Payload(tmp_path / "executed")))
    state = {"weight": torch.zeros(2)}
    load(state, storage_reader=MegaliteReader(tmp_path))
    assert state["weight"].eq(1.0).all() and not (tmp_path / "executed").exists()


def _through_dtensors(mpu: ParallelState, folder: str) -> tuple[list[float], list[float]]:
    """Ours -> DTensors cut in columns -> ours, on two ranks; the values that arrive on each way."""
    ours = cut_state(mpu, 1.0 + mpu.rank)
    store.save(f"{folder}/ours", 1, ours, {}, mpu)
    group = mpu.tp.group  # the world of the tests may have more ranks
    assert group is not None
    mesh = DeviceMesh.from_group(group, "cpu")
    columns = distribute_tensor(torch.zeros(7, 3), mesh, [Shard(1)])
    load({"words": columns}, storage_reader=MegaliteReader(f"{folder}/ours", kind="parameter"), process_group=group)
    assert isinstance(columns, DTensor)
    writer = MegaliteWriter(f"{folder}/theirs", step=2, kind="parameter")
    save({"words": columns}, storage_writer=writer, process_group=group)
    back = cut_state(mpu, 0.0)
    store.load(f"{folder}/theirs", back, mpu)
    local = columns.to_local()
    return local[:, 0].tolist(), back["parameter"][0][1][:, -1].tolist()


def test_ranks_with_dtensors(world: World, tmp_path: Path) -> None:
    results = world.run(_through_dtensors, str(tmp_path), layout=ParallelConfig(tp=2), ranks=2, timeout=90.0)
    for rank, (column, rows) in enumerate(results):
        assert column == [1.0] * 3 + [2.0] * 4 and rows == [1.0 + rank] * (3 + rank)
    pieces = Manifest.read(tmp_path / "theirs/checkpoints/step_00000002").tensors["parameter/words"].pieces
    assert sorted((piece.offset, piece.sizes) for piece in pieces) == [((0, 0), (7, 2)), ((0, 2), (7, 1))]


def test_a_rank_with_nothing_to_write_and_a_state_in_memory(tmp_path: Path) -> None:
    url = "memory://bucket/dcp"
    save({"a": torch.arange(6.0).view(2, 3)}, storage_writer=MegaliteWriter(url, step=1))
    state = {"a": torch.zeros(2, 3)}
    load(state, storage_reader=MegaliteReader(url))
    assert state["a"].flatten().tolist() == [0, 1, 2, 3, 4, 5]
    with pytest.raises(CheckpointError, match="neither a checkpoint"):
        MegaliteReader(tmp_path).read_metadata()
