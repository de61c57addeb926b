"""How many samples each step of a run consumes."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property

Ramp = tuple[int, int, int]
"""(start, increment, samples), as Megatron-LM's --rampup-batch-size."""


@dataclass(frozen=True)
class _Phase:
    """Steps of one size: the number of the first one, the samples consumed before it, samples of each."""

    step: int
    consumed: int
    size: int


@dataclass(frozen=True, kw_only=True)
class BatchSizes:
    """The size of every global batch, and with it the first sample of every step; there is no state to save.

    With a ramp (start, increment, samples) a step that begins after c samples has start + i x increment of them, where
    i is c x k // samples, and k increments lead from start to `final`: the samples of the ramp are cut into k equal
    parts. From `samples` on, each step has `final`. `problems` says whether the ramp can be.
    """

    final: int
    """Samples of a step, after the ramp if there is one."""
    ramp: Ramp | None = None
    """start, increment, samples."""

    def problems(self) -> list[str]:
        """What is wrong with the ramp, as the end of a sentence about it."""
        if self.ramp is None or self.final < 1:
            return []
        start, increment, _ = self.ramp
        if min(self.ramp) < 1:
            return ["start, increment and samples must be at least 1"]
        if start > self.final:
            return [f"it starts above global_batch_size={self.final}"]
        if (self.final - start) % increment:
            below = start + (self.final - start) // increment * increment
            return [
                f"steps of {increment} do not lead from {start} to global_batch_size={self.final}; they do to {below}"
                f" and {below + increment}"
            ]
        return []

    @property
    def all(self) -> tuple[int, ...]:
        """Every size that a step can have, ascending."""
        return tuple(dict.fromkeys(phase.size for phase in self._phases))

    def of(self, step: int) -> int:
        """Samples of the step after `step` others."""
        return self._phase(step).size

    def before(self, step: int) -> int:
        """Samples that `step` steps have consumed."""
        phase = self._phase(step)
        return phase.consumed + (step - phase.step) * phase.size

    def _phase(self, step: int) -> _Phase:
        return self._phases[bisect_right(self._phases, step, key=lambda phase: phase.step) - 1]

    @cached_property
    def _phases(self) -> tuple[_Phase, ...]:
        if self.ramp is None:
            return (_Phase(0, 0, self.final),)
        start, increment, samples = self.ramp
        count = (self.final - start) // increment
        phases, step, consumed = [], 0, 0
        while (done := consumed * count // samples) < count:
            size = start + done * increment
            phases.append(_Phase(step, consumed, size))
            threshold = -(-(done + 1) * samples // count)  # the fewest samples with one more increment
            steps = -(-(threshold - consumed) // size)
            step, consumed = step + steps, consumed + steps * size
        return (*phases, _Phase(step, consumed, self.final))
