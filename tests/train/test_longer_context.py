"""A model goes on with longer rows: weights of short ones, scaled rotary frequencies, another layout."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from megalite.checkpoint.config import CheckpointConfig
from megalite.config import Config
from megalite.layout import parse_layout
from megalite.mpu import ParallelState
from megalite.testing.world import World
from megalite.train.build import build_training
from megalite.train.checkpoints import ResumeError, RunCheckpoints
from megalite.train.step import train_step
from tests.tiny import config_for

CPU = torch.device("cpu")


def short(tokens: str, cache: Path) -> Config:
    """Rows of 16 tokens."""
    config = config_for("llama", tokens, cache, precision="fp64", global_batch_size=8, num_steps=40)
    optim = dataclasses.replace(config.optim, name="adamw", schedule="constant", lr=0.01)
    return dataclasses.replace(config, data=dataclasses.replace(config.data, seq_len=16), optim=optim)


def longer(config: Config, start: Path, scaling: str) -> Config:
    """Rows of 32 tokens, of documents kept apart, from the weights in `start`."""
    model = dataclasses.replace(config.model, rope_scaling=scaling, rope_factor=2.0, rope_original_positions=16)
    data = dataclasses.replace(
        config.data, seq_len=32, pack="best_fit", reset_attention=True, reset_positions=True
    )  # fmt: skip
    return dataclasses.replace(config, model=model, data=data, checkpoint=CheckpointConfig(load=str(start)))


def go_on(mpu: ParallelState, config: Config, folder: str, num_steps: int) -> list[tuple[float, float]]:
    """(loss, gradient norm) of the first steps of a run, and a checkpoint after them."""
    training = build_training(config, mpu, CPU)
    checkpoints = RunCheckpoints(config, training, Path(folder))
    checkpoints.load_start()
    results = [train_step(training, step) for step in range(num_steps)]
    checkpoints.save(num_steps)
    return [(result.loss, result.grad_norm) for result in results]


@pytest.mark.parametrize(
    "scaling",
    [
        pytest.param("linear", marks=pytest.mark.full),
        pytest.param("ntk", marks=pytest.mark.full),
        "yarn",
        pytest.param("llama3", marks=pytest.mark.full),
    ],
)
def test_training_goes_on_with_longer_rows(scaling: str, tokens: str, tmp_path: Path, world: World) -> None:
    config = short(tokens, tmp_path)
    (first,) = world.run(go_on, config, str(tmp_path / "short"), 12, ranks=1)
    start = tmp_path / "short" / "checkpoints" / "step_00000012"
    extended = longer(config, start, scaling)
    (expected,) = world.run(go_on, extended, str(tmp_path / "long"), 3, ranks=1)
    fresh = dataclasses.replace(extended, checkpoint=CheckpointConfig())
    (from_nothing,) = world.run(go_on, fresh, str(tmp_path / "fresh"), 1, ranks=1)
    assert expected[0][0] < from_nothing[0][0] - 0.1 and first[-1][0] < first[0][0], "it knows what it had learnt"

    layout = parse_layout("cp2:ring+tp2")
    applied = layout.apply(extended)
    found = world.run(
        go_on, applied, str(tmp_path / "cut"), 3, layout=applied.parallel, ranks=layout.num_ranks, timeout=120.0
    )
    for a, b in zip(expected, found[0], strict=True):
        assert a == pytest.approx(b, rel=1e-9)


def test_a_run_is_not_resumed_with_longer_rows(tokens: str, tmp_path: Path) -> None:
    config = short(tokens, tmp_path)
    go_on(ParallelState.single(), config, str(tmp_path / "short"), 1)
    start = tmp_path / "short" / "checkpoints" / "step_00000001"
    extended = longer(config, start, "yarn")
    training = build_training(extended, ParallelState.single(), CPU)
    told = r"rope_scaling=none there, yarn here; .*data.seq_len=16 there, 32 here; data.pack=.*--checkpoint.load"
    with pytest.raises(ResumeError, match=told):
        RunCheckpoints(extended, training, tmp_path / "long").load(start)
