"""Replaying a run: the same bits when nothing has changed, and each planted difference by its step and cause."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from megalite.checkpoint import store
from megalite.checkpoint.config import CheckpointConfig
from megalite.checkpoint.errors import CheckpointError
from megalite.checkpoint.manifest import Manifest
from megalite.config import Config
from megalite.layout import parse_layout
from megalite.mpu import ParallelState
from megalite.testing.world import World
from megalite.train.build import build_training
from megalite.train.callbacks import MetricsFiles
from megalite.train.checkpoints import RunCheckpoints, state_tensors
from megalite.train.replay import Divergence, Replay, replay
from megalite.train.resume import ResumeError
from megalite.train.run_folder import RunFolder
from megalite.train.trainer import Trainer
from tests.tiny import config_for

SINGLE = ParallelState.single()
CPU = torch.device("cpu")
LAST = 6


def config_of(tokens: str, folder: Path, **train: Any) -> Config:
    """Six steps with a batch ramp, dropout and AdamW; checkpoints at 2, 4 and 6."""
    config = config_for(
        "gpt2", tokens, folder / "cache", num_steps=LAST, global_batch_size=8, batch_ramp=(4, 4, 10), **train
    )
    return dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, num_layers=2),
        checkpoint=CheckpointConfig(every=2, keep_last=0),
    )


def trained(mpu: ParallelState, config: Config, path: Path) -> None:
    """A run with its metrics and checkpoints in `path`."""
    training = build_training(config, mpu, CPU)
    folder = RunFolder.open(path, mpu, resume="none", console=Console(quiet=True), write_config=lambda file: None)
    callbacks = [MetricsFiles(folder)] if folder.is_writer else []
    Trainer(config, training, callbacks, folder=folder).run()
    folder.close()


@pytest.fixture(scope="module")
def original(tokens: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Config, Path]:
    folder = tmp_path_factory.mktemp("replay")
    config = config_of(tokens, folder)
    trained(SINGLE, config, folder / "run")
    return config, folder / "run"


@pytest.fixture
def run(original: tuple[Config, Path], tmp_path: Path) -> tuple[Config, Path]:
    """A copy to spoil."""
    return original[0], Path(shutil.copytree(original[1], tmp_path / "run"))


def again(run: tuple[Config, Path], **options: Any) -> Replay:
    """A replay, in which all settings may differ."""
    config, folder = run
    config = dataclasses.replace(config, checkpoint=dataclasses.replace(config.checkpoint, allow=("*",)))
    return replay(config, SINGLE, CPU, folder, **options)


def changed(run: tuple[Config, Path], section: str, **settings: Any) -> tuple[Config, Path]:
    """The run with a setting that it was not trained with."""
    config, folder = run
    part = dataclasses.replace(getattr(config, section), **settings)
    return dataclasses.replace(config, **{section: part}), folder


def found(outcome: Replay) -> tuple[int, str]:
    """Step and cause of the divergence."""
    assert outcome.divergence is not None
    return outcome.divergence.step, outcome.divergence.cause


@pytest.mark.parametrize(("start", "steps"), [(None, [5, 6]), (2, [3, 4, 5, 6]), (0, [1, 2, 3, 4, 5, 6])])
def test_a_run_replays_bit_for_bit(run: tuple[Config, Path], start: int | None, steps: list[int]) -> None:
    before = {path: path.read_bytes() for path in run[1].rglob("*") if path.is_file()}
    outcome = again(run, start=start)
    assert outcome.exact and outcome.divergence is None and outcome.notes == []
    assert [step.step for step in outcome.steps] == steps
    assert all((step.loss, step.grad_norm, step.learning_rate) == (0.0, 0.0, 0.0) for step in outcome.steps)
    assert {path: path.read_bytes() for path in run[1].rglob("*") if path.is_file()} == before


def test_fewer_steps_may_be_asked_for(run: tuple[Config, Path]) -> None:
    assert [step.step for step in again(run, start=2, num_steps=1).steps] == [3]


def _rewrite(run: tuple[Config, Path], step: int, kind: str) -> None:
    """Alters one element of a checkpoint, in a checkpoint that is whole: checksums do not tell."""
    config, folder = run
    training = build_training(config, SINGLE, CPU)
    checkpoints = RunCheckpoints(
        dataclasses.replace(config, checkpoint=CheckpointConfig(allow=("*",))), training, folder
    )
    place = folder / "checkpoints" / store.step_name(step)
    checkpoints.load(place)
    state = Manifest.read(place).state
    tensors = state_tensors(training)
    with torch.no_grad():
        tensors[kind][1][1].view(-1)[3] += 0.25
    store.save(folder, step, tensors, state, SINGLE)


@pytest.mark.parametrize("kind", ["parameter", "exp_avg", "exp_avg_sq"])
def test_an_altered_checkpoint(run: tuple[Config, Path], kind: str) -> None:
    _rewrite(run, 2, kind)
    outcome = again(run, start=2)
    assert found(outcome) == (2, "weights") and outcome.steps == []
    assert f"what the run had saved in {kind}/" in str(outcome.divergence)


def test_a_damaged_checkpoint_is_refused_with_its_file(run: tuple[Config, Path]) -> None:
    file = run[1] / "checkpoints/step_00000002/rank_00000.safetensors"
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"step_00000002/rank_00000\.safetensors is damaged"):
        again(run, start=2)


def test_an_altered_corpus(run: tuple[Config, Path], tmp_path: Path) -> None:
    """Other tokens under the same name, in files of the same sizes."""
    (prefix,) = run[0].data.paths
    for file in Path(prefix).parent.glob(f"{Path(prefix).name}.*"):
        shutil.copy(file, tmp_path / f"altered{file.suffix}")
    content = bytearray((tmp_path / "altered.bin").read_bytes())
    content[::2] = bytes((byte + 1) % 61 for byte in content[::2])
    (tmp_path / "altered.bin").write_bytes(content)
    outcome = again(changed(run, "data", paths=(str(tmp_path / "altered"),)), start=2)
    assert found(outcome) == (3, "data") and "sample_fingerprint" in str(outcome.divergence)


@pytest.mark.parametrize(
    ("section", "settings", "step", "cause", "text"),
    [
        ("optim", {"lr": 0.04}, 3, "update", "learning_rate 0.0"),
        ("optim", {"weight_decay": 0.2}, 3, "update", "all that was recorded of it is the same, but in step 4 loss"),
        ("model", {"norm_eps": 1e-2}, 3, "loss", "from the same data and weights"),
    ],
)
def test_a_setting_that_was_another(
    run: tuple[Config, Path], section: str, settings: dict[str, Any], step: int, cause: str, text: str
) -> None:
    outcome = again(changed(run, section, **settings), start=2)
    assert found(outcome) == (step, cause) and text in str(outcome.divergence)


def _edit_row(folder: Path, step: int, **values: Any) -> None:
    path = folder / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows[step - 1] |= values
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize(
    ("values", "at", "cause"),
    [
        ({"grad_norm": 0.125}, 4, "gradient"),
        ({"skipped": True}, 4, "update"),
        ({"samples": 3}, 4, "data"),
        ({"loss": None}, 3, "update"),  # of the step before: its weights are not known
    ],
)
def test_a_record_that_is_another(run: tuple[Config, Path], values: dict[str, Any], at: int, cause: str) -> None:
    _edit_row(run[1], 4, **values)
    assert found(again(run, start=2)) == (at, cause)


def test_a_loss_after_weights_that_are_proved_is_a_loss(run: tuple[Config, Path]) -> None:
    _edit_row(run[1], 5, loss=1.0)
    outcome = again(run, start=2)
    assert found(outcome) == (5, "loss") and "loss 1.0 recorded" in str(outcome.divergence)


def test_an_older_checkpoint_has_no_fingerprints(run: tuple[Config, Path]) -> None:
    for manifest in (run[1] / "checkpoints").glob("*/manifest.json"):
        content = json.loads(manifest.read_text())
        del content["state"]["fingerprints"], content["state"]["threads"]
        manifest.write_text(json.dumps(content))
    assert again(run, start=2).divergence is None
    outcome = again(changed(run, "model", norm_eps=1e-2), start=2)
    assert found(outcome) == (3, "loss") and "no fingerprint of the weights" in str(outcome.divergence)


def test_other_threads_are_noted(run: tuple[Config, Path]) -> None:
    manifest = run[1] / "checkpoints/step_00000002/manifest.json"
    content = json.loads(manifest.read_text())
    content["state"]["threads"] = 63
    manifest.write_text(json.dumps(content))
    (note,) = again(run, start=2).notes
    assert "63 in the run" in note and "OMP_NUM_THREADS=63" in note


def _no_metrics(folder: Path) -> None:
    (folder / "metrics.jsonl").unlink()


def _no_checkpoints(folder: Path) -> None:
    shutil.rmtree(folder / "checkpoints")


@pytest.mark.parametrize(
    ("start", "spoil", "message"),
    [
        (3, None, r"no complete checkpoint of step 3; there are 2, 4, 6"),
        (6, None, r"has no step 7: it ends at step 6"),
        (None, _no_metrics, r"has no metrics\.jsonl with a step in it"),
        (None, _no_checkpoints, r"has no complete checkpoint; checkpoint\.every writes them"),
    ],
)
def test_what_cannot_be_replayed(
    run: tuple[Config, Path], start: int | None, spoil: Callable[[Path], None] | None, message: str
) -> None:
    if spoil is not None:
        spoil(run[1])
    with pytest.raises(CheckpointError, match=message):
        again(run, start=start)


def test_other_batches_are_refused(run: tuple[Config, Path]) -> None:
    with pytest.raises(ResumeError, match=r"train\.seed=11 there, 12 here"):
        again(changed(run, "train", seed=12), start=2)


def _replayed(
    mpu: ParallelState, config: Config, path: Path, may_be_exact: bool
) -> tuple[bool, float, Divergence | None]:
    outcome = replay(config, mpu, CPU, path, start=2, may_be_exact=may_be_exact)
    return outcome.exact, max(max(step.loss, step.grad_norm) for step in outcome.steps), outcome.divergence


@pytest.mark.parametrize(
    ("there", "here"),
    [
        ("tp2+dp2+zero1", "tp2+dp2+zero1"),
        ("tp2+dp2+zero1", "pp2"),
        pytest.param("pp2:zb_v+dp2+zero3", "tp2+sp", marks=pytest.mark.full),
    ],
)
def test_in_the_layout_of_the_run_and_in_another(
    there: str, here: str, tokens: str, tmp_path: Path, world: World
) -> None:
    config = config_of(tokens, tmp_path, precision="fp64", micro_batch_size=1)
    saves, loads = parse_layout(there), parse_layout(here)
    applied = saves.apply(config)
    path = tmp_path / "run"
    world.run(trained, applied, path, layout=applied.parallel, ranks=saves.num_ranks, timeout=180.0)
    applied = loads.apply(config)
    results = world.run(
        _replayed, applied, path, there == here, layout=applied.parallel, ranks=loads.num_ranks, timeout=180.0
    )
    for exact, worst, divergence in results:
        assert divergence is None and exact == (there == here)
        assert worst == 0.0 if exact else 0.0 < worst < 1e-12
