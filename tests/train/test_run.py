"""What a run says of itself before it starts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest
import torch

from megalite.mpu import ParallelConfig, ParallelState
from megalite.parallel.data import DataParallel, Unit
from megalite.parallel.wgrad import WeightGradQueue
from megalite.testing.world import World
from megalite.train.run import count_parameters
from megalite.train.step import Training
from tests.parallel.parameters import cut_experts, cut_rows, whole


def _count(mpu: ParallelState) -> tuple[int, int]:
    """Two layers: a cut matrix of 24 elements, a whole vector of 5; experts of 4 x 48 and their biases of 4 x 6."""
    data_parallels = {}
    for stage in range(2) if mpu.pp.size == 1 else [mpu.pp.rank]:
        parameters = [
            cut_rows(f"{stage}.words", torch.zeros(8, 3), mpu), whole(f"{stage}.norm", torch.zeros(5)),
            cut_experts(f"{stage}.fc", torch.zeros(4, 8, 6), mpu, 1), cut_experts(f"{stage}.b", torch.zeros(4, 6), mpu),
        ]  # fmt: skip
        data_parallels[stage] = DataParallel([Unit(f"{stage}", parameters)], mpu, queue=WeightGradQueue())
    return count_parameters(cast(Training, SimpleNamespace(mpu=mpu, data_parallels=data_parallels)))


@pytest.mark.parametrize(
    ("layout", "ranks"),
    [
        (ParallelConfig(), 1),
        (ParallelConfig(ep=2), 4),
        (ParallelConfig(tp=2, ep=2, etp=2), 8),
        (ParallelConfig(tp=2, pp=2, ep=4), 8),
    ],
)
def test_parameters_are_those_of_the_global_model(world: World, layout: ParallelConfig, ranks: int) -> None:
    assert world.run(_count, layout=layout, ranks=ranks) == [(2 * 29, 2 * 4 * 54)] * ranks
