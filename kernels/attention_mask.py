"""Which keys a query sees, as an interval of places, and the blocks of scores that are not empty.

Causal attention, documents and sliding windows, alone or together, let the query at place i of its row see the places
start_i .. i and nothing else. Three integers a token say so; a mask of the size of the scores is never made.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

_BLOCK = 128  # queries in a block
_WIDTH = 1024  # keys that meet a block of queries at a time

Span = tuple[int, int]
"""(start, stop) among the queries or keys here, not places."""


@dataclass(frozen=True, kw_only=True, eq=False)
class AttentionMask:
    """Query n of batch row b sees the keys at places start[n, b] .. query[n, b]; tensors are int64.

    Queries and keys may be any part of a row, in any order; blocks are large where they come in ascending runs. The
    plan of the work is made once, on first use, so that a mask should be kept for all layers that share it.
    """

    query: Tensor
    """[sq, b]: the place of each query in its row."""
    start: Tensor
    """[sq, b]: the first place that it sees."""
    key: Tensor
    """[sk, b]: the place of each key in its row."""
    kept: dict[Any, Any] = field(default_factory=dict, init=False, repr=False)
    """What a backend made of the mask and wants to find again, by a name of its own."""

    @cached_property
    def columns(self) -> tuple[Columns, ...]:
        """The work, by runs of batch rows that have the same mask."""
        if not self.query.shape[1]:
            return ()
        tokens = torch.cat((self.query, self.start, self.key)).cpu()
        changes = (tokens[:, 1:] != tokens[:, :-1]).any(0).nonzero().flatten().add_(1).tolist()
        starts = [0, *changes]
        sizes = [self.query.shape[0], self.start.shape[0], self.key.shape[0]]
        return tuple(
            _plan_columns(slice(first, stop), *tokens[:, first].split(sizes))
            for first, stop in zip(starts, [*changes, tokens.shape[1]], strict=True)
        )

    @property
    def is_empty(self) -> bool:
        """Whether no query sees any key."""
        return not any(columns.blocks for columns in self.columns)

    @cached_property
    def pieces(self) -> tuple[Piece, ...]:
        """The work as flash kernels know it, see `Piece`; made once, on first use."""
        return tuple(piece for columns in self.columns for piece in _pieces(columns))


class Tile(NamedTuple):
    """Keys that meet a block of queries: all queries see those of `full`, of the others it depends on the query."""

    keys: Span
    full: Span


class Block(NamedTuple):
    """Consecutive queries, and the tiles of keys that some of them see."""

    queries: Span
    tiles: tuple[Tile, ...]


@dataclass(frozen=True)
class Columns:
    """The work of the batch rows `batch`: its blocks, and what each query sees as runs of keys, `seen`.

    seen[r] = (lo, hi), int64 [sq] each: query n sees the keys lo[n] .. hi[n] - 1 of the r-th ascending run of keys.
    """

    batch: slice
    blocks: tuple[Block, ...]
    seen: tuple[tuple[Tensor, Tensor], ...]

    @property
    def num_pairs(self) -> int:
        """(query, key) pairs of one batch row that the mask allows."""
        return sum(int((hi - lo).sum()) for lo, hi in self.seen)


Shape = Literal["full", "causal", "band", "fade"]


class Piece(NamedTuple):
    """Consecutive queries and keys of the batch rows `batch` with a mask that needs no tensor.

    Of sq queries and sk keys, query i sees key j: full: always; causal: for j <= i + sk - sq; band: for
    i <= j <= i + sk - sq; fade: for j >= i. Each query sees a key.
    """

    batch: slice
    queries: Span
    keys: Span
    shape: Shape


class PairCount(NamedTuple):
    """(query, key) pairs of all batch rows, for one head: those that a mask allows, and those that are computed."""

    allowed: int
    computed: int


def num_pairs(mask: AttentionMask) -> PairCount:
    """How much of the scores the mask allows, and how much `masked_forward` computes of them."""
    allowed = computed = 0
    for columns in mask.columns:
        num_rows = columns.batch.stop - columns.batch.start
        allowed += num_rows * columns.num_pairs
        computed += num_rows * sum(
            _length(block.queries) * _length(t.keys) for block in columns.blocks for t in block.tiles
        )
    return PairCount(allowed, computed)


def first_seen(places: Tensor, documents: Tensor | None, window: int = 0) -> Tensor:
    """int64 [s, b]: the first place that the token at each of `places` [s, b] sees, causally.

    documents: int64 [s, b], the place where the document of each token starts (None: one document from place 0).
    window: how many places a token sees at most, its own included; 0 is no limit.
    """
    start = torch.zeros_like(places) if documents is None else documents
    return torch.maximum(start, places - (window - 1)) if window else start


def _length(span: Span) -> int:
    return span[1] - span[0]


_SHAPES: dict[Span, Shape] = {(0, 0): "full", (0, 1): "causal", (1, 1): "band", (1, 0): "fade"}
"""By how much the first and the last key that are seen move on from one query to the next."""


def _pieces(columns: Columns) -> Iterator[Piece]:
    """Cuts the queries, for each ascending run of keys, where the way their keys move on changes."""
    for lo, hi in columns.seen:
        starts, stops = lo.tolist(), hi.tolist()
        begin, num_queries = 0, len(starts)
        while begin < num_queries:
            end, shape, sees = begin + 1, None, starts[begin] < stops[begin]
            while end < num_queries:
                step = _SHAPES.get((starts[end] - starts[end - 1], stops[end] - stops[end - 1]))
                if starts[end] >= stops[end - 1]:
                    step = None  # another document, if only of one token
                if step is None or shape not in (None, step) or (starts[end] < stops[end]) != sees:
                    break
                end, shape = end + 1, step
            if sees:
                yield Piece(columns.batch, (begin, end), (starts[begin], stops[end - 1]), shape or "full")
            begin = end


def _plan_columns(batch: slice, query: Tensor, start: Tensor, key: Tensor) -> Columns:
    seen = tuple(_seen(query, start, key))
    return Columns(batch, tuple(_blocks(query.shape[0], seen)), seen)


def _seen(query: Tensor, start: Tensor, key: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """(lo, hi) of `Columns.seen` for each ascending run of keys that somebody sees."""
    ends = (key[1:] <= key[:-1]).nonzero().flatten().add_(1).tolist()
    for first, stop in zip([0, *ends], [*ends, key.shape[0]], strict=True):
        run = key[first:stop].contiguous()
        hi = torch.searchsorted(run, query.contiguous(), right=True)
        lo = torch.minimum(torch.searchsorted(run, start.contiguous()), hi)
        if bool((lo < hi).any()):
            yield lo + first, hi + first


def _blocks(num_queries: int, seen: tuple[tuple[Tensor, Tensor], ...]) -> Iterator[Block]:
    """Blocks of up to _BLOCK queries; one ends early where the keys that are seen move on by more than a block."""
    if not seen:
        return
    bounds = torch.stack([bound for pair in seen for bound in pair])
    jumps = ((bounds[:, 1:] - bounds[:, :-1]).abs() > _BLOCK).any(0).nonzero().flatten().add_(1).tolist()
    runs = [(lo.tolist(), hi.tolist()) for lo, hi in seen]
    for first, stop in zip([0, *jumps], [*jumps, num_queries], strict=True):
        for begin in range(first, stop, _BLOCK):
            block = _block(begin, min(begin + _BLOCK, stop), runs)
            if block is not None:
                yield block


def _block(begin: int, end: int, runs: list[tuple[list[int], list[int]]]) -> Block | None:
    """The block of queries begin .. end - 1, without those at its ends that see nothing."""
    sees = [n for n in range(begin, end) if any(lo[n] < hi[n] for lo, hi in runs)]
    if not sees:
        return None
    begin, end = sees[0], sees[-1] + 1
    return Block((begin, end), tuple(tile for lo, hi in runs for tile in _tiles(lo[begin:end], hi[begin:end])))


def _tiles(lo: list[int], hi: list[int]) -> Iterator[Tile]:
    """The keys that some query of a block sees, _WIDTH at a time."""
    visible = [(first, stop) for first, stop in zip(lo, hi, strict=True) if first < stop]
    if not visible:
        return
    start, stop = min(first for first, _ in visible), max(last for _, last in visible)
    full = (max(lo), min(hi))
    for begin in range(start, stop, _WIDTH):
        end = min(begin + _WIDTH, stop)
        part = (max(full[0], begin), min(full[1], end))
        yield Tile((begin, end), part if part[0] < part[1] else (end, end))
