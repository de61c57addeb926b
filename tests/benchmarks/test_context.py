"""The ways that benchmarks/context.py compares compute the same attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.context import BY_HAND, MODES, make_batch, one_rank_ways, two_rank_ways
from megalite.mpu import ParallelConfig, ParallelState
from megalite.parallel.context import cut_rows
from megalite.testing.world import World


def outputs(mpu: ParallelState, seq_len: int, documents: int) -> dict[str, Any]:
    """Name -> (places, output) of this rank."""
    batch = make_batch(seq_len, documents)
    states = {mode: ParallelState.build(ParallelConfig(cp=2, cp_mode=mode), ranks=mpu.world.ranks) for mode in MODES}  # pyright: ignore[reportArgumentType]
    places = cut_rows(batch, mpu.cp)[1].mine[:, 0]
    found = {name: (places, run()) for name, run in two_rank_ways(states, batch, torch.float64).items()}
    half = seq_len // 2
    found[BY_HAND] = (torch.arange(half) + mpu.cp.rank * half, found[BY_HAND][1])
    return found


@pytest.mark.parametrize("documents", [0, 100])
def test_every_way_computes_the_same(documents: int, world: World) -> None:
    first, *others = (run() for run in one_rank_ways(make_batch(256, documents), torch.float64).values())
    for other in others:
        torch.testing.assert_close(other, first)
    for result in world.run(outputs, 256, documents, layout=ParallelConfig(cp=2)):
        for name, (places, out) in result.items():
            torch.testing.assert_close(out, first[places], msg=name)
