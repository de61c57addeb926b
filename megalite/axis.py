"""One mesh axis as a rank sees it, with every collective along it.

All communication of the framework goes through `Axis`, so that it can be counted (`Axis.stats`), named when it hangs
(`LastCall`), and given back without sending when a part of the model is computed again (`Stash`).
"""

from __future__ import annotations

import itertools
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass
class CallStats:
    """What one call site has sent over one axis."""

    calls: int = 0
    bytes_sent: int = 0


@dataclass
class AxisStats:
    """Payload bytes sent per rank by the bandwidth-optimal algorithm, by call site; size-1 axes count nothing."""

    by_site: dict[str, CallStats] = field(default_factory=dict)

    def add(self, site: str, bytes_sent: int) -> None:
        """Counts one call."""
        entry = self.by_site.setdefault(site, CallStats())
        entry.calls += 1
        entry.bytes_sent += bytes_sent

    @property
    def calls(self) -> int:
        """Calls over all sites."""
        return sum(entry.calls for entry in self.by_site.values())

    @property
    def bytes_sent(self) -> int:
        """Bytes over all sites."""
        return sum(entry.bytes_sent for entry in self.by_site.values())

    def reset(self) -> None:
        """Forgets everything counted so far."""
        self.by_site.clear()


class Stash:
    """Results of collectives, kept in the order of the calls, for a second run of the same code that sends nothing.

    Sums and exchanges are kept; gathers are not, since their results are larger than what a rank keeps anyway. Nobody
    may change a result in place.
    """

    def __init__(self) -> None:
        self._kept: list[tuple[str, Tensor]] = []
        self._next: int | None = None

    def __len__(self) -> int:
        return len(self._kept)

    def truncate(self, length: int) -> None:
        """Forgets all but the first `length` results."""
        del self._kept[length:]

    def replay(self) -> None:
        """From now on results are given back, once each, from the first one on."""
        self._next = 0

    def keep(self, operation: str, pending: Pending) -> None:
        """Adds a result, which may still be on its way."""
        assert self._next is None, f"{operation} after the last one of the first run"
        self._kept.append((operation, pending.result.detach()))  # the result itself may become part of a graph

    def take(self, operation: str, shape: torch.Size) -> Tensor | None:
        """The result of the next call; None while results are collected."""
        if self._next is None:
            return None
        assert self._next < len(self._kept), f"{operation}: the first run made {len(self._kept)} calls"
        kept, result = self._kept[self._next]
        assert (kept, result.shape) == (operation, shape), f"{operation} of {shape}: the first run made {kept}"
        self._next += 1
        return result.detach()


@dataclass
class LastCall:
    """The collective that this rank entered last: what the watchdog reports when a rank hangs."""

    axis: str = "none"
    operation: str = "none"
    site: str = "none"
    entered: float = 0.0
    finished: bool = True
    stash: Stash | None = None
    """Where results go to, or come from, while a part of the model runs that backward computes again."""
    planned: int | None = None
    """The rank that the axes are worked out for, where no process plays it and nothing can be sent."""

    def __deepcopy__(self, memo: dict[int, Any]) -> LastCall:
        return self  # the rank's, as its axes

    def enter(self, axis: str, operation: str, site: str) -> None:
        """Notes that this rank enters a collective, or begins to wait for one that it started before."""
        assert self.planned is None, f"{operation} on axis {axis} from {site}: rank {self.planned} is only planned"
        self.axis, self.operation, self.site = axis, operation, site
        self.entered, self.finished = time.monotonic(), False

    def __str__(self) -> str:
        state = "finished" if self.finished else f"waiting for {time.monotonic() - self.entered:.0f} s"
        return f"{self.operation} on axis {self.axis} from {self.site} ({state})"


class Pending:
    """A collective under way; `wait` returns its result."""

    def __init__(
        self,
        result: Tensor,
        work: dist.Work | None,
        call: LastCall | None = None,
        finish: Callable[[], object] | None = None,
    ):
        self._result, self._work, self._call, self._finish = result, work, call, finish
        if call is not None:
            self._named = (call.axis, call.operation, call.site)

    @property
    def result(self) -> Tensor:
        """Where the result is, or will be."""
        return self._result

    def wait(self) -> Tensor:
        """Blocks until the result is there (on CUDA: until the current stream waits for it)."""
        if self._work is not None:
            if self._call is not None:
                self._call.enter(*self._named)  # calls entered since then are not the one that may hang
            self._work.wait()
            self._work = None
            if self._finish is not None:
                self._finish()
                self._finish = None  # with what it holds
            if self._call is not None:
                self._call.finished = True
        return self._result


class PendingExchange:
    """Messages under way, to and from several ranks; `wait` returns when all of them are through."""

    def __init__(self, works: Sequence[Pending] = (), tensors: Sequence[Tensor] = ()):
        self._works, self._tensors = works, tensors  # backends need not keep what they send alive

    def wait(self) -> None:
        """Blocks until what was received is there and what was sent may change."""
        for work in self._works:
            work.wait()
        self._works = self._tensors = ()


_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
# torch 2.13 renamed these two and warns about the old names.
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_TRANSPARENT = ("megalite.axis", "megalite.parallel.collectives")


def _call_site() -> str:
    """The function that asked for communication: the innermost frame outside of the plumbing."""
    frame: FrameType | None = sys._getframe(2)
    plumbing = "backward"
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.startswith("torch."):
            return plumbing  # called by the autograd engine
        if module not in _TRANSPARENT:
            return f"{module.removeprefix('megalite.')}.{frame.f_code.co_qualname}"
        plumbing = frame.f_code.co_qualname
        frame = frame.f_back
    return plumbing


class Axis:
    """One mesh axis as a rank sees it: its group, and every collective along it.

    `ranks` are the global ranks in order, `rank` is this rank's index among them. Collectives on a size-1
    axis return their input and need no torch.distributed. Gather and scatter concatenate along `dim`.
    """

    def __init__(
        self,
        name: str,
        ranks: Sequence[int] = (0,),
        rank: int = 0,
        group: dist.ProcessGroup | None = None,
        last_call: LastCall | None = None,
    ):
        is_planned = last_call is not None and last_call.planned is not None
        assert is_planned or (group is not None) == (len(ranks) > 1), (
            f"axis {name}: a group is needed exactly for several ranks"
        )
        self.name, self.ranks, self.rank = name, tuple(ranks), rank
        self._group = weakref.ref(group) if group is not None else None
        self.size = len(self.ranks)
        self.stats = AxisStats()
        self.last_call = last_call if last_call is not None else LastCall()

    def __deepcopy__(self, memo: dict[int, Any]) -> Axis:
        return self  # a place: the copy of a layer stays where the layer is

    def __repr__(self) -> str:
        return f"Axis({self.name}, rank {self.rank} of {self.size}, ranks {compact_ranks(self.ranks)})"

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The process group; None on a size-1 axis, and once torch.distributed has ended.

        It is not the axis that keeps it: a group that outlives torch.distributed keeps its threads, and one of them may
        let go of a tensor while the interpreter shuts down, which ends the process with SIGABRT.
        """
        return self._group() if self._group is not None else None

    @property
    def is_first(self) -> bool:
        """Whether this rank is the first on the axis."""
        return self.rank == 0

    @property
    def is_last(self) -> bool:
        """Whether this rank is the last on the axis."""
        return self.rank == self.size - 1

    def _enter(self, operation: str, bytes_sent: int) -> None:
        site = _call_site()
        self.stats.add(f"{site}:{operation}", bytes_sent)
        self.last_call.enter(self.name, operation, site)

    def _stashed(self, operation: str, shape: torch.Size) -> Tensor | None:
        """The result of this call in an earlier run of the same code, if that is being replayed."""
        stash = self.last_call.stash
        return stash.take(operation, shape) if stash is not None else None

    def _kept(self, operation: str, pending: Pending) -> Pending:
        if self.last_call.stash is not None:
            self.last_call.stash.keep(operation, pending)
        return pending

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> Tensor:
        """Reduces `tensor` over the axis, in place; returns it."""
        return self.start_all_reduce(tensor, op).wait()

    def start_all_reduce(self, tensor: Tensor, op: str = "sum") -> Pending:
        """Begins an in-place all-reduce."""
        if self.size == 1:
            return Pending(tensor, None)
        assert tensor.is_contiguous(), "all_reduce works in place and needs a contiguous tensor"
        if (stashed := self._stashed("all_reduce", tensor.shape)) is not None:
            return Pending(tensor.copy_(stashed), None)
        self._enter("all_reduce", 2 * (self.size - 1) * tensor.nbytes // self.size)
        work = dist.all_reduce(tensor, _OPS[op], group=self.group, async_op=True)
        return self._kept("all_reduce", Pending(tensor, work, self.last_call))

    def all_gather(self, tensor: Tensor, dim: int = 0) -> Tensor:
        """Concatenates the equal-shaped `tensor` of every rank along `dim`."""
        return self.start_all_gather(tensor, dim).wait()

    def start_all_gather(self, tensor: Tensor, dim: int = 0, *, out: Tensor | None = None) -> Pending:
        """Begins an all-gather; for `dim` 0 the gathered memory is the result itself.

        out: where the result goes (`dim` 0 only); `tensor` may be this rank's place in it.
        """
        if self.size == 1:
            return Pending(tensor, None)
        assert out is None or dim == 0, "a result in place is gathered along dim 0"
        self._enter("all_gather", (self.size - 1) * tensor.nbytes)
        moved = tensor if dim == 0 else tensor.movedim(dim, 0)
        out = out if out is not None else tensor.new_empty((self.size * moved.shape[0], *moved.shape[1:]))
        work = _all_gather(out, moved.contiguous(), group=self.group, async_op=True)
        return Pending(out if dim == 0 else out.movedim(0, dim), work, self.last_call)

    def reduce_scatter(self, tensor: Tensor, dim: int = 0) -> Tensor:
        """Sums over the axis and keeps this rank's equal part of `dim`."""
        return self.start_reduce_scatter(tensor, dim).wait()

    def start_reduce_scatter(self, tensor: Tensor, dim: int = 0, *, out: Tensor | None = None) -> Pending:
        """Begins a summing reduce-scatter along `dim`, which the axis size must divide.

        out: where the result goes (`dim` 0 only); it may be this rank's part of `tensor`, whose rest is then undefined.
        """
        if self.size == 1:
            return Pending(tensor, None)
        assert out is None or dim == 0, "a result in place is scattered along dim 0"
        moved = tensor if dim == 0 else tensor.movedim(dim, 0)
        assert moved.shape[0] % self.size == 0, f"reduce_scatter of {moved.shape[0]} rows over {self.size} ranks"
        shape = torch.Size((*tensor.shape[:dim], moved.shape[0] // self.size, *tensor.shape[dim:][1:]))
        if (stashed := self._stashed("reduce_scatter", shape)) is not None:
            return Pending(stashed, None)
        self._enter("reduce_scatter", (self.size - 1) * tensor.nbytes // self.size)
        out = out if out is not None else tensor.new_empty((moved.shape[0] // self.size, *moved.shape[1:]))
        work, finish = self._start_scatter(moved.contiguous(), out)
        pending = Pending(out if dim == 0 else out.movedim(0, dim), work, self.last_call, finish)
        return self._kept("reduce_scatter", pending)

    def _start_scatter(self, rows: Tensor, out: Tensor) -> tuple[dist.Work | None, Callable[[], object] | None]:
        """A summing reduce-scatter of `rows` into `out`, and what is left to do once it is through.

        gloo's own all-reduces a copy of all rows, twice the bytes. On the CPU, parts are exchanged and added here.
        """
        if rows.device.type != "cpu":
            return _reduce_scatter(out, rows, group=self.group, async_op=True), None
        received = torch.empty_like(rows)
        work = dist.all_to_all_single(received, rows, group=self.group, async_op=True)
        parts = received.chunk(self.size)

        def add() -> None:
            torch.add(parts[0], parts[1], out=out)
            for part in parts[2:]:
                out.add_(part)

        return work, add

    def all_to_all(
        self, tensor: Tensor, send_rows: Sequence[int] | None = None, receive_rows: Sequence[int] | None = None
    ) -> Tensor:
        """Exchanges rows (dim 0): equal parts, or `send_rows[i]` rows to rank i and `receive_rows[i]` from it."""
        return self.start_all_to_all(tensor, send_rows, receive_rows).wait()

    def start_all_to_all(
        self, tensor: Tensor, send_rows: Sequence[int] | None = None, receive_rows: Sequence[int] | None = None
    ) -> Pending:
        """Begins an exchange of rows; keep `tensor` unchanged until `wait`."""
        if self.size == 1:
            return Pending(tensor, None)
        rows = sum(receive_rows) if receive_rows is not None else tensor.shape[0]
        if (stashed := self._stashed("all_to_all", torch.Size((rows, *tensor.shape[1:])))) is not None:
            return Pending(stashed, None)
        out = tensor.new_empty((rows, *tensor.shape[1:]))
        row_bytes = tensor.nbytes // max(tensor.shape[0], 1)
        mine = send_rows[self.rank] if send_rows is not None else tensor.shape[0] // self.size
        self._enter("all_to_all", tensor.nbytes - mine * row_bytes)
        work = dist.all_to_all_single(
            out,
            tensor.contiguous(),
            list(receive_rows) if receive_rows is not None else None,
            list(send_rows) if send_rows is not None else None,
            group=self.group,
            async_op=True,
        )
        return self._kept("all_to_all", Pending(out, work, self.last_call))

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        """Copies the tensor of the rank at index `source` to all, in place; returns it."""
        if self.size == 1:
            return tensor
        self._enter("broadcast", tensor.nbytes if self.rank == source else 0)
        work = dist.broadcast(tensor, self.ranks[source], group=self.group, async_op=True)
        return Pending(tensor, work, self.last_call).wait()

    def gather_objects(self, value: Any) -> list[Any]:
        """The picklable `value` of every rank, in order, on every rank (for messages, not for tensors)."""
        if self.size == 1:
            return [value]
        self._enter("gather_objects", 0)
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        self.last_call.finished = True
        return values

    def barrier(self) -> None:
        """Returns when every rank of the axis has entered."""
        if self.size > 1:
            self.all_reduce(torch.zeros(1, device=self.device))

    def send(self, tensor: Tensor, peer: int) -> Pending:
        """Begins sending to the rank at index `peer`; keep `tensor` unchanged until `wait`."""
        assert tensor.is_contiguous(), "send needs a contiguous tensor"
        self._enter("send", tensor.nbytes)
        work = dist.isend(tensor.detach(), self.ranks[peer], group=self.group)
        return self._started(tensor, work)

    def receive(self, tensor: Tensor, peer: int) -> Pending:
        """Begins receiving into `tensor` from the rank at index `peer`."""
        self.last_call.enter(self.name, "receive", _call_site())
        work = dist.irecv(tensor, self.ranks[peer], group=self.group)
        return self._started(tensor, work)

    def start_exchange(
        self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]
    ) -> PendingExchange:
        """Begins messages (index of the peer, contiguous tensor) in both directions as one batch.

        It cannot deadlock if both ends of each message put it into batches of the same number, and messages between
        two ranks have the same order in the lists of both. Keep what is sent unchanged until `wait`.
        """
        if not sends and not receives:
            return PendingExchange()
        for _, tensor in sends:
            assert tensor.is_contiguous(), "send needs a contiguous tensor"
            self._enter("send", tensor.nbytes)
        self.last_call.enter(self.name, "exchange", _call_site())
        messages = [(dist.isend, tensor.detach(), peer) for peer, tensor in sends]
        messages += [(dist.irecv, tensor, peer) for peer, tensor in receives]
        works = dist.batch_isend_irecv(
            [dist.P2POp(kind, tensor, self.ranks[peer], self.group) for kind, tensor, peer in messages]
        )
        # NCCL joins a batch into one work
        started = [Pending(messages[0][1], work, self.last_call) for work in works]
        self.last_call.finished = True
        return PendingExchange(started, [tensor for _, tensor, _ in messages])

    def _started(self, tensor: Tensor, work: dist.Work | None) -> Pending:
        """A point-to-point operation, which cannot hang before its `wait`."""
        pending = Pending(tensor, work, self.last_call)
        self.last_call.finished = True
        return pending

    @property
    def device(self) -> torch.device:
        """Where the backend wants its tensors: the current CUDA device under NCCL, else the CPU."""
        if self.group is not None and "nccl" in dist.get_backend(self.group):
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("cpu")


def compact_ranks(ranks: Sequence[int]) -> str:
    """`0 2 4 6` as `0..6 by 2`, for tables."""
    if len(ranks) > 2:
        step = ranks[1] - ranks[0]
        if all(b - a == step for a, b in itertools.pairwise(ranks)):
            return f"{ranks[0]}..{ranks[-1]}" + (f" by {step}" if step > 1 else "")
    return " ".join(map(str, ranks))
