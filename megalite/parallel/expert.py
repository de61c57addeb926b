"""Token dispatch and combine: tokens travel to the ranks of their experts and their outputs come home.

A dispatch is a linear map from a rank's tokens to the rows of its experts, made of steps that each know their
transpose: choose rows, exchange them, gather them, put them in order. Combining is the transpose of dispatching, and
the backward pass of each is the other one, so that a route is described once and used four times.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.axis import Axis, Pending
from megalite.kernels.chosen import Kernels
from megalite.kernels.routing import Bags
from megalite.mpu import ParallelState, make_axis
from megalite.parallel.collectives import part_sizes


@dataclass(frozen=True)
class Assignment:
    """Which tokens go to which experts: pairs, sorted by expert and, for one expert, by token.

    token: int64 [n], row of the local token tensor (equal to its number of rows: a row of zeros, which fills an unused
    place). expert: int64 [n], global number. probs: [n], the weight of the expert's output, differentiable.
    counts: int64 [num_experts], pairs of each expert. has_unused: whether there may be unused places, on any rank.
    """

    token: Tensor
    expert: Tensor
    probs: Tensor
    counts: Tensor
    has_unused: bool = False


class Step(Protocol):
    """One part of a route: a linear map of rows, and its transpose."""

    def out(self, rows: Tensor) -> Tensor:
        """Towards the experts."""
        ...

    def home(self, rows: Tensor) -> Tensor:
        """The transpose: each row goes back where it came from, and copies of one row are summed."""
        ...


class Spread:
    """Row `token[i]` of `size` rows in place i; home, the rows of one token are summed in order of their places.

    A token number of `size` stands for a row of zeros (`zeros`: whether there are any).
    """

    def __init__(self, token: Tensor, size: int, *, zeros: bool = False, kernels: Kernels | None = None):
        self.token, self.size, self.zeros = token, size, zeros
        self.kernels = kernels if kernels is not None else Kernels()
        self._bags: Bags | None = None

    def out(self, rows: Tensor) -> Tensor:
        """[size, h] -> [n, h]."""
        assert rows.shape[0] == self.size, f"{rows.shape[0]} tokens are not {self.size}"
        return self.kernels.permute(rows, self.token, zeros=self.zeros)

    def home(self, rows: Tensor) -> Tensor:
        """[n, h] -> [size, h], without the rows of unused places; the order of the sum never changes."""
        if self._bags is None:
            self._bags = Bags.of(self.token, self.size)
        return self.kernels.unpermute(rows, *self._bags)


class Reorder:
    """Row `index[i]` of `size` rows in place i, each at most once; the rows of `size` not named are padding."""

    def __init__(self, index: Tensor, size: int):
        self.index, self.size = index, size

    def out(self, rows: Tensor) -> Tensor:
        """[size, ...] -> [n, ...]."""
        return rows.index_select(0, self.index)

    def home(self, rows: Tensor) -> Tensor:
        """[n, ...] -> [size, ...], zeros in the padding."""
        fresh = rows.new_empty if self.size == rows.shape[0] else rows.new_zeros
        return fresh((self.size, *rows.shape[1:])).index_copy_(0, self.index, rows)


class Exchange:
    """An all-to-all of consecutive rows: `send[i]` of them to rank i of the axis, `receive[i]` from it."""

    def __init__(self, axis: Axis, send: Sequence[int], receive: Sequence[int]):
        self.axis, self.send, self.receive = axis, send, receive

    def start(self, rows: Tensor) -> Pending:
        """Begins `out`."""
        return self.axis.start_all_to_all(rows, self.send, self.receive)

    def out(self, rows: Tensor) -> Tensor:
        """[sum of send, ...] -> [sum of receive, ...]."""
        return self.start(rows).wait()

    def home(self, rows: Tensor) -> Tensor:
        """[sum of receive, ...] -> [sum of send, ...]."""
        return self.axis.all_to_all(rows, self.receive, self.send)


class Gather:
    """All-gather of `sizes[r]` rows of each rank of the axis, padded to the longest; home, a reduce-scatter."""

    def __init__(self, axis: Axis, sizes: Sequence[int]):
        self.axis, self.size, self.longest = axis, sizes[axis.rank], max(sizes)

    def start(self, rows: Tensor) -> Pending:
        """Begins `out`."""
        return self.axis.start_all_gather(_lengthened(rows, self.longest))

    def out(self, rows: Tensor) -> Tensor:
        """[this rank's size, ...] -> [ranks * longest, ...]; what the padding holds is not to be read."""
        return self.start(rows).wait()

    def home(self, rows: Tensor) -> Tensor:
        """[ranks * longest, ...] -> [this rank's size, ...]."""
        return self.axis.reduce_scatter(rows)[: self.size]


class Copied:
    """Rows that every rank of the axis holds alike enter a region cut over it; home, their partial sums are summed."""

    def __init__(self, axis: Axis):
        self.axis = axis

    def out(self, rows: Tensor) -> Tensor:
        """The rows."""
        return rows

    def home(self, rows: Tensor) -> Tensor:
        """Their sum over the axis."""
        return self.axis.all_reduce(rows.clone(memory_format=torch.contiguous_format))


def _lengthened(rows: Tensor, length: int) -> Tensor:
    """Rows with zeros after them, `length` in all."""
    missing = length - rows.shape[0]
    return F.pad(rows, (0,) * (2 * rows.dim() - 1) + (missing,)) if missing else rows.contiguous()


@dataclass(frozen=True)
class Route:
    """The way of one micro-batch's tokens and of their probs to this rank's experts, and back.

    counts[e]: rows that arrive for local expert e.
    """

    tokens: tuple[Step, ...]
    probs: tuple[Step, ...]
    counts: list[int]


def _out(rows: Tensor, steps: Sequence[Step]) -> Tensor:
    for step in steps:
        rows = step.out(rows)
    return rows


def _home(rows: Tensor, steps: Sequence[Step]) -> Tensor:
    for step in reversed(steps):
        rows = step.home(rows)
    return rows


class _Underway:
    """Rows on their way out: up to the first communication it is started now, the rest is for `wait`."""

    def __init__(self, rows: Tensor, steps: Sequence[Step]):
        self._rest: Sequence[Step] = ()
        for place, step in enumerate(steps):
            if isinstance(step, Exchange | Gather):
                self._pending, self._rest = step.start(rows), steps[place + 1 :]
                return
            rows = step.out(rows)
        self._pending = Pending(rows, None)

    def wait(self) -> Tensor:
        """The rows at the end; once, and keeps none of them."""
        pending = self._pending
        del self._pending
        rows = pending.wait()
        del pending
        return _out(rows, self._rest)


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tokens: Tensor, probs: Tensor, route: Route, underway: tuple[_Underway, _Underway]
    ) -> tuple[Tensor, Tensor]:
        ctx.route = route
        tokens_there, probs_there = (rows.wait() for rows in underway)
        # On one rank probs do not move, and a Function must not return its input as it is.
        return tokens_there, probs_there.view_as(probs_there) if probs_there is probs else probs_there

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        dtokens = _home(grads[0], ctx.route.tokens) if ctx.needs_input_grad[0] else None
        dprobs = _home(grads[1], ctx.route.probs) if ctx.needs_input_grad[1] else None
        return dtokens, dprobs, None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, outputs: Tensor, route: Route) -> Tensor:
        ctx.route = route
        return _home(outputs, route.tokens)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _out(grads[0], ctx.route.tokens), None


@dataclass(frozen=True)
class Arrived:
    """Tokens at their experts: tokens [n, h] and probs [n] sorted by local expert, counts[e] of local expert e."""

    tokens: Tensor
    probs: Tensor
    counts: list[int]
    route: Route


class Travelling:
    """Tokens on their way; the sender may compute meanwhile."""

    def __init__(self, tokens: Tensor, probs: Tensor, route: Route, underway: tuple[_Underway, _Underway]):
        self._sent, self._route, self._underway = (tokens, probs), route, underway

    def wait(self) -> Arrived:
        """What has arrived at this rank's experts; once."""
        tokens, probs = _Dispatch.apply(*self._sent, self._route, self._underway)
        return Arrived(tokens, probs, self._route.counts, self._route)


class Dispatcher:
    """Sends tokens over mpu.ep to the ranks of their experts, and over mpu.etp to those that share an expert.

    Each rank sends tokens of its own, or with `parallel.cut_expert_tokens` off all ranks of mpu.etp send the same.
    All members of mpu.ep x mpu.etp must make their dispatchers in the same order. Names of `parallel.expert_dispatch`:

    all_to_all: tokens go to the ranks of their experts only, then to all ranks that share the expert.
    all_gather: every rank gets all tokens and picks its own: fewer messages, more bytes when top_k < ep.
    hierarchical: as all_to_all, in two steps, first to the rank of the right place inside a node of
    `parallel.expert_node_size` consecutive ep ranks, then between nodes: fewer and longer messages leave a node.
    """

    def __init__(self, num_experts: int, mpu: ParallelState, kernels: Kernels | None = None):
        self.kernels = kernels if kernels is not None else Kernels()
        self.num_experts, self.ep, self.etp = num_experts, mpu.ep, mpu.etp
        self.kind = mpu.config.expert_dispatch
        self.cut = mpu.config.cut_expert_tokens or mpu.config.sequence_parallel
        if not self.cut and mpu.etp.size != mpu.tp.size:
            raise ValueError(
                f"parallel.cut_expert_tokens=false needs etp = tp, not etp={mpu.etp.size} and tp={mpu.tp.size}:"
                f" set etp={mpu.tp.size}, or leave cut_expert_tokens on"
            )
        # Ranks whose tokens may meet in one expert, and their numbers on that axis by (etp rank, ep rank).
        # On the host, even where the model is built on the meta device.
        self.sources, self._numbers = mpu.ep, torch.arange(mpu.ep.size, device="cpu")[None]
        if self.cut:
            self.sources, self._numbers = _sources(mpu)
        self._row = mpu.etp.rank if self.cut else 0
        self._split = part_sizes(num_experts, mpu.ep)
        start = sum(self._split[: mpu.ep.rank])
        self._mine = slice(start, start + self._split[mpu.ep.rank])
        if self.kind == "hierarchical":
            self._inner, self._outer = _node_axes(mpu)

    def send(self, tokens: Tensor, assignment: Assignment) -> Travelling:
        """tokens [t, h] of this rank, to the experts that `assignment` names; returns while they travel."""
        with torch.no_grad():
            counts = assignment.counts
            counting = self.sources.start_all_gather(torch.cat((counts, counts.new_tensor([tokens.shape[0]])))[None])
            rows, probs = tokens.detach(), assignment.probs
            if self.kind == "all_gather":
                route = self._gathered(assignment, self._board(counting))
                underway = _Underway(rows, route.tokens), _Underway(probs, route.probs)
            else:
                spread = Spread(assignment.token, tokens.shape[0], zeros=assignment.has_unused, kernels=self.kernels)
                rows = spread.out(rows)  # before the counts are waited for
                route = self._exchanged(spread, self._board(counting))
                underway = _Underway(rows, route.tokens[1:]), _Underway(probs, route.probs)
        return Travelling(tokens, assignment.probs, route, underway)

    def combine(self, outputs: Tensor, arrived: Arrived) -> Tensor:
        """outputs [n, h] of this rank's experts -> [t, h], summed over each token's experts."""
        return _Combine.apply(outputs, arrived.route)

    def _board(self, counting: Pending) -> Tensor:
        """int64 [etp, ep, num_experts + 1] on the host: each source's counts, and its number of tokens."""
        return counting.wait().cpu()[self._numbers]

    def _exchanged(self, spread: Spread, board: Tensor) -> Route:
        """All-to-all over ep, all-gather over etp, and from the order of arrival to that of experts."""
        device, counts = spread.token.device, board[:, :, self._mine]  # [etp, ep, local expert]
        to_rank = torch.stack([part.sum(-1) for part in board[self._row, :, :-1].split(self._split, -1)], 1)
        steps = self._between_nodes(to_rank, device) if self.kind == "hierarchical" else self._directly(to_rank)
        starts, length = _starts(counts), int(counts.sum())
        if self.cut and self.etp.size > 1:
            sizes = counts.sum((1, 2)).tolist()
            steps.append(Gather(self.etp, sizes))
            starts, length = _starts(counts, max(sizes)), max(sizes) * self.etp.size
        steps += _reordered(counts.flatten(0, 1), starts.flatten(0, 1), length, device)
        steps += self._entered()
        return Route((spread, *steps), tuple(steps), counts.sum((0, 1)).tolist())

    def _directly(self, to_rank: Tensor) -> list[Step]:
        """to_rank [ep, ep]: rows from one rank to another."""
        me = self.ep.rank
        return [Exchange(self.ep, to_rank[me].tolist(), to_rank[:, me].tolist())] if self.ep.size > 1 else []

    def _between_nodes(self, to_rank: Tensor, device: torch.device) -> list[Step]:
        """The same exchange in two: to the right place inside the node, then between the nodes' ranks of that place."""
        inner, outer = self._inner, self._outer
        rows = to_rank.view(outer.size, inner.size, outer.size, inner.size)
        from_me = rows[outer.rank, inner.rank]  # [node, place] that they go to
        via_me = rows[outer.rank, :, :, inner.rank]  # [place that they come from, node that they go to]
        to_me = rows[:, :, outer.rank, inner.rank]  # [node, place] that they come from
        inside = Exchange(inner, from_me.sum(0).tolist(), via_me.sum(1).tolist())
        across = Exchange(outer, via_me.sum(0).tolist(), to_me.sum(1).tolist())
        by_place = _reordered(from_me, _starts(from_me), int(from_me.sum()), device)
        by_node = _reordered(via_me, _starts(via_me), int(via_me.sum()), device)
        return [*by_place, inside, *by_node, across]

    def _gathered(self, assignment: Assignment, board: Tensor) -> Route:
        """All-gather over all sources, and from there the pairs of this rank's experts."""
        device, sources = assignment.token.device, self.sources
        by_source = torch.empty_like(board.flatten(0, 1)).index_copy_(0, self._numbers.flatten(), board.flatten(0, 1))
        pairs, sizes = by_source[:, :-1].sum(1).tolist(), by_source[:, -1].tolist()
        gather_tokens, gather_probs = Gather(sources, sizes), Gather(sources, pairs)
        counts = by_source[:, self._mine]
        starts = _starts(by_source[:, None, :-1], max(pairs)).squeeze(1)[:, self._mine]
        pick = _reordered(counts, starts, max(pairs) * sources.size, device)
        # Rows of the gathered tokens; unused places stay beyond the last of them.
        end = max(sizes) * sources.size
        token = assignment.token + sources.rank * max(sizes)
        if assignment.has_unused:
            token = token.masked_fill(assignment.token == sizes[sources.rank], end)
        spread = Spread(_out(token, (gather_probs, *pick)), end, zeros=assignment.has_unused, kernels=self.kernels)
        entered = self._entered()
        return Route((gather_tokens, spread, *entered), (gather_probs, *pick, *entered), counts.sum(0).tolist())

    def _entered(self) -> list[Step]:
        return [] if self.cut or self.etp.size == 1 else [Copied(self.etp)]


def _starts(sizes: Tensor, padded_to: int | None = None) -> Tensor:
    """Where each of consecutive runs begins; with `padded_to`, those of sizes[i] follow one another from i times it."""
    if padded_to is None:
        return sizes.flatten().cumsum(0).view(sizes.shape) - sizes
    inside = sizes.flatten(1).cumsum(1).view(sizes.shape) - sizes
    return inside + torch.arange(sizes.shape[0], device="cpu").view(-1, *[1] * (sizes.dim() - 1)) * padded_to


def _reordered(sizes: Tensor, starts: Tensor, length: int, device: torch.device) -> list[Step]:
    """The runs [i, j], of `sizes` rows from `starts` on among `length` rows, put in the order of j, then i."""
    sizes, starts = sizes.t().flatten(), starts.t().flatten()
    shift = starts - (sizes.cumsum(0) - sizes)
    place = torch.arange(int(sizes.sum()), device="cpu")
    index = place + shift.repeat_interleave(sizes)
    if length == len(place) and torch.equal(index, place):
        return []
    return [Reorder(index.to(device, non_blocking=True), length)]


def _sources(mpu: ParallelState) -> tuple[Axis, Tensor]:
    """The axis of ep x etp, and the number on it of each (etp rank, ep rank)."""
    members = mpu.grid.members(mpu.rank, ("etp", "ep"))
    numbers = torch.empty(mpu.etp.size, mpu.ep.size, dtype=torch.int64, device="cpu")
    for number, member in enumerate(members):
        at = mpu.grid.coordinates(member, expert=True)
        numbers[at["etp"], at["ep"]] = number
    ranks = tuple(mpu.world.ranks[member] for member in members)
    for axis in (mpu.ep, mpu.etp):
        if axis.ranks == ranks:
            return axis, numbers
    return make_axis("ep_etp", ranks, mpu.last_call), numbers


def _node_axes(mpu: ParallelState) -> tuple[Axis, Axis]:
    """The ep ranks of this rank's node, and those of its place in all nodes."""
    size, ep = mpu.config.expert_node_size, mpu.ep
    if size is None or size < 1 or ep.size % size:
        divisors = ", ".join(str(d) for d in range(1, ep.size + 1) if ep.size % d == 0)
        raise ValueError(
            f"parallel.expert_dispatch=hierarchical needs an expert_node_size that divides ep={ep.size}, not {size};"
            f" it can be {divisors}"
        )
    inner = mpu.blocks(ep, size)
    return inner, make_axis("ep_nodes", ep.ranks[inner.rank :: size], mpu.last_call)
