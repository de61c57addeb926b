"""Loading ahead: the same batches whatever is asked for, and errors where they belong."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable
from typing import cast

import pytest

from megalite.data.loader import Prefetcher
from megalite.data.rows import Sample
from megalite.data.sampler import GlobalBatches, LoaderError, LocalBatch


class Batches:
    """Stands for GlobalBatches: the batch of step k is k. `trouble` is called first."""

    def __init__(self, trouble: Callable[[int], None] = lambda _: None):
        self.trouble, self.asked, self.threads = trouble, list[int](), set[str]()

    def load(self, step: int) -> LocalBatch:
        self.asked.append(step)
        self.threads.add(threading.current_thread().name)
        self.trouble(step)
        return cast(LocalBatch, step)


def _load(loader: Prefetcher, batches: Batches, step: int) -> int:
    return cast(int, loader.load(cast(GlobalBatches, batches), step))


def test_steps_come_in_any_order_from_a_thread() -> None:
    batches, loader = Batches(), Prefetcher(2, last_step=12)
    steps = [0, 1, 2, 3, 7, 8, 8, 9, 3, 10, 11]
    assert [_load(loader, batches, step) for step in steps] == steps
    assert batches.threads == {"megalite-loader"} and max(batches.asked) == 11
    assert _load(loader, batches, 12) == 12, "asked for, so it is loaded"
    other = Batches()
    assert _load(loader, other, 13) == 13 and other.asked == [13]
    loader.close()


def test_batches_are_there_before_they_are_asked_for() -> None:
    loaded = threading.Event()
    batches, loader = Batches(lambda step: loaded.set() if step == 2 else None), Prefetcher(2)
    assert _load(loader, batches, 0) == 0 and loaded.wait(30)
    loader.close()


def test_without_loading_ahead_no_thread_is_made() -> None:
    batches = Batches()
    assert _load(Prefetcher(0), batches, 5) == 5 and batches.threads == {threading.current_thread().name}


def test_an_error_belongs_to_its_step_and_is_survived() -> None:
    state = {"broken": True}

    def trouble(step: int) -> None:
        if step == 3 and state["broken"]:
            raise OSError("the disk is away")

    batches, loader = Batches(trouble), Prefetcher(3)
    assert [_load(loader, batches, step) for step in range(3)] == [0, 1, 2]
    with pytest.raises(OSError, match="the disk is away") as caught:
        _load(loader, batches, 3)
    assert any(entry.name == "trouble" for entry in caught.traceback), "the traceback of the thread"
    state["broken"] = False
    assert [_load(loader, batches, step) for step in range(3, 6)] == [3, 4, 5]
    loader.close()


def test_a_thread_that_dies_is_told_and_replaced() -> None:
    batches, loader = Batches(), Prefetcher(1)
    assert _load(loader, batches, 0) == 0
    assert loader._worker is not None
    loader._worker.jobs.put(None)
    loader._worker.join(30)
    assert _load(loader, batches, 1) == 1, "it was on its way"
    with pytest.raises(LoaderError, match="the thread that loads batches died before that of step 2"):
        _load(loader, batches, 2)
    assert _load(loader, batches, 2) == 2
    loader.close()


def test_the_thread_ends_with_what_it_loads_for() -> None:
    loader = Prefetcher(1)
    assert _load(loader, Batches(), 0) == 0
    worker = loader._worker
    assert worker is not None and worker.is_alive()
    del loader
    worker.join(30)
    assert not worker.is_alive()


def test_a_thread_that_hangs_is_told_with_its_place() -> None:
    release = threading.Event()

    def a_file_system_that_does_not_answer(step: int) -> None:
        if step == 0:
            release.wait(60)

    loader = Prefetcher(1, wait_seconds=0.2)
    with pytest.raises(LoaderError, match=r"(?s)step 0 has not come within .*a_file_system_that_does_not_answer"):
        _load(loader, Batches(a_file_system_that_does_not_answer), 0)
    release.set()


class Gone:
    """A file system that has lost its file, in the way that Python takes for a time-out."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, i: int) -> Sample:
        raise OSError(errno.ETIMEDOUT, "the server has gone")


@pytest.mark.parametrize("depth", [0, 2])
def test_what_cannot_be_read_is_told_with_its_step(depth: int) -> None:
    batches, begin = GlobalBatches(dataset=Gone(), global_batch_size=4, micro_batch_size=2), time.process_time()
    with pytest.raises(LoaderError, match=r"the batch of step 2 could not be read: .*the server has gone"):
        Prefetcher(depth, wait_seconds=30.0).load(batches, 1)
    assert time.process_time() - begin < 5.0
