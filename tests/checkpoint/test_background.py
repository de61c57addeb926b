"""Saving while training goes on: a consistent copy, one at a time, and failures that are told and never promoted."""

from __future__ import annotations

import errno
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megalite.checkpoint import store
from megalite.checkpoint.background import BackgroundSaver, Saved, Snapshot
from megalite.checkpoint.errors import CheckpointError
from megalite.checkpoint.store import Retention
from megalite.mpu import ParallelConfig, ParallelState
from megalite.testing.world import World
from tests.checkpoint.state import cut_state, fill, make_state, values_of

SINGLE = ParallelState.single()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Writers wait until it is set."""
    opened, real = threading.Event(), store.write_tensors

    def slow(*args: Any) -> Any:
        assert opened.wait(60)
        return real(*args)

    monkeypatch.setattr(store, "write_tensors", slow)
    yield opened
    opened.set()


def loaded(folder: Path, *, step: int | None = None) -> set[float]:
    """The values in a run's latest checkpoint, or in that of a step."""
    state = make_state(-1.0)
    place = folder if step is None else folder / "checkpoints" / store.step_name(step)
    store.load(place, state, SINGLE)
    return values_of(state)


def test_what_is_saved_is_the_state_when_the_save_began(tmp_path: Path, gate: threading.Event) -> None:
    state, saver = make_state(1.0), BackgroundSaver(tmp_path, SINGLE, Retention())
    saver.start(1, state, {"updates": 1})
    fill(state, 2.0)
    assert saver.finished(wait=False) is None and store.latest(tmp_path) is None, "nothing waits for the writer"
    gate.set()
    assert saver.finished(wait=True) == Saved(1, tmp_path / "checkpoints" / "step_00000001")
    assert saver.finished(wait=True) is None
    assert loaded(tmp_path) == {1.0, 1.5}
    saver.start(2, state, {})
    fill(state, 3.0)
    assert saver.finished(wait=True) is not None
    assert loaded(tmp_path) == {2.0} and loaded(tmp_path, step=1) == {1.0, 1.5}
    assert (tmp_path / "checkpoints" / "latest").read_text() == "step_00000002\n"


def test_the_copy_takes_the_same_memory_each_time() -> None:
    snapshot = Snapshot()
    views = {"a": torch.arange(10.0, dtype=torch.float64)[::3], "b": torch.ones(3, 1, dtype=torch.bfloat16).t()}
    views |= {"none": torch.empty(0, 4), "number": torch.tensor(7), "flag": torch.tensor([True, False])}
    first = snapshot.take(views)
    assert all(torch.equal(first[name], view) and first[name].is_contiguous() for name, view in views.items())
    views["a"].add_(1)
    second = snapshot.take(views)
    assert second["a"].data_ptr() == first["a"].data_ptr() and torch.equal(second["a"], views["a"])


def test_the_one_before_stays_until_the_new_one_is_complete(tmp_path: Path, gate: threading.Event) -> None:
    state, saver = make_state(1.0), BackgroundSaver(tmp_path, SINGLE, Retention(keep_last=1))
    gate.set()
    saver.start(1, state, {})
    assert saver.finished(wait=True) is not None
    gate.clear()
    fill(state, 2.0)
    saver.start(2, state, {})
    assert store.complete(tmp_path) == ["step_00000001"] and loaded(tmp_path) == {1.0, 1.5}
    with pytest.raises(AssertionError, match="one save at a time"):
        saver.start(3, state, {})
    with pytest.raises(CheckpointError, match="another process is saving into"):
        store.save(tmp_path, 3, state, {}, SINGLE)
    gate.set()
    assert saver.finished(wait=True) is not None
    assert store.complete(tmp_path) == ["step_00000002"] and loaded(tmp_path) == {2.0}


def test_a_process_that_dies_while_it_saves_leaves_the_one_before(tmp_path: Path) -> None:
    store.save(tmp_path, 1, make_state(1.0), {}, SINGLE)
    child = os.fork()
    if child == 0:
        try:
            reached = threading.Event()

            def never(*_: Any) -> Any:
                reached.set()
                threading.Event().wait()

            store.write_tensors = never
            BackgroundSaver(tmp_path, SINGLE, Retention(keep_last=1)).start(2, make_state(2.0), {})
            reached.wait(60)
            os.kill(os.getpid(), signal.SIGKILL)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert loaded(tmp_path) == {1.0, 1.5} and store.complete(tmp_path) == ["step_00000001"]
    store.save(tmp_path, 2, make_state(2.0), {}, SINGLE, keep_last=1)
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["latest", "step_00000002"]


def _fails_on_rank_one(mpu: ParallelState, folder: str) -> tuple[str, set[float]]:
    state, saver = cut_state(mpu, 1.0), BackgroundSaver(folder, mpu, Retention(keep_last=1))
    saver.start(1, state, {})
    assert saver.finished(wait=True) is not None
    fill(state, 2.0)
    real, message = store.write_tensors, ""
    if mpu.rank == 1:

        def full(*_: Any) -> Any:
            raise OSError(errno.ENOSPC, "No space left on device")

        store.write_tensors = full
    try:
        saver.start(2, state, {})
        while saver.finished(wait=False) is None:  # as a training loop does, step by step
            pass
    except CheckpointError as error:
        message = str(error)
    finally:
        store.write_tensors = real
    store.load(folder, state, mpu)
    found = values_of(state)
    fill(state, 3.0)
    saver.start(3, state, {})  # and the next one works
    assert saver.finished(wait=True) is not None
    return message, found


def test_a_failure_is_told_to_all_ranks_and_never_promoted(world: World, tmp_path: Path) -> None:
    results = world.run(_fails_on_rank_one, str(tmp_path), layout=ParallelConfig(tp=2), ranks=2, timeout=60.0)
    for message, found in results:
        assert "rank 1: [Errno 28] No space left on device" in message and "step_00000002" in message
        assert found == {1.0}
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["latest", "step_00000003"]


def test_a_fault_of_the_program_in_the_thread_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def faulty(*_: Any) -> Any:
        raise MemoryError("none left")

    monkeypatch.setattr(store, "write_tensors", faulty)
    saver = BackgroundSaver(tmp_path, SINGLE, Retention())
    saver.start(1, make_state(1.0), {})
    with pytest.raises(MemoryError, match="none left"):
        saver.finished(wait=True)
    assert store.latest(tmp_path) is None
