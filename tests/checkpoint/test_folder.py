"""Checkpoints behind fsspec: the same rules where nothing can be renamed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from megalite.checkpoint import store
from megalite.checkpoint.errors import CheckpointError
from megalite.checkpoint.folder import folder_at
from megalite.mpu import ParallelConfig, ParallelState
from megalite.testing.world import World
from tests.checkpoint.state import cut_state, fill, make_state, values_of

SINGLE = ParallelState.single()
RUN = "memory://bucket/run"


@pytest.fixture
def memory() -> Iterator[MemoryFileSystem]:
    """An empty object store."""
    files = MemoryFileSystem()
    files.store.clear()
    files.pseudo_dirs[:] = [""]
    yield files
    files.store.clear()


def loaded(folder: str = RUN) -> set[float]:
    state = make_state(-1.0)
    assert store.load_latest(folder, state, SINGLE) is not None
    return values_of(state)


def test_a_run_is_saved_and_loaded(memory: MemoryFileSystem) -> None:
    assert store.load_latest(RUN, make_state(0.0), SINGLE) is None and store.complete(RUN) == []
    path = store.save(RUN, 1, make_state(1.0), {"updates": 4}, SINGLE)
    assert path == f"{RUN}/checkpoints/step_00000001" and store.latest(RUN) == path
    state = make_state(0.0)
    manifest = store.load(path, state, SINGLE)
    assert (manifest.step, manifest.state) == (1, {"updates": 4}) and values_of(state) == {1.0, 1.5}
    assert store.verify(path, SINGLE).step == 1
    assert memory.cat_file("/bucket/run/checkpoints/latest") == b"step_00000001\n"


def test_retention_and_saving_a_step_again(memory: MemoryFileSystem) -> None:
    for step in (1, 2, 3, 4):
        store.save(RUN, step, make_state(float(step)), {}, SINGLE, keep_last=1, keep_every=3)
    assert store.complete(RUN) == ["step_00000003", "step_00000004"]
    store.save(RUN, 4, make_state(9.0), {}, SINGLE, keep_last=1)
    assert loaded() == {9.0, 9.5}
    files = [path for path in memory.store if "step_00000004" in path]
    assert sorted(path.rpartition("/")[2] for path in files) == ["manifest.json", "rank_00000.safetensors"]
    assert not [path for path in memory.store if "step_00000003" in path]


def test_damage_is_named_and_passed_over(memory: MemoryFileSystem) -> None:
    for step in (1, 2):
        store.save(RUN, step, make_state(float(step)), {}, SINGLE)
    (file,) = [path for path in memory.store if "step_00000002" in path and path.endswith("safetensors")]
    content = bytearray(memory.cat_file(file))
    content[-1] ^= 1
    memory.pipe_file(file, bytes(content))
    with pytest.raises(CheckpointError, match=r"memory://bucket/run.*safetensors is damaged: .*weight@0,0 is not what"):
        store.load(RUN, make_state(0.0), SINGLE)
    assert store.newest_intact(RUN, SINGLE) == f"{RUN}/checkpoints/step_00000001"


@pytest.mark.parametrize("again", [False, True], ids=["next step", "same step again"])
def test_a_save_that_is_cut_short_at_any_moment_leaves_the_one_before(
    memory: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch, again: bool
) -> None:
    step, outcomes = 1 if again else 2, []
    for last in range(30):
        memory.store.clear()
        store.save(RUN, 1, make_state(1.0), {}, SINGLE)
        with monkeypatch.context() as patched:
            calls = _lose_connection_after(patched, last)
            try:
                store.save(RUN, step, make_state(2.0), {}, SINGLE, keep_last=1)
            except CheckpointError as error:
                assert "connection lost" in str(error)
        outcomes.append(loaded())
        store.save(RUN, 3, make_state(3.0), {}, SINGLE, keep_last=1)
        assert loaded() == {3.0, 3.5}
        if calls[0] <= last:
            break
    old, new = outcomes.count({1.0, 1.5}), outcomes.count({2.0, 2.5})
    assert old + new == len(outcomes) and old and new and outcomes == [{1.0, 1.5}] * old + [{2.0, 2.5}] * new


def _lose_connection_after(patched: pytest.MonkeyPatch, last: int) -> list[int]:
    """From the call after `last` on, changes to the store fail; returns the count of calls, as it grows."""
    calls = [0]

    def counted(name: str) -> None:
        real = getattr(MemoryFileSystem, name)

        def change(self: MemoryFileSystem, *args: Any, **options: Any) -> Any:
            if name != "_open" or "w" in str(options.get("mode", args[1:2])):
                calls[0] += 1
                if calls[0] > last:
                    raise RuntimeError("connection lost")  # clients have exceptions of their own
            return real(self, *args, **options)

        patched.setattr(MemoryFileSystem, name, change)

    for name in ("_open", "pipe_file", "makedirs", "rm"):
        counted(name)
    return calls


class OneRoom(LocalFileSystem):
    """Files of a disk as an object store has them: there is no rename."""

    protocol = "oneroom"

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        return super()._strip_protocol(str(path).removeprefix("oneroom://"))

    def mv(self, *args: Any, **options: Any) -> None:
        raise AssertionError("an object store renames nothing")

    rename = move = mv_file = mv


def _save_and_load(mpu: ParallelState, folder: str) -> set[float]:
    fsspec.register_implementation("oneroom", OneRoom, clobber=True)
    state = cut_state(mpu, 1.0 + mpu.tp.rank)
    store.save(folder, 1, state, {}, mpu)
    store.save(folder, 1, state, {}, mpu)
    fill(state, 0.0)
    assert store.load_latest(folder, state, mpu) is not None
    return values_of(state)


def test_ranks_save_and_load_where_nothing_can_be_renamed(world: World, tmp_path: Path) -> None:
    folder = f"oneroom://{tmp_path}/run"
    assert world.run(_save_and_load, folder, layout=ParallelConfig(tp=2), ranks=2) == [{1.0}, {2.0}]
    fsspec.register_implementation("oneroom", OneRoom, clobber=True)
    whole = cut_state(SINGLE, 0.0)
    store.load(folder, whole, SINGLE)
    assert whole["parameter"][0][1][:, 0].tolist() == [1.0] * 3 + [2.0] * 4
    assert not list(tmp_path.rglob(".*"))


def test_what_is_missing_for_a_url_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CheckpointError, match=r"nowhere://x cannot be reached: Protocol not known: nowhere"):
        folder_at("nowhere://x")
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(CheckpointError, match=r"s3://bucket/run cannot be reached: Install s3fs"):
        folder_at("s3://bucket/run")
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(CheckpointError, match=r"memory://run needs fsspec: pip install fsspec"):
        folder_at("memory://run")
