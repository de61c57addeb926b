"""Peak activation memory of a rank, counted, falls as the number of context-parallel ranks rises."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megalite.batch import MicroBatch
from megalite.kernels.config import KernelConfig
from megalite.models.llama import Llama
from megalite.mpu import ParallelConfig, ParallelState
from megalite.nn.config import ModelConfig
from megalite.testing.world import World
from tests.memory import LiveMemory

SEQ_LEN = 4096


def peak_of_a_step(mpu: ParallelState, seq_len: int) -> tuple[int, int]:
    """Bytes that a tiny model keeps for backward, and the most that it holds, beside weights and their gradients."""
    config = ModelConfig(num_layers=6, hidden_size=32, num_heads=4, num_kv_heads=2, ffn_hidden_size=64, vocab_size=64)
    model = Llama(config, mpu, kernels=KernelConfig())
    tokens = (torch.arange(seq_len) * 7919 % 64)[:, None]
    batch = MicroBatch(
        tokens=tokens, labels=tokens, loss_mask=torch.ones(seq_len, 1), positions=torch.arange(seq_len)[:, None],
        samples=torch.zeros(1, dtype=torch.int64), step=0,
    )  # fmt: skip
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    with LiveMemory() as memory:
        loss = model(None, batch)
        kept = memory.now
        loss.backward()
    return kept, memory.peak


@pytest.fixture(scope="module")
def on_one_rank(world: World) -> tuple[int, int]:
    return world.run(peak_of_a_step, SEQ_LEN, ranks=1)[0]


@pytest.mark.parametrize(
    ("cp", "mode"), [(2, "ring"), (4, "ring"), (4, "ulysses"), (4, "ulysses_ring"), (2, "all_gather")]
)
def test_memory_falls_with_the_ranks(cp: int, mode: Any, on_one_rank: tuple[int, int], world: World) -> None:
    found = world.run(peak_of_a_step, SEQ_LEN, layout=ParallelConfig(cp=cp, cp_mode=mode), timeout=120.0)
    kept, peak = on_one_rank
    # Ulysses keeps a copy of KV heads that are fewer than the ranks
    assert max(kept_here for kept_here, _ in found) < 1.06 * kept / cp
    # the largest block of scores with its temporaries does not depend on the length of rows
    assert max(peak_here for _, peak_here in found) < peak / cp + (8 << 20)
