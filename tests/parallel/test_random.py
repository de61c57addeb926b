"""Initial values: one global tensor for every layout, with the right distribution."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from megalite.axis import Axis
from megalite.mpu import ParallelState
from megalite.parallel.random import hashed_normal, initialize, normal_
from megalite.parallel.shard import Cut, Shard, even_cut, materialize
from megalite.parallel.tensor import ColumnParallelLinear, RowParallelLinear


class _Place(Axis):
    """An axis position without a process group."""

    def __init__(self, rank: int, size: int):
        super().__init__("tp")
        self.rank, self.size, self.ranks = rank, size, tuple(range(size))


def test_every_cut_is_a_part_of_the_same_tensor() -> None:
    whole = torch.empty(7, 10, dtype=torch.float64)
    normal_(whole, 1, 0.5, Shard("w", (7, 10)))
    for dim in (0, 1):
        parts = []
        for rank in range(3):
            cut = Cut(_Place(rank, 3), dim, even_cut(whole.shape[dim], _Place(rank, 3)))
            shard = Shard("w", (7, 10), (cut,))
            parts.append(torch.empty(shard.local_shape, dtype=torch.float64))
            normal_(parts[-1], 1, 0.5, shard)
        torch.testing.assert_close(torch.cat(parts, dim), whole, rtol=0, atol=0)


def test_split_segments_draw_their_own_elements() -> None:
    whole, part = torch.empty(12, 3), torch.empty(6, 3)
    normal_(whole, 1, 1.0, Shard("w", (12, 3)))
    normal_(part, 1, 1.0, Shard("w", (12, 3), (Cut(_Place(0, 2), 0, ((0, 2), (6, 4))),)))
    torch.testing.assert_close(part, torch.cat([whole[0:2], whole[6:10]]), rtol=0, atol=0)


def test_moments_and_independence() -> None:
    n = 1 << 18
    values = hashed_normal(torch.arange(n), "layers.0.w", 7)
    other = hashed_normal(torch.arange(n), "layers.2.w", 7)
    reseeded = hashed_normal(torch.arange(n), "layers.0.w", 8)
    bound = 5 / math.sqrt(n)
    assert abs(values.mean()) < bound and abs(values.var() - 1) < math.sqrt(2) * bound
    assert abs((values**4).mean() - 3) < math.sqrt(96) * bound
    assert abs((values * other).mean()) < bound, "layers must differ"
    assert abs((values * reseeded).mean()) < bound, "seeds must differ"
    assert abs((values[1:] * values[:-1]).mean()) < bound
    tail = (values.abs() > 3).double().mean()
    assert abs(tail - 0.0026998) < 5 * math.sqrt(0.0027 / n)
    assert values.isfinite().all()


def test_large_indices_do_not_repeat() -> None:
    far = hashed_normal(torch.arange(4) + (1 << 40), "w", 0)
    assert not torch.isclose(far, hashed_normal(torch.arange(4), "w", 0)).any()


@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_scale_is_that_of_the_global_shape(size: int) -> None:
    """A fan-dependent scale on a shard would grow with tp; ours is given and the values are the global ones."""
    whole = RowParallelLinear(64, 16, axis=ParallelState.single().tp, init_std=0.1581)
    parts = [RowParallelLinear(64, 16, axis=_Place(rank, size), init_std=0.1581) for rank in range(size)]
    for layer in (whole, *parts):
        initialize(layer, seed=5)
    assert all(abs(part.weight.std().item() - 0.1581) < 0.02 for part in (whole, *parts))
    assert torch.equal(torch.cat([part.weight for part in parts], 1), whole.weight)


def test_meta_then_materialize_equals_direct() -> None:
    direct = ColumnParallelLinear(6, 7, axis=ParallelState.single().tp)
    initialize(direct, seed=5)
    with torch.device("meta"):
        later = ColumnParallelLinear(6, 7, axis=ParallelState.single().tp)
    materialize(later, torch.device("cpu"), torch.float32)
    initialize(later, seed=5)
    torch.testing.assert_close(later.weight, direct.weight, rtol=0, atol=0)


def test_modules_that_say_nothing_get_defaults() -> None:
    linear, norm = nn.Linear(3, 4), nn.LayerNorm(4)
    initialize(nn.Sequential(linear, norm), seed=0)
    assert linear.weight.std() < 0.05 and not linear.bias.any() and bool((norm.weight == 1).all())
