"""The command that continues texts: sources, prompts, what it prints, and what it refuses."""

import dataclasses
import io
import json
import shutil
from pathlib import Path

import pytest
import torch

from megalite.checkpoint import store
from megalite.config import Config, save_config
from megalite.data.config import DataConfig
from megalite.generate.load import find_source, load_stage
from megalite.models.transformer import StageSpec
from megalite.mpu import ParallelConfig, ParallelState
from megalite.nn.config import ModelConfig
from megalite.parallel.shard import shard_of
from megalite.train.build import build_stage
from megalite.train.config import TrainConfig
from megalite.train.resume import identity
from tools.generate import Arguments, Printer, layout_of, main

CPU = torch.device("cpu")
CONFIG = Config(
    model=ModelConfig(num_layers=2, hidden_size=32, num_heads=4, ffn_hidden_size=48, vocab_size=257, init_std=0.3),
    data=DataConfig(tokenizer="byte", seq_len=12),
    # The layout that a run was trained in does not matter.
    parallel=ParallelConfig(pp=2, cp=2, sequence_parallel=True),
    train=TrainConfig(precision="bf16", recompute="full"),
)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder with a checkpoint of a model with random weights, and masters."""
    path, mpu = tmp_path_factory.mktemp("run"), ParallelState.single()
    model = build_stage(dataclasses.replace(CONFIG, parallel=ParallelConfig()), mpu, StageSpec(0, 1, range(2)), CPU)
    save_config(CONFIG, path / "config.yaml")
    weights = [(shard_of(p), p.data) for p in model.parameters()]
    masters = [(shard, value.float() + 1e-3) for shard, value in weights]
    tensors = {"parameter": weights, "master": masters, "exp_avg": masters}
    store.save(path, 7, tensors, {"config": identity(CONFIG)}, mpu)
    return path


def lines(capsys: pytest.CaptureFixture[str], *argv: str) -> list[dict[str, object]]:
    assert main([*argv, "--json"]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_weights_come_in_the_precision_that_is_asked_for(run_dir: Path) -> None:
    mpu, source = ParallelState.single(), find_source(run_dir)
    loaded = load_stage(source, mpu, CPU)
    assert loaded.step == 7 and source.context == 12 and not loaded.stage.training
    assert loaded.stage.hidden_dtype == torch.float32
    rounded = load_stage(source, mpu, CPU, "bf16").stage
    for exact, low in zip(loaded.stage.parameters(), rounded.parameters(), strict=True):
        assert low.dtype == torch.bfloat16
        assert torch.equal((exact - 1e-3).bfloat16(), low) and not torch.equal(exact, low.float())  # from the masters


def test_text_is_printed_as_it_grows(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(run_dir), "--prompt", "Hello", "World", "--max-new-tokens", "20", "--ignore-eod"]) == 0
    printed = capsys.readouterr()
    assert "after step 7, torch.float32 on cpu" in printed.err and "tokens/s" in printed.err
    assert printed.out.startswith("Hello") and "\n\nWorld" in printed.out and len(printed.out) > 30


def test_json_lines_are_what_is_printed(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = lines(capsys, str(run_dir), "--prompt", "Hello", "World", "--max-new-tokens", "20", "--batch-size", "1")
    assert main([str(run_dir), "--prompt", "Hello", "World", "--max-new-tokens", "20"]) == 0
    assert capsys.readouterr().out == "".join(f"{row['prompt']}{row['text']}\n\n" for row in rows)
    assert [row["prompt"] for row in rows] == ["Hello", "World"]


def test_a_checkpoint_alone_is_enough(run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = lines(capsys, str(run_dir), "--max-new-tokens", "5")
    folder = run_dir / "checkpoints/step_00000007"
    assert lines(capsys, str(folder), "--max-new-tokens", "5") == whole
    shutil.copytree(folder, tmp_path / "alone")
    assert main([str(tmp_path / "alone")]) == 1
    assert "name it with --tokenizer" in capsys.readouterr().err
    assert lines(capsys, str(tmp_path / "alone"), "--num-tokens", "5", "--tokenizer", "byte") == whole


def test_prompts_come_from_files_and_standard_input(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = ("--max-new-tokens", "1")
    text, objects = tmp_path / "prompts.txt", tmp_path / "prompts.jsonl"
    text.write_text("first one\n\nsecond é\n", encoding="utf-8")
    objects.write_text('{"prompt": "two\\nlines"}\n')
    rows = lines(capsys, str(run_dir), "--prompt-file", str(text), "--num-samples", "2", *one)
    assert [row["prompt"] for row in rows] == ["first one", "first one", "second é", "second é"]
    assert [row["prompt"] for row in lines(capsys, str(run_dir), "--prompt-file", str(objects), *one)] == ["two\nlines"]
    monkeypatch.setattr("sys.stdin", io.StringIO("typed\n"))
    assert [row["prompt"] for row in lines(capsys, str(run_dir), "--prompt", "-", *one)] == ["typed\n"]
    objects.write_text("[]\n")
    assert main([str(run_dir), "--prompt-file", str(objects)]) == 1
    assert "every line should be an object" in capsys.readouterr().err


def test_rows_are_shown_in_their_order(capsys: pytest.CaptureFixture[str]) -> None:
    printer = Printer(["A", "B"])
    for number, piece, last in ((1, "1", False), (0, "x", False), (1, "2", True), (0, "y", False)):
        printer(number, piece, last)
    assert capsys.readouterr().out == "Axy"
    printer(0, "z", True)
    assert capsys.readouterr().out == "z\n\nB12\n\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "nowhere does not exist"),
        (["RUN", "--top-k", "-1"], "--top-k=-1 must be at least 0"),
        (["RUN", "--batch-size", "0"], "--batch-size=0 must be at least 1"),
        (["RUN", "--layout", "tp2"], "--layout tp2 has 2 ranks, and there are 1: torchrun --nproc-per-node 2"),
        (["RUN", "--layout", "cp2"], "--layout cp2 has 2 ranks"),
        (["RUN", "--tokenizer", "missing.json"], "missing.json does not exist"),
        (["RUN/checkpoints"], "is neither a checkpoint (manifest.json) nor a run"),
    ],
)
def test_the_command_says_what_is_wrong(
    run_dir: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([word.replace("RUN", str(run_dir)) for word in arguments]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("layout", "ranks", "message"),
    [
        ("cp2", 2, "cp=2: a context-parallel model generates nothing"),
        ("tp2+dp2", 4, "2 copies of the model, which would all say the same: start 2, without dp"),
    ],
)
def test_layouts_that_generate_nothing_are_refused(layout: str, ranks: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        layout_of(Arguments(src="", layout=layout), ranks)
    assert layout_of(Arguments(src=""), ranks) == ParallelConfig(tp=ranks)
    assert layout_of(Arguments(src="", layout="pp2+tp2+sp"), 4) == ParallelConfig(tp=2, pp=2)


def test_experts_that_choose_tokens_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = dataclasses.replace(CONFIG.model, num_experts=4, routing="expert_choice")
    save_config(dataclasses.replace(CONFIG, model=model), tmp_path / "config.yaml")
    (tmp_path / "checkpoints/step_00000001").mkdir(parents=True)
    (tmp_path / "checkpoints/latest").write_text("step_00000001")
    (tmp_path / "checkpoints/step_00000001/manifest.json").write_text("{}")
    assert main([str(tmp_path)]) == 1
    assert "expert_choice: its experts choose among the tokens of a whole row" in capsys.readouterr().err


def test_a_run_without_a_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_config(CONFIG, tmp_path / "config.yaml")
    assert main([str(tmp_path)]) == 1
    assert "has no checkpoint yet" in capsys.readouterr().err
