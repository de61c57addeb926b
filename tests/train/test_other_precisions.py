"""A run that goes on in another precision: allowed by name, from the widest weights that the checkpoint has."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megalite.checkpoint.config import CheckpointConfig
from megalite.checkpoint.errors import CheckpointError
from megalite.checkpoint.manifest import held
from megalite.config import Config
from megalite.layout import parse_layout
from megalite.mpu import ParallelState
from megalite.testing.world import World
from megalite.train.build import build_training
from megalite.train.checkpoints import RunCheckpoints, state_tensors
from megalite.train.resume import ResumeError
from megalite.train.step import Training, train_step
from tests.tiny import config_for

SINGLE = ParallelState.single()
CPU = torch.device("cpu")


def config_of(tokens: str, folder: Path, precision: str, *, allow: tuple[str, ...] = ("train.precision",)) -> Config:
    """precision: fp32, bf16, bf16-none (without masters), ..."""
    name, _, masters = precision.partition("-")
    config = config_for("gpt2", tokens, folder / "cache", num_steps=4, global_batch_size=4, precision=name)
    return dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, num_layers=2),
        optim=dataclasses.replace(config.optim, master_weights=masters or "fp32"),
        checkpoint=CheckpointConfig(allow=allow),
    )


def state_of(training: Training) -> dict[str, Tensor]:
    """Whole tensors of one rank, by kind/name."""
    return {piece.key: piece.view.clone() for piece in held(state_tensors(training))}


def saved(mpu: ParallelState, config: Config, folder: Path) -> dict[str, Tensor]:
    training = build_training(config, mpu, CPU)
    for step in range(2):
        train_step(training, step)
    RunCheckpoints(config, training, folder).save(2)
    return state_of(training)


def loaded(mpu: ParallelState, config: Config, folder: Path) -> tuple[dict[str, Tensor], float]:
    """The state after the load, and the loss of the next step."""
    training = build_training(config, mpu, CPU)
    assert RunCheckpoints(config, training, folder).load(folder) == 2
    return state_of(training), train_step(training, 2).loss


@pytest.mark.parametrize(
    ("there", "here"),
    [
        ("bf16", "fp32"), ("bf16-none", "fp32"), ("fp32", "bf16"), ("fp32", "bf16-none"), ("fp32", "fp64"),
        ("fp64", "bf16"), ("bf16", "fp16"), ("fp16", "bf16-none"), ("bf16", "fp64"),
    ],
)  # fmt: skip
def test_the_widest_weights_come_over(there: str, here: str, tokens: str, tmp_path: Path) -> None:
    before = saved(SINGLE, config_of(tokens, tmp_path, there), tmp_path / "run")
    after, loss = loaded(SINGLE, config_of(tokens, tmp_path, here), tmp_path / "run")
    assert 0 < loss < 10
    kinds = {key.partition("/")[0] for key in after}
    assert ("master" in kinds) == (here in ("bf16", "fp16"))
    for key, tensor in after.items():
        kind, _, name = key.partition("/")
        wide = before.get(f"master/{name}", before[f"parameter/{name}"] if "parameter/" + name in before else tensor)
        if kind in ("parameter", "master"):
            same = before[key] if kind == "parameter" and before[key].dtype == tensor.dtype else wide
            assert torch.equal(tensor, same.to(tensor.dtype)), key
        elif key in before:
            assert torch.equal(tensor, before[key].to(tensor.dtype)), key
    assert {key for key in after if key.startswith("exp_avg")} == {key for key in before if key.startswith("exp_avg")}


def test_it_is_refused_by_name_unless_it_is_allowed(
    tokens: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved(SINGLE, config_of(tokens, tmp_path, "bf16"), tmp_path / "run")
    plain = config_of(tokens, tmp_path, "fp32", allow=())
    resumed = dataclasses.replace(plain, train=dataclasses.replace(plain.train, resume="auto"))
    training = build_training(plain, SINGLE, CPU)
    with pytest.raises(
        ResumeError, match=r"train\.precision=bf16 there, fp32 here.*--checkpoint\.allow train\.precision"
    ):
        RunCheckpoints(resumed, training, tmp_path / "run").find()
    start = dataclasses.replace(plain, checkpoint=CheckpointConfig(load=str(tmp_path / "run")))
    with pytest.raises(CheckpointError, match=r"bfloat16 .* float32 .*\(--checkpoint\.allow train\.precision converts"):
        RunCheckpoints(start, training, tmp_path / "new").load_start()
    allowed = CheckpointConfig(load=str(tmp_path / "run"), allow=("train.*",))
    start = dataclasses.replace(plain, checkpoint=allowed)
    assert RunCheckpoints(start, training, tmp_path / "new").load_start() is not None
    loaded(SINGLE, config_of(tokens, tmp_path, "fp32"), tmp_path / "run")
    assert "with another setting: train.precision=bf16 there, fp32 here" in caplog.text


def test_masters_alone_are_no_difference(tokens: str, tmp_path: Path) -> None:
    """Within a precision, masters may come and go without a word."""
    for there, here in (("bf16", "bf16-none"), ("bf16-none", "bf16")):
        folder = tmp_path / there
        before = saved(SINGLE, config_of(tokens, tmp_path, there, allow=()), folder)
        after, _ = loaded(SINGLE, config_of(tokens, tmp_path, here, allow=()), folder)
        for key, tensor in after.items():
            name = key.partition("/")[2]
            source = before[key] if key in before else before[f"parameter/{name}"]
            assert torch.equal(tensor, source.to(tensor.dtype)), key


def _saved(mpu: ParallelState, config: Config, folder: Path) -> None:
    saved(mpu, config, folder)


def _loss(mpu: ParallelState, config: Config, folder: Path) -> float:
    return loaded(mpu, config, folder)[1]


@pytest.mark.parametrize("here", ["pp2", pytest.param("tp2+dp2+zero2", marks=pytest.mark.full)])
def test_in_another_layout_too(here: str, tokens: str, tmp_path: Path, world: World) -> None:
    """Masters that ZeRO has cut flat become the parameters of a float64 run, as they do on one rank."""
    there, target = parse_layout("tp2+dp2+zero3+mbs1"), parse_layout(f"{here}+mbs1")
    config = there.apply(config_of(tokens, tmp_path, "bf16"))
    world.run(_saved, config, tmp_path / "run", layout=config.parallel, ranks=there.num_ranks, timeout=120.0)
    config = config_of(tokens, tmp_path, "fp64")
    expected = _loss(SINGLE, config, tmp_path / "run")
    config = target.apply(config)
    losses = world.run(_loss, config, tmp_path / "run", layout=config.parallel, ranks=target.num_ranks, timeout=120.0)
    assert losses == [pytest.approx(expected, rel=1e-12)] * target.num_ranks
