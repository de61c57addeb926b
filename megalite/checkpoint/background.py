"""Saving while training goes on.

The state is copied when a save begins; a thread writes the copy. Ranks meet in the main thread only: to prepare a save,
and once every rank has written, to complete it. So the thread takes part in no collective, and a checkpoint becomes the
latest between two steps or not at all.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megalite.checkpoint.manifest import Tensors
from megalite.checkpoint.store import PendingSave, Retention
from megalite.mpu import ParallelState

_ALIGNMENT = 64


class Snapshot:
    """Host memory for one copy of what a rank stores, kept from save to save."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def take(self, views: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copies of `views`, by the same names; those of before are overwritten."""
        begins, size = [], 0
        for view in views.values():
            begins.append(size)
            size += -(-view.nbytes // _ALIGNMENT) * _ALIGNMENT
        if self._memory.numel() < size:
            # From pinned memory's side, copies off a GPU do not wait for one another.
            on_gpu = any(view.is_cuda for view in views.values())
            self._memory = torch.empty(size, dtype=torch.uint8, pin_memory=on_gpu)
        copies: dict[str, Tensor] = {}
        for (name, view), begin in zip(views.items(), begins, strict=True):
            memory = self._memory[begin : begin + view.nbytes]
            copies[name] = memory.view(view.dtype).view(view.shape)
            copies[name].copy_(view.detach(), non_blocking=True)
        if self._memory.is_pinned():
            torch.cuda.synchronize()
        return copies


@dataclass(frozen=True)
class Saved:
    """A checkpoint that is complete: the step it holds, and its folder."""

    step: int
    path: Path | str


class BackgroundSaver:
    """Saves the checkpoints of a run in the background, one at a time.

    Every rank makes one and calls each method at the same time.
    """

    def __init__(self, run_dir: str | Path, mpu: ParallelState, retention: Retention):
        self._run_dir, self._mpu, self._retention = run_dir, mpu, retention
        self._snapshot = Snapshot()
        self._flying: _Flight | None = None

    def start(self, step: int, tensors: Tensors, state: Mapping[str, Any]) -> None:
        """Begins to save what `tensors` hold now; they may change as soon as this returns.

        No other save may be under way (see `finished`). Raises CheckpointError on all ranks when there is no room.
        """
        assert self._flying is None, "one save at a time: wait for the one before"
        pending = PendingSave(self._run_dir, step, tensors, state, self._mpu, self._retention)
        self._flying = _Flight(pending, self._snapshot.take(pending.views))

    def finished(self, *, wait: bool) -> Saved | None:
        """The save that is under way, if every rank has written: it is then complete and the latest.

        wait: until it is. Raises CheckpointError on all ranks when it failed on one; the one before is then the latest.
        """
        flight = self._flying
        if flight is None or not (wait or self._all_done(flight)):
            return None
        self._flying = None
        return Saved(flight.pending.step, flight.pending.complete(flight.result()))

    def _all_done(self, flight: _Flight) -> bool:
        done = torch.tensor([int(flight.is_done)], device=self._mpu.world.device)
        return bool(self._mpu.world.all_reduce(done, "min").item())


class _Flight(threading.Thread):
    """Writes this rank's file. It ends with the process: what is not complete then never will be."""

    def __init__(self, pending: PendingSave, copies: Mapping[str, Tensor]):
        super().__init__(name=f"megalite save of step {pending.step}", daemon=True)
        self.pending, self._copies = pending, copies
        self._result: Any = None
        self._fault: BaseException | None = None
        self.start()

    def run(self) -> None:
        """Nobody sees what a thread raises: it is kept for `result`."""
        try:
            self._result = self.pending.write(self._copies)
        except BaseException as error:
            self._fault = error

    @property
    def is_done(self) -> bool:
        """Whether this rank has written, or failed to."""
        return not self.is_alive()

    def result(self) -> Any:
        """What PendingSave.write returned, once it has."""
        self.join()
        if self._fault is not None:
            raise self._fault
        return self._result
