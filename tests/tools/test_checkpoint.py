"""`tools/checkpoint.py` as users start it."""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megalite.checkpoint.stored import StoredCheckpoint
from megalite.config import Config, load_config
from megalite.mpu import ParallelState
from megalite.train.build import build_training
from megalite.train.checkpoints import RunCheckpoints
from megalite.train.step import train_step
from tests.checkpoint.megatron_files import GPT2, Layout, make_weights, write_torch_dist
from tests.tiny import config_for, write_tokens
from tests.tools.conftest import Command

ROOT = Path(__file__).parents[2]


def test_as_a_script(run: Path) -> None:
    command = [sys.executable, str(ROOT / "tools" / "checkpoint.py"), "inspect", str(run)]
    environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "HOME": str(Path.home())}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, check=True)
    assert "step_00000002: step 2" in done.stdout and not done.stderr


def _train(config: Config, folder: Path, steps: int, every: int) -> list[float]:
    """Trains, saves every so many steps, and returns the losses."""
    training = build_training(config, ParallelState.single(), torch.device("cpu"))
    checkpoints = RunCheckpoints(config, training, folder)
    path = checkpoints.find() if config.train.resume != "none" else None
    first = checkpoints.load(path) if path is not None else 0
    losses = []
    for step in range(first, steps):
        losses.append(train_step(training, step).loss)
        if (step + 1) % every == 0:
            checkpoints.save(step + 1)
    return losses


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in bf16 with experts: checkpoints of steps 1 and 2."""
    folder = tmp_path_factory.mktemp("run")
    _train(_config(folder), folder, 2, 1)
    return folder


def _config(folder: Path, **train: object) -> Config:
    tokens = folder / "tokens"
    if not tokens.with_suffix(".bin").exists():
        write_tokens(tokens)
    return config_for(
        "moe-bias", str(tokens), folder / "cache",
        **{"num_steps": 3, "precision": "bf16", "global_batch_size": 4} | train,  # pyright: ignore[reportArgumentType]
    )  # fmt: skip


def test_inspect(run: Path, tmp_path: Path, command: Command) -> None:
    shown = command("inspect", run, "--json", tmp_path / "all.json")
    assert "step_00000002: step 2" in shown and "oldest first: step_00000001, step_00000002" in shown
    assert "layers.*.attention.qkv.k.weight" in shown and "exp_avg_sq" in shown and "optim.lr" in shown
    found = json.loads((tmp_path / "all.json").read_text())
    kinds = {(row["kind"], row["dtype"]): row for row in found["kinds"]}
    assert [row["kind"] for row in found["kinds"]] == ["parameter", "master", "buffer", "exp_avg", "exp_avg_sq"]
    assert kinds["master", "float32"]["bytes"] == 2 * kinds["parameter", "bfloat16"]["bytes"]
    assert found["state"]["updates"] == 2 and found["changed_settings"]["optim.lr"] == 0.05
    assert "optim.beta1" not in found["changed_settings"] and len(found["tensors"]) == sum(
        row["tensors"] for row in found["kinds"]
    )
    shown = command("inspect", run / "checkpoints/step_00000001", "--tensors", "layers.1.mlp.router.*")
    assert "buffer/layers.1.mlp.router.expert_bias" in shown and "attention" not in shown.partition("State")[0]


def test_verify_names_file_and_tensor(run: Path, tmp_path: Path, command: Command) -> None:
    assert command("verify", run, "--all").count("is intact") == 2
    hurt = tmp_path / "hurt"
    shutil.copytree(run, hurt)
    file = hurt / "checkpoints/step_00000001/rank_00000.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1  # one bit of one byte
    head = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + head])
    (last,) = (name for name, tensor in header.items() if tensor["data_offsets"][1] == len(content) - 8 - head)
    file.write_bytes(content)
    assert "step_00000002 is intact" in command("verify", hurt)
    shown = command("verify", hurt, "--all", code=1)
    assert f"step_00000001/rank_00000.safetensors is damaged: {last} is not what" in shown
    file.write_bytes(content[:-9])
    shown = command("verify", hurt / "checkpoints/step_00000001", code=1)
    assert "was cut short or altered" in shown and f"{last} of its" in shown and "beyond its end" in shown


def test_diff(run: Path, tmp_path: Path, command: Command) -> None:
    assert "0 differ" in command("diff", run, run)
    first = run / "checkpoints/step_00000001"
    shown = command("diff", first, run, "--json", tmp_path / "all.json", "--rows", 3, code=1)
    assert "the first 3 of them here" in shown and "updates" in shown
    found = json.loads((tmp_path / "all.json").read_text())
    assert found["state"]["step"] == {"a": 1, "b": 2} and not found["only_a"]
    rows = {row["key"]: row for row in found["tensors"]}
    with StoredCheckpoint(first) as a, StoredCheckpoint(run) as b:
        x, y = (there.read("master/head.weight").double() for there in (a, b))
    assert rows["master/head.weight"]["largest"] == float((x - y).abs().max())
    assert rows["master/head.weight"]["count"] == int((x != y).sum())
    shown = command(
        "diff", first, run, "--tensors", "parameter/*", "--tolerance", 10, code=1
    )  # the state still differs
    assert "0 differ" in shown


def test_a_run_goes_on_from_other_files(run: Path, tmp_path: Path, command: Command) -> None:
    """Bit for bit, from the files of another layout."""
    told = command("reshard", run, tmp_path / "other", "--layout", "tp2+pp2+ep2")
    assert "step_00000002" in told and "0 differ" in command("diff", run, tmp_path / "other")
    command("verify", tmp_path / "other")
    with StoredCheckpoint(tmp_path / "other") as found:
        assert len(found.manifest.files) == 4 and found.manifest.layout["pp"] == 2
        assert len(found.tensors["exp_avg/layers.1.attention.proj.weight"].pieces) == 2
    shutil.copytree(run / "checkpoints", tmp_path / "same" / "checkpoints")
    config = _config(run, resume="auto")
    assert _train(config, tmp_path / "other", 3, 1) == _train(config, tmp_path / "same", 3, 1)
    assert "0 differ" in command("diff", tmp_path / "same", tmp_path / "other")


def test_a_mean_and_another_precision(run: Path, tmp_path: Path, command: Command) -> None:
    command("average", run, tmp_path / "mean", "--last", 2, "--files", 2)
    with StoredCheckpoint(tmp_path / "mean") as mean, StoredCheckpoint(run) as last:
        with StoredCheckpoint(run / "checkpoints/step_00000001") as first:
            key = "master/layers.2.mlp.experts.fc1"
            expected = (first.read(key).double() + last.read(key).double()) / 2
            assert torch.equal(mean.read(key), expected.float())
        assert mean.manifest.kinds == {"parameter", "master", "buffer"} and mean.manifest.step == 2
    command("reshard", run, tmp_path / "wide", "--dtype", "fp32", "--only", "weights")
    with StoredCheckpoint(tmp_path / "wide") as wide, StoredCheckpoint(run) as last:
        assert wide.manifest.kinds == {"parameter", "buffer"}
        assert torch.equal(wide.read("parameter/head.weight"), last.read("master/head.weight"))


def test_a_run_goes_on_from_what_was_rewritten_in_another_precision(
    run: Path, tmp_path: Path, command: Command
) -> None:
    """The stored settings have the new precision: nothing is to be allowed, and it is what a load would convert to."""
    command("reshard", run, tmp_path / "wide", "--dtype", "fp32")
    wide = _config(run, precision="fp32", resume="auto")
    found = _train(wide, tmp_path / "wide", 3, 9)
    allowed = dataclasses.replace(wide, checkpoint=dataclasses.replace(wide.checkpoint, allow=("train.precision",)))
    assert found == _train(allowed, Path(shutil.copytree(run, tmp_path / "copy")), 3, 9)
    assert "fingerprints" not in command("diff", run, tmp_path / "wide", code=1)


def test_import_and_start(tmp_path: Path, command: Command) -> None:
    """From Megatron's files to a run, with the config that the tool writes."""
    write_torch_dist(tmp_path / "there", make_weights(GPT2), GPT2, Layout())
    told = command("import-megatron", tmp_path / "there", tmp_path / "start", "--dtype", "fp32")
    assert "--checkpoint.load" in told
    config = load_config(
        ["--config", str(tmp_path / "start/config.yaml"), "--checkpoint.load", str(tmp_path / "start")]
    )
    assert config.model.name == "gpt2" and config.model.vocab_size == 61 and config.train.precision == "fp32"
    assert config.data.seq_len == 16
    tiny = config_for("gpt2", write_tokens(tmp_path / "tokens"), tmp_path / "cache")
    data = dataclasses.replace(tiny.data, seq_len=config.data.seq_len)
    whole = dataclasses.replace(tiny, model=config.model, data=data, checkpoint=config.checkpoint)
    training = build_training(whole, ParallelState.single(), torch.device("cpu"))
    RunCheckpoints(whole, training, tmp_path / "run").load_start()
    table = next(iter(training.stages.values())).embedding
    assert table is not None
    assert torch.equal(table.weight, make_weights(GPT2)["embedding.word_embeddings.weight"][:61].float())
    assert "model.tie_embeddings" in command("inspect", tmp_path / "start")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("inspect", "nowhere"), "nowhere is neither a checkpoint (manifest.json) nor a run with one"),
        (("verify", "nowhere", "--all"), "nowhere has no complete checkpoints"),
        (("average", "RUN", "OUT"), "one checkpoint has no mean"),
        (("average", "RUN", "OUT", "--last", "3"), "has 2 complete checkpoints (step_00000001, step_00000002), not 3"),
        (("average", "RUN", "RUN", "OUT", "--weights", "1"), "1 weights for 2 checkpoints"),
        (("reshard", "RUN", "OUT", "--layout", "tp3"), "num_heads=8 is not divisible by tp=3; tp can be 1, 2, 4, 8"),
        (("reshard", "RUN", "OUT", "--layout", "tq2"), "did you mean tp?"),
        (("reshard", "RUN", "RUN"), "step_00000002 is there already"),
        (("reshard", "RUN", "OUT", "--files", "0"), "--files 0 must be at least 1"),
        (("import-megatron", "RUN", "OUT"), "is no checkpoint of Megatron-LM"),
    ],
)
def test_errors_name_the_fix(
    arguments: tuple[str, ...], said: str, run: Path, tmp_path: Path, command: Command
) -> None:
    places = {"RUN": run, "OUT": tmp_path / "out"}
    assert said in command(*(places.get(word, word) for word in arguments), code=1)
    assert not (tmp_path / "out" / "checkpoints" / "latest").exists()
