"""Sampling from a run's checkpoint."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from megalite.batch import MicroBatch
from megalite.checkpoint import store
from megalite.config import Config, save_config
from megalite.data.config import DataConfig
from megalite.models.transformer import StageSpec, Transformer
from megalite.mpu import ParallelConfig, ParallelState
from megalite.nn.config import ModelConfig
from megalite.parallel.shard import shard_of
from megalite.train.build import build_stage
from tools.generate import Arguments, continue_tokens, load_run, main, pick

CPU = torch.device("cpu")
CONFIG = Config(
    model=ModelConfig(num_layers=2, hidden_size=32, num_heads=4, ffn_hidden_size=48, vocab_size=257, init_std=0.3),
    data=DataConfig(tokenizer="byte", seq_len=12),
    # The layout that a run was trained in does not matter once its weights are one stage.
    parallel=ParallelConfig(pp=2),
)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run folder with a checkpoint of a model with random weights."""
    mpu = ParallelState.single()
    model = build_stage(dataclasses.replace(CONFIG, parallel=ParallelConfig()), mpu, StageSpec(0, 1, range(2)), CPU)
    save_config(CONFIG, tmp_path / "config.yaml")
    weights = [(shard_of(p), p.data) for p in model.parameters()]
    store.save(tmp_path, 7, {"parameter": weights, "exp_avg": weights}, {}, mpu)
    return tmp_path


def continuation(model: Transformer, prompt: list[int], **changes: object) -> list[int]:
    args = dataclasses.replace(Arguments(run_dir="", num_tokens=20, top_k=0, temperature=1.0), **changes)  # pyright: ignore[reportArgumentType]
    return continue_tokens(model, prompt, args, window=12, eod=256, device=CPU)


def test_the_trained_weights_are_loaded(run_dir: Path) -> None:
    with torch.no_grad():
        model, config, step = load_run(run_dir, None, CPU)
    saved = json.loads((run_dir / "checkpoints/step_00000007/manifest.json").read_text())
    assert step == 7 and config.data.tokenizer == "byte" and not model.training
    assert {f"parameter/{shard_of(p).name}" for p in model.parameters()} < set(saved["tensors"])


def test_greedy_takes_the_likeliest_token_of_a_window(run_dir: Path) -> None:
    model, _, _ = load_run(run_dir, None, CPU)
    tokens = continuation(model, [65, 66], temperature=0.0)
    assert len(tokens) > 12  # longer than the window
    assert tokens == continuation(model, [65, 66], top_k=1)
    # Each token follows from the ones before it, however long the continuation becomes.
    assert tokens[:5] == continuation(model, [65, 66], temperature=0.0, num_tokens=5)
    assert tokens[5:] == continuation(model, [65, 66, *tokens[:5]], temperature=0.0, num_tokens=15)


def test_the_model_sees_the_last_tokens_of_a_window(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, _, _ = load_run(run_dir, None, CPU)
    seen: list[list[int]] = []

    def logits(batch: MicroBatch) -> torch.Tensor:
        seen.append(batch.tokens[:, 0].tolist())
        assert batch.positions[:, 0].tolist() == list(range(len(seen[-1])))
        return torch.eye(257)[len(seen) : len(seen) + 1, None, :]

    monkeypatch.setattr(model, "logits", logits)
    assert continuation(model, list(range(100, 110)), temperature=0.0, num_tokens=4) == [1, 2, 3, 4]
    assert seen[1:] == [[*range(100, 110), 1], [*range(100, 110), 1, 2], [*range(101, 110), 1, 2, 3]]


def test_a_seed_repeats_a_sample(run_dir: Path) -> None:
    model, _, _ = load_run(run_dir, None, CPU)
    first = continuation(model, [65], seed=1, temperature=3.0)
    assert first == continuation(model, [65], seed=1, temperature=3.0)
    assert first != continuation(model, [65], seed=2, temperature=3.0)


def test_pick_follows_the_distribution() -> None:
    logits = torch.tensor([0.0, 2.0, 1.0, -30.0]).log_softmax(0)
    generator = torch.Generator().manual_seed(0)

    def share(temperature: float, top_k: int) -> torch.Tensor:
        drawn = [pick(logits, temperature=temperature, top_k=top_k, generator=generator) for _ in range(4000)]
        return torch.bincount(torch.tensor(drawn), minlength=4) / 4000

    assert torch.allclose(share(1.0, 0), logits.exp(), atol=0.03)
    assert torch.allclose(share(0.5, 0), (2 * logits).softmax(0), atol=0.03)
    assert torch.allclose(share(1.0, 2), torch.tensor([0.0, 0.7311, 0.2689, 0.0]), atol=0.03)
    assert share(1.0, 9)[0] > 0
    assert pick(logits, temperature=0.0, top_k=0, generator=generator) == 1


def test_a_document_ends_at_eod(run_dir: Path) -> None:
    model, _, _ = load_run(run_dir, None, CPU)
    tokens = continuation(model, [65], temperature=0.0)
    args = Arguments(run_dir="", num_tokens=20, temperature=0.0)
    ended = continue_tokens(model, [65], args, window=12, eod=tokens[4], device=CPU)
    assert ended == tokens[: tokens.index(tokens[4])]


def test_command_prints_prompts_and_continuations(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--run-dir", str(run_dir), "--prompt", "Hello", "World", "--num-tokens", "5"]) == 0
    out = capsys.readouterr().out
    assert "after step 7" in out and "Hello" in out and "World" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--run-dir", "nowhere"], "nowhere is not a run folder"),
        (["--top-k", "-1"], "--top-k=-1 must be at least 0"),
        (["--checkpoint", "nothing"], "nothing is neither a checkpoint"),
    ],
)
def test_command_says_what_is_wrong(
    run_dir: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--run-dir", str(run_dir), *arguments]) == 1
    assert message in capsys.readouterr().err


def test_command_without_a_checkpoint(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run_dir / "checkpoints/latest").unlink()
    assert main(["--run-dir", str(run_dir)]) == 1
    assert "has no checkpoint yet" in capsys.readouterr().err
