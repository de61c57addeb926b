"""A run goes on in another layout: weights, optimizer state and router buffers come from what any ranks have stored."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megalite.config import Config
from megalite.layout import parse_layout
from megalite.mpu import ParallelState
from megalite.testing.world import World
from megalite.train.build import build_training
from megalite.train.checkpoints import RunCheckpoints
from megalite.train.step import train_step
from tests.tiny import config_for

CPU = torch.device("cpu")


def _steps(mpu: ParallelState, config: Config, folder: str, first: int, last: int) -> list[tuple[float, float]]:
    """(loss, gradient norm) of steps first .. last - 1, from the checkpoint at `first`, with one at `last`."""
    training = build_training(config, mpu, CPU)
    checkpoints = RunCheckpoints(config, training, Path(folder))
    if first:
        assert checkpoints.load(Path(folder)) == first
    results = [train_step(training, step) for step in range(first, last)]
    checkpoints.save(last)
    return [(result.loss, result.grad_norm) for result in results]


CHAINS = [
    ("tied-llama", ["tp2", "pp2", "dp2", "tp2+sp+pp2:zb_v"]),
    ("moe", ["ep2+tp2", "etp2+tp2+ep2+dp2", "ep4+mbs1", "ep2+pp2:dualpipe+mbs1"]),
    ("moe-bias", ["single", "ep8+mbs1", "pp2:zb_h1+ep2", "tp4"]),
    ("gpt2", ["pp3", "tp4+sp", "pp2v2:interleaved", "dp4"]),
]


@pytest.mark.parametrize(
    ("model", "layouts"),
    [pytest.param(*row, id=row[0], marks=pytest.mark.full if row[0] in ("moe-bias", "gpt2") else ()) for row in CHAINS],
)
def test_a_run_goes_on_in_another_layout(
    model: str, layouts: list[str], tokens: str, tmp_path: Path, world: World
) -> None:
    config = config_for(model, tokens, tmp_path, num_steps=8, precision="fp64")
    expected = world.run(_steps, config, str(tmp_path / "whole"), 0, 8, ranks=1)[0]
    found: list[tuple[float, float]] = []
    for number, text in enumerate(layouts):
        layout = parse_layout(text)
        applied = layout.apply(config)
        results = world.run(
            _steps, applied, str(tmp_path / "moved"), 2 * number, 2 * number + 2,
            layout=applied.parallel, ranks=layout.num_ranks,
        )  # fmt: skip
        found += results[0]
    for a, b in zip(expected, found, strict=True):
        assert a == pytest.approx(b, rel=1e-9)
