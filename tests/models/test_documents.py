"""Documents that share a row do not know of each other, wherever they lie in it and whoever holds them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megalite.batch import MicroBatch
from megalite.models import MODELS
from megalite.mpu import ParallelConfig, ParallelState
from megalite.parallel.context import cut_rows, pad_rows, row_multiple
from megalite.parallel.random import initialize
from megalite.testing.world import World
from tests.parallel.dense_attention import starts_of
from tests.tiny import GPT2, LFM2, LLAMA

CONFIGS = {"gpt2": GPT2, "llama": LLAMA, "lfm2": LFM2}
LENGTH = 10


def batch_of(tokens: Tensor, lengths: list[int]) -> MicroBatch:
    """One row of documents with positions of their own."""
    starts = starts_of(lengths)
    positions = torch.arange(len(tokens))[:, None] - starts
    return MicroBatch(
        tokens=tokens[:, None], labels=tokens[:, None], loss_mask=torch.ones(len(tokens), 1), positions=positions,
        samples=torch.zeros(1, dtype=torch.int64), step=0, documents=starts,
    )  # fmt: skip


def logits(mpu: ParallelState, name: str, batch: MicroBatch) -> tuple[Tensor, Tensor]:
    """(places, logits [s_local, vocab]) of this rank's tokens."""
    model = MODELS[CONFIGS[name].name](CONFIGS[name], mpu).double().eval()
    initialize(model, seed=5)
    rows = pad_rows(batch, row_multiple(mpu.cp.size, 1, False))
    _, cut = cut_rows(rows, mpu.cp)
    with torch.no_grad():
        return cut.mine[:, 0], model.logits(batch)[:, 0]


def whole(found: list[tuple[Tensor, Tensor]], seq_len: int) -> Tensor:
    """The logits of all places."""
    places, values = (torch.cat(parts) for parts in zip(*found, strict=True))
    return values[places.argsort()][:seq_len]


@pytest.mark.parametrize("layout", [ParallelConfig(), ParallelConfig(cp=2), ParallelConfig(cp=2, cp_mode="ulysses")])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_document_twice_in_a_row_is_itself_twice(name: str, layout: ParallelConfig, world: World) -> None:
    document = torch.arange(LENGTH) * 7 % 61
    between = torch.arange(3) + 40
    alone = logits(ParallelState.single(), name, batch_of(document, [LENGTH]))[1]
    batch = batch_of(torch.cat((document, between, document)), [LENGTH, 3, LENGTH])
    found: Any = world.run(logits, name, batch, layout=layout, ranks=layout.cp)
    together = whole(found, batch.seq_len)
    for copy in (together[:LENGTH], together[-LENGTH:]):
        torch.testing.assert_close(copy, alone, rtol=0, atol=1e-12)
    assert (together[LENGTH : LENGTH + 3] - alone[:3]).abs().max() > 1e-3
