"""Flat parameter and gradient memory of a unit, whole or divided among the ranks that hold the same parameters.

A unit is a layer, the embedding or the head. Its parameters become views of flat buckets, its gradients accumulate in
others of the same layout, in float32 or better. ZeRO (Rajbhandari et al., 2020, arXiv:1910.02054) divides a bucket into
equal slices, one for each rank; `Bucket.zero` says what is kept as a slice only between uses:

    0  nothing                        gradients are all-reduced
    1  (optimizer state)              gradients are reduce-scattered, updated parameters gathered
    2  and gradients                  whole ones exist from a unit's first contribution to its reduction
    3  and parameters                 whole ones exist while the unit computes

The optimizer always works on `Bucket.segments`, this rank's slice, so that all stages do the same arithmetic. With
`parallel.zero_shard_size` the slices are those of a block of ranks, and what a rank keeps has replicas in other blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from megalite.axis import Axis, Pending
from megalite.mpu import ParallelState
from megalite.parallel.shard import (
    Group,
    Shard,
    give_memory,
    replicas_axis,
    set_shard,
    shard_of,
    slices_axis,
    storage_groups,
)

ALIGNMENT = 64
"""Elements: storage groups begin, and segments and slices end, at multiples of it."""


@dataclass(frozen=True)
class Unit:
    """Parameters that are reduced together, in the order of the forward pass.

    tied: a copy lives in a unit of the same shape on the other end of the pipeline; gradients are summed over both.
    shared: other stages on this rank use the parameters as well, so that the unit is complete at `finish` only.
    modules: what uses the parameters when it is called, and until the next module of a unit is; without any, the
    parameters are always there.
    """

    name: str
    parameters: Sequence[nn.Parameter]
    tied: bool = False
    shared: bool = False
    modules: Sequence[nn.Module] = ()


@dataclass(frozen=True)
class Fresh:
    """How the parameters of a model on the meta device come into being, a unit at a time: whole, then divided.

    fill: gives the parameters of a unit, which have memory then, their values; of one whose shard has `kept`, these
    elements suffice.
    """

    device: torch.device
    dtype: torch.dtype
    fill: Callable[[Unit], None]


@dataclass(frozen=True)
class Span:
    """Where a parameter, or elements `run` of it, lies in flat memory: in elements [start, end)."""

    parameter: nn.Parameter
    start: int
    run: tuple[int, int] | None = None

    @property
    def end(self) -> int:
        """One past the last element."""
        begin, end = self.run if self.run is not None else (0, self.parameter.numel())
        return self.start + end - begin

    @property
    def shard(self) -> Shard:
        """The place of these elements in the global model."""
        return replace(shard_of(self.parameter), run=self.run)

    def of(self, flat: Tensor) -> Tensor:
        """This part of a buffer laid out alike: in the parameter's shape, or flat when it is a run."""
        part = flat[self.start : self.end]
        return part if self.run is not None else part.view(self.parameter.shape)

    def within(self, begin: int, end: int) -> Span | None:
        """What of a whole parameter lies in elements [begin, end), as a run, counted from there."""
        low, high = max(self.start, begin), min(self.end, end)
        return Span(self.parameter, low - begin, (low - self.start, high - self.start)) if low < high else None


@dataclass(frozen=True)
class Segment:
    """Flat memory that the optimizer updates in one call: what this rank keeps of a unit's parameters of one kind.

    param and main_grad: [n], n a multiple of ALIGNMENT; what no span covers is padding, zero in both for ever.
    """

    unit: str
    group: Group
    param: Tensor
    main_grad: Tensor
    decay: bool
    spans: tuple[Span, ...]


@dataclass(frozen=True)
class _Kind:
    """What parameters of one bucket have in common.

    partial: over which ranks gradients of it are partial sums. These are completed on slices, so that the ranks must
    have the same layout; a bucket of their own ensures it. small: stays gathered under ZeRO-3.
    """

    group: Group
    dtype: torch.dtype
    partial: tuple[tuple[int, ...], ...]
    small: bool


class Bucket:
    """The memory of a unit's parameters of one kind, divided over `axis` as far as `zero` says.

    param, grad: whole, flat; without memory while they are not in use. param_shard, grad_shard: what is always there,
    the same on all of `replicas`. Parameters are whole until `divide`.
    """

    def __init__(
        self,
        unit: str,
        kind: _Kind,
        runs: Sequence[list[nn.Parameter]],
        device: torch.device,
        *,
        axis: Axis,
        replicas: Axis,
        zero: int,
    ):
        self.unit = unit
        self.group: Group = kind.group
        self.axis, self.replicas, self.zero = axis, replicas, zero
        self._regions = _regions(runs)
        slices = axis.size if zero else 1
        size = _round_up(sum(length for _, _, length in self._regions), ALIGNMENT * slices)
        begin = axis.rank * (size // slices) if zero else 0
        self._own = slice(begin, begin + size // slices)
        self.spans = tuple(self._places())
        wide = torch.promote_types(kind.dtype, torch.float32)
        self.grad = torch.zeros(size, dtype=wide, device=device)
        self.grad_shard = self.grad[self._own]
        for span in self.spans:
            span.parameter.main_grad = span.of(self.grad)  # pyright: ignore[reportAttributeAccessIssue]
        if zero >= 2:
            _free(self.grad)
            self.grad_shard = torch.zeros_like(self.grad_shard)
        self.param = torch.zeros(size, dtype=kind.dtype, device=device)
        self.param_shard = self.param[self._own]
        for span in self.spans:
            _move(span, self.param)
        self.segments: tuple[Segment, ...] = ()
        self._reducing: tuple[Pending, Tensor] | None = None
        self._gathering: Pending | None = None

    def _places(self) -> Iterator[Span]:
        """Where the parameters lie."""
        begin = 0
        for _, spans, length in self._regions:
            yield from (replace(span, start=begin + span.start) for span in spans)
            begin += length

    def mark_kept(self) -> None:
        """Tells who gives initial values which of them count."""
        for span in self.spans if self.zero >= 3 else ():
            kept = span.within(self._own.start, self._own.stop)
            run = kept.run if kept is not None else (0, 0)
            set_shard(span.parameter, replace(shard_of(span.parameter), kept=run))

    def divide(self) -> None:
        """Parameters have their values: from now on there is as much of them as `zero` says."""
        if self.zero >= 3:
            self.param_shard = self.param_shard.clone()
            _free(self.param)
            for span in self.spans:
                set_shard(span.parameter, replace(shard_of(span.parameter), kept=None))
        self.segments = tuple(self._segments())

    def _segments(self) -> list[Segment]:
        """What of each region is in this rank's slice."""
        own, divided = self._own, self.zero > 0
        found, at = [], 0
        for decay, spans, length in self._regions:
            begin, end = max(at, own.start), min(at + length, own.stop)
            if begin < end:
                place = slice(begin - own.start, end - own.start)
                kept = spans if not divided else (span.within(begin - at, end - at) for span in spans)
                mine = tuple(span for span in kept if span is not None)
                segment = Segment(self.unit, self.group, self.param_shard[place], self.grad_shard[place], decay, mine)
                found.append(segment)
            at += length
        return found

    def zero_grad(self) -> None:
        """All gradients are zero."""
        assert not self.grad_is_open or self.zero < 2, "gradients were neither reduced nor wanted"
        (self.grad_shard if self.zero >= 2 else self.grad).zero_()

    @property
    def grad_is_open(self) -> bool:
        """Whether whole gradients have memory."""
        return _has_memory(self.grad)

    def open_grad(self) -> None:
        """Gives whole gradients memory, zeros, if they have none."""
        if self._reducing is not None:
            self.finish_reduction()
        if not self.grad_is_open:
            _allocate(self.grad)
            self.grad.zero_()

    def start_reduction(self, wire_dtype: torch.dtype | None) -> None:
        """Begins to sum the gradients over the axis, or over all copies of what is not divided; a narrower dtype
        travels as a copy."""
        if self.zero == 0:
            self.start_replica_sum(wire_dtype)
            return
        if self.zero >= 2:
            self.open_grad()
        wire = self.grad.to(wire_dtype) if wire_dtype is not None else self.grad
        self._reducing = (self.axis.start_reduce_scatter(wire, out=wire[self._own]), wire)

    def start_replica_sum(self, wire_dtype: torch.dtype | None) -> None:
        """At the end of a step, when the reductions are finished: begins to sum what is kept over the replicas."""
        if self.replicas.size > 1:
            wire = self.grad_shard.to(wire_dtype) if wire_dtype is not None else self.grad_shard
            self._reducing = (self.replicas.start_all_reduce(wire), wire)

    def finish_replica_sum(self) -> None:
        """Waits for that sum."""
        if self._reducing is not None:
            self._store(self._reducing[0].wait())
            self._reducing = None

    def finish_reduction(self) -> None:
        """Waits for the sum, which is then in, or added to, `grad_shard`; frees whole gradients that are divided."""
        if self._reducing is None:
            return
        total = self._reducing[0].wait()
        self._reducing = None
        if self.zero >= 2:
            self.grad_shard.add_(total)
            _free(self.grad)
        else:
            self._store(total)

    def _store(self, total: Tensor) -> None:
        if total.data_ptr() != self.grad_shard.data_ptr():
            self.grad_shard.copy_(total)

    def publish(self) -> None:
        """After an update: begins to bring whole parameters up to date, where they are kept."""
        if self.zero in (1, 2):
            self._gathering = self.axis.start_all_gather(self.param_shard, out=self.param)

    def start_gather(self) -> None:
        """Gives whole parameters memory and begins to fill it, unless that was done."""
        if self.zero >= 3 and not _has_memory(self.param):
            _allocate(self.param)
            self._gathering = self.axis.start_all_gather(self.param_shard, out=self.param)

    def finish_gather(self) -> None:
        """Waits until whole parameters are there."""
        if self._gathering is not None:
            self._gathering.wait()
            self._gathering = None

    def release(self) -> None:
        """Frees whole parameters that are divided."""
        if self.zero >= 3 and _has_memory(self.param):
            self.finish_gather()
            _free(self.param)


_Region = tuple[bool, tuple[Span, ...], int]
"""Of a bucket: whether it decays, where its parameters lie, and its length."""


def main_grad(parameter: nn.Parameter) -> Tensor:
    """The accumulated gradient of an adopted parameter, in its shape (under ZeRO, before the reduction only)."""
    grad = getattr(parameter, "main_grad", None)
    assert isinstance(grad, Tensor), f"{shard_of(parameter).name} has no main_grad: it is frozen or was not adopted"
    return grad


def make_buckets(unit: Unit, mpu: ParallelState, fresh: Fresh | None = None) -> tuple[Bucket, ...]:
    """Moves the unit's learning parameters into buckets, one for each kind; frozen ones stay as they are.

    fresh: for parameters without memory. No bucket is divided yet.
    """
    by_kind: dict[_Kind, list[list[nn.Parameter]]] = {}
    for stored_together in storage_groups(list(dict.fromkeys(unit.parameters))):
        partial, small = _partial_ranks(stored_together, mpu), _stays(stored_together, mpu)
        for run in _runs(stored_together):
            if run[0].requires_grad:
                dtype = fresh.dtype if fresh is not None else run[0].dtype
                kind = _Kind(shard_of(run[0]).group, dtype, partial, small)
                by_kind.setdefault(kind, []).append(run)
            else:
                _settle(run, fresh)
    return tuple(
        Bucket(
            unit.name,
            kind,
            runs,
            fresh.device if fresh is not None else runs[0][0].device,
            axis=axis,
            replicas=replicas_axis(kind.group, mpu),
            zero=_stage(unit, kind, axis, mpu),
        )
        for kind, runs in by_kind.items()
        for axis in [slices_axis(kind.group, mpu)]
    )


def _settle(frozen: Sequence[nn.Parameter], fresh: Fresh | None) -> None:
    """Frozen neighbours have memory of their own."""
    if fresh is not None:
        size = sum(parameter.numel() for parameter in frozen)
        give_memory(frozen, torch.zeros(size, dtype=fresh.dtype, device=fresh.device))
    elif frozen[0].untyped_storage().nbytes() > frozen[0].nbytes:
        for parameter in frozen:
            parameter.data = parameter.data.clone()  # else it would keep its old neighbours' memory alive


def _stage(unit: Unit, kind: _Kind, axis: Axis, mpu: ParallelState) -> int:
    """What of a bucket is divided: less than asked for where it has one owner, or uses that nothing announces."""
    if axis.size == 1:
        return 0
    if unit.shared:
        return min(mpu.config.zero, 1)
    return min(mpu.config.zero, 2) if kind.small or not unit.modules else mpu.config.zero


def _partial_ranks(parameters: Sequence[nn.Parameter], mpu: ParallelState) -> tuple[tuple[int, ...], ...]:
    if mpu.config.zero == 0:
        return ()
    return tuple(sorted({axis.ranks for p in parameters for axis in shard_of(p).partial if axis.size > 1}))


def _stays(parameters: Sequence[nn.Parameter], mpu: ParallelState) -> bool:
    return mpu.config.zero == 3 and max(p.numel() for p in parameters) <= mpu.config.zero_persistent


def _runs(stored_together: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Runs of parameters that lie side by side in one storage and are treated alike, in order of first appearance."""
    runs: dict[tuple[bool, bool, Group], list[list[nn.Parameter]]] = {}
    for parameter in stored_together:
        shard = shard_of(parameter)
        of_kind = runs.setdefault((parameter.requires_grad, shard.decay, shard.group), [])
        if of_kind and _touch(of_kind[-1][-1], parameter):
            of_kind[-1].append(parameter)
        else:
            of_kind.append([parameter])
    return [run for of_kind in runs.values() for run in of_kind]


def _touch(first: Tensor, second: Tensor) -> bool:
    """Whether `second`, in the same storage, begins where `first` ends."""
    return first.dtype == second.dtype and first.storage_offset() + first.numel() == second.storage_offset()


def _regions(runs: Sequence[list[nn.Parameter]]) -> list[_Region]:
    """Decaying parameters first, then the others, each padded to ALIGNMENT."""
    kinds = [(decay, [run for run in runs if shard_of(run[0]).decay == decay]) for decay in (True, False)]
    return [(decay, *_place(of_kind)) for decay, of_kind in kinds if of_kind]


def _place(runs: Sequence[list[nn.Parameter]]) -> tuple[tuple[Span, ...], int]:
    """Spans of the parameters, run by run, and the padded length."""
    spans, offset = [], 0
    for run in runs:
        for parameter in run:
            spans.append(Span(parameter, offset))
            offset += parameter.numel()
        offset = _round_up(offset, ALIGNMENT)
    return tuple(spans), offset


def _move(span: Span, flat: Tensor) -> None:
    """The parameter lives in its place in `flat`."""
    parameter, place = span.parameter, span.of(flat)
    if parameter.is_meta:
        give_memory([parameter], place.view(-1))
    else:
        place.copy_(parameter.data)
        parameter.data = place
    parameter.grad = None


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _has_memory(flat: Tensor) -> bool:
    return flat.untyped_storage().nbytes() > 0


def _allocate(flat: Tensor) -> None:
    """Gives `flat`, and all views of it, memory again; what is in it is undefined."""
    flat.untyped_storage().resize_(flat.numel() * flat.element_size())


def _free(flat: Tensor) -> None:
    """Takes the memory of `flat` and of all views of it, which stay what they are: nothing may touch them meanwhile."""
    flat.untyped_storage().resize_(0)
