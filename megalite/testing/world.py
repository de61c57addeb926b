"""A world of gloo ranks that lives as long as a test session and runs functions on any layout.

Starting processes is what makes distributed tests slow, so the ranks are started once, stay, and receive pickled
functions. A rank that raises, hangs or dies ends the call within seconds of its cause (or at its time limit) with a
report that names the rank, the collective and the ranks that are missing from it; the next call gets fresh ranks.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection, forkserver
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from megalite.mpu import ParallelConfig, ParallelState
from megalite.train.failure import list_ranks, summarize_calls

GRACE_SECONDS = 1.0
"""How long the other ranks may go on after the first failure, to tell theirs."""


class RankFailure(RuntimeError):
    """A rank raised, died or did not finish in time; the message begins with the rank that caused it.

    ranks: the ranks at fault (that raised first, died, or did not finish). kind: `raised`, `died` or `hung`.
    """

    def __init__(self, message: str, ranks: Sequence[int], kind: str):
        super().__init__(message)
        self.ranks = tuple(ranks)
        self.kind = kind


@dataclass(frozen=True)
class _Answer:
    """What a rank sends back: its value, or the text of its exception."""

    value: Any = None
    error: str = ""
    when: float = 0.0


@dataclass(frozen=True)
class _Report:
    """What an unfinished rank is doing: its last collective (None: outside of any) and its stack."""

    waits_in: str | None
    last_call: str
    stack: str


@dataclass
class _Rank:
    """The parent's handle on a worker."""

    process: BaseProcess
    jobs: Connection
    control: Connection
    stacks: Path

    def ask_report(self) -> _Report:
        """What the rank is doing; when Python itself is stuck there, faulthandler's stack from its signal."""
        with contextlib.suppress(OSError, EOFError):
            self.control.send_bytes(b"report")
            if self.control.poll(1.0):
                return pickle.loads(self.control.recv_bytes())
        with contextlib.suppress(ProcessLookupError, TypeError):
            os.kill(self.process.pid, signal.SIGUSR1)  # pyright: ignore[reportArgumentType]
            time.sleep(0.3)
        stack = self.stacks.read_text() or "  (no stack: the process does not react)\n"
        return _Report(None, "unknown: Python is stuck inside an extension", stack)


class World:
    """Gloo ranks on this machine that call functions, started when first needed.

    `max_ranks` bounds the size. Use it as a context manager, under `if __name__ == "__main__":` in a script.
    """

    def __init__(self, max_ranks: int = 8):
        self.max_ranks = max_ranks
        self._ranks: list[_Rank] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._store: TCPStore | None = None

    def __enter__(self) -> World:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def pids(self) -> list[int]:
        """Process ids of the living ranks."""
        return [rank.process.pid for rank in self._ranks if rank.process.pid is not None]

    def run(
        self,
        fn: Callable[..., Any],
        *args: Any,
        layout: ParallelConfig | None = None,
        ranks: int | None = None,
        timeout: float = 60.0,
    ) -> list[Any]:
        """Calls `fn(mpu, *args)` on ranks 0 .. `ranks` - 1, each with its place in `layout`; returns their results.

        `fn` must be importable (a function at the top of a module), and `args` and results picklable. By default
        `layout` is a single axis, dp, and `ranks` the fewest that hold the layout. Raises RankFailure when a rank
        raises, dies, or has not finished after `timeout` seconds.
        """
        layout = layout if layout is not None else ParallelConfig()
        ranks = ranks if ranks is not None else fewest_ranks(layout)
        if ranks > self.max_ranks:
            raise ValueError(f"{ranks} ranks asked of a world of at most {self.max_ranks}")
        layout.grid(ranks)  # an impossible layout is the caller's error, not the ranks'
        payload = pickle.dumps((fn, args, layout, ranks))
        if len(self._ranks) < ranks or any(rank.process.exitcode is not None for rank in self._ranks):
            self.close()
            self._start(ranks)
        finished = False
        try:
            values = self._call(self._ranks[:ranks], payload, timeout, getattr(fn, "__qualname__", str(fn)))
            finished = True
            return values
        finally:
            if not finished:
                self.close()

    def close(self) -> None:
        """Ends all ranks; a later `run` starts new ones."""
        for rank in self._ranks:
            rank.jobs.close()
            rank.control.close()
        for rank in self._ranks:
            rank.process.join(0.5)
            if rank.process.is_alive():
                rank.process.kill()
                rank.process.join()
            rank.process.close()
        self._ranks = []
        self._store = None
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def _start(self, size: int) -> None:
        context = _forkserver()
        self._folder = tempfile.TemporaryDirectory(prefix="megalite_world_")
        self._store = store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        for rank in range(size):
            jobs, worker_jobs = connection.Pipe()
            control, worker_control = connection.Pipe()
            stacks = Path(self._folder.name) / f"rank_{rank}.txt"
            stacks.touch()
            process = context.Process(
                target=_serve,
                args=(rank, size, store.port, worker_jobs, worker_control, str(stacks)),
                name=f"megalite rank {rank}",
                daemon=True,
            )
            process.start()
            worker_jobs.close()
            worker_control.close()
            self._ranks.append(_Rank(process, jobs, control, stacks))

    def _call(self, ranks: list[_Rank], payload: bytes, timeout: float, name: str) -> list[Any]:
        deadline = time.monotonic() + timeout
        for rank in ranks:
            with contextlib.suppress(OSError):  # a rank that died meanwhile is found below
                rank.jobs.send_bytes(payload)
        answers: dict[int, _Answer] = {}
        died: dict[int, str] = {}
        while len(answers) + len(died) < len(ranks):
            waiting = {ranks[i].jobs: i for i in range(len(ranks)) if i not in answers and i not in died}
            ready = connection.wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                assert isinstance(pipe, Connection)
                number = waiting[pipe]
                try:
                    answers[number] = pickle.loads(pipe.recv_bytes())
                    failed = bool(answers[number].error)
                except (EOFError, OSError):
                    died[number] = _exit_reason(ranks[number].process)
                    failed = True
                if failed:
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        if len(answers) == len(ranks) and not any(answer.error for answer in answers.values()):
            return [answers[i].value for i in range(len(ranks))]
        reports = {i: ranks[i].ask_report() for i in range(len(ranks)) if i not in answers and i not in died}
        raise _failure(name, len(ranks), timeout, answers, died, reports)


def fewest_ranks(layout: ParallelConfig) -> int:
    """The smallest world that holds `layout`."""
    ranks = layout.tp * layout.cp * layout.pp
    while ranks % layout.pp or (ranks // layout.pp) % (layout.ep * layout.etp):
        ranks += layout.tp * layout.cp * layout.pp
    return ranks


def _forkserver() -> ForkServerContext:
    """The context whose server has imported torch, single-threaded, so that a rank starts in 0.1 s."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", "megalite.testing.world"])
    inherited = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"  # OpenMP reads it once, when the server imports torch
    try:
        forkserver.ensure_running()
    finally:
        if inherited is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = inherited
    return context


def _exit_reason(process: BaseProcess) -> str:
    process.join(2.0)
    code = process.exitcode
    if code is not None and code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"


def _failure(
    name: str,
    size: int,
    timeout: float,
    answers: dict[int, _Answer],
    died: dict[int, str],
    reports: dict[int, _Report],
) -> RankFailure:
    """The exception that puts the cause first: a death, else the earliest raise, else the hang."""
    raised = sorted((i for i, answer in answers.items() if answer.error), key=lambda i: answers[i].when)
    if died:
        kind, culprits = "died", sorted(died)
        head = "\n".join(f"rank {i} of {size} {died[i]} in {name}" for i in culprits)
    elif raised:
        kind, culprits = "raised", raised[:1]
        head = f"rank {raised[0]} of {size} raised in {name}\n{answers[raised[0]].error}"
    else:
        kind, culprits = "hung", sorted(reports)
        head = f"{name} has not finished after {timeout:g} s on ranks {list_ranks(culprits)} of {size}"
    lines = [head.rstrip()]
    lines += summarize_calls({number: report.waits_in for number, report in reports.items()})
    if done := [i for i, answer in answers.items() if not answer.error]:
        lines.append(f"returned: ranks {list_ranks(sorted(done))}")
    for number in raised:
        if number not in culprits:
            last = answers[number].error.rstrip().splitlines()[-1]
            later = answers[number].when - answers[raised[0]].when
            lines.append(f"rank {number} raised too, {later:.1f} s later: {last}")
    for number, report in reports.items():
        lines += [f"--- rank {number}, last collective: {report.last_call}", report.stack.rstrip()]
    return RankFailure("\n".join(lines), culprits, kind)


class _Worker:
    """The life of one rank."""

    def __init__(self, rank: int):
        self.rank = rank
        self.mpu: ParallelState | None = None

    def answer(self, payload: bytes) -> bytes:
        """Runs one job; the pickled _Answer."""
        with _restored_defaults():
            try:
                fn, args, layout, ranks = pickle.loads(payload)
                self.mpu = ParallelState.build(layout, range(ranks))
                return pickle.dumps(_Answer(value=fn(self.mpu, *args)))
            except BaseException:
                return pickle.dumps(_Answer(error=_own_frames(), when=time.monotonic()))
            finally:
                self.mpu = None

    def watch(self, control: Connection) -> None:
        """Thread: reports what the main thread does when asked, and ends the process when the parent is gone."""
        while True:
            try:
                control.recv_bytes()
                control.send_bytes(pickle.dumps(self._report()))
            except (EOFError, OSError):
                os._exit(0)

    def _report(self) -> _Report:
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        lines = traceback.format_stack(frame)
        start = next((i + 1 for i, line in enumerate(lines) if "in answer\n" in line and __file__ in line), 0)
        mpu = self.mpu
        call = mpu.last_call if mpu is not None else None
        if call is None:
            return _Report(None, "none: still starting", "".join(lines[start:]))
        inside = None if call.finished else f"{call.operation} on axis {call.axis} from {call.site}"
        return _Report(inside, str(call), "".join(lines[start:]))


@contextlib.contextmanager
def _restored_defaults() -> Iterator[None]:
    """Keeps what a job sets for its process from reaching the next job."""
    dtype, grad = torch.get_default_dtype(), torch.is_grad_enabled()
    deterministic = torch.are_deterministic_algorithms_enabled()
    try:
        yield
    finally:
        torch.set_default_dtype(dtype)
        torch.set_grad_enabled(grad)
        if torch.are_deterministic_algorithms_enabled() != deterministic:
            torch.use_deterministic_algorithms(deterministic)  # imports the compiler: seconds in every rank
        torch.set_num_threads(1)


def _own_frames() -> str:
    """The current exception's traceback without the frames of this file."""
    kind, error, trace = sys.exc_info()
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__ and trace.tb_next is not None:
        trace = trace.tb_next
    return "".join(traceback.format_exception(kind, error, trace))


def _serve(rank: int, size: int, port: int, jobs: Connection, control: Connection, stacks: str) -> None:
    """The main function of a rank's process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent ends the ranks
    file = open(stacks, "w")  # noqa: SIM115 - faulthandler writes to it until the process ends
    faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)
    torch.set_num_threads(1)
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all ranks are here; the host name may not resolve
    worker = _Worker(rank)
    threading.Thread(target=worker.watch, args=(control,), daemon=True).start()
    store = TCPStore("127.0.0.1", port, is_master=False)
    # The world's own limits end a hang; gloo's must not come first, it would hide who was missing.
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(days=1))
    with contextlib.suppress(EOFError, OSError):
        while True:
            jobs.send_bytes(worker.answer(jobs.recv_bytes()))
    os._exit(0)  # without tearing gloo down: the other ranks end at the same time
