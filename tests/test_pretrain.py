"""pretrain_gpt.py as users start it: several ranks, a kill in mid-run, bad input."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from megalite.data.indexed import IndexedWriter
from megalite.pipeline.schedule import make_plan
from tests.tiny import VOCAB

ROOT = Path(__file__).parents[1]
TIMING = {"tokens_per_second", "step_seconds", "tflops_per_second", "mfu", "peak_memory_mb"}
LIMIT = 180


@pytest.fixture
def config(tokens: str, tmp_path: Path) -> Path:
    """A tiny GPT-2 with dropout, validation and checkpoints."""
    content = {
        "model": {
            "name": "gpt2", "num_layers": 4, "hidden_size": 32, "num_heads": 4, "vocab_size": VOCAB,
            "max_positions": 32, "tie_embeddings": True, "hidden_dropout": 0.1,
        },
        "data": {"paths": [tokens], "seq_len": 32, "split": "80,20,0", "cache_dir": str(tmp_path / "cache")},
        "optim": {"lr": 1e-2, "warmup_steps": 2, "decay_steps": 8},
        "train": {"num_steps": 8, "global_batch_size": 8, "micro_batch_size": 2, "precision": "fp32", "eval_every": 3},
        "checkpoint": {"every": 2, "keep_last": 0},
    }  # fmt: skip
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def _command(ranks: int, config: Path, run_dir: Path, *options: str) -> list[str]:
    launcher = [sys.executable]
    if ranks > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return [*launcher, "pretrain_gpt.py", "--config", str(config), "--train.run-dir", str(run_dir), *options]


def _run(ranks: int, config: Path, run_dir: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        _command(ranks, config, run_dir, *options), cwd=ROOT, capture_output=True, text=True, timeout=LIMIT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def _rows(run_dir: Path, *, timing: bool = False) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return rows if timing else [{k: v for k, v in row.items() if k not in TIMING} for row in rows]


def test_four_ranks_give_the_losses_of_one(config: Path, tmp_path: Path) -> None:
    layout = ("--parallel.tp", "2", "--parallel.pp", "2", "--parallel.sequence-parallel")
    for name, ranks, options in (("x1", 1, ()), ("x4", 4, layout)):
        done = _run(ranks, config, tmp_path / name, *options)
        assert done.returncode == 0, done.stderr
    one, four = _rows(tmp_path / "x1"), _rows(tmp_path / "x4")
    assert [row["step"] for row in four] == list(range(1, 9))
    for a, b in zip(one, four, strict=True):
        assert abs(a["loss"] - b["loss"]) < 1e-5 and abs(a["grad_norm"] - b["grad_norm"]) < 1e-4
        for key in ("sample_fingerprint", "tokens", "samples", "learning_rate", "loss_tokens"):
            assert a[key] == b[key], key
    assert one[-1]["tokens"] == 8 * 8 * 32
    validation = [(tmp_path / name / "validation.jsonl").read_text().splitlines() for name in ("x1", "x4")]
    assert [len(rows) for rows in validation] == [2, 2]


@pytest.mark.full
def test_a_run_goes_on_in_another_layout(config: Path, tmp_path: Path) -> None:
    whole, moved = tmp_path / "whole", tmp_path / "moved"
    assert _run(1, config, whole, "--train.precision", "fp64").returncode == 0
    layouts = (
        (2, "4", ("--parallel.pp", "2", "--parallel.schedule", "zb_v")),
        (4, "6", ("--parallel.tp", "2", "--parallel.sequence-parallel")),
        (1, "8", ()),
    )
    for ranks, steps, options in layouts:
        session = ("--train.precision", "fp64", "--train.resume", "auto", "--train.num-steps", steps)
        done = _run(ranks, config, moved, *session, *options)
        assert done.returncode == 0, done.stderr
    one, other = _rows(whole), _rows(moved)
    assert [row["step"] for row in other] == list(range(1, 9))
    for a, b in zip(one, other, strict=True):
        assert abs(a["loss"] - b["loss"]) < 1e-10 and abs(a["grad_norm"] - b["grad_norm"]) < 1e-10


@pytest.mark.full
def test_eight_ranks_then_one_then_four(config: Path, tmp_path: Path) -> None:
    """tp2 pp2 dp2 with ZeRO 1 to step 4, one rank for a step, tp2 dp2 with ZeRO 3 to the end: as one rank alone."""
    settings = (
        "--train.precision", "fp64", "--optim.schedule", "constant", "--train.global-batch-size", "16",
        "--train.batch-ramp", "8", "4", "36",
    )  # fmt: skip
    whole, moved = tmp_path / "whole", tmp_path / "moved"
    done = _run(1, config, whole, *settings, "--train.num-steps", "6")
    assert done.returncode == 0, done.stderr
    sessions = (
        (8, "4", ("--parallel.tp", "2", "--parallel.pp", "2", "--parallel.zero", "1")),
        (1, "5", ()),
        (4, "6", ("--parallel.tp", "2", "--parallel.zero", "3")),
    )
    for ranks, steps, options in sessions:
        session = ("--train.resume", "auto", "--train.num-steps", steps, "--checkpoint.keep-last", "1")
        done = _run(ranks, config, moved, *settings, *session, *options)
        assert done.returncode == 0, done.stderr
    one, other = _rows(whole), _rows(moved)
    assert [row["samples"] for row in one] == [8, 16, 24, 36, 52, 68]
    assert [row["step"] for row in other] == list(range(1, 7))
    for a, b in zip(one, other, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-10)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-10)
        exact = ("learning_rate", "tokens", "samples", "loss_tokens", "sample_fingerprint", "skipped")
        assert [a[name] for name in exact] == [b[name] for name in exact]


@pytest.mark.full
def test_a_zero_bubble_run_with_a_trace_of_its_pipeline(config: Path, tmp_path: Path) -> None:
    """The checkpoint of a V placement resumes, and the trace holds each action of the plan once, in its order."""
    layout = ("--parallel.pp", "2", "--parallel.schedule", "zb_v", "--train.trace-pipeline")
    assert _run(1, config, tmp_path / "x1").returncode == 0
    for options in (("--train.num-steps", "4"), ("--train.resume", "auto")):
        done = _run(2, config, tmp_path / "x2", *layout, *options)
        assert done.returncode == 0, done.stderr
    one, two = _rows(tmp_path / "x1"), _rows(tmp_path / "x2")
    assert max(abs(a["loss"] - b["loss"]) for a, b in zip(one, two, strict=True)) < 1e-5
    events = [json.loads(line) for line in (tmp_path / "x2" / "pipeline_trace.jsonl").read_text().splitlines()]
    assert {event["step"] for event in events} == {6, 7, 8}
    plan = make_plan("zb_v", 2, 4)
    for step in (6, 7, 8):
        for rank in range(2):
            mine = [event for event in events if (event["step"], event["rank"]) == (step, rank)]
            assert [event["action"] for event in mine] == [str(action) for action in plan.compute(rank)]
            times = [time for event in mine for time in (event["begin"], event["end"])]
            assert times == sorted(times)
        assert min(event["begin"] for event in events if event["step"] == step) == 0.0
    measured = ("--parallel.pp", "2", "--parallel.partition", f"measured:{tmp_path / 'x2'}")
    done = _run(2, config, tmp_path / "x3", *measured)
    assert done.returncode == 0, done.stderr
    assert max(abs(a["loss"] - b["loss"]) for a, b in zip(one, _rows(tmp_path / "x3"), strict=True)) < 1e-5


@pytest.mark.parametrize(
    ("ranks", "options"), [(1, ()), pytest.param(2, ("--checkpoint.async-save",), marks=pytest.mark.full)]
)
def test_a_killed_run_goes_on_as_if_nothing_had_been(
    ranks: int, options: tuple[str, ...], config: Path, tmp_path: Path
) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert _run(ranks, config, whole).returncode == 0
    process = subprocess.Popen(
        _command(ranks, config, killed, *options), cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        env=os.environ | {"OMP_NUM_THREADS": "1"}, start_new_session=True,
    )  # fmt: skip
    begin = time.monotonic()
    while not (killed / "checkpoints" / "latest").exists():
        assert process.poll() is None and time.monotonic() - begin < LIMIT, "no checkpoint appeared"
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert len((killed / "metrics.jsonl").read_text().splitlines()) < 8, "the run was over before the kill"
    done = _run(ranks, config, killed, "--train.resume", "auto", *options)
    assert done.returncode == 0, done.stderr
    assert "resumed from" in done.stdout
    assert _rows(killed) == _rows(whole)


def test_a_signal_saves_and_the_run_goes_on(config: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "stopped"
    process = subprocess.Popen(
        _command(1, config, run_dir, "--train.num-steps", "2000", "--checkpoint.every", "0"), cwd=ROOT,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    begin = time.monotonic()
    while not (run_dir / "metrics.jsonl").exists() or not (run_dir / "metrics.jsonl").read_text():
        assert process.poll() is None and time.monotonic() - begin < LIMIT
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=LIMIT)
    assert process.returncode == 0, output
    assert "stopped by SIGTERM" in output and "--train.resume auto" in output
    last = _rows(run_dir)[-1]["step"]
    assert (run_dir / "checkpoints" / f"step_{last:08d}").is_dir()


def test_a_run_that_cannot_do_what_it_is_asked_says_so_without_a_traceback(config: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "short"
    looked = _run(1, config, run_dir, "--train.eval-only")
    assert looked.returncode == 1 and "Traceback" not in looked.stderr, looked.stderr
    assert "RunError: train.eval_only found no weights: give --train.resume auto, or a checkpoint" in looked.stderr
    assert not run_dir.exists()
    assert _run(1, config, run_dir, "--train.num-steps", "2").returncode == 0
    before = (run_dir / "metrics.jsonl").read_bytes()
    resumed = _run(1, config, run_dir, "--train.num-steps", "1", "--train.resume", "auto")
    assert resumed.returncode == 1 and "Traceback" not in resumed.stderr, resumed.stderr
    assert "step_00000002 is at step 2, beyond train.num_steps=1" in resumed.stderr
    assert (run_dir / "metrics.jsonl").read_bytes() == before
    manifest = run_dir / "checkpoints/step_00000002/manifest.json"
    manifest.write_text("[" * 100_000)
    damaged = _run(1, config, run_dir, "--train.resume", "auto")
    assert damaged.returncode == 1 and "Traceback" not in damaged.stderr, damaged.stderr
    assert "CheckpointError" in damaged.stderr and "manifest.json is damaged" in damaged.stderr


def test_tokens_that_are_not_what_their_side_file_says_end_the_run_plainly(config: Path, tmp_path: Path) -> None:
    """The ids were exchanged after the largest one had been written down."""
    with IndexedWriter(tmp_path / "stale", dtype="uint16", vocab_size=VOCAB) as writer:
        writer.add_document(np.full(2000, 3))
    np.full(2000, VOCAB + 9, dtype=np.uint16).tofile(tmp_path / "stale.bin")
    options = ("--data.paths", str(tmp_path / "stale"), "--data.split", "1", "--train.eval-every", "0")
    done = _run(1, config, tmp_path / "run", *options)
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    assert f"FormatError: {tmp_path}/stale has token id {VOCAB + 9} in sample" in done.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--parallel.tp", "3"), "model.num_heads=4 is not divisible by parallel.tp=3"),
        pytest.param(("--model.num-layer", "3"), "did you mean", marks=pytest.mark.full),
        (("--data.paths", "nowhere.jsonl"), "nowhere.jsonl does not exist"),
        (("--model.vocab-size", "40"), "vocab"),
        pytest.param(("--train.precision", "fp8"), "not built yet", marks=pytest.mark.full),
        pytest.param(("--data.seq-len", "100000"), "max_positions", marks=pytest.mark.full),
        pytest.param(("--parallel.zero", "4"), "parallel.zero=4", marks=pytest.mark.full),
    ],
)
def test_bad_input_is_named_without_a_traceback(
    options: tuple[str, ...], message: str, config: Path, tmp_path: Path
) -> None:
    done = _run(1, config, tmp_path / "bad", *options)
    assert done.returncode != 0
    assert message in done.stderr, done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    assert not (tmp_path / "bad").exists(), "a run that cannot start leaves nothing behind"
