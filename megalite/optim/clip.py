"""The global gradient norm, each element of the model counted once, and clipping by it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from megalite.kernels.grad_norm import sum_of_squares
from megalite.mpu import ParallelState
from megalite.parallel.data import DataParallel, Segment
from megalite.parallel.shard import shard_of, slices_axis

SumOfSquares = Callable[[Tensor], Tensor]


class GradNorm:
    """The 2-norm of the whole model's gradient, on its way from all pipeline ranks.

    Squares are summed (by the kernel `squares`) in float64, so float32 gradients of any finite size give a finite norm;
    a nan or an infinity anywhere makes it non-finite everywhere. Make it after this rank's gradients have been summed
    over all ranks that share them. `of_rank` is what this pipeline rank contributes, known before the other ranks have
    arrived.

    A stage's dense squares come from its tp ranks, those of its experts from its etp and ep ranks; these cut the same
    ranks in two ways, and each sum is that of one copy. Sums are gathered and added in the order of the axis, so that
    all ranks get the same bits, whatever the library does and however long they wait.
    """

    def __init__(
        self, data_parallels: Sequence[DataParallel], mpu: ParallelState, squares: SumOfSquares = sum_of_squares
    ):
        segments = [segment for data_parallel in data_parallels for segment in data_parallel.segments]
        device = segments[0].param.device if segments else mpu.world.device
        dense = _squares([segment for segment in segments if segment.group == "dense"], mpu, device, squares)
        experts = _squares([segment for segment in segments if segment.group == "expert"], mpu, device, squares)
        if mpu.config.zero:  # each rank has the squares of its slices
            dense = _in_order(slices_axis("dense", mpu).all_gather(dense))
            experts = _in_order(slices_axis("expert", mpu).all_gather(experts))
        self._mine = _in_order(mpu.tp.all_gather(dense)) + _in_order(mpu.etp_ep.all_gather(experts))
        self._pending = mpu.pp.start_all_gather(self._mine)

    @property
    def of_rank(self) -> Tensor:
        """The norm of this pipeline rank's part."""
        return self._mine.sqrt().squeeze(0)

    def wait(self) -> Tensor:
        """The norm, a float64 scalar with the same bits on every rank."""
        return _in_order(self._pending.wait()).sqrt().squeeze(0)


def grad_norm(data_parallels: Sequence[DataParallel], mpu: ParallelState) -> Tensor:
    """The 2-norm of the whole model's gradient: `GradNorm`, waited for."""
    return GradNorm(data_parallels, mpu).wait()


def owned_runs(segment: Segment, mpu: ParallelState) -> Iterator[slice]:
    """Runs of the segment that this rank counts (padding between owned parameters, always zero, may be included)."""
    begin, end = 0, 0
    for span in segment.spans:
        if not shard_of(span.parameter).is_owner(mpu):
            if end > begin:
                yield slice(begin, end)
            begin = end = span.end
        else:
            begin = span.start if end == begin else begin
            end = span.end
    if end > begin:
        yield slice(begin, end)


def _squares(segments: Sequence[Segment], mpu: ParallelState, device: torch.device, squares: SumOfSquares) -> Tensor:
    """float64 [1]: the sum of squares of what this rank counts."""
    total = torch.zeros(1, dtype=torch.float64, device=device)
    for segment in segments:
        for run in owned_runs(segment, mpu):
            total += squares(segment.main_grad[run])
        total += _not_finite(segment, mpu)
    return total


def _in_order(parts: Tensor) -> Tensor:
    """[1]: parts[0] + parts[1] + ..., in this order."""
    total = torch.zeros_like(parts[:1])
    for part in parts:
        total += part
    return total


def _not_finite(segment: Segment, mpu: ParallelState) -> Tensor:
    """nan where a gradient that another rank counts is not finite here (its copies should agree), else 0."""
    found = torch.zeros((), dtype=torch.float64, device=segment.param.device)
    for span in segment.spans:
        shard = shard_of(span.parameter)
        if shard.tied_to is None and not shard.is_owner(mpu):
            found += 0.0 * segment.main_grad[span.start : span.end].sum(dtype=torch.float64)
    return found


def clip_coefficient(norm: float, limit: float) -> float:
    """What a gradient of this norm is multiplied by, so that its norm is at most `limit` (0: no limit)."""
    return limit / norm if 0 < limit < norm else 1.0
