"""benchmarks/zero.py runs, and counts the bytes that are sent."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.bytes_sent import BytesSent
from megalite.mpu import ParallelConfig, ParallelState
from megalite.testing.world import World

ROOT = Path(__file__).parents[2]


PEERS = {0: "DDP", 1: "ZeroRedundancyOptimizer", 2: "FSDP2", 3: "FSDP2"}
STATE_BYTES = {"megalite": (18, 12, 10, 9), "FSDP2": (16, 16, 8, 8), "DDP": (16,)}


@pytest.mark.parametrize("stage", [pytest.param(stage, marks=pytest.mark.full) for stage in (0, 2, 3)] + [1])
def test_gives_every_contender_of_a_stage(stage: int, tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    command = [sys.executable, "benchmarks/zero.py", "--small", "--rounds", "1", "--stages", str(stage)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([*command, "--json", str(path)], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = {row["name"]: row for row in json.loads(path.read_text()) if row["name"] != "DeepSpeed"}
    assert rows.keys() == {"megalite", PEERS[stage]}, done.stdout
    for name, row in rows.items():
        assert row["stage"] == stage
        assert row["step_ms"] > 0 and row["peak_mb"] > 0 and row["bytes_sent"] > 0
        assert 6.0 < row["loss"] < 6.3, "all begin near log(512) = 6.24"
        if name in STATE_BYTES:
            expected = STATE_BYTES[name][stage]
            assert expected <= row["state_bytes_per_param"] < 1.01 * expected


def _count(mpu: ParallelState) -> tuple[int, int]:
    """Bytes by the counter and by the axis."""
    axis, x = mpu.dp, torch.ones(12, 4)
    axis.stats.reset()
    with BytesSent(axis.rank, axis.size) as sent:
        axis.all_reduce(x)
        axis.all_gather(x)
        axis.reduce_scatter(x.double())
        axis.all_to_all(x.to(torch.bfloat16))
        axis.broadcast(x, source=1)
    return sent.total, axis.stats.bytes_sent


def test_counts_calls_as_the_axes_do(world: World) -> None:
    counts = world.run(_count, layout=ParallelConfig(), ranks=4)
    assert all(counted == sent > 0 for counted, sent in counts)
    assert counts[1][0] - counts[0][0] == 12 * 4 * 4, "the source of a broadcast sends it"
