"""Recorded router logits: what was computed, whatever the layout that computed it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megalite.batch import BatchTotals, MicroBatch
from megalite.data.batch_sizes import BatchSizes
from megalite.mpu import ParallelConfig, ParallelState
from megalite.nn.config import ModelConfig
from megalite.nn.context import Context
from megalite.nn.router import Router
from megalite.parallel.collectives import sequence_part
from megalite.testing.world import World
from megalite.train.metrics import Speed
from megalite.train.router_record import RouterRecorder, read_recording, recorded_files
from tests.train.test_metrics import make_metrics

S, ROWS, H, E = 6, 4, 5, 8
CONFIG = ModelConfig(
    num_layers=4, hidden_size=H, num_experts=E, moe_layers="every:2", expert_bias=True, router_jitter=0.1
)


def _hidden(layer: int, step: int) -> Tensor:
    return torch.randn(S, ROWS, H, generator=torch.Generator().manual_seed(10 * layer + step), dtype=torch.float64)


def _router(mpu: ParallelState, layer: int) -> Router:
    router = Router(CONFIG, mpu, layer, mpu.tp).double()
    with torch.no_grad():
        router.weight.copy_(torch.randn(E, H, generator=torch.Generator().manual_seed(layer), dtype=torch.float64))
    router.expert_bias.fill_(layer / 4)
    return router


def _context(batch: MicroBatch, training: bool = True) -> Context:
    return Context.uncut(batch, seed=5, training=training)


def _batches(mpu: ParallelState, step: int) -> list[tuple[slice, MicroBatch]]:
    """One row at a time, dealt out over dp; the last position of row 1 is padding."""
    found = []
    for index, row in enumerate(range(mpu.dp.rank, ROWS, mpu.dp.size)):
        ids = torch.zeros(S, 1, dtype=torch.int64)
        mask = torch.ones(S, 1, dtype=torch.bool)
        mask[-1] = row != 1
        batch = MicroBatch(
            tokens=ids, labels=ids, loss_mask=torch.ones(S, 1), positions=ids, step=step, token_mask=mask, index=index,
            samples=torch.tensor([step * ROWS + row]), totals=BatchTotals(num_rows=ROWS, num_tokens=S * ROWS - 1),
        )  # fmt: skip
        found.append((slice(row, row + 1), batch))
    return found


def _record(mpu: ParallelState, folder: Path) -> None:
    layers = (1, 3) if mpu.pp.size == 1 else ((1,), (3,))[mpu.pp.rank]
    routers = [_router(mpu, layer) for layer in layers]
    recorder = RouterRecorder(
        folder, (2,), routers, CONFIG, mpu, sizes=BatchSizes(final=ROWS), seq_len=S, dtype=torch.float64
    )
    for step in range(3):
        recorder.before_step(step + 1)
        for rows, batch in _batches(mpu, step):
            for router in routers:
                x = sequence_part(_hidden(router.layer, step)[:, rows], mpu.tp, True)
                for _ in range(2):  # a recompute says the same again
                    router(x, _context(batch))
                router(x + 1, _context(replace(batch, step=step), training=False))  # an evaluation says nothing
        recorder.after_step(replace(make_metrics(), step=step + 1), Speed(1, 1.0))


def record_one_rank(folder: Path) -> None:
    """Layers 1 and 3 of step 2, on one rank."""
    _record(ParallelState.single(), folder)


def test_a_recording_is_what_the_router_computed(tmp_path: Path) -> None:
    mpu = ParallelState.single()
    record_one_rank(tmp_path)
    files = recorded_files(tmp_path)
    assert {layer: [file.parent.name for file in found] for layer, found in files.items()} == {
        1: ["step_00000002"], 3: ["step_00000002"],
    }  # fmt: skip
    assert recorded_files(tmp_path / "step_00000002") == files
    recording = read_recording(files[3][0])
    assert (recording.step, recording.layer, recording.hidden_size) == (2, 3, H)
    assert recording.moe.expert_bias and recording.moe.num_experts == E
    assert recording.samples.tolist() == [4, 5, 6, 7] and recording.expert_bias.tolist() == [0.75] * E
    expected = torch.ones(ROWS, S, dtype=torch.bool)
    expected[1, -1] = False
    assert torch.equal(recording.mask, expected)
    router = _router(mpu, 3)
    for rows, batch in _batches(mpu, 1):
        logits = router.logits(_hidden(3, 1)[:, rows], _context(batch))
        assert torch.equal(recording.logits[rows], logits.transpose(0, 1))


@pytest.mark.parametrize(
    ("layout", "ranks"),
    [(ParallelConfig(tp=2, sequence_parallel=True), 4), (ParallelConfig(pp=2), 2), (ParallelConfig(tp=2, pp=2), 4)],
)
def test_the_layout_leaves_no_trace(layout: ParallelConfig, ranks: int, world: World, tmp_path: Path) -> None:
    record_one_rank(tmp_path / "one")
    world.run(_record, tmp_path / "many", layout=layout, ranks=ranks)
    for layer, (file,) in recorded_files(tmp_path / "one").items():
        one, many = read_recording(file), read_recording(recorded_files(tmp_path / "many")[layer][0])
        assert torch.allclose(one.logits, many.logits, atol=1e-14)
        for name in ("mask", "samples", "expert_bias"):
            assert torch.equal(getattr(one, name), getattr(many, name))
        assert (one.step, one.layer, one.moe) == (many.step, many.layer, many.moe)
