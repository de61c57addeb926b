"""The queue of weight gradients that a stage's linears fill in the backward pass.

Zero-bubble schedules (Qi et al., 2023, arXiv:2401.10241) run the input gradient and the weight gradient of a
stage as two actions. A linear hands its weight gradient to its queue, which runs it at once or keeps it for `drain`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from megalite.kernels.linear import accumulate_weight_grad


@dataclass
class WeightGradQueue:
    """Weight gradients of one stage, first in, first out.

    While `deferring`, `put` keeps the work under the current `microbatch`; otherwise it runs it at once.
    `accumulate(main_grad, dy, x)` is how a linear adds dy^T x to its main gradient. `on_start` is told the parameters
    of each work before it runs, `on_done` those of a deferred one when it has run (gradient buckets listen).
    """

    deferring: bool = False
    microbatch: int = 0
    accumulate: Callable[[Tensor, Tensor, Tensor], None] = accumulate_weight_grad
    on_start: Callable[[Sequence[nn.Parameter]], None] | None = None
    on_done: Callable[[Sequence[nn.Parameter]], None] | None = None
    _waiting: dict[int, deque[tuple[Callable[[], None], Sequence[nn.Parameter]]]] = field(default_factory=dict)

    def __deepcopy__(self, memo: dict[int, Any]) -> WeightGradQueue:
        return WeightGradQueue(
            accumulate=self.accumulate
        )  # of a copied layer: what waits here, and who listens, belongs to the original

    def put(self, work: Callable[[], None], parameters: Sequence[nn.Parameter]) -> None:
        """Runs `work`, which adds to the main gradients of `parameters`, now or in `drain`."""
        if self.deferring:
            self._waiting.setdefault(self.microbatch, deque()).append((work, parameters))
        else:
            self.run(work, parameters)

    def run(self, work: Callable[[], None], parameters: Sequence[nn.Parameter]) -> None:
        """Runs `work` now, deferring or not."""
        if self.on_start is not None:
            self.on_start(parameters)
        work()

    def drain(self, microbatch: int) -> None:
        """Runs what was put for `microbatch`, in order."""
        waiting = self._waiting.pop(microbatch, deque())
        with torch.no_grad():
            while waiting:
                work, parameters = waiting.popleft()
                self.run(work, parameters)
                if self.on_done is not None:
                    self.on_done(parameters)

    @property
    def num_waiting(self) -> int:
        """Weight gradients kept, over all micro-batches."""
        return sum(len(works) for works in self._waiting.values())

    def waiting_parameters(self, microbatch: int | None = None) -> Iterator[nn.Parameter]:
        """The parameters that kept work (of one micro-batch, or all) will still add to, once for each work."""
        for number, works in self._waiting.items():
            if microbatch in (None, number):
                for _, parameters in works:
                    yield from parameters
