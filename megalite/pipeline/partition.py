"""Which layers each pipeline stage holds: a pure function of their costs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True, kw_only=True)
class PartCosts:
    """What the parts of a model cost, in any unit."""

    layers: tuple[float, ...]
    """Of each layer."""
    embedding: float
    """Of what the first stage has besides layers."""
    head: float
    """Of what the last stage has besides layers."""


def partition(
    num_layers: int,
    num_stages: int,
    *,
    layer_cost: float | Sequence[float],
    embedding_cost: float,
    head_cost: float,
    layers_per_stage: Sequence[int] | None = None,
) -> list[range]:
    """The layers of each stage: consecutive ranges that cover 0 .. num_layers - 1 in order.

    The first stage also holds the embedding, the last one the head. Costs share any unit; `layer_cost` is one for
    all layers or one for each. The slowest stage is made as fast as can be, then the others as even as can be. Only
    the first and the last stage may have no layers, as they have parameters without; they are left empty only where
    that makes the slowest stage faster (a head dearer than its share, or fewer layers than stages).
    `layers_per_stage` sets the numbers of layers instead. Raises ValueError for what cannot be split.
    """
    if num_layers < 0 or num_stages < 1:
        raise ValueError(f"num_layers={num_layers} must be at least 0 and the stages (pp * vpp), {num_stages}, 1")
    if layers_per_stage is not None:
        return _explicit(num_layers, num_stages, tuple(layers_per_stage))
    if num_layers < num_stages - 2:
        raise ValueError(
            f"num_layers={num_layers} is too few for {num_stages} pipeline stages (pp * vpp): each of the "
            f"{num_stages - 2} between the first and the last needs a layer; use at most {num_layers + 2} stages"
        )
    costs = [layer_cost] * num_layers if isinstance(layer_cost, int | float) else list(layer_cost)
    if len(costs) != num_layers:
        raise ValueError(f"{len(costs)} layer costs for num_layers={num_layers}")
    if not all(0 <= cost < math.inf for cost in (*costs, embedding_cost, head_cost)):
        raise ValueError(
            f"costs must be finite and not negative: layers from {min(costs, default=0)} to {max(costs, default=0)}, "
            f"{embedding_cost=}, {head_cost=}"
        )
    # A power of two changes no comparison, but keeps squares within what floats can hold.
    unit = math.ldexp(1.0, min(-math.frexp(max(*costs, embedding_cost, head_cost))[1], 1000))
    table = _CostTable([cost * unit for cost in costs], num_stages, embedding_cost * unit, head_cost * unit)
    full, sparse = table.slowest(empty_ends=False), table.slowest(empty_ends=True)
    empty_ends = sparse < full
    return table.most_even(sparse if empty_ends else full, empty_ends)


def _explicit(num_layers: int, num_stages: int, counts: tuple[int, ...]) -> list[range]:
    problems = []
    if len(counts) != num_stages:
        problems.append(f"has {len(counts)} entries for {num_stages} stages (pp * vpp)")
    if sum(counts) != num_layers:
        problems.append(f"adds up to {sum(counts)}, but num_layers={num_layers}")
    problems += [f"has {count} layers on stage {i}" for i, count in enumerate(counts) if count < 0]
    problems += [
        f"leaves stage {i} without parameters; only the first and the last stage may have no layers"
        for i, count in enumerate(counts)
        if count == 0 and 0 < i < len(counts) - 1
    ]
    if problems:
        raise ValueError(f"parallel.layers_per_stage={list(counts)} " + " and ".join(problems))
    ends = list(accumulate(counts))
    return [range(end - count, end) for count, end in zip(counts, ends, strict=True)]


class _CostTable:
    """Costs of all possible stages, and dynamic programs over them."""

    def __init__(self, layer_costs: Sequence[float], num_stages: int, embedding_cost: float, head_cost: float):
        self.num_layers, self.num_stages = len(layer_costs), num_stages
        self.prefix = list(accumulate(layer_costs, initial=0))
        self.extra = [0.0] * num_stages
        self.extra[0] += embedding_cost
        self.extra[-1] += head_cost

    def cost(self, stage: int, begin: int, end: int) -> float:
        """What `stage` costs with the layers begin .. end - 1."""
        return self.prefix[end] - self.prefix[begin] + self.extra[stage]

    def begins(self, stage: int, end: int, empty_ends: bool) -> range:
        """Where `stage` may begin when it ends before layer `end`."""
        may_be_empty = self.num_stages == 1 or (empty_ends and stage in (0, self.num_stages - 1))
        return range(end + 1 if may_be_empty else end)

    def slowest(self, empty_ends: bool) -> float:
        """The least possible cost of the dearest stage; infinite when there are too few layers."""
        best = [0.0] + [float("inf")] * self.num_layers
        for stage in range(self.num_stages):
            best = [
                min(
                    (max(best[begin], self.cost(stage, begin, end)) for begin in self.begins(stage, end, empty_ends)),
                    default=float("inf"),
                )
                for end in range(self.num_layers + 1)
            ]
        return best[-1]

    def most_even(self, limit: float, empty_ends: bool) -> list[range]:
        """The split with the least sum of squared costs among those with no stage above `limit`."""
        best: list[list[tuple[float, int]]] = []  # by stage and end: the sum so far, and where the stage begins
        for stage in range(self.num_stages):
            before = [total for total, _ in best[-1]] if best else [0.0] + [float("inf")] * self.num_layers
            best.append(
                [
                    min(
                        (
                            (before[begin] + cost**2, begin)
                            for begin in self.begins(stage, end, empty_ends)
                            if (cost := self.cost(stage, begin, end)) <= limit
                        ),
                        default=(float("inf"), 0),
                    )
                    for end in range(self.num_layers + 1)
                ]
            )
        ranges, end = [], self.num_layers
        for stage in reversed(range(self.num_stages)):
            begin = best[stage][end][1]
            ranges.append(range(begin, end))
            end = begin
        return ranges[::-1]
