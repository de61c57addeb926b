"""Who needs which keys of whom, for attention whose sequence is cut: pure data, the same on every rank.

Everything follows from what each token sees, an interval of places of its row (`Sight`). A rank's keys travel to the
ranks that see some of them, and only those tokens travel. All index tensors are made on the CPU and count a rank's
tokens row by row ("flat": row * n + number in the row).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

NEVER = 1 << 62
"""The place of a key that is not there: no query sees so far."""


@dataclass(frozen=True)
class Sight:
    """What tokens see: keys at places first <= place <= last of their row; nothing where first > last.

    places, first, last: int64 [ranks, n, b], on the CPU; a rank's places ascend in every row, and all ranks together
    hold the places 0 .. ranks * n - 1 of every row once.
    """

    places: Tensor
    first: Tensor
    last: Tensor

    @staticmethod
    def causal(places: Tensor, documents: Tensor | None = None, window: int = 0) -> Sight:
        """Each token sees itself and what precedes it in its document, at most `window` tokens in all (0: no limit).

        documents: int64 [s, b], the place at which the document of each place begins; None: one document.
        """
        places = places.cpu()
        first = torch.zeros_like(places)
        if documents is not None:
            whole = documents.cpu().expand(-1, places.shape[2])
            first = whole.gather(0, places.flatten(0, 1)).view_as(places)
        if window:
            first = torch.maximum(first, places - window + 1)
        return Sight(places, first, places)

    @property
    def num_ranks(self) -> int:
        """Ranks that hold parts of the rows."""
        return self.places.shape[0]

    @property
    def num_pairs(self) -> Tensor:
        """int64 [ranks]: the (query, key) pairs of each rank's queries, per head: what attention costs it."""
        return (self.last - self.first + 1).clamp(min=0).sum((1, 2))

    def joined(self, size: int) -> tuple[Sight, Tensor]:
        """(blocks of `size` consecutive ranks as one rank each, order): order int64 [blocks, size * n, b] sorts them.

        Token i of a block is token order[i] of its ranks' tokens, one rank after the other.
        """
        if size == 1:
            n, b = self.places.shape[1:]
            return self, torch.arange(n)[None, :, None].expand(self.num_ranks, n, b)
        places, first, last = (
            x.reshape(-1, size * x.shape[1], x.shape[2]) for x in (self.places, self.first, self.last)
        )
        order = places.argsort(1)
        return Sight(places.gather(1, order), first.gather(1, order), last.gather(1, order)), order

    def seen_by(self, rank: int) -> Tensor:
        """bool [s, b]: the places that some query of `rank` sees."""
        first, last = self.first[rank], self.last[rank]
        some = (first <= last).long()
        edges = torch.zeros(self.num_ranks * first.shape[0] + 1, first.shape[1], dtype=torch.int64)
        edges.scatter_add_(0, torch.where(some > 0, first, 0), some)
        edges.scatter_add_(0, torch.where(some > 0, last + 1, 0), -some)
        return edges.cumsum(0)[:-1] > 0

    def queries(self, rank: int, keys: Tensor) -> slice:
        """The least run of tokens of `rank` that holds all queries which see some of `keys`, bool [s, b]."""
        before = torch.zeros(keys.shape[0] + 1, keys.shape[1], dtype=torch.int64)
        torch.cumsum(keys, 0, out=before[1:])
        first, last = self.first[rank], self.last[rank]
        active = (before.gather(0, last + 1) > before.gather(0, first)) & (first <= last)
        found = active.any(1).nonzero()
        return slice(int(found[0]), int(found[-1]) + 1) if len(found) else slice(0, 0)


@dataclass(frozen=True, kw_only=True, eq=False)
class Block:
    """The keys of one kernel call, taken out of a message of tokens, and the queries that see some of them.

    key: int64 [m, b], places, ascending in a row, NEVER where a row has fewer than the others. index: int64 [b * m],
    the number in the message of each key, row by row (None: they lie there just so). real: int64, which of those b * m
    are no fillers (None: all). tokens: int64, their numbers in the message.
    """

    queries: slice
    key: Tensor
    index: Tensor | None
    real: Tensor | None
    tokens: Tensor

    def take(self, message: Tensor) -> Tensor:
        """[m, b, ...] out of a message [tokens, ...]."""
        m, b = self.key.shape
        flat = message if self.index is None else message.index_select(0, self.index)
        return flat.view(b, m, *message.shape[1:]).transpose(0, 1)

    def flat(self, grad: Tensor) -> Tensor:
        """[len(tokens), ...] out of [m, b, ...]: the inverse, without fillers."""
        rows = grad.transpose(0, 1).flatten(0, 1)
        return rows if self.real is None else rows.index_select(0, self.real)

    def to(self, device: torch.device) -> Block:
        """The same on `device`."""
        return replace(
            self,
            key=self.key.to(device),
            tokens=self.tokens.to(device),
            index=None if self.index is None else self.index.to(device),
            real=None if self.real is None else self.real.to(device),
        )


@dataclass(frozen=True, kw_only=True)
class Message:
    """Tokens of `owner` that travel to or from `peer`, `count` of them.

    index: their numbers among those that a sender (or an owner whose gradients come home) holds, None: all, in order. A
    receiver puts them where `start` says, one message behind the other.
    """

    peer: int
    owner: int
    count: int
    index: Tensor | None = None
    start: int = 0

    @property
    def part(self) -> slice:
        """Where a receiver puts the tokens."""
        return slice(self.start, self.start + self.count)

    def to(self, device: torch.device) -> Message:
        """The same on `device`."""
        return self if self.index is None else replace(self, index=self.index.to(device))


@dataclass
class RingStep:
    """What a rank does in step t: it computes with the keys that it sees of rank + t, while messages travel.

    sends and receives carry keys for step t + 1. grad_sends and grad_receives carry gradients of what was computed
    before step t, either to the rank that computes with those keys in this step, or home.
    """

    owner: int
    block: Block | None = None
    sends: list[Message] = field(default_factory=list)
    receives: list[Message] = field(default_factory=list)
    grad_sends: list[Message] = field(default_factory=list)
    grad_receives: list[Message] = field(default_factory=list)

    def to(self, device: torch.device) -> RingStep:
        """The same on `device`."""
        groups = (self.sends, self.receives, self.grad_sends, self.grad_receives)
        block = self.block.to(device) if self.block is not None else None
        return RingStep(self.owner, block, *([message.to(device) for message in group] for group in groups))


@dataclass(frozen=True)
class RingPlan:
    """One rank's part of the ring: the keys of rank o go to o - 1, o - 2, ..., each to those that see it.

    A rank that does not see a key is passed over, so that no key travels in vain; where all see it, keys go from
    neighbour to neighbour. Gradients take the same way, and from the last stop of their key home.
    """

    steps: Sequence[RingStep]

    def to(self, device: torch.device) -> RingPlan:
        """The same on `device`."""
        return RingPlan([step.to(device) for step in self.steps])

    @property
    def tokens_sent(self) -> int:
        """Keys that this rank sends in a forward pass."""
        return sum(message.count for step in self.steps for message in step.sends)

    @property
    def grad_tokens_sent(self) -> int:
        """Keys whose gradient this rank sends in a backward pass."""
        return sum(message.count for step in self.steps for message in step.grad_sends)


@dataclass(frozen=True)
class GatherPlan:
    """One rank's part of an exchange of all keys at once: to each rank the tokens that it sees.

    block: own keys; others: those of other ranks (None: it sees none). send_rows, receive_rows: tokens to and from each
    rank; send: int64, their numbers, rank by rank. whole: everyone needs everything, and `others` takes its keys from
    those of all ranks, one rank after the other.
    """

    block: Block | None
    others: Block | None
    send_rows: Sequence[int]
    receive_rows: Sequence[int]
    send: Tensor
    whole: bool

    def to(self, device: torch.device) -> GatherPlan:
        """The same on `device`."""
        block, others = (part.to(device) if part is not None else None for part in (self.block, self.others))
        return replace(self, block=block, others=others, send=self.send.to(device))

    @property
    def tokens_sent(self) -> int:
        """Keys that this rank sends in a forward pass."""
        return sum(self.send_rows)

    @property
    def grad_tokens_sent(self) -> int:
        """Keys whose gradient this rank sends in a backward pass."""
        return sum(self.receive_rows)


class Needs:
    """Which tokens of each rank the queries of each rank see, as ascending flat numbers."""

    def __init__(self, sight: Sight):
        self.sight = sight
        self.seen = [sight.seen_by(rank) for rank in range(sight.num_ranks)]
        self._flat: dict[tuple[int, int], Tensor] = {}

    def of(self, rank: int, owner: int) -> Tensor:
        """int64: the tokens of `owner` that `rank` sees."""
        if (rank, owner) not in self._flat:
            here = self.seen[rank].gather(0, self.sight.places[owner])
            self._flat[rank, owner] = here.t().flatten().nonzero().flatten()
        return self._flat[rank, owner]

    def block(self, rank: int, owners: Sequence[int], message: Tensor | None) -> Block | None:
        """What `rank` computes with its keys of `owners`; None where it sees none.

        message: the tokens of the one owner in the order in which they lie; None: ascending, owner by owner.
        """
        wanted = [self.of(rank, owner) for owner in owners]
        if not sum(map(len, wanted)):
            return None
        n, b = self.sight.places.shape[1:]
        flat = [self.sight.places[owner].t().flatten() for owner in owners]
        wanted = wanted if message is None else [message]
        place = torch.cat([places[want] for places, want in zip(flat, wanted, strict=True)])
        row = torch.cat(wanted) // n
        mine = torch.zeros_like(self.seen[rank])
        mine[place, row] = True
        return _block(self.sight.queries(rank, mine), row, place, b)

    def route(self, owner: int) -> list[int]:
        """The distances of the ranks that see keys of `owner`, in the order of the ring."""
        ranks = self.sight.num_ranks
        return [j for j in range(1, ranks) if len(self.of((owner - j) % ranks, owner))]


def _block(queries: slice, row: Tensor, place: Tensor, num_rows: int) -> Block:
    """Keys (row, place), in the order of a message, as a grid [m, b]."""
    number = (row * (int(place.max()) + 1) + place).argsort()
    row, place = row[number], place[number]
    counts = torch.bincount(row, minlength=num_rows)
    m = int(counts.max())
    slot = row * m + torch.arange(len(row)) - (counts.cumsum(0) - counts)[row]
    index = torch.zeros(num_rows * m, dtype=torch.int64).index_copy(0, slot, number)
    key = torch.full((num_rows * m,), NEVER).index_copy(0, slot, place)
    full = len(row) == num_rows * m
    return Block(
        queries=queries,
        key=key.view(num_rows, m).t(),
        index=None if full and torch.equal(number, torch.arange(len(number))) else index,
        real=None if full else slot,
        tokens=number,
    )


def own_block(sight: Sight, rank: int) -> Block | None:
    """A rank's queries with all of its own keys, as they lie; None where they see none of them."""
    places = sight.places[rank]
    n, b = places.shape
    mine = torch.zeros(sight.num_ranks * n, b, dtype=torch.bool).scatter_(0, places, True)
    queries = sight.queries(rank, mine)
    if queries.stop == 0:
        return None
    return Block(queries=queries, key=places, index=None, real=None, tokens=torch.arange(n * b))


def ring_plan(sight: Sight, rank: int, needs: Needs | None = None) -> RingPlan:
    """The part of `rank` in the ring."""
    needs = needs if needs is not None else Needs(sight)
    ranks = sight.num_ranks
    steps = [RingStep((rank + t) % ranks) for t in range(ranks)] + [RingStep(rank)]
    steps[0].block = own_block(sight, rank)
    for owner in range(ranks):
        _travel(steps, needs, owner, rank)
    for step in steps:  # messages between two ranks have one order at both ends
        for messages in (step.sends, step.receives, step.grad_sends, step.grad_receives):
            messages.sort(key=lambda message: message.owner)
    return RingPlan(steps[: 1 if ranks == 1 else None])


_HOME = -1


def _travel(steps: list[RingStep], needs: Needs, owner: int, rank: int) -> None:
    """Writes into `steps` what `rank` has to do with the keys of `owner`."""
    ranks = needs.sight.num_ranks
    route = needs.route(owner)
    distance = (owner - rank) % ranks
    if not route or (distance and distance not in route):
        return
    me = route.index(distance) if distance else _HOME
    held = torch.arange(needs.sight.places[0].numel())  # of what this rank holds, in order
    latest = torch.full_like(held, _HOME)  # where each token was last

    def peer(stop: int) -> int:
        return (owner - (route[stop] if stop != _HOME else 0)) % ranks

    for stop, step in enumerate(route):
        tokens = needs.of(peer(stop), owner)
        groups = [(source, tokens[latest[tokens] == source]) for source in latest[tokens].unique().tolist()]
        latest[tokens] = stop
        if stop == me:
            held = torch.cat([group for _, group in groups])
            steps[step].block = needs.block(rank, [owner], held)
            start = 0
            for source, group in groups:
                message = Message(peer=peer(source), owner=owner, count=len(group), start=start)
                steps[step - 1].receives.append(message)
                if source != _HOME:
                    steps[step].grad_receives.append(message)
                start += len(group)
        for source, group in groups:
            if source == me:
                message = Message(peer=peer(stop), owner=owner, count=len(group), index=_within(group, held))
                steps[step - 1].sends.append(message)
                if me != _HOME:
                    steps[step].grad_sends.append(message)
    for stop, step in enumerate(route):
        if me not in (stop, _HOME):
            continue
        group = (latest == stop).nonzero().flatten()
        if len(group):
            to = peer(stop) if me == _HOME else owner
            message = Message(peer=to, owner=owner, count=len(group), index=_within(group, held))
            (steps[step + 1].grad_receives if me == _HOME else steps[step + 1].grad_sends).append(message)


def gather_plan(sight: Sight, rank: int, needs: Needs | None = None) -> GatherPlan:
    """The part of `rank` when all keys that are needed travel at once."""
    needs = needs if needs is not None else Needs(sight)
    ranks, tokens = sight.num_ranks, sight.places[0].numel()
    others = [other for other in range(ranks) if other != rank]
    whole = all(len(needs.of(r, o)) == tokens for r in range(ranks) for o in range(ranks) if r != o)
    block = needs.block(rank, others, None)
    if whole and block is not None:  # the keys of this rank lie among those of all ranks
        block = _skip(block, rank * tokens, tokens)
    send = [needs.of(other, rank) if other != rank else torch.empty(0, dtype=torch.int64) for other in range(ranks)]
    return GatherPlan(
        block=own_block(sight, rank),
        others=block,
        send_rows=[len(part) for part in send],
        receive_rows=[len(needs.of(rank, other)) if other != rank else 0 for other in range(ranks)],
        send=torch.cat(send),
        whole=whole,
    )


def _skip(block: Block, start: int, count: int) -> Block:
    """The same keys in a message that has `count` more tokens at `start`."""
    assert block.real is None, "rows of the same length have no fillers"
    index = block.tokens if block.index is None else block.index
    index = torch.where(index >= start, index + count, index)
    tokens = torch.where(block.tokens >= start, block.tokens + count, block.tokens)
    return replace(block, index=index, tokens=tokens)


def _within(part: Tensor, whole: Tensor) -> Tensor | None:
    """Where the tokens of `part` stand in `whole`; None if they are the same, in the same order."""
    if torch.equal(part, whole):
        return None
    order = whole.argsort()
    return order[torch.searchsorted(whole[order], part)]
