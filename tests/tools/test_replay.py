"""tools/replay.py as users start it: on one rank and on several, what it prints, writes and refuses."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from megalite.config.load import save_config
from megalite.mpu import ParallelState
from tests.train.test_replay import config_of, trained

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def run(tokens: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tool")
    config = config_of(tokens, folder, precision="fp64")
    trained(ParallelState.single(), config, folder / "run")
    save_config(config, folder / "run" / "config.yaml")
    return folder / "run"


def replay(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int | str | None:
    """The exit status."""
    monkeypatch.setattr(sys, "argv", ["replay.py", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / "tools" / "replay.py"), run_name="__main__")
    return ended.value.code


def test_a_run_that_is_as_recorded(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert replay(monkeypatch, run, "--from", 2, "--steps", 3, "--json", tmp_path / "out.json") == 0
    assert "steps 3 to 5 are as recorded, bit for bit" in capsys.readouterr().out
    content = json.loads((tmp_path / "out.json").read_text())
    assert content["pass"] and content["exact"] and [step["step"] for step in content["steps"]] == [3, 4, 5]
    assert replay(monkeypatch, run, "--layout", "mbs1") == 0
    assert "steps 5 to 6 are as recorded, within the tolerance" in capsys.readouterr().out


def test_a_run_that_is_not(run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    before = (run / "metrics.jsonl").read_text()
    rows = [json.loads(line) for line in before.splitlines()]
    rows[4]["grad_norm"] = 0.5
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    try:
        assert replay(monkeypatch, run, "--layout", "mbs1") == 1
    finally:
        (run / "metrics.jsonl").write_text(before)
    assert "differs first in step 5, gradient: the loss is the same, grad_norm 0.5 recorded" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--layout", "tp2"), "--layout tp2 takes 2 ranks, and this job has 1: torchrun --nproc-per-node 2"),
        (("--layout", "mbs3"), "batches of 4 rows, not divisible"),
        (("--from", "3"), "has no complete checkpoint of step 3; there are 2, 4, 6"),
        (("--steps", "0"), "--steps must be at least 1"),
    ],
)
def test_what_it_refuses(
    run: Path,
    arguments: tuple[str, ...],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert replay(monkeypatch, run, *arguments) == 2
    assert message in capsys.readouterr().err


def test_a_folder_that_is_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert replay(monkeypatch, tmp_path) == 2
    assert "is not a run folder: it has no config.yaml" in capsys.readouterr().err


@pytest.mark.full
def test_several_ranks(run: Path) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*launcher, "tools/replay.py", str(run), "--layout", "pp2+mbs1"],
        cwd=ROOT, capture_output=True, text=True, timeout=180,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "steps 5 to 6 are as recorded, within the tolerance" in done.stdout
