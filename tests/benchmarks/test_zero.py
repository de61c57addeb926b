"""benchmarks/zero.py runs, and counts the bytes that are sent."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import torch

from benchmarks.bytes_sent import BytesSent
from megalite.mpu import ParallelConfig, ParallelState
from megalite.testing.world import World

ROOT = Path(__file__).parents[2]


def test_gives_every_stage_of_every_contender(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    command = [sys.executable, "benchmarks/zero.py", "--small", "--rounds", "1", "--json", str(path)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = json.loads(path.read_text())
    expected = {("megalite", stage) for stage in range(4)}
    expected |= {("DDP", 0), ("ZeroRedundancyOptimizer", 1), ("FSDP2", 2), ("FSDP2", 3)}
    assert {(row["name"], row["stage"]) for row in rows if row["name"] != "DeepSpeed"} == expected, done.stdout
    for row in rows:
        assert row["step_ms"] > 0 and row["peak_mb"] > 0 and row["bytes_sent"] > 0
        assert 6.0 < row["loss"] < 6.3, "all begin near log(512) = 6.24"
    state = {(row["name"], row["stage"]): row["state_bytes_per_param"] for row in rows}
    for stage, count in enumerate((18, 12, 10, 9)):
        assert count <= state["megalite", stage] < 1.01 * count
    assert 8 <= state["FSDP2", 3] < 8.08 and 16 <= state["DDP", 0] < 16.1, "what theirs should be"


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
