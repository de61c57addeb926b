"""Attention over a sequence that is cut: ring, all-gather, all-to-all (Ulysses), and the two-level mode.

Every mode is two stages. Ranks of `cp_inner` exchange sequence for heads (Jacobs et al., 2023, arXiv:2309.14509), so
that together they hold what is then one rank's part of the sequence; over `cp_outer`, keys and values travel round a
ring (Liu et al., 2023, arXiv:2310.01889) or are gathered (Llama 3, arXiv:2407.21783), and partial results are merged by
their log-sum-exp. Pure modes have one stage of size 1 (two levels: Fang and Zhao, 2024, arXiv:2405.07719). What the
mask makes empty is neither computed nor sent.

Only inputs, output and log-sum-exp are saved; backward lets the keys travel again. Partial results and the gradients of
keys and values are merged and sent in promote_types(dtype, float32).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from megalite.kernels.attention import AttentionDropout
from megalite.kernels.attention_kernel import AttentionKernel
from megalite.kernels.attention_mask import AttentionMask
from megalite.kernels.masked_attention import add_sinks_, merge, sinks_grad
from megalite.mpu import Axis, ParallelState, PendingExchange
from megalite.parallel.context import RowCut
from megalite.parallel.context_plan import (
    Block,
    GatherPlan,
    Message,
    RingPlan,
    Sight,
    gather_plan,
    ring_plan,
)

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


@dataclass(frozen=True)
class _Rows:
    """What all layers with the same window share: the plan of this rank's rows, and its masks.

    first, last, places: int64 [n, b], of this rank's tokens after the exchange over `inner`, which `order` sorts.
    """

    route: Ring | Gather
    first: Tensor
    last: Tensor
    places: Tensor
    order: Tensor
    masks: dict[Block, AttentionMask] = field(default_factory=dict)

    def mask(self, block: Block) -> AttentionMask:
        """What the block's queries see of its keys."""
        if block not in self.masks:
            rows = block.queries
            self.masks[block] = AttentionMask(query=self.last[rows], start=self.first[rows], key=block.key)
        return self.masks[block]


@dataclass(frozen=True)
class _Call:
    """What one attention call is made of, apart from tensors that learn."""

    rows: _Rows
    kernel: AttentionKernel
    dropout: AttentionDropout | None

    def arguments(self, block: Block) -> tuple[AttentionMask, AttentionDropout | None]:
        """Mask and dropout of the block's queries."""
        if self.dropout is None:
            return self.rows.mask(block), None
        token_index = self.dropout.token_index[block.queries]
        return self.rows.mask(block), dataclasses.replace(self.dropout, token_index=token_index)


class _Attend(torch.autograd.Function):
    """Attention of one rank's queries over everyone's keys; sinks are an epilogue on output and log-sum-exp."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, call: _Call) -> Tensor:
        out, lse = _forward(q, k, v, call)
        if sinks is not None:
            add_sinks_(out, lse, sinks)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse, sinks)
        ctx.call = call
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, sinks = ctx.saved_tensors
        call: _Call = ctx.call
        dout = grads[0]
        delta = (dout.to(lse.dtype) * out).sum(-1)
        dq = torch.zeros_like(q, dtype=lse.dtype, memory_format=torch.contiguous_format)
        back = call.rows.route.backward(k, v, lse.dtype)
        for block, k_block, v_block in back.travel():
            rows = block.queries
            dq_rows, dk, dv = call.kernel.backward(
                dout[rows], q[rows], k_block, v_block, out[rows], lse[rows], delta[rows], *call.arguments(block)
            )
            dq[rows] += dq_rows
            back.add(dk, dv)
        dk, dv = back.own
        dsinks = None if sinks is None else sinks_grad(sinks, lse, delta).to(sinks.dtype)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dsinks, None


def _forward(q: Tensor, k: Tensor, v: Tensor, call: _Call) -> tuple[Tensor, Tensor]:
    """(out, log-sum-exp) over all keys, in promote_types(dtype, float32)."""
    out, lse = None, None
    wide = torch.promote_types(q.dtype, torch.float32)
    for block, k_block, v_block in call.rows.route.forward(k, v):
        rows = block.queries
        part, part_lse = call.kernel.forward(q[rows], k_block, v_block, *call.arguments(block))
        if out is None and len(part) == len(q):
            out, lse = part, part_lse
            continue
        if out is None or lse is None:
            out, lse = _nothing_seen(q, v, wide)
        merge(out[rows], lse[rows], part, part_lse)
    return (out, lse) if out is not None and lse is not None else _nothing_seen(q, v, wide)


def _nothing_seen(q: Tensor, v: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    out = torch.zeros(*q.shape[:3], v.shape[-1], dtype=dtype, device=q.device)
    return out, torch.full(q.shape[:3], float("-inf"), dtype=dtype, device=q.device)


class _Exchange(torch.autograd.Function):
    """[n, b, ranks * features] <-> [ranks * n, b, features]: a part of the sequence for a part of the heads.

    Backward is the way back. `order` int64 [ranks * n, b] (or [ranks * n]) sorts the tokens of all ranks.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, order: Tensor, to_heads: bool) -> Tensor:
        ctx.axis, ctx.order, ctx.to_heads = axis, order, to_heads
        return _to_heads(x, axis, order) if to_heads else _to_sequence(x, axis, order)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        back = _to_sequence if ctx.to_heads else _to_heads
        return back(grads[0], ctx.axis, ctx.order), None, None, None


def _to_heads(x: Tensor, axis: Axis, order: Tensor) -> Tensor:
    n, b, width = x.shape
    parts = x.view(n, b, axis.size, width // axis.size).permute(2, 0, 1, 3).contiguous()
    whole = axis.all_to_all(parts).flatten(0, 1)
    return whole.index_select(0, order) if order.dim() == 1 else whole.gather(0, order[..., None].expand_as(whole))


def _to_sequence(x: Tensor, axis: Axis, order: Tensor) -> Tensor:
    whole = torch.empty_like(x, memory_format=torch.contiguous_format)
    if order.dim() == 1:
        whole.index_copy_(0, order, x)
    else:
        whole.scatter_(0, order[..., None].expand_as(x), x)
    n = len(whole) // axis.size
    parts = axis.all_to_all(whole.view(axis.size, n, *whole.shape[1:]))
    return parts.permute(1, 2, 0, 3).flatten(2)


@dataclass(frozen=True)
class ContextAttention:
    """How attention crosses the sequence cut on this rank.

    inner: ranks that exchange sequence for heads; outer: over which keys and values travel, all at once if `gathers`.
    """

    inner: Axis
    outer: Axis
    gathers: bool = False

    @staticmethod
    def of(mpu: ParallelState) -> ContextAttention:
        """The mode that the configuration names; every rank of mpu.cp must ask at the same time."""
        if mpu.cp.device.type == "cuda" and mpu.cp_outer.size > 1:
            mpu.cp_outer.barrier()  # NCCL wants all ranks in the first call of a group
        return ContextAttention(mpu.cp_inner, mpu.cp_outer, mpu.config.cp_mode == "all_gather")

    def problems(self, num_heads: int) -> list[str]:
        """Why this many query heads of a rank cannot be exchanged (empty when they can)."""
        return head_exchange_problems(num_heads, self.inner.size)

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cut: RowCut,
        kernel: AttentionKernel,
        *,
        window: int = 0,
        dropout: AttentionDropout | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Causal attention of this rank's tokens: q [n, b, H, d], k [n, b, G, d], v [n, b, G, dv] -> [n, b, H, dv].

        A token sees its document so far, at most `window` tokens of it (0: no limit). dropout.token_index: [n, b], of
        the same tokens. sinks: [H], see `add_sinks_`.
        """
        key = (self.inner.size, self.outer.size, self.gathers, window, q.device)
        if key not in cut.plans:
            cut.plans[key] = self._prepare(cut.sight(window), q.device)
        return self._attend(q, k, v, cut.plans[key], kernel, dropout, sinks)

    def with_sight(self, q: Tensor, k: Tensor, v: Tensor, sight: Sight, kernel: AttentionKernel) -> Tensor:
        """The same for any `sight` of the tokens of all ranks."""
        return self._attend(q, k, v, self._prepare(sight, q.device), kernel, None, None)

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        rows: _Rows,
        kernel: AttentionKernel,
        dropout: AttentionDropout | None,
        sinks: Tensor | None,
    ) -> Tensor:
        dropout = dropout if dropout is not None and dropout.p > 0.0 else None
        inner = self.inner
        if inner.size == 1:
            return _Attend.apply(q, k, v, sinks, _Call(rows, kernel, dropout))
        value_size = v.shape[-1]
        q, k, v = self._enter(q, k, v, rows.order)
        first_head = inner.rank * q.shape[2]
        if dropout is not None:
            dropout = dataclasses.replace(
                dropout,
                token_index=self._token_index(dropout.token_index, rows),
                head_offset=dropout.head_offset + first_head,
            )
        if sinks is not None:
            sinks = sinks.narrow(0, first_head, q.shape[2])
        out = cast(Tensor, _Attend.apply(q, k, v, sinks, _Call(rows, kernel, dropout)))
        return _Exchange.apply(out.flatten(2), inner, rows.order, False).unflatten(2, (-1, value_size))

    def _token_index(self, mine: Tensor, rows: _Rows) -> Tensor:
        """The numbers in the run of the tokens of all `inner` ranks, from those of this rank's."""
        n = len(mine)
        unsorted = torch.empty_like(rows.places)
        order = rows.order if rows.order.dim() == 2 else rows.order[:, None].expand_as(rows.places)
        unsorted.scatter_(0, order, rows.places)
        return rows.places + (mine[:1] - unsorted[self.inner.rank * n][None])

    def _enter(self, q: Tensor, k: Tensor, v: Tensor, order: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """All tokens of some heads from some tokens of all heads, q, k and v in one message."""
        size = self.inner.size
        repeats = _kv_repeats(q.shape[2], k.shape[2], size)
        if repeats > 1:
            k, v = k.repeat_interleave(repeats, 2), v.repeat_interleave(repeats, 2)
        parts = [x.unflatten(2, (size, -1)).flatten(3) for x in (q, k, v)]  # [n, b, ranks, features]
        together = torch.cat(parts, -1).flatten(2)
        whole = _Exchange.apply(together, self.inner, order, True)
        split = whole.split([part.shape[-1] for part in parts], -1)
        return tuple(x.unflatten(-1, (-1, like.shape[-1])) for x, like in zip(split, (q, k, v), strict=True))

    def _prepare(self, sight: Sight, device: torch.device) -> _Rows:
        joined, orders = sight.joined(self.inner.size)
        me = self.outer.rank
        order = orders[me]
        if bool((order == order[:, :1]).all()):
            order = order[:, 0]
        route: Ring | Gather
        if self.gathers and self.outer.size > 1:
            route = Gather(_gather_to(gather_plan(joined, me), device), self.outer)
        else:
            route = Ring(_ring_to(ring_plan(joined, me), device), self.outer)
        mine = (x[me].to(device) for x in (joined.first, joined.last, joined.places))
        return _Rows(route, *mine, order=order.to(device))


def _kv_repeats(num_heads: int, kv_heads: int, size: int) -> int:
    """How often each KV head must be there, so that `size` ranks get whole groups of query heads with their own."""
    return next(r for r in range(1, num_heads // kv_heads + 1) if _fits(num_heads, kv_heads * r, size))


def _fits(num_heads: int, kv_heads: int, size: int) -> bool:
    return kv_heads % size == 0 and num_heads % kv_heads == 0


def head_exchange_problems(num_heads: int, size: int) -> list[str]:
    """Why `num_heads` query heads of a tensor-parallel rank cannot be exchanged over `size` ranks."""
    if num_heads % size == 0:
        return []
    legal = ", ".join(str(n) for n in range(1, num_heads + 1) if num_heads % n == 0)
    return [f"{num_heads} query heads of a rank cannot be exchanged over {size} ranks; these can be {legal}"]


def _move(message: Message, device: torch.device) -> Message:
    return message if message.index is None else dataclasses.replace(message, index=message.index.to(device))


def _ring_to(plan: RingPlan, device: torch.device) -> RingPlan:
    if device.type == "cpu":
        return plan
    for step in plan.steps:
        step.block = step.block.to(device) if step.block is not None else None
        for messages in (step.sends, step.receives, step.grad_sends, step.grad_receives):
            messages[:] = [_move(message, device) for message in messages]
    return plan


def _gather_to(plan: GatherPlan, device: torch.device) -> GatherPlan:
    blocks = {name: block.to(device) for name in ("block", "others") if (block := getattr(plan, name)) is not None}
    return dataclasses.replace(plan, send=plan.send.to(device), **blocks)
