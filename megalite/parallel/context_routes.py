"""How keys and values of a cut sequence come to the ranks that see them: around a ring, or all at once.

Around a ring, the next ones arrive while a rank works on these (Liu et al., 2023, arXiv:2310.01889); a gather brings
all, while each rank works on its own (Llama 3, arXiv:2407.21783). Either follows a plan (`context_plan`), so that only
what some query sees travels. In backward the keys travel again, and their gradients home.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from megalite.axis import Axis, PendingExchange
from megalite.parallel.context_plan import Block, GatherPlan, RingPlan

Travel = Iterator[tuple[Block, Tensor, Tensor]]
"""(block, its keys, its values), while other messages are under way."""


class Route(Protocol):
    """How keys and values [n, b, G, d] of all ranks come to this one."""

    def forward(self, k: Tensor, v: Tensor) -> Travel:
        """Everything that this rank's queries see, in parts."""
        ...

    def backward(self, k: Tensor, v: Tensor, wide: torch.dtype) -> Gradients:
        """The same again, taking gradients of the parts."""
        ...


class Gradients(Protocol):
    """The backward half of a `Route`: for each part that `travel` yields, `add` takes its gradients, before the next.

    When all have been taken, `own` is (dk, dv) of this rank's keys and values.
    """

    own: tuple[Tensor, Tensor]

    def travel(self) -> Travel:
        """See above."""
        ...

    def add(self, dk: Tensor, dv: Tensor) -> None:
        """See above."""
        ...


def _pack(k: Tensor, v: Tensor) -> Tensor:
    """k [n, b, G, d] and v [n, b, G, dv] as one message [b * n, G, d + dv], row by row."""
    n, b = k.shape[:2]
    message = k.new_empty(b, n, k.shape[2], k.shape[3] + v.shape[3])
    message[..., : k.shape[3]].copy_(k.transpose(0, 1))
    message[..., k.shape[3] :].copy_(v.transpose(0, 1))
    return message.flatten(0, 1)


class Ring:
    """Keys and values that go from rank to rank: the next ones arrive while these are worked on."""

    def __init__(self, plan: RingPlan, axis: Axis):
        self.plan, self.axis = plan, axis

    def forward(self, k: Tensor, v: Tensor) -> Travel:
        """See `Route`."""
        mail = _RingMail(self, k, v)
        for number, step in enumerate(self.plan.steps):
            under_way = mail.start(number)
            if step.block is not None:
                yield mail.part(step.owner, step.block)
            under_way.wait()
            mail.forget(number)

    def backward(self, k: Tensor, v: Tensor, wide: torch.dtype) -> Gradients:
        """See `Route`."""
        return _RingGradients(self, k, v, wide)


class _RingMail:
    """The messages of keys and values that a rank holds, by the rank whose they are."""

    def __init__(self, ring: Ring, k: Tensor, v: Tensor):
        self.plan, self.axis, self.k, self.v = ring.plan, ring.axis, k, v
        self.held: dict[int, Tensor] = {}
        if any(m.owner == self.axis.rank for step in self.plan.steps for m in step.sends):
            self.held[self.axis.rank] = _pack(k, v)
        # what is neither sent nor worked on after a step can go
        self.last = {m.owner: number for number, step in enumerate(self.plan.steps) for m in step.sends}
        for number, step in enumerate(self.plan.steps):
            if step.block is not None:
                self.last[step.owner] = max(number, self.last.get(step.owner, 0))

    def messages(self, number: int) -> tuple[list[tuple[int, Tensor]], list[tuple[int, Tensor]]]:
        """Keys and values that are sent and received during a step."""
        step = self.plan.steps[number]
        sends = [(m.peer, _taken(self.held[m.owner], m.index)) for m in step.sends]
        receives = []
        count = sum(m.count for m in step.receives)  # all of one owner
        for m in step.receives:
            if not m.start:
                self.held[m.owner] = _tokens(count, self.k, self.v, self.k.dtype)
            receives.append((m.peer, self.held[m.owner][m.part]))
        return sends, receives

    def start(self, number: int) -> PendingExchange:
        """Begins the messages of a step."""
        return self.axis.start_exchange(*self.messages(number))

    def part(self, owner: int, block: Block) -> tuple[Block, Tensor, Tensor]:
        """What a kernel call needs of the keys of `owner`."""
        if owner == self.axis.rank:
            return block, self.k, self.v
        k, v = block.take(self.held[owner]).split([self.k.shape[-1], self.v.shape[-1]], -1)
        return block, k, v

    def forget(self, number: int) -> None:
        """Frees what no later step uses."""
        for owner in [owner for owner in self.held if self.last.get(owner, -1) <= number]:
            del self.held[owner]


def _taken(message: Tensor, index: Tensor | None) -> Tensor:
    return message if index is None else message.index_select(0, index)


def _tokens(count: int, k: Tensor, v: Tensor, dtype: torch.dtype) -> Tensor:
    """Room for keys and values."""
    return torch.empty(count, k.shape[2], k.shape[3] + v.shape[3], dtype=dtype, device=k.device)


class _RingGradients:
    """Keys and values go round again; their gradients follow, gathering on the way, and come home."""

    def __init__(self, ring: Ring, k: Tensor, v: Tensor, wide: torch.dtype):
        self.plan, self.axis, self.k, self.v, self.wide = ring.plan, ring.axis, k, v, wide
        self.mail = _RingMail(ring, k, v)
        self.made: dict[int, Tensor] = {}
        self.last = {m.owner: number for number, step in enumerate(self.plan.steps) for m in step.grad_sends}
        self.current: tuple[Tensor, Tensor] | None = None
        self.own = (torch.zeros_like(k, dtype=wide), torch.zeros_like(v, dtype=wide))

    def add(self, dk: Tensor, dv: Tensor) -> None:
        """Takes the gradients of the part that was yielded last."""
        self.current = (dk, dv)

    def travel(self) -> Travel:
        """See `Gradients`."""
        for number, step in enumerate(self.plan.steps):
            sends, receives = self.mail.messages(number)
            sends += [(m.peer, _taken(self.made[m.owner], m.index)) for m in step.grad_sends]
            arriving = [(m, _tokens(m.count, self.k, self.v, self.wide)) for m in step.grad_receives]
            receives += [(m.peer, grads) for m, grads in arriving]
            under_way = self.axis.start_exchange(sends, receives)
            if step.block is not None:
                yield self.mail.part(step.owner, step.block)
                self._keep(step.owner, step.block)
            under_way.wait()
            for m, grads in arriving:
                if m.owner == self.axis.rank:
                    self._add_home(grads, m.index)
                else:
                    self.made[m.owner][m.part].add_(grads)
            self.mail.forget(number)
            for owner in [owner for owner in self.made if self.last[owner] <= number]:
                del self.made[owner]

    def _keep(self, owner: int, block: Block) -> None:
        """Puts this step's gradients where those of other ranks will be added, in the order of their message."""
        assert self.current is not None, "the gradients of a part must be added before the next one"
        (dk, dv), self.current = self.current, None
        if owner == self.axis.rank:
            self.own[0].add_(dk)
            self.own[1].add_(dv)
            return
        grads = torch.cat((block.flat(dk), block.flat(dv)), -1)
        self.made[owner] = grads if block.index is None else torch.empty_like(grads).index_copy_(0, block.tokens, grads)

    def _add_home(self, grads: Tensor, index: Tensor | None) -> None:
        n, b = self.k.shape[:2]
        total = grads
        if index is not None:
            total = grads.new_zeros(b * n, *grads.shape[1:]).index_copy_(0, index, grads)
        parts = total.view(b, n, *total.shape[1:]).transpose(0, 1).split([self.k.shape[-1], self.v.shape[-1]], -1)
        for own, part in zip(self.own, parts, strict=True):
            own.add_(part)


class Gather:
    """All keys and values that ranks need of one another travel at once, while each works on its own."""

    def __init__(self, plan: GatherPlan, axis: Axis):
        self.plan, self.axis = plan, axis

    def forward(self, k: Tensor, v: Tensor) -> Travel:
        """See `Route`."""
        plan, packed = self.plan, _pack(k, v)
        if plan.whole:
            pending = self.axis.start_all_gather(packed)
        else:
            packed = packed.index_select(0, plan.send)
            pending = self.axis.start_all_to_all(packed, plan.send_rows, plan.receive_rows)
        if plan.block is not None:
            yield plan.block, k, v
        message = pending.wait()
        if plan.others is not None:
            k_block, v_block = plan.others.take(message).split([k.shape[-1], v.shape[-1]], -1)
            yield plan.others, k_block, v_block

    def backward(self, k: Tensor, v: Tensor, wide: torch.dtype) -> Gradients:
        """See `Route`."""
        return _GatherGradients(self, k, v, wide)


class _GatherGradients:
    """Gathers again; gradients of what others own are summed at their owners."""

    def __init__(self, gather: Gather, k: Tensor, v: Tensor, wide: torch.dtype):
        self.gather, self.k, self.v = gather, k, v
        self.own = (torch.zeros_like(k, dtype=wide), torch.zeros_like(v, dtype=wide))
        size = self.k.shape[0] * self.k.shape[1]
        count = size * gather.axis.size if gather.plan.whole else sum(gather.plan.receive_rows)
        features = (k.shape[2], k.shape[3] + v.shape[3])
        self.made = torch.zeros(count, *features, dtype=wide, device=k.device)
        self.current: Block | None = None

    def add(self, dk: Tensor, dv: Tensor) -> None:
        """Takes the gradients of the part that was yielded last."""
        block = self.current
        if block is self.gather.plan.block:
            self.own[0].add_(dk)
            self.own[1].add_(dv)
        elif block is not None:
            self.made.index_copy_(0, block.tokens, torch.cat((block.flat(dk), block.flat(dv)), -1))

    def travel(self) -> Travel:
        """See `Gradients`."""
        for part in self.gather.forward(self.k, self.v):
            self.current = part[0]
            yield part
        plan, axis = self.gather.plan, self.gather.axis
        n, b = self.k.shape[:2]
        if plan.whole:
            home = axis.reduce_scatter(self.made)
        else:
            arrived = axis.all_to_all(self.made, plan.receive_rows, plan.send_rows)
            home = arrived.new_zeros(b * n, *arrived.shape[1:]).index_add_(0, plan.send, arrived)
        parts = home.view(b, n, *home.shape[1:]).transpose(0, 1).split([self.k.shape[-1], self.v.shape[-1]], -1)
        for own, part in zip(self.own, parts, strict=True):
            own.add_(part)
