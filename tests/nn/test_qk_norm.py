"""The norm over all heads of a token, cut over ranks."""

from __future__ import annotations

import torch

from megalite.axis import Stash
from megalite.mpu import ParallelConfig, ParallelState
from megalite.nn.qk_norm import _CutRMSNorm
from megalite.testing.world import World


def _twice(mpu: ParallelState) -> bool:
    """Whether the recomputation, which sends nothing, gives what the first run gave."""
    x = torch.arange(6.0, dtype=torch.float64).view(2, 3) + mpu.rank
    weight = torch.ones(3, dtype=torch.float64)
    mpu.last_call.stash = stash = Stash()
    first = _CutRMSNorm.apply(x, weight, mpu.tp, 6, 1, 1e-5)
    stash.replay()
    second = _CutRMSNorm.apply(x, weight, mpu.tp, 6, 1, 1e-5)
    mpu.last_call.stash = None
    return torch.equal(first, second)


def test_a_stashed_sum_stays_as_it_is(world: World) -> None:
    assert world.run(_twice, layout=ParallelConfig(tp=2), ranks=2) == [True, True]
