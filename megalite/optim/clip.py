"""The global gradient norm, each element of the model counted once, and clipping by it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from megalite.mpu import ParallelState
from megalite.parallel.data import DataParallel, Segment
from megalite.parallel.shard import shard_of

_CHUNK = 1 << 18
"""Elements squared at a time on the CPU, so that their float64 copy stays in the cache."""
_CUDA_CHUNK = 1 << 24


class GradNorm:
    """The 2-norm of the whole model's gradient, on its way from all pipeline ranks.

    Squares are summed in float64, so float32 gradients of any finite size give a finite norm; a nan or an infinity
    anywhere makes it non-finite everywhere. Make it after this rank's gradients have been summed over all ranks that
    share them. `of_rank` is what this pipeline rank contributes, known before the other ranks have arrived. The
    ranks' squares are added in pipeline order, so that all get the same bits, however long they wait.
    """

    def __init__(self, data_parallels: Sequence[DataParallel], mpu: ParallelState):
        segments = [segment for data_parallel in data_parallels for segment in data_parallel.segments]
        total = torch.zeros((), dtype=torch.float64, device=segments[0].param.device if segments else mpu.tp.device)
        for segment in segments:
            for run in owned_runs(segment, mpu):
                total += _sum_of_squares(segment.main_grad[run])
            total += _not_finite(segment, mpu)
        self._mine = mpu.tp.all_reduce(total.view(1))
        self._pending = mpu.pp.start_all_gather(self._mine)

    @property
    def of_rank(self) -> Tensor:
        """The norm of this pipeline rank's part."""
        return self._mine.sqrt().squeeze(0)

    def wait(self) -> Tensor:
        """The norm, a float64 scalar with the same bits on every rank."""
        total = torch.zeros_like(self._mine)
        for part in self._pending.wait():
            total += part
        return total.sqrt().squeeze(0)


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


def _not_finite(segment: Segment, mpu: ParallelState) -> Tensor:
    """nan where a gradient that another rank counts is not finite here (its copies should agree), else 0."""
    found = torch.zeros((), dtype=torch.float64, device=segment.param.device)
    for span in segment.spans:
        shard = shard_of(span.parameter)
        if shard.tied_to is None and not shard.is_owner(mpu):
            found += 0.0 * segment.main_grad[span.start : span.end].sum(dtype=torch.float64)
    return found


def _sum_of_squares(values: Tensor) -> Tensor:
    total = torch.zeros((), dtype=torch.float64, device=values.device)
    for part in values.split(_CUDA_CHUNK if values.is_cuda else _CHUNK):
        wide = part.to(torch.float64)
        total += torch.dot(wide, wide)
    return total


def clip_coefficient(norm: float, limit: float) -> float:
    """What a gradient of this norm is multiplied by, so that its norm is at most `limit` (0: no limit)."""
    return limit / norm if 0 < limit < norm else 1.0
