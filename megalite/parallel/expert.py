"""Token dispatch and combine: tokens travel to the ranks of their experts and their outputs come home."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from megalite.mpu import ParallelState


@dataclass(frozen=True)
class Assignment:
    """Which tokens go to which experts: pairs, sorted by expert and, for one expert, by token.

    token: int64 [n], row of the local token tensor (equal to its number of rows: a row of zeros, which fills an unused
    place). expert: int64 [n], global number. probs: [n], the weight of the expert's output, differentiable.
    counts: int64 [num_experts], pairs of each expert.
    """

    token: Tensor
    expert: Tensor
    probs: Tensor
    counts: Tensor


@dataclass(frozen=True)
class Arrived:
    """Tokens at their experts: tokens [n, h] and probs [n] sorted by local expert, counts[e] of local expert e."""

    tokens: Tensor
    probs: Tensor
    counts: list[int]


class Travelling:
    """Tokens on their way."""

    def wait(self) -> Arrived:
        """What has arrived at this rank's experts."""
        raise NotImplementedError


class Dispatcher:
    """Sends tokens over mpu.ep (and gathers them over mpu.etp)."""

    def __init__(self, num_experts: int, mpu: ParallelState):
        self.num_experts, self.mpu = num_experts, mpu

    def send(self, tokens: Tensor, assignment: Assignment) -> Travelling:
        """tokens [t, h] of this rank, to the experts that `assignment` names."""
        raise NotImplementedError

    def combine(self, outputs: Tensor, arrived: Arrived) -> Tensor:
        """outputs [n, h] of this rank's experts -> [t, h], summed over each token's experts."""
        raise NotImplementedError
