"""Gradients of one model stage, summed over data-parallel ranks during backward; parameters gathered where divided.

The memory is that of `megalite.parallel.buckets`; this module knows when: which contributions a unit still waits for,
in which order reductions start, and what must be done before the optimizer looks at the result.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from megalite.axis import Axis
from megalite.mpu import ParallelState
from megalite.parallel.buckets import ALIGNMENT, Bucket, Fresh, Segment, Span, Unit, main_grad, make_buckets
from megalite.parallel.shard import Shard, shard_of
from megalite.parallel.wgrad import WeightGradQueue
from megalite.parallel.zero import Gatherer

__all__ = ["ALIGNMENT", "Bucket", "DataParallel", "Fresh", "Segment", "Span", "Unit", "main_grad"]

_IN_FLIGHT = 2
"""Units whose reduction may be under way at a time: enough to keep the network busy. Each takes memory under ZeRO: its
whole gradients (stages 2 and 3), and where a reduction receives beside them."""


@dataclass
class _UnitState:
    """A unit within a step: what it still waits for, and whether its reduction has started (in this pass)."""

    unit: Unit
    buckets: tuple[Bucket, ...]
    learning: tuple[nn.Parameter, ...]
    missing: set[nn.Parameter] = field(default_factory=set)
    works: Counter[nn.Parameter] = field(default_factory=Counter)
    started: bool = False

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
    adjacent, in both. Frozen parameters (requires_grad false) stay where they are, whole, and have no gradient; a tied
    weight that is frozen at one end of the pipeline only is a ValueError.
    `mpu.config.zero` says what is divided among the ranks (see `megalite.parallel.buckets`). Units on the meta device
    come into being here, one by one, so that no more than one is whole where parameters are divided: `fresh` says how.

    Gradients must already carry their share of the loss scale: reductions are sums. `reduce_dtype` is what travels
    (None: the dtype of the main gradients); a narrower one halves the bytes and rounds each partial sum.

    A step: `zero_grad`, backward passes, `arm` before the last one, `finish`; with `reduces_each_pass` (ZeRO 2 and 3)
    `arm` and `complete` around each. A parameter has its last contribution of a pass
    when the autograd engine is done with it and no deferred work for it waits in `queue`; one that takes no part in
    the pass delays its unit, and those after it, to `complete` or `finish`, as zero (experts without a token take part,
    with zero, when they stay in the graph). Units start in reverse order on
    every rank, so that the reductions of all ranks pair up; shared ones must come first in `units`, and start last.

    A bidirectional pipeline holds each stage twice, on the two ranks of `mpu.replica`: with `copied`, `finish` sums
    over both, so that ranks must finish their stages in model order.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        mpu: ParallelState,
        *,
        queue: WeightGradQueue,
        reduce_dtype: torch.dtype | None = None,
        copied: bool = False,
        fresh: Fresh | None = None,
    ):
        self._replica = mpu.replica if copied else None
        self.units, self.mpu, self.queue, self.reduce_dtype = tuple(units), mpu, queue, reduce_dtype
        self.reduces_each_pass = mpu.config.zero >= 2
        _check_units(self.units, has_memory=fresh is None)
        _check_tied(self.units, mpu.embd)
        assert all(a.shared or not b.shared for a, b in pairwise(self.units)), "shared units must come first"
        self._states = [_adopt(unit, mpu, fresh) for unit in reversed(self.units)]
        self._state_of = {p: state for state in self._states for p in state.learning}
        self._bucket_of = {span.parameter: b for b in self.buckets for span in b.spans}
        self._flying: deque[_UnitState] = deque()
        self._next = 0
        self._phase = _Phase.OPEN
        self._is_drain = False
        self._partial = _partial_sums(self.buckets)
        self._gatherer = Gatherer(
            [(state.unit, state.buckets) for state in reversed(self._states)], before_backward=self._start_before
        )
        if self.reduces_each_pass:
            self._land_in_forward()
        for parameter in self._state_of:
            parameter.register_post_accumulate_grad_hook(self._after_autograd)
        queue.on_start, queue.on_done = self._before_work, self._after_deferred

    @property
    def buckets(self) -> list[Bucket]:
        """The flat memory, in the order of the units."""
        return [bucket for state in reversed(self._states) for bucket in state.buckets]

    @property
    def segments(self) -> list[Segment]:
        """What the optimizer works on, in the order of the units."""
        return [segment for bucket in self.buckets for segment in bucket.segments]

    @property
    def parameters(self) -> list[nn.Parameter]:
        """All parameters, frozen ones too, each once."""
        return list(dict.fromkeys(p for unit in self.units for p in unit.parameters))

    def gradients(self) -> Iterator[tuple[Shard, Tensor]]:
        """(place, value) of the summed gradients that this rank keeps, after `finish`."""
        for segment in self.segments:
            for span in segment.spans:
                yield span.shard, span.of(segment.main_grad)

    def weights(self) -> Iterator[tuple[Shard, Tensor]]:
        """(place, value) of the parameters that this rank keeps between uses: whole, or its slices."""
        for parameter in self.parameters:
            bucket = self._bucket_of.get(parameter)
            if bucket is None or bucket.zero < 3:
                yield shard_of(parameter), parameter.data
                continue
            for segment in bucket.segments:
                for span in segment.spans:
                    if span.parameter is parameter:
                        yield span.shard, span.of(segment.param)

    def state_tensors(self) -> dict[str, list[tuple[Shard, Tensor]]]:
        """The parameters as a checkpoint keeps them: kind `parameter` -> (shard, this rank's part)."""
        return {"parameter": list(self.weights())}

    def zero_grad(self) -> None:
        """Begins a step: all gradients are zero and accumulate again."""
        for state in self._states:
            state.started = False
            for bucket in state.buckets:
                bucket.zero_grad()
        self._phase, self._next = _Phase.OPEN, 0

    def arm(self, microbatch: int | None = None) -> None:
        """Announces that the next backward pass, or drain of the queue, is the last (of the step, or before a
        reduction); `microbatch`: whose pass, where the queue keeps work of others too."""
        assert self._phase is _Phase.OPEN, f"arm() while gradients are {self._phase.value}"
        self._phase, self._next = _Phase.ARMED, 0
        waiting = Counter(self.queue.waiting_parameters(microbatch))
        for state in self._states:
            state.started = False
            # With deferred work waiting, the last pass is its drain: autograd is already done with every parameter.
            state.missing = set() if waiting else set(state.learning)
            state.works = Counter({p: waiting[p] for p in state.learning if waiting[p]})
        self._is_drain = bool(waiting)
        self._start_complete_units()

    def complete(self) -> None:
        """Starts what has not started: the pass that `arm` announced is over, and absent contributions are zero.

        `finish` does it too. With several stages on a rank, calling it right after the pass makes the order of
        reductions independent of which parameters took part on which rank.
        """
        while self._next < len(self._states) and not self._states[self._next].unit.shared:
            self._start(self._states[self._next])
        if self.reduces_each_pass:
            self._phase = _Phase.OPEN

    def leave(self) -> None:
        """A forward or backward pass of the stage is over: parameters that are divided go."""
        self._gatherer.leave()

    def finish(self) -> None:
        """Waits until every gradient is the sum over all ranks that contribute to it."""
        assert self._phase is not _Phase.REDUCED, "finish() twice in a step would sum gradients twice"
        assert self.queue.num_waiting == 0, f"finish() with {self.queue.num_waiting} weight gradients not yet computed"
        while self._next < len(self._states):
            self._start(self._states[self._next])
        for state in self._states:
            for bucket in state.buckets:
                bucket.finish_reduction()
                assert bucket.zero < 2 or not bucket.grad_is_open, f"{state.unit.name}: a pass was not announced"
        self._flying.clear()
        self._sum_replicas()
        for axis, grads in self._partial:
            _sum_over(axis, grads)
        for state in self._states:
            if state.unit.tied:
                for bucket in state.buckets:
                    self.mpu.embd.all_reduce(bucket.grad_shard)
        if self._replica is not None:
            grads = [bucket.grad_shard for state in self._states for bucket in state.buckets]
            for pending in [self._replica.start_all_reduce(grad) for grad in grads]:
                pending.wait()
        self._phase = _Phase.REDUCED

    def _sum_replicas(self) -> None:
        """What other blocks of ranks have too: slices, and what is whole where others are reduced after each pass."""
        buckets = [b for state in self._states for b in state.buckets if b.zero or self.reduces_each_pass]
        for bucket in buckets:
            bucket.start_replica_sum(self.reduce_dtype)
        for bucket in buckets:
            bucket.finish_replica_sum()

    def _before_work(self, parameters: Sequence[nn.Parameter]) -> None:
        """Called before work adds to the main gradients of `parameters`."""
        for parameter in parameters:
            if parameter in self._state_of:
                self._check_open(parameter)
                self._bucket_of[parameter].open_grad()

    def _after_autograd(self, parameter: nn.Parameter) -> None:
        """Called when the engine is done with `parameter`; a layer that adds to main_grad itself leaves no grad."""
        self._check_open(parameter)
        if (grad := parameter.grad) is not None:
            parameter.grad = None

            def add() -> None:
                main_grad(parameter).add_(grad)

            if self._bucket_of[parameter].zero >= 2:
                self.queue.put(add, [parameter])  # deferred like the others: whole gradients exist during W only
            else:
                add()
        if self._phase is _Phase.ARMED:
            self._state_of[parameter].missing.discard(parameter)
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
        if self._phase is _Phase.REDUCED or (self._phase is _Phase.ARMED and state.started):
            raise RuntimeError(
                f"a gradient of {shard_of(parameter).name} arrived after its bucket was reduced;"
                " call zero_grad() before a step, and arm() only before the step's last pass"
            )
        return state

    def _start_complete_units(self) -> None:
        """Starts the units that wait for nothing, in order.

        A backward pass that gathers parameters starts them in `_start_before` instead: reductions and gathers share
        the ranks, and must follow one another in one order, whichever parameters took part where.
        """
        if self._gatherer.gathers and not self._is_drain:
            return
        while self._next < len(self._states) and self._states[self._next].is_complete:
            self._start(self._states[self._next])

    def _start_before(self, units: Sequence[Unit]) -> None:
        """Called when backward is about to enter `units`: those after them in the model are done."""
        if self._phase is _Phase.ARMED and not self._is_drain:
            while self._next < len(self._states) and self._states[self._next].unit not in units:
                if self._states[self._next].unit.shared:
                    return
                self._start(self._states[self._next])

    def _start(self, state: _UnitState) -> None:
        self._next += 1
        state.started = True
        if self.mpu.config.zero:
            self._land(_IN_FLIGHT - 1)
            self._flying.append(state)
        for bucket in state.buckets:
            if bucket.zero or not self.reduces_each_pass:
                bucket.start_reduction(self.reduce_dtype)

    def _land(self, left: int) -> None:
        """Waits for the oldest reductions, but for those of `left` units."""
        while len(self._flying) > left:
            for bucket in self._flying.popleft().buckets:
                bucket.finish_reduction()

    def _land_in_forward(self) -> None:
        """Lets the last reductions of a pass end behind the first units of the next forward, not later: they would
        take memory while activations take most."""
        modules = list(dict.fromkeys(module for unit in self.units for module in unit.modules))

        def before_forward(module: nn.Module, args: Any) -> None:
            if self._phase is _Phase.OPEN:  # not in a recompute
                self._land(0)

        for module in modules[_IN_FLIGHT:][:1] or modules[-1:]:
            module.register_forward_pre_hook(before_forward)


def _check_units(units: Sequence[Unit], *, has_memory: bool) -> None:
    seen: dict[nn.Parameter, str] = {}
    for unit in units:
        for parameter in unit.parameters:
            shard = shard_of(parameter)
            other = seen.setdefault(parameter, unit.name)
            assert other == unit.name, f"{shard.name} is in two units: {other} and {unit.name}"
            assert parameter.is_meta != has_memory, f"{shard.name} must have memory, or be on meta with all others"
            assert unit.tied or shard.tied_to in (None, shard.name), (
                f"{shard.name} is a tied copy: unit {unit.name} must be tied"
            )


def _check_tied(units: Sequence[Unit], ends: Axis) -> None:
    """A tied weight learns at both ends of the pipeline or at none: its gradient is a sum over both."""
    tied = [p for unit in units if unit.tied for p in unit.parameters]
    if not tied:
        return
    here = {shard_of(p).name: "learns" if p.requires_grad else "is frozen" for p in tied}
    first, *others = ends.gather_objects(here)
    if any(list(other.values()) != list(first.values()) for other in others):
        states = ", ".join(f"{name} {state}" for end in (first, *others) for name, state in end.items())
        raise ValueError(
            f"a weight is tied over pipeline stages, but {states}; freeze it on both stages, or on neither"
        )


def _adopt(unit: Unit, mpu: ParallelState, fresh: Fresh | None) -> _UnitState:
    """Moves the unit's parameters into flat buffers."""
    buckets = make_buckets(unit, mpu, fresh)
    if fresh is not None:
        for bucket in buckets:
            bucket.mark_kept()
        fresh.fill(unit)
    for bucket in buckets:
        bucket.divide()
    learning = tuple(dict.fromkeys(span.parameter for bucket in buckets for span in bucket.spans))
    return _UnitState(unit, buckets, learning)


def _partial_sums(buckets: Sequence[Bucket]) -> list[tuple[Axis, list[Tensor]]]:
    """The main gradients that are partial sums over an axis of several ranks, by axis and dtype."""
    found: dict[tuple[tuple[int, ...], torch.dtype], tuple[Axis, list[Tensor]]] = {}
    for segment in (segment for bucket in buckets for segment in bucket.segments):
        for span in segment.spans:
            for axis in span.shard.partial:
                if axis.size > 1:
                    grad = span.of(segment.main_grad)
                    found.setdefault((axis.ranks, grad.dtype), (axis, []))[1].append(grad)
    return list(found.values())


def _sum_over(axis: Axis, grads: Sequence[Tensor]) -> None:
    """Sums many small gradients over `axis` in one message."""
    flat = torch.cat([grad.reshape(-1) for grad in grads])
    axis.all_reduce(flat)
    for grad, total in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
        grad.copy_(total.view_as(grad))
