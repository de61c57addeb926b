"""Peak activation memory of a rank, counted, falls as the number of context-parallel ranks rises."""

from __future__ import annotations

import functools

import pytest

from benchmarks.context_memory import MODEL, measure
from megalite.testing.world import World

FULL = [
    (8192, "cp2"), (8192, "cp4"), (8192, "cp4:all_gather"), (8192, "cp4:ulysses"),
    *[(length, layout) for length in (16384, 32768) for layout in ("cp2", "cp4", "cp4:all_gather", "cp4:ulysses")],
]  # fmt: skip
KV_BYTES = 2 * MODEL.kv_heads * MODEL.head_size * 4
ROWS = [pytest.param(*row, marks=pytest.mark.full) for row in ((8192, "cp4:ulysses_ring"), *FULL)]


@pytest.fixture(scope="module")
def on_one_rank(world: World) -> functools._lru_cache_wrapper[tuple[int, int]]:
    """(kept, peak) by the length of the row."""
    return functools.cache(lambda seq_len: measure(world, "single", seq_len))


@pytest.mark.parametrize(("seq_len", "layout"), ROWS)
def test_memory_falls_with_the_ranks(
    seq_len: int, layout: str, on_one_rank: functools._lru_cache_wrapper[tuple[int, int]], world: World
) -> None:
    cp = int(layout[2])
    kept, peak = on_one_rank(seq_len)
    kept_here, peak_here = measure(world, layout, seq_len)
    # Ulysses keeps a copy of KV heads that are fewer than the ranks
    assert kept_here < 1.12 * kept / cp
    # the largest block of scores with its temporaries does not depend on the length of rows
    allowed = 1.1 * peak / cp + (8 << 20)
    if layout.endswith("all_gather"):
        allowed += 3 * seq_len * KV_BYTES  # those of all ranks, their gradients, and one of them on its way
    assert peak_here < allowed
