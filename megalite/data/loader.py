"""Loads the batches of the next steps while a step computes."""

from __future__ import annotations

import contextlib
import queue
import sys
import threading
import time
import traceback
import weakref
from collections import deque
from concurrent.futures import Future, wait

from megalite.data.sampler import GlobalBatches, LoaderError, LocalBatch

WAIT_SECONDS = 600.0
_LOOK_SECONDS = 1.0


class Prefetcher:
    """Gives the batch of a step, and loads those of the `depth` steps after it in the background.

    One thread loads, in the order of the steps: reading maps and copies memory, which holds the interpreter's lock only
    briefly. A batch is a function of its step alone, so any step may be asked for at any time; steps that were not
    foreseen (a resume, a step that is run again) are loaded anew.

    What goes wrong while loading is raised by `load` of the step that it belongs to, with the traceback of the thread;
    afterwards everything begins anew, with another thread, so that the call may be repeated. LoaderError when the
    thread has died, or takes more than `wait_seconds` for a batch (with the place where it stands). Steps from
    `last_step` on are not loaded ahead. A `depth` of 0 loads when asked.
    """

    def __init__(self, depth: int = 2, *, last_step: int | None = None, wait_seconds: float = WAIT_SECONDS):
        self.depth, self.last_step, self.wait_seconds = depth, last_step, wait_seconds
        self._worker: _Worker | None = None
        self._batches: GlobalBatches | None = None
        self._coming: deque[tuple[int, Future[LocalBatch]]] = deque()

    def load(self, batches: GlobalBatches, step: int) -> LocalBatch:
        """This rank's part of the batch of `step`."""
        if self.depth < 1:
            return batches.load(step)
        if batches is not self._batches or (self._coming and self._coming[0][0] != step):
            self.close()
        try:
            return self._wait_for(self._ask(batches, step), step)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Lets go of what is on its way, and of the thread, once it has ended what it is loading.

        A thread that is in the middle of it while the interpreter shuts down could end the process with SIGABRT. One
        that hangs is not waited for.
        """
        worker, self._worker, self._batches = self._worker, None, None
        self._coming.clear()
        if worker is not None:
            worker.end()
            worker.join(_LOOK_SECONDS)

    def _ask(self, batches: GlobalBatches, step: int) -> Future[LocalBatch]:
        """The batch of `step` to come; those after it are asked for too, as far as they are not on their way."""
        if self._worker is None:
            self._worker, self._batches = _Worker(batches), batches
            self._worker.start()
            weakref.finalize(self, self._worker.end)  # the thread must not outlive its run
        first = self._coming[-1][0] + 1 if self._coming else step
        for number in range(first, step + self.depth + 1):
            if number == step or self.last_step is None or number < self.last_step:
                self._coming.append((number, self._worker.ask(number)))
        return self._coming.popleft()[1]

    def _wait_for(self, batch: Future[LocalBatch], step: int) -> LocalBatch:
        worker, deadline = self._worker, time.monotonic() + self.wait_seconds
        assert worker is not None, "it was asked"
        while True:
            if wait([batch], timeout=min(_LOOK_SECONDS, self.wait_seconds)).done:
                return batch.result()
            if not worker.is_alive() and not batch.done():
                raise LoaderError(f"the thread that loads batches died before that of step {step}")
            if time.monotonic() >= deadline:
                raise LoaderError(
                    f"the batch of step {step} has not come within {self.wait_seconds:.0f} s; the thread that loads it"
                    f" is at\n{worker.place()}"
                )


class _Worker(threading.Thread):
    """Loads what it is asked for, in turn. A daemon: a file system that does not answer must not keep a run alive."""

    def __init__(self, batches: GlobalBatches):
        super().__init__(name="megalite-loader", daemon=True)
        self.batches = batches
        self.jobs: queue.SimpleQueue[tuple[int, Future[LocalBatch]] | None] = queue.SimpleQueue()

    def ask(self, step: int) -> Future[LocalBatch]:
        """Puts a step at the end of the line."""
        future: Future[LocalBatch] = Future()
        self.jobs.put((step, future))
        return future

    def end(self) -> None:
        """Nothing that is not begun yet will be loaded."""
        with contextlib.suppress(queue.Empty):
            while True:
                self.jobs.get_nowait()
        self.jobs.put(None)

    def run(self) -> None:
        """Works until it is told to end."""
        while (job := self.jobs.get()) is not None:
            self._answer(*job)
            del job  # while it waits the thread keeps no batch

    def _answer(self, step: int, future: Future[LocalBatch]) -> None:
        try:
            future.set_result(self.batches.load(step))
        except BaseException as error:  # raised where the batch is waited for
            future.set_exception(error)

    def place(self) -> str:
        """Where it is."""
        frame = sys._current_frames().get(self.ident or 0)
        return "".join(traceback.format_stack(frame)) if frame is not None else "  (it has ended)"
