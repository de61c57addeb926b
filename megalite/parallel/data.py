"""Gradient buckets: flat parameter and gradient memory per unit, summed over data-parallel ranks during backward.

A unit is a layer, the embedding or the head. Its parameters become views of one flat buffer (per dtype, dense ones and
experts apart), its gradients accumulate in another, in float32 or better, and are summed by one all-reduce that starts
when the last contribution of the step has arrived: over dp x cp, or over edp for experts. The optimizer
works on the same buffers, segment by segment; sharding them (ZeRO, Rajbhandari et al., 2020, arXiv:1910.02054) changes
who keeps which slice, not the layout.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import pairwise

import torch
from torch import Tensor, nn

from megalite.mpu import Axis, ParallelState, Pending
from megalite.parallel.shard import Group, Shard, copies_axis, shard_of, storage_groups
from megalite.parallel.wgrad import WeightGradQueue

ALIGNMENT = 64
"""Elements: storage groups begin, and segments end, at multiples of it, so that slices of a segment are aligned too."""


@dataclass(frozen=True)
class Unit:
    """Parameters that are reduced together, in the order of the forward pass.

    tied: a copy lives in a unit of the same shape on the other end of the pipeline; gradients are summed over both.
    shared: other stages on this rank use the parameters as well, so that the unit is complete at `finish` only.
    """

    name: str
    parameters: Sequence[nn.Parameter]
    tied: bool = False
    shared: bool = False


@dataclass(frozen=True)
class Span:
    """Where a parameter lies in its segment: elements [start, start + parameter.numel())."""

    parameter: nn.Parameter
    start: int

    @property
    def end(self) -> int:
        """One past the last element."""
        return self.start + self.parameter.numel()

    def of(self, flat: Tensor) -> Tensor:
        """The parameter's part of a buffer laid out like the segment, in the parameter's shape."""
        return flat[self.start : self.end].view(self.parameter.shape)


@dataclass(frozen=True)
class Segment:
    """Flat memory that the optimizer updates in one call: a unit's parameters of one group and dtype, decaying or not.

    param and main_grad: [n], n a multiple of ALIGNMENT; what no span covers is padding, zero in both for ever.
    """

    unit: str
    group: Group
    param: Tensor
    main_grad: Tensor
    decay: bool
    spans: tuple[Span, ...]


@dataclass(frozen=True)
class _Bucket:
    """The memory of a unit in one dtype that is summed over one axis, its segments one after another."""

    group: Group
    param: Tensor
    grad: Tensor
    segments: tuple[Segment, ...]


@dataclass
class _UnitState:
    """A unit within a step: what it still waits for, then the reductions under way (None: not started)."""

    unit: Unit
    buckets: tuple[_Bucket, ...]
    learning: tuple[nn.Parameter, ...]
    missing: set[nn.Parameter] = field(default_factory=set)
    works: Counter[nn.Parameter] = field(default_factory=Counter)
    reducing: list[tuple[Tensor, Pending]] | None = None

    @property
    def is_complete(self) -> bool:
        return not self.unit.shared and not self.missing and not self.works.total()


class _Phase(Enum):
    OPEN = "accumulating"
    ARMED = "accumulating for the last time"
    REDUCED = "reduced"


class DataParallel:
    """The gradients of one model stage on this rank, and their sum over all ranks that hold the same parameters.

    Adopts the parameters of `units`: their data move into flat buffers (values kept) and each gets `main_grad`, a
    view of the gradient buffer in promote_types(dtype, float32). Parameters created in one storage (q, k, v) stay
    adjacent, in both. Frozen parameters (requires_grad false) stay where they are and have no gradient.

    Gradients must already carry their share of the loss scale: reductions are sums. `reduce_dtype` is what travels
    (None: the dtype of the main gradients); a narrower one halves the bytes and rounds each partial sum.

    A step: `zero_grad`, backward passes, `arm` before the last one, `finish`. A parameter has its last contribution
    when the autograd engine is done with it and no deferred work for it waits in `queue`; one that takes no part in
    the pass delays its unit, and those after it, to `complete` or `finish`, as zero (experts without a token take part,
    with zero, when they stay in the graph). Units start in reverse order on
    every rank, so that the all-reduces of all ranks pair up; shared ones must come first in `units`, and start last.

    A bidirectional pipeline holds each stage twice, on the two ranks of `mpu.replica`: `finish` sums over both, so
    that ranks must finish their stages in model order.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        mpu: ParallelState,
        *,
        queue: WeightGradQueue,
        reduce_dtype: torch.dtype | None = None,
    ):
        self.units, self.mpu, self.queue, self.reduce_dtype = tuple(units), mpu, queue, reduce_dtype
        _check_units(self.units)
        assert all(a.shared or not b.shared for a, b in pairwise(self.units)), "shared units must come first"
        self._states = [_adopt(unit) for unit in reversed(self.units)]
        self._state_of = {p: state for state in self._states for p in state.learning}
        self._next = 0
        self._phase = _Phase.OPEN
        self._partial = _partial_sums(self._states)
        for parameter in self._state_of:
            parameter.register_post_accumulate_grad_hook(self._after_autograd)
        queue.on_done = self._after_deferred

    @property
    def segments(self) -> list[Segment]:
        """What the optimizer works on, in the order of the units."""
        return [s for state in reversed(self._states) for bucket in state.buckets for s in bucket.segments]

    @property
    def parameters(self) -> list[nn.Parameter]:
        """All parameters, frozen ones too, each once."""
        return list(dict.fromkeys(p for unit in self.units for p in unit.parameters))

    def state_tensors(self) -> dict[str, list[tuple[Shard, Tensor]]]:
        """The parameters as a checkpoint keeps them: kind `parameter` -> (shard, this rank's part)."""
        return {"parameter": [(shard_of(p), p.data) for p in self.parameters]}

    def zero_grad(self) -> None:
        """Begins a step: all gradients are zero and accumulate again."""
        for state in self._states:
            for bucket in state.buckets:
                bucket.grad.zero_()
        self._phase, self._next = _Phase.OPEN, 0

    def arm(self) -> None:
        """Announces that the next backward pass, or the next drain of the queue, is the last of the step."""
        assert self._phase is _Phase.OPEN, f"arm() while gradients are {self._phase.value}"
        self._phase = _Phase.ARMED
        waiting = Counter(self.queue.waiting_parameters())
        for state in self._states:
            # With deferred work waiting, the last pass is its drain: autograd is already done with every parameter.
            state.missing = set() if waiting else set(state.learning)
            state.works = Counter({p: waiting[p] for p in state.learning if waiting[p]})
        self._start_complete_units()

    def complete(self) -> None:
        """Starts what has not started: the pass that `arm` announced is over, and absent contributions are zero.

        `finish` does it too. With several stages on a rank, calling it right after the pass makes the order of
        all-reduces independent of which parameters took part on which rank.
        """
        while self._next < len(self._states) and not self._states[self._next].unit.shared:
            self._start(self._states[self._next])

    def finish(self) -> None:
        """Waits until every gradient is the sum over all ranks that contribute to it."""
        assert self._phase is not _Phase.REDUCED, "finish() twice in a step would sum gradients twice"
        assert self.queue.num_waiting == 0, f"finish() with {self.queue.num_waiting} weight gradients not yet computed"
        while self._next < len(self._states):
            self._start(self._states[self._next])
        for state in self._states:
            self._wait(state)
        for axis, grads in self._partial:
            _sum_over(axis, grads)
        for state in self._states:
            if state.unit.tied:
                for bucket in state.buckets:
                    self.mpu.embd.all_reduce(bucket.grad)
        mirrored = [self.mpu.replica.start_all_reduce(b.grad) for state in self._states for b in state.buckets]
        for pending in mirrored:
            pending.wait()
        self._phase = _Phase.REDUCED

    def _after_autograd(self, parameter: nn.Parameter) -> None:
        """Called when the engine is done with `parameter`; a layer that adds to main_grad itself leaves no grad."""
        state = self._check_open(parameter)
        if parameter.grad is not None:
            main_grad(parameter).add_(parameter.grad)
            parameter.grad = None
        if self._phase is _Phase.ARMED:
            state.missing.discard(parameter)
            self._start_complete_units()

    def _after_deferred(self, parameters: Sequence[nn.Parameter]) -> None:
        """Called when a deferred weight gradient of `parameters` has been added."""
        for parameter in parameters:
            if parameter in self._state_of:
                state = self._check_open(parameter)
                if self._phase is _Phase.ARMED:
                    state.works[parameter] -= 1
        if self._phase is _Phase.ARMED:
            self._start_complete_units()

    def _check_open(self, parameter: nn.Parameter) -> _UnitState:
        state = self._state_of[parameter]
        if self._phase is _Phase.REDUCED or state.reducing is not None:
            raise RuntimeError(
                f"a gradient of {shard_of(parameter).name} arrived after its bucket was reduced;"
                " call zero_grad() before a step, and arm() only before the step's last pass"
            )
        return state

    def _start_complete_units(self) -> None:
        while self._next < len(self._states) and self._states[self._next].is_complete:
            self._start(self._states[self._next])

    def _start(self, state: _UnitState) -> None:
        self._next += 1
        state.reducing = []
        for bucket in state.buckets:
            axis = copies_axis(bucket.group, self.mpu)
            if axis.size == 1:
                continue
            # A narrower dtype travels as a copy; the main gradient takes the sum back.
            wire = bucket.grad.to(self.reduce_dtype) if self.reduce_dtype is not None else bucket.grad
            state.reducing.append((bucket.grad, axis.start_all_reduce(wire)))

    def _wait(self, state: _UnitState) -> None:
        for grad, pending in state.reducing or ():
            total = pending.wait()
            if total is not grad:
                grad.copy_(total)
        state.reducing = None


def main_grad(parameter: nn.Parameter) -> Tensor:
    """The accumulated gradient of an adopted parameter, in its shape."""
    grad = getattr(parameter, "main_grad", None)
    assert isinstance(grad, Tensor), f"{shard_of(parameter).name} has no main_grad: it is frozen or was not adopted"
    return grad


def _check_units(units: Sequence[Unit]) -> None:
    seen: dict[nn.Parameter, str] = {}
    for unit in units:
        for parameter in unit.parameters:
            shard = shard_of(parameter)
            other = seen.setdefault(parameter, unit.name)
            assert other == unit.name, f"{shard.name} is in two units: {other} and {unit.name}"
            assert not parameter.is_meta, f"{shard.name} has no memory yet; materialize the module first"
            assert unit.tied or shard.tied_to in (None, shard.name), (
                f"{shard.name} is a tied copy: unit {unit.name} must be tied"
            )


def _adopt(unit: Unit) -> _UnitState:
    """Moves the unit's parameters into flat buffers, one pair for each group and dtype."""
    runs = _adjacent_runs(unit.parameters)
    learning = [run for run in runs if run[0].requires_grad]
    by_bucket: dict[tuple[Group, torch.dtype], list[list[nn.Parameter]]] = {}
    for run in learning:
        by_bucket.setdefault((shard_of(run[0]).group, run[0].dtype), []).append(run)
    buckets = tuple(_bucket(unit.name, group, of_bucket) for (group, _), of_bucket in by_bucket.items())
    for run in runs:
        if not run[0].requires_grad and run[0].untyped_storage().nbytes() > run[0].nbytes:
            for parameter in run:
                parameter.data = parameter.data.clone()  # else it would keep its old neighbours' memory alive
    return _UnitState(unit, buckets, tuple(p for run in learning for p in run))


def _adjacent_runs(parameters: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Runs of parameters that lie side by side in one storage and are treated alike, in order of first appearance."""
    found: list[list[nn.Parameter]] = []
    for stored_together in storage_groups(list(dict.fromkeys(parameters))):
        runs: dict[tuple[bool, bool, Group], list[list[nn.Parameter]]] = {}
        for parameter in stored_together:
            shard = shard_of(parameter)
            of_kind = runs.setdefault((parameter.requires_grad, shard.decay, shard.group), [])
            if of_kind and _touch(of_kind[-1][-1], parameter):
                of_kind[-1].append(parameter)
            else:
                of_kind.append([parameter])
        found += [run for of_kind in runs.values() for run in of_kind]
    return found


def _touch(first: Tensor, second: Tensor) -> bool:
    """Whether `second` begins where `first` ends."""
    return first.dtype == second.dtype and first.data_ptr() + first.nbytes == second.data_ptr()


def _bucket(unit: str, group: Group, runs: Sequence[list[nn.Parameter]]) -> _Bucket:
    """Buffers for `runs`: decaying parameters first, then the others, each segment padded to ALIGNMENT."""
    kinds = [(decay, [run for run in runs if shard_of(run[0]).decay == decay]) for decay in (True, False)]
    plans = [(decay, *_place(of_kind)) for decay, of_kind in kinds if of_kind]
    dtype, device = runs[0][0].dtype, runs[0][0].device
    size = sum(length for _, _, length in plans)
    param = torch.zeros(size, dtype=dtype, device=device)
    grad = torch.zeros(size, dtype=torch.promote_types(dtype, torch.float32), device=device)
    segments, begin = [], 0
    for decay, spans, length in plans:
        end = begin + length
        segment = Segment(unit, group, param[begin:end], grad[begin:end], decay, spans)
        for span in spans:
            _move(span, segment)
        segments.append(segment)
        begin = end
    return _Bucket(group, param, grad, tuple(segments))


def _place(runs: Sequence[list[nn.Parameter]]) -> tuple[tuple[Span, ...], int]:
    """Spans of the parameters, run by run, and the padded length."""
    spans, offset = [], 0
    for run in runs:
        for parameter in run:
            spans.append(Span(parameter, offset))
            offset += parameter.numel()
        offset = -(-offset // ALIGNMENT) * ALIGNMENT
    return tuple(spans), offset


def _move(span: Span, segment: Segment) -> None:
    parameter = span.parameter
    place = span.of(segment.param)
    place.copy_(parameter.data)
    parameter.data = place
    parameter.grad = None
    parameter.main_grad = span.of(segment.main_grad)  # pyright: ignore[reportAttributeAccessIssue]


def _partial_sums(states: Sequence[_UnitState]) -> list[tuple[Axis, list[Tensor]]]:
    """The main gradients that are partial sums over an axis of several ranks, by axis and dtype."""
    found: dict[tuple[tuple[int, ...], torch.dtype], tuple[Axis, list[Tensor]]] = {}
    for state in states:
        for parameter in state.learning:
            grad = main_grad(parameter)
            for axis in shard_of(parameter).partial:
                if axis.size > 1:
                    found.setdefault((axis.ranks, grad.dtype), (axis, []))[1].append(grad)
    return list(found.values())


def _sum_over(axis: Axis, grads: Sequence[Tensor]) -> None:
    """Sums many small gradients over `axis` in one message."""
    flat = torch.cat([grad.reshape(-1) for grad in grads])
    axis.all_reduce(flat)
    for grad, total in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
        grad.copy_(total.view_as(grad))
