"""What the callbacks that every run has leave behind."""

import io
import logging
import time
from pathlib import Path

import pytest
from rich.console import Console

from megalite.mpu import ParallelState
from megalite.train.callbacks import Callback, Heartbeat, default_callbacks
from megalite.train.config import TrainConfig
from megalite.train.failure import Board, Watchdog
from megalite.train.run_folder import RunFolder
from tests.train.fakes import FakeTraining, make_trainer


def names(callbacks: list[Callback]) -> list[str]:
    return [type(callback).__name__ for callback in callbacks]


def defaults(folder: RunFolder, config: TrainConfig, console: Console | None = None) -> list[Callback]:
    return list(
        default_callbacks(
            config, folder, ParallelState.single(), watchdog=Watchdog(Board()), console=console or Console(quiet=True)
        )
    )


def test_only_the_writer_has_files_and_progress(tmp_path: Path) -> None:
    config = TrainConfig(profile_steps=(2, 3))
    first = names(defaults(RunFolder(tmp_path), config))
    assert first == ["Heartbeat", "ProfilerTrace", "MetricsFiles", "TensorBoard", "ProgressLines"]
    assert names(defaults(RunFolder(tmp_path, is_writer=False), config)) == ["Heartbeat", "ProfilerTrace"]
    assert "TensorBoard" not in names(defaults(RunFolder(tmp_path), TrainConfig(tensorboard=False)))


def test_console_and_log_tell_the_same_story(tmp_path: Path) -> None:
    text = io.StringIO()
    console = Console(file=text, width=200)
    training = FakeTraining()
    trainer, folder, _ = make_trainer(tmp_path, training, num_steps=21, log_every=8, eval_every=16, console=console)
    trainer.callbacks = defaults(folder, trainer.config.train, console)
    trainer.run()
    folder.close()
    lines = text.getvalue().splitlines()
    steps = [line.split("|")[0].strip() for line in lines if line.startswith("step ") and "loss" in line]
    assert steps == ["step  8/21", "step 16/21", "step 16", "step 21/21"]
    assert any("checkpoint saved in" in line for line in lines) and "loss over 21 steps" in lines
    log = folder.log_file.read_text()
    assert all(line in log for line in lines)
    assert (tmp_path / "metrics.jsonl").exists() and list((tmp_path / "tensorboard").iterdir())


def test_the_watchdog_hears_of_each_moment_and_rests_after_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watchdog = Watchdog(Board())
    heard: list[str] = []
    monkeypatch.setattr(watchdog, "heartbeat", lambda step: heard.append(f"step {step}"))
    monkeypatch.setattr(watchdog, "watch", lambda mpu, seconds, folder: heard.append(f"watch {seconds}"))
    heartbeat = Heartbeat(watchdog, ParallelState.single(), hang_seconds=9.0, folder=tmp_path)
    trainer, folder, _ = make_trainer(tmp_path / "run", FakeTraining(), [heartbeat], num_steps=1, eval_every=1)
    trainer.run()
    folder.close()
    assert heard == ["step 0", "watch 9.0", "step 1", "step 1", "step 1", "step 1", "watch 0.0"]


def test_messages_of_other_packages_stay_out_of_the_log(tmp_path: Path) -> None:
    folder = RunFolder.open(
        tmp_path, ParallelState.single(), resume="none", console=Console(quiet=True), write_config=lambda path: None
    )
    logging.getLogger("other").warning("%s", time.time())
    folder.begin(0)
    folder.close()
    assert folder.log_file.read_text() == ""
