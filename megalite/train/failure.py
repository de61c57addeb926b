"""How a job ends when something goes wrong: a rank raises, dies or hangs, or somebody asks the run to stop.

The ranks share a `Board` in the job's key-value store. The first failure is posted there; a `Watchdog` thread on
every rank reads it and ends its process, so that a job never waits for a rank that will not come, and the first
error is told once, in full, while the errors that it causes elsewhere (lost connections) take one line.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from megalite.axis import Axis, LastCall
from megalite.mpu import ParallelState

GRACE_SECONDS = 3.0
"""How long a rank that lost a connection waits to learn which rank caused it."""
FOLLOW_SECONDS = 1.5
"""How much longer than the culprit the other ranks stay."""
_FIRST = "megalite/first_failure"
_LOST_PEER = ("connection reset", "connection closed", "connection refused", "broken pipe", "socket error")


@dataclass(frozen=True)
class Failure:
    """The first thing that went wrong in a job: which rank, how, and the error in one line."""

    rank: int
    kind: Literal["raised", "hung"]
    text: str

    def __str__(self) -> str:
        return f"rank {self.rank} {'raised: ' if self.kind == 'raised' else ''}{self.text}"


class Board:
    """Where the ranks of a job tell each other of failures; a single process has one without a store."""

    def __init__(self, store: Store | None = None, rank: int = 0, world_size: int = 1):
        self.rank, self.world_size = rank, world_size
        self._store = store
        self._ending = threading.Lock()

    @property
    def poll_seconds(self) -> float:
        """Time between looks at the board: one store serves all ranks, so a larger job looks less often."""
        return max(1.0, self.world_size / 2000)

    def post(self, kind: Literal["raised", "hung"], text: str) -> Failure:
        """Tells the others; returns the job's first failure, another rank's if that was faster."""
        mine = Failure(self.rank, kind, text)
        if self._store is None:
            return mine
        try:
            return Failure(**json.loads(self._store.compare_set(_FIRST, "", json.dumps(asdict(mine)))))
        except RuntimeError:  # the store went with the rank that held it
            return mine

    def first(self) -> Failure | None:
        """The job's first failure so far; RuntimeError when the store is gone."""
        if self._store is None or not self._store.check([_FIRST]):
            return None
        return Failure(**json.loads(self._store.get(_FIRST)))

    def wait_first(self, seconds: float) -> Failure | None:
        """The first failure, waiting up to `seconds` for it."""
        deadline = time.monotonic() + seconds
        with contextlib.suppress(RuntimeError):
            while time.monotonic() < deadline:
                if (failure := self.first()) is not None:
                    return failure
                time.sleep(0.1)
        return None

    def note_call(self, call: LastCall) -> None:
        """Records what this rank waits in, for `calls`."""
        if self._store is not None:
            waits = None if call.finished else f"{call.operation} on axis {call.axis} from {call.site}"
            self._store.set(f"megalite/hang/{self.rank}", json.dumps(waits))

    def calls(self) -> dict[int, str | None]:
        """What each rank that has answered waits in (None: outside of any collective)."""
        keys = {rank: f"megalite/hang/{rank}" for rank in range(self.world_size)}
        store = self._store
        return {} if store is None else {r: json.loads(store.get(k)) for r, k in keys.items() if store.check([k])}

    def end(self, text: str, code: int = 1, linger: float = 0.0) -> None:
        """Prints `text` in one write and ends this process, `linger` seconds later; the first caller's text counts.

        Ranks that follow another one linger, so that the launcher sees the culprit fail first.
        """
        if self._ending.acquire(blocking=False):
            _say(text)
            time.sleep(linger)
            # Not sys.exit: tearing process groups down waits for peers that may be gone.
            os._exit(code)
        threading.Event().wait()


def _say(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os.write(2, (text.rstrip() + "\n").encode())


def summarize_calls(calls: Mapping[int, str | None]) -> list[str]:
    """Lines that say which ranks wait in which collective, and which are absent from all."""
    waits: dict[str, list[int]] = {}
    for rank, call in sorted(calls.items()):
        if call is not None:
            waits.setdefault(call, []).append(rank)
    lines = [f"waiting in {call}: ranks {list_ranks(ranks)}" for call, ranks in waits.items()]
    if absent := [rank for rank, call in sorted(calls.items()) if call is None]:
        lines.append(f"running outside of any collective: ranks {list_ranks(absent)}")
    return lines


def list_ranks(ranks: Sequence[int]) -> str:
    """`0, 1, 5`, cut off when long."""
    shown = ", ".join(map(str, ranks[:16]))
    return shown if len(ranks) <= 16 else f"{shown}, ... ({len(ranks)} in all)"


def lost_peer(error: BaseException) -> bool:
    """Whether `error` says no more than that another rank is gone."""
    if isinstance(error, dist.DistNetworkError | dist.DistBackendError):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError | ConnectionError) and any(word in text for word in _LOST_PEER)


@contextlib.contextmanager
def abort_on_error(board: Board) -> Iterator[None]:
    """Ends the whole job when its body raises on one rank, that rank's traceback first; alone, just raises.

    A rank whose error is the loss of a peer prints one line that names the peer's error. An exit by
    SystemExit with code 0 passes.
    """
    try:
        yield
    except BaseException as error:
        if board.world_size == 1 or (isinstance(error, SystemExit) and error.code in (None, 0)):
            raise
        _abort(board, error)


def _abort(board: Board, error: BaseException) -> None:
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the launcher may end this rank before it has spoken
    summary = _one_line(error)
    lost = lost_peer(error)
    cause = board.wait_first(GRACE_SECONDS) if lost else None
    if cause is None:
        cause = board.post("raised", summary)
    if cause.rank != board.rank and (lost or cause.text == summary):
        board.end(f"[rank {board.rank}] stopped because {cause}", linger=FOLLOW_SECONDS)
    text = f"[rank {board.rank}] raised, and ends the job of {board.world_size} ranks:\n"
    if isinstance(error, SystemExit):
        text += f"{error.code}\n"  # a message for the user: where it came from does not matter
    else:
        text += "".join(traceback.format_exception(type(error), error, _outside(error.__traceback__)))
    if lost:
        text += "No rank has told of an error before: one was killed, or its machine is gone (out of memory?).\n"
    get_error_handler().record_exception(error)  # for torchrun's closing summary
    if board.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        _say(text)
        time.sleep(2 * board.poll_seconds)  # without an agent this process serves the board
        board.end("")
    board.end(text, 130 if isinstance(error, KeyboardInterrupt) else 1)


def _outside(trace: TracebackType | None) -> TracebackType | None:
    """`trace` from the first frame after the context managers that caught it."""
    managers = ("megalite.train.failure", "megalite.train.distributed")
    while trace is not None and trace.tb_next is not None and trace.tb_frame.f_globals.get("__name__") in managers:
        trace = trace.tb_next
    return trace


def _one_line(error: BaseException) -> str:
    first = next(iter(str(error).splitlines()), "")
    return f"{type(error).__name__}: {first}"[:500]


class Watchdog:
    """A thread that ends this process when another rank has failed, and the job when it makes no progress.

    It looks at the board from the start; `watch` turns the search for hangs on. A hang is reported by every rank:
    its last collective and all its Python stacks go to stderr and to <run_dir>/hang/rank_00000.txt.
    """

    def __init__(self, board: Board):
        self._board = board
        self._call = LastCall()
        self._hang_seconds, self._armed = 0.0, False
        self._folder: Path | None = None
        self._step, self._alive = -1, time.monotonic()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="megalite watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join()
        self._last_resort(0.0)

    def watch(self, mpu: ParallelState, hang_seconds: float, run_dir: Path | str | None) -> None:
        """From now on `hang_seconds` without a heartbeat end the job; 0 turns the search off."""
        self._call, self._folder = mpu.last_call, Path(run_dir) / "hang" if run_dir is not None else None
        self.heartbeat(self._step)
        self._hang_seconds = hang_seconds

    def heartbeat(self, step: int) -> None:
        """Says that the run is alive and at `step`; call it once a step and between slow phases."""
        self._step, self._alive = step, time.monotonic()

    def _loop(self) -> None:
        while not self._stop.wait(min(self._board.poll_seconds, self._hang_seconds / 4 or 1.0)):
            self._last_resort(self._hang_seconds)
            try:
                failure = self._board.first()
            except RuntimeError as error:
                if not self._stop.wait(GRACE_SECONDS):
                    self._board.end(f"[rank {self._board.rank}] the job's store is gone, and its host with it: {error}")
                return
            if failure is not None and failure.rank != self._board.rank:
                self._follow(failure)
            elif self._hang_seconds and time.monotonic() - self._alive > self._hang_seconds:
                self._hang()

    def _last_resort(self, hang_seconds: float) -> None:
        """Has C code end the process when even this thread cannot run: an extension may keep the interpreter lock."""
        if hang_seconds:
            faulthandler.dump_traceback_later(hang_seconds + 60, exit=True)
        elif self._armed:
            faulthandler.cancel_dump_traceback_later()
        self._armed = bool(hang_seconds)

    def _follow(self, failure: Failure) -> None:
        """Ends this rank because another one failed."""
        linger = FOLLOW_SECONDS
        if failure.kind == "hung":
            self._report()
            linger += 2 * self._board.poll_seconds  # the rank that reports the hang waits so long for answers
        self._board.end(f"[rank {self._board.rank}] stopped because {failure}", linger=linger)

    def _hang(self) -> None:
        """Reports the hang that this rank has found and ends the job, unless another rank does."""
        silence = time.monotonic() - self._alive
        failure = self._board.post("hung", f"made no progress for {silence:.0f} s in step {self._step}")
        if failure.rank != self._board.rank:
            self._follow(failure)
        self._report()
        lines = [f"[rank {self._board.rank}] the job hangs: {failure}"]
        if self._board.world_size > 1:
            time.sleep(2 * self._board.poll_seconds)  # the others' watchdogs tell what they wait in
            with contextlib.suppress(RuntimeError):
                calls = self._board.calls()
                lines += summarize_calls(calls)
                if silent := [rank for rank in range(self._board.world_size) if rank not in calls]:
                    lines.append(f"no answer from ranks {list_ranks(silent)}")
        self._board.end("\n".join(lines))

    def _report(self) -> None:
        """Writes what this rank is doing to stderr and to its file."""
        with contextlib.suppress(RuntimeError):
            self._board.note_call(self._call)
        silence = time.monotonic() - self._alive
        text = (
            f"rank {self._board.rank}: no progress for {silence:.0f} s in step {self._step}\n"
            f"last collective: {self._call}\n{stacks_of_all_threads()}"
        )
        _say(f"--- {text}")
        if self._folder is not None:
            with contextlib.suppress(OSError):
                self._folder.mkdir(parents=True, exist_ok=True)
                (self._folder / f"rank_{self._board.rank:05d}.txt").write_text(text)


def stacks_of_all_threads() -> str:
    """The Python stack of every thread but this one, the main thread first."""
    frames = sys._current_frames()
    threads = sorted(threading.enumerate(), key=lambda thread: thread is not threading.main_thread())
    parts = []
    for thread in threads:
        frame = frames.get(thread.ident or 0)
        if frame is not None and thread is not threading.current_thread():
            parts.append(f"thread {thread.name}:\n{''.join(traceback.format_stack(frame))}")
    return "".join(parts)


class StopRequest:
    """Remembers SIGTERM and SIGINT, so that the loop can save and leave at the end of a step.

    A context manager: the handlers are in place inside of it. Launchers repeat a signal that the terminal or the
    scheduler has already sent to every process, so a repetition counts only for Ctrl-C, after two seconds.
    """

    def __init__(self) -> None:
        self.signal = 0
        self._received = 0.0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if not self.signal:
            self.signal, self._received = number, time.monotonic()
            if os.environ.get("RANK", "0") == "0":
                os.write(2, b"\nstopping after this step; Ctrl-C again ends it at once\n")
        elif number == signal.SIGINT and time.monotonic() - self._received > 2.0:
            raise KeyboardInterrupt

    def agreed(self, world: Axis) -> str | None:
        """The name of a signal that any rank of `world` has received (all ranks must ask), or None."""
        number = int(world.all_reduce(torch.tensor([self.signal], device=world.device), "max").item())
        return signal.Signals(number).name if number else None
