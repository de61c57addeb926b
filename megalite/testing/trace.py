"""Which collectives a rank enters, in order: members of a group must agree, or the job hangs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from megalite.axis import Axis

_UNPAIRED = ("send", "receive")


@dataclass(frozen=True)
class Entered:
    """One collective, as this rank entered it; `ranks` are its members."""

    ranks: tuple[int, ...]
    operation: str


@contextlib.contextmanager
def record_collectives() -> Iterator[list[Entered]]:
    """Collects every collective that this process enters inside the context, over all axes."""
    entered: list[Entered] = []
    original = Axis._enter

    def enter(self: Axis, operation: str, bytes_sent: int) -> None:
        original(self, operation, bytes_sent)
        entered.append(Entered(self.ranks, operation))

    Axis._enter = enter
    try:
        yield entered
    finally:
        Axis._enter = original


def check_same_order(entered: Mapping[int, Sequence[Entered]]) -> None:
    """Compares what each global rank entered, group by group; AssertionError names the first that differs."""
    groups = {call.ranks for calls in entered.values() for call in calls}
    for ranks in sorted(groups):
        found = {rank: _of_group(entered[rank], ranks) for rank in ranks if rank in entered}
        first = next(iter(found))
        for rank, calls in found.items():
            for place in range(max(len(calls), len(found[first]))):
                mine, theirs = (c[place] if place < len(c) else "nothing more" for c in (calls, found[first]))
                if mine != theirs:
                    raise AssertionError(
                        f"group {ranks}, call {place}: rank {rank} enters {mine}, rank {first} enters {theirs}"
                    )


def _of_group(calls: Sequence[Entered], ranks: tuple[int, ...]) -> list[str]:
    return [c.operation for c in calls if c.ranks == ranks and c.operation not in _UNPAIRED]
