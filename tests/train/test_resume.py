"""What a run may go on with: differences by name, the data order of a longer run, fallback, folders elsewhere."""

from __future__ import annotations

import dataclasses
import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

from megalite.checkpoint.config import CheckpointConfig
from megalite.checkpoint.errors import CheckpointError
from megalite.config import Config
from megalite.mpu import ParallelState
from megalite.train.build import build_training
from megalite.train.checkpoints import RunCheckpoints
from megalite.train.resume import Origin, ResumeError, find_latest, find_origin
from megalite.train.step import StepResult, train_step
from tests.tiny import config_for

SINGLE = ParallelState.single()
CPU = torch.device("cpu")


@pytest.fixture
def config(tokens: str, tmp_path: Path) -> Config:
    """Four steps of a small model, of 5 rows each."""
    config = config_for("gpt2", tokens, tmp_path / "cache", num_steps=4, global_batch_size=5, micro_batch_size=1)
    model = dataclasses.replace(config.model, num_layers=1)
    return dataclasses.replace(config, model=model)


def changed(config: Config, settings: dict[str, Any]) -> Config:
    """`config` with `section.field` set."""
    for name, value in settings.items():
        section, field = name.split(".")
        part = dataclasses.replace(getattr(config, section), **{field: value})
        config = dataclasses.replace(config, **{section: part})
    return config


def run(config: Config, folder: Path, *, stop: int | None = None, save: bool = True) -> list[StepResult]:
    """A run, or what is left of it, up to step `stop`, with a checkpoint there."""
    origin = find_origin(config, SINGLE, folder)
    training = build_training(config, SINGLE, CPU, orders=origin.orders)
    checkpoints = RunCheckpoints(config, training, folder, origin)
    path = checkpoints.find()
    first = checkpoints.load(path) if path is not None else 0
    last = stop if stop is not None else config.train.num_steps
    results = [train_step(training, step) for step in range(first, last)]
    if save:
        checkpoints.save(last)
    return results


def resumed(config: Config, **settings: Any) -> Config:
    """`config`, going on, with other settings (double underscores stand for dots)."""
    return changed(config, {"train.resume": "auto"} | {k.replace("__", "."): v for k, v in settings.items()})


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "muon"])
def test_resuming_is_bit_equal(config: Config, tmp_path: Path, optimizer: str) -> None:
    config = changed(config, {"optim.name": optimizer, "optim.momentum": 0.9})
    whole = run(config, tmp_path / "whole")
    first = run(config, tmp_path / "run", stop=2)
    assert first + run(resumed(config), tmp_path / "run") == whole


@pytest.mark.parametrize("unit", ["steps", "samples"])
def test_resuming_inside_a_batch_ramp_is_bit_equal(config: Config, tmp_path: Path, unit: str) -> None:
    """Steps of 2, 2, 2, 3, 3, 4 and 5 rows, stopped after each of them."""
    settings = {"train.batch_ramp": (2, 1, 15), "train.num_steps": 7, "optim.schedule_unit": unit}
    config = changed(config, settings | {"optim.warmup_steps": 4})
    whole = run(config, tmp_path / "whole")
    samples = [2, 4, 6, 9, 12, 16, 21]
    assert len({result.sample_fingerprint for result in whole}) == 7
    if unit == "samples":
        rates = [0.05 * (n / 4 if n < 4 else (21 - n) / 17) for n in samples]
        assert [result.learning_rate for result in whole] == pytest.approx(rates)
    for stop in range(1, 7):
        folder = tmp_path / f"stopped at {stop}"
        first = run(config, folder, stop=stop)
        assert first + run(resumed(config), folder) == whole
        manifest = json.loads((folder / "checkpoints" / f"step_{stop:08d}" / "manifest.json").read_text())
        assert manifest["state"]["samples"] == samples[stop - 1]


def test_skipped_steps_of_a_ramp_move_no_rate(config: Config, tmp_path: Path) -> None:
    """Samples of steps without an update do not count for a rate by samples, over a resume either."""
    config = changed(config, {"train.batch_ramp": (2, 1, 15), "train.num_steps": 7, "optim.schedule_unit": "samples"})
    training = build_training(config, SINGLE, CPU)
    training.skip(0)
    training.skip(3)
    assert (training.num_skipped, training.skipped_samples) == (2, 5)
    assert training.learning_rate(5) == pytest.approx(0.05 * (21 - (16 - 5)) / 21)
    RunCheckpoints(config, training, tmp_path).save(4)
    again = build_training(config, SINGLE, CPU)
    RunCheckpoints(config, again, tmp_path).load(tmp_path)
    assert (again.num_skipped, again.skipped_samples) == (2, 5)


def test_a_resume_may_move_data_and_change_what_is_fast(config: Config, tmp_path: Path) -> None:
    expected = run(config, tmp_path / "whole")[2:]
    run(config, tmp_path / "run", stop=2)
    (prefix,) = config.data.paths
    for file in Path(prefix).parent.glob(f"{Path(prefix).name}.*"):
        shutil.copy(file, (tmp_path / "moved").with_suffix(file.suffix))
    moved = resumed(
        config, data__paths=(str(tmp_path / "moved"),), data__cache_dir=str(tmp_path / "other cache"),
        optim__post_validation=True, train__micro_batch_size=5, train__recompute="full",
    )  # fmt: skip
    for a, b in zip(run(moved, tmp_path / "run"), expected, strict=True):
        assert (a.loss, a.sample_fingerprint) == (pytest.approx(b.loss, rel=1e-4), b.sample_fingerprint)
        assert a.learning_rate == b.learning_rate  # by steps, not by micro-batches


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"optim.lr": 0.1}, r"optim\.lr=0\.05 there, 0\.1 here\. Use the same values, allow them with --checkpoint"),
        ({"optim.beta2": 0.9, "optim.name": "sgd"}, r"optim\.name=adamw there, sgd here; optim\.beta2=0\.999 there"),
        ({"optim.decay_steps": 9}, r"optim\.decay_steps=null there, 9 here"),
        ({"optim.groups": ("*.norm:lr=2",)}, r'optim\.groups=\[\] there, \["\*\.norm:lr=2"\] here'),
        ({"model.hidden_dropout": 0.0}, r"model\.hidden_dropout=0\.2 there, 0\.0 here"),
        ({"model.num_layers": 2}, r"model\.num_layers=1 there, 2 here.*--checkpoint\.allow model\.num_layers"),
        ({"data.split": "90,10,0"}, r"data\.split=100,0,0 there, 90,10,0 here"),
        ({"data.seq_len": 16}, r"data\.seq_len=32 there, 16 here\. Use the same values, or start a new run"),
        ({"train.seed": 3}, r"train\.seed=11 there, 3 here"),
        ({"train.batch_ramp": (1, 1, 9)}, r"train\.batch_ramp=null there, \[1, 1, 9\] here\. Use the same values, or"),
        ({"train.global_batch_size": 10}, r"train\.global_batch_size=5 there, 10 here"),
    ],
)  # fmt: skip
def test_a_difference_is_refused_by_name_before_anything_is_built(
    config: Config, tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    run(config, tmp_path, stop=1)
    with pytest.raises(ResumeError, match=message):
        find_origin(resumed(changed(config, settings)), SINGLE, tmp_path)


def test_other_data_of_the_same_name_are_refused(config: Config, tmp_path: Path) -> None:
    run(config, tmp_path / "run", stop=1)
    training = build_training(config, SINGLE, CPU)
    training.datasets = dataclasses.replace(training.datasets, fingerprint="another")
    with pytest.raises(ResumeError, match=r"data\.fingerprint=\w+ there, another here"):
        RunCheckpoints(config, training, tmp_path / "run").load(tmp_path / "run")
    allowed = changed(config, {"checkpoint.allow": ("data.fingerprint",)})
    assert RunCheckpoints(allowed, training, tmp_path / "run").load(tmp_path / "run") == 1


def test_what_is_allowed_goes_on_and_is_told(config: Config, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run(config, tmp_path, stop=2)
    other = resumed(config, optim__lr=0.1, optim__clip_grad=2.0, checkpoint__allow=("optim.*",))
    (third,) = run(other, tmp_path, stop=3, save=False)
    assert third.learning_rate == pytest.approx(0.1 / 4)  # linear to 0 over 4 steps
    assert "with another setting: optim.lr=0.05 there, 0.1 here" in caplog.text
    with pytest.raises(ResumeError, match=r"from another run: optim\.lr=0\.05 there, 0\.1 here\. Use"):
        run(changed(other, {"checkpoint.allow": ("optim.clip_grad", "train.*")}), tmp_path)
    never = changed(other, {"train.seed": 3, "checkpoint.allow": ("*",)})
    with pytest.raises(ResumeError, match=r"from another run: train\.seed=11 there, 3 here\. Use the same values, or"):
        run(never, tmp_path)


def test_a_setting_that_an_older_checkpoint_does_not_know_was_at_its_default(config: Config, tmp_path: Path) -> None:
    run(config, tmp_path, stop=1)
    manifest = tmp_path / "checkpoints" / "step_00000001" / "manifest.json"
    content = json.loads(manifest.read_text())
    del content["state"]["config"]["model.window"], content["state"]["config"]["optim.lr"]
    manifest.write_text(json.dumps(content))
    with pytest.raises(ResumeError, match=r"another run: optim\.lr=0\.0003 there, 0\.05 here\. Use"):
        find_origin(resumed(config), SINGLE, tmp_path)


def test_a_longer_run_appends_and_reorders_nothing(
    config: Config, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A run of 4 steps is prolonged to 200, twice: what it has consumed stays, and no step is the longer run's own."""
    caplog.set_level(logging.WARNING)
    config = changed(config, {"optim.schedule": "constant"})
    whole = run(config, tmp_path / "short")
    run(config, tmp_path / "run", stop=2)
    longer = resumed(config, train__num_steps=200)
    found = run(longer, tmp_path / "run", stop=5)
    assert [r.sample_fingerprint for r in found[:2]] == [r.sample_fingerprint for r in whole[2:]]
    origin = find_origin(longer, SINGLE, tmp_path / "run")
    assert origin.orders == (20, 1000)
    training = build_training(longer, SINGLE, CPU, orders=origin.orders)
    assert len(training.datasets.train) >= 1000 and training.datasets.orders == (20, 1000)
    shorter = changed(longer, {"train.num_steps": 6})  # back again: the same order as before
    assert run(shorter, tmp_path / "run")[0].sample_fingerprint == train_step(training, 5).sample_fingerprint
    assert find_origin(shorter, SINGLE, tmp_path / "run").orders == (20, 1000)
    assert caplog.text == ""


def test_the_rate_follows_num_steps_unless_decay_steps_is_set(
    config: Config, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run(config, tmp_path / "a", stop=2)
    (third,) = run(resumed(config, train__num_steps=8), tmp_path / "a", stop=3)
    assert third.learning_rate == pytest.approx(0.05 * 5 / 8)
    assert "decays until step 8, and did until step 4" in caplog.text
    caplog.clear()
    fixed = changed(config, {"optim.decay_steps": 4})
    run(fixed, tmp_path / "b", stop=2)
    (third,) = run(resumed(fixed, train__num_steps=8), tmp_path / "b", stop=3)
    assert third.learning_rate == pytest.approx(0.05 / 4) and caplog.text == ""


def test_fallback_goes_on_from_the_newest_that_is_intact(
    config: Config, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run(config, tmp_path, stop=1)
    run(resumed(config), tmp_path, stop=2)
    (tmp_path / "checkpoints" / "step_00000002" / "rank_00000.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"step_00000002/rank_00000\.safetensors is missing"):
        run(resumed(config), tmp_path)
    careful = resumed(config, checkpoint__fallback=True)
    assert find_origin(careful, SINGLE, tmp_path).path == tmp_path / "checkpoints" / "step_00000001"
    assert "passing over" in caplog.text and "rank_00000.safetensors is missing" in caplog.text
    assert len(run(careful, tmp_path)) == 3
    assert find_origin(careful, SINGLE, tmp_path / "nothing") == Origin()


def test_checkpoints_live_in_an_object_store(config: Config, tmp_path: Path) -> None:
    MemoryFileSystem().store.clear()
    home = "memory://bucket/run"
    elsewhere = changed(config, {"checkpoint.folder": home})
    whole = run(config, tmp_path / "whole")
    first = run(elsewhere, tmp_path / "run", stop=2)
    assert not (tmp_path / "run").exists() and find_latest(home)[0] == f"{home}/checkpoints/step_00000002"
    assert first + run(resumed(elsewhere), tmp_path / "run") == whole
    named = changed(elsewhere, {"train.resume": f"{home}/checkpoints/step_00000002"})
    assert run(named, tmp_path / "run", save=False) == whole[2:]
    fresh = changed(config, {"checkpoint.load": home})
    training = build_training(fresh, SINGLE, CPU)
    assert RunCheckpoints(fresh, training, tmp_path / "new").load_start() == home
    assert training.optimizer.steps == 4


def test_saving_in_the_background_stores_the_same(config: Config, tmp_path: Path) -> None:
    run(config, tmp_path / "at once", stop=2)
    training = build_training(config, SINGLE, CPU)
    checkpoints = RunCheckpoints(config, training, tmp_path / "behind")
    for step in range(2):
        train_step(training, step)
    checkpoints.start_save(2)
    rest = [train_step(training, step) for step in range(2, 4)]
    saved = checkpoints.finished(wait=True)
    assert saved is not None and saved.step == 2
    files = [tmp_path / name / "checkpoints/step_00000002" for name in ("at once", "behind")]
    for name in ("rank_00000.safetensors", "manifest.json"):
        assert (files[0] / name).read_bytes() == (files[1] / name).read_bytes()
    assert run(resumed(config), tmp_path / "behind") == rest


def test_config_problems() -> None:
    assert CheckpointConfig(keep_last=1, keep_every=10, async_save=True).problems() == []
    assert len(CheckpointConfig(every=-1, keep_last=-1, keep_every=-1).problems()) == 3
    (problem,) = CheckpointConfig(keep_last=0, keep_every=10).problems()
    assert "keep_every=10" in problem and "keep_last=0 keeps all" in problem
