"""`tools/checkpoint.py to-hf --adapters`: what peft would add to the base is what merging adds."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from megalite.config import Config
from megalite.mpu import ParallelState
from megalite.nn.config import ModelConfig
from megalite.nn.lora import LoRAConfig
from megalite.train.build import build_training
from megalite.train.checkpoints import RunCheckpoints
from megalite.train.step import train_step
from tests.tiny import GPT2, LLAMA, MODELS, config_for
from tests.tools.conftest import Command

PLAIN = replace(GPT2, hidden_dropout=0.0, attention_dropout=0.0, label_smoothing=0.0)
CASES: dict[str, tuple[ModelConfig, tuple[str, ...], set[str]]] = {
    "llama": (replace(LLAMA, z_loss=0.0), ("all",), set()),
    "some": (replace(LLAMA, z_loss=0.0), ("q_proj", "v_proj", "layers.1.mlp.fc2"), set()),
    "moe": (replace(MODELS["moe"], name="qwen2_moe", z_loss=0.0, aux_loss="none", router_z_loss=0.0), ("all",), set()),
    "gpt2": (PLAIN, ("all",), {"attn.c_attn"}),
    "gpt_neox": (replace(PLAIN, name="gpt_neox", tie_embeddings=False), ("q_proj", "v_proj"), {"query_key_value"}),
}


def _run(config: Config, folder: Path, num_steps: int) -> Path:
    training = build_training(config, ParallelState.single(), torch.device("cpu"))
    checkpoints = RunCheckpoints(config, training, folder)
    checkpoints.load_start()
    for step in range(num_steps):
        train_step(training, step)
    checkpoints.save(num_steps)
    return folder


def _adapted(base: dict[str, Tensor], folder: Path) -> dict[str, Tensor]:
    """The weights as peft computes with them."""
    config, adapters = (
        json.loads((folder / "adapter_config.json").read_text()),
        load_file(folder / "adapter_model.safetensors"),
    )
    found = dict(base)
    for module in config["target_modules"]:
        a, b = (adapters.pop(f"base_model.model.{module}.lora_{letter}.weight") for letter in "AB")
        rank = config["rank_pattern"].get(module, config["r"])
        assert len(a) == rank == b.shape[1]
        added = config["alpha_pattern"].get(module, config["lora_alpha"]) / rank * (b @ a)
        found[f"{module}.weight"] = found[f"{module}.weight"] + (added.t() if config["fan_in_fan_out"] else added)
    assert not adapters, "every tensor belongs to a module"
    return found


@pytest.mark.parametrize(
    ("case", "separate"),
    [
        ("llama", True), ("some", False), ("gpt2", True), ("gpt_neox", False),
        *(pytest.param(*row, marks=pytest.mark.full) for row in (("llama", False), ("gpt2", False), ("moe", True))),
    ],
)  # fmt: skip
def test_adapters_add_what_merging_adds(
    case: str, separate: bool, tokens: str, tmp_path: Path, command: Command
) -> None:
    model, targets, fused = CASES[case]
    plain = replace(config_for("llama", tokens, tmp_path / "cache", precision="fp64"), model=model)
    base = _run(plain, tmp_path / "base", 1)
    lora = LoRAConfig(rank=3, alpha=5.0, dropout=0.1, targets=targets, separate=separate)
    tuned = replace(plain, lora=lora, checkpoint=replace(plain.checkpoint, load=str(base)))
    run = _run(tuned, tmp_path / "tuned", 2)
    command("to-hf", base, tmp_path / "out")
    command("merge-lora", run, tmp_path / "merged", *(("--base", base) if separate else ()))
    command("to-hf", tmp_path / "merged", tmp_path / "merged_out")
    command("to-hf", run, tmp_path / "adapters", "--adapters", "--base", tmp_path / "out")
    config = json.loads((tmp_path / "adapters/adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(tmp_path / "out") and config["lora_dropout"] == 0.1
    assert all(any(name in module for name in fused) for module in config["rank_pattern"])
    assert bool(config["rank_pattern"]) == bool(fused)
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("out", "merged_out"))
    found = _adapted(before, tmp_path / "adapters")
    assert found.keys() == after.keys()
    assert sum(not torch.equal(before[name], after[name]) for name in after) == len(config["target_modules"])
    for name, tensor in after.items():
        torch.testing.assert_close(found[name], tensor, rtol=0.0, atol=1e-13)


def test_what_cannot_be_exported(tokens: str, tmp_path: Path, command: Command) -> None:
    plain = replace(config_for("llama", tokens, tmp_path / "cache"), model=replace(LLAMA, z_loss=0.0, num_layers=1))
    base = _run(plain, tmp_path / "base", 1)
    assert "is not of a run with adapters" in command("to-hf", base, tmp_path / "out", "--adapters", code=1)
    assert "--base x is for --adapters" in command("to-hf", base, tmp_path / "out", "--base", "x", code=1)
    tuned = replace(plain, lora=LoRAConfig(rank=2), checkpoint=replace(plain.checkpoint, load=str(base)))
    run = _run(tuned, tmp_path / "tuned", 1)
    assert "merge-lora" in command("to-hf", run, tmp_path / "out", code=1), "adapters are never dropped in silence"
    ahead = replace(tuned, model=replace(plain.model, mtp_layers=1), checkpoint=plain.checkpoint)
    run = _run(ahead, tmp_path / "ahead", 1)
    assert "model.mtp_layers=1 cannot be said" in command("to-hf", run, tmp_path / "out", "--adapters", code=1)
