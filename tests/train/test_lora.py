"""Low-rank adapters: as merged weights in plain algebra, the same on every layout, and in and out of checkpoints."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megalite.batch import MicroBatch
from megalite.checkpoint.stored import StoredCheckpoint
from megalite.config import Config, ConfigError, check
from megalite.layout import parse_layout
from megalite.models.transformer import StageSpec, Transformer
from megalite.mpu import ParallelState
from megalite.nn.lora import NAMES, LoRAConfig
from megalite.parallel.lora import LowRankPair
from megalite.parallel.random import normal_
from megalite.parallel.shard import freeze
from megalite.testing.layouts import prove_layouts
from megalite.testing.step_memory import beside_predicted, measure
from megalite.testing.world import World
from megalite.train.build import build_stage, build_training
from megalite.train.checkpoints import RunCheckpoints, state_tensors
from megalite.train.memory import STATE
from megalite.train.step import train_step
from tests.nn.lora_runs import begin_as_noise
from tests.tiny import config_for
from tools.checkpoint import main

CPU, SINGLE = torch.device("cpu"), ParallelState.single()
ALL = LoRAConfig(rank=3, alpha=6.0)


def adapted(model: str, tokens: str, folder: Path, lora: LoRAConfig = ALL, **train: object) -> Config:
    """A run of adapters."""
    return replace(config_for(model, tokens, folder, global_batch_size=8, **train), lora=lora)


def stage_of(config: Config) -> Transformer:
    """The whole model in float64, with adapters that do something."""
    config = replace(config, train=replace(config.train, precision="fp64"))
    stage = build_stage(config, SINGLE, StageSpec(0, 1, range(config.model.num_layers)), CPU)
    for module in stage.modules():
        if isinstance(module, LowRankPair):
            normal_(module.B, 1, 0.2)
    return stage


def batch(vocab_size: int) -> MicroBatch:
    """Two rows."""
    ids = torch.arange(24).view(12, 2) * 7 % vocab_size
    return MicroBatch(
        tokens=ids, labels=ids.roll(-1, 0), loss_mask=torch.ones(12, 2), samples=torch.arange(2), step=0,
        positions=torch.arange(12)[:, None].expand(12, 2),
    )  # fmt: skip


def merge_by_hand(stage: Transformer, plain: Transformer, scale: float) -> dict[str, tuple[str, str]]:
    """W + scale B A in `plain`, beside W elsewhere; the names of A and B by that of W."""
    values, names = dict(stage.named_parameters()), {}
    for name, weight in plain.named_parameters():
        weight.data.copy_(values[name].data)
        linear, part = name.removesuffix(".weight"), "weight"
        if f"{linear}.lora.weight.A" not in values:
            linear, _, part = linear.rpartition(".")
        pair = (f"{linear}.lora.{part}.A", f"{linear}.lora.{part}.B")
        if pair[0] in values:
            names[name] = pair
            weight.data += scale * values[pair[1]].data @ values[pair[0]].data
    return names


@pytest.mark.parametrize("model", ["llama", "gpt2", "moe"])
def test_loss_and_gradients_are_those_of_merged_weights(model: str, tokens: str, tmp_path: Path) -> None:
    """dA = s B^T dW and dB = s dW A^T, where dW is the gradient of the merged weight."""
    config = adapted(model, tokens, tmp_path)
    config = replace(config, model=replace(config.model, hidden_dropout=0.0, attention_dropout=0.0))
    stage, plain = stage_of(config), stage_of(replace(config, lora=LoRAConfig()))
    names = merge_by_hand(stage, plain, 2.0)
    assert len(names) >= config.model.num_layers * (4 if model == "moe" else 6)
    freeze(stage, [NAMES], but=True)
    rows = batch(config.model.vocab_size)
    loss, expected = stage(None, rows), plain(None, rows)
    torch.testing.assert_close(loss, expected, rtol=1e-13, atol=0)
    loss.backward()
    expected.backward()
    with torch.no_grad():
        torch.testing.assert_close(stage.eval().logits(rows), plain.eval().logits(rows), rtol=1e-11, atol=1e-12)
    values = dict(stage.named_parameters())
    for name, weight in plain.named_parameters():
        assert values[name].grad is None
        if name in names:
            a, b = (values[part] for part in names[name])
            assert weight.grad is not None
            torch.testing.assert_close(a.grad, 2.0 * b.data.t() @ weight.grad, rtol=1e-10, atol=1e-13)
            torch.testing.assert_close(b.grad, 2.0 * weight.grad @ a.data.t(), rtol=1e-10, atol=1e-13)


ROWS = [
    ("llama", "tp2+sp+pp2:zb_h1+mbs1"),
    ("gpt2", "tp2+mbs1+recompute:selective"),
    ("llama", "cp2+dp2+zero3+mbs1+recompute:full"),
    *[
        pytest.param(*row, marks=pytest.mark.full)
        for row in (
            ("llama", "tp4"), ("llama", "tp2"), ("llama", "pp2"), ("llama", "dp2+zero2"), ("llama", "cp2:ulysses"),
            ("gpt2", "pp2:zb_v+tp2+sp+mbs1"), ("tied-llama", "pp2:dualpipe+mbs1"), ("tied-llama", "pp3+zero1"),
            ("moe", "ep2+tp2+sp"), ("moe", "ep2+etp2+tp2"), ("lfm2", "tp2+sp+pp2"), ("mtp", "pp2+tp2"),
        )
    ],
]  # fmt: skip


@pytest.mark.parametrize(("model", "layout"), ROWS)
def test_layout_is_a_deployment_detail(model: str, layout: str, tokens: str, references: Path, world: World) -> None:
    config = adapted(model, tokens, references, replace(ALL, dropout=0.1))
    (difference,) = prove_layouts(
        config, [parse_layout(layout)], world, references, num_steps=1, setup=begin_as_noise, timeout=120.0
    )
    assert difference.passed, difference.first_diff
    assert max(difference.loss, difference.grads, difference.grad_norm, difference.weights) < 1e-10


@pytest.mark.parametrize("layout", ["tp2+sp", pytest.param("pp2:zb_h1+dp2+zero3", marks=pytest.mark.full),
                                    pytest.param("recompute:full", marks=pytest.mark.full)])  # fmt: skip
def test_memory_is_predicted(layout: str, tokens: str, tmp_path: Path, world: World) -> None:
    place = parse_layout(layout)
    config = place.apply(adapted("llama", tokens, tmp_path, replace(ALL, dropout=0.1), precision="bf16"))
    found = world.run(measure, config, layout=config.parallel, ranks=place.num_ranks)
    for rank, counted in beside_predicted(config, place.num_ranks, found):
        assert {kind: rank.kinds[kind] for kind in STATE} == counted.state
        assert sum(rank.settled.values()) == pytest.approx(counted.step, rel=0.05)


def steps(mpu: ParallelState, config: Config, folder: str, first: int) -> float:
    """The loss of the step after `first`, from the checkpoint there or checkpoint.load, with one after it."""
    training = build_training(config, mpu, CPU)
    checkpoints = RunCheckpoints(config, training, Path(folder))
    if first:
        assert checkpoints.load(Path(folder)) == first
    else:
        checkpoints.load_start()
    loss = train_step(training, first).loss
    checkpoints.save(first + 1)
    return loss


@pytest.mark.parametrize("separate", [pytest.param(False, marks=pytest.mark.full), True])
def test_from_a_full_checkpoint_to_a_merged_one(separate: bool, tokens: str, tmp_path: Path, world: World) -> None:
    base = adapted("llama", tokens, tmp_path, LoRAConfig(), precision="fp64")
    world.run(steps, base, str(tmp_path / "base"), 0, ranks=1)
    without = world.run(steps, base, str(tmp_path / "base"), 1, ranks=1)[0]
    config = replace(
        base,
        lora=replace(ALL, separate=separate),
        checkpoint=replace(base.checkpoint, load=str(tmp_path / "base" / "checkpoints" / "step_00000001")),
    )
    begin, folder = replace(config, train=replace(config.train, seed=base.train.seed)), str(tmp_path / "tuned")
    whole = [world.run(steps, begin, folder, step, ranks=1)[0] for step in (0, 1, 2)]
    other = str(tmp_path / "moved")
    for step, text in enumerate(("tp2+sp+mbs1", "pp2+mbs1", "dp2+zero3+mbs1")):
        layout = parse_layout(text)
        found = world.run(steps, layout.apply(begin), other, step, layout=layout.parallel, ranks=layout.num_ranks)
        assert found[0] == pytest.approx(whole[step], rel=1e-10)
    assert whole[2] < whole[0] and without != whole[1]

    with StoredCheckpoint(other) as stored:
        names = {key.partition("/")[2] for key in stored.tensors}
        assert all(".lora." in name for name in names) == separate
    options = ["--base", str(tmp_path / "base" / "checkpoints" / "step_00000001")] if separate else []
    assert main(["merge-lora", other, str(tmp_path / "merged"), *options]) == 0
    tuned = build_training(config, SINGLE, CPU)
    RunCheckpoints(config, tuned, Path(other)).load(Path(other))
    plain = replace(base, checkpoint=replace(base.checkpoint, load=str(tmp_path / "merged")))
    merged = build_training(plain, SINGLE, CPU)
    RunCheckpoints(plain, merged, tmp_path / "new").load_start()
    rows = batch(config.model.vocab_size)
    with torch.no_grad():
        expected, found = (training.stages[0].eval().logits(rows) for training in (tuned, merged))
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-11)
    if separate:
        assert main(["merge-lora", other, str(tmp_path / "merged_2")]) == 1


def test_adapters_alone_have_state_and_a_first_step_is_that_of_the_model(tokens: str, tmp_path: Path) -> None:
    config = adapted("tied-llama", tokens, tmp_path, replace(ALL, targets=("q_proj", "layers.1.mlp.*")))
    training = build_training(config, SINGLE, CPU)
    tensors = state_tensors(training)
    learning = {shard.name for shard, _ in tensors["exp_avg"]}
    assert {name.rpartition(".lora.")[0] for name in learning} == {
        *(f"layers.{i}.attention.qkv" for i in range(3)), "layers.1.mlp.fc1", "layers.1.mlp.fc2",
    }  # fmt: skip
    assert sum(bucket.grad.numel() for bucket in training.data_parallels[0].buckets) <= 2048
    plain = build_training(replace(config, lora=LoRAConfig()), SINGLE, CPU)
    assert train_step(training, 0).loss == train_step(plain, 0).loss


@pytest.mark.parametrize(
    ("model", "lora", "message"),
    [
        ("gpt2", {"targets": ("gate_proj",)}, r"targets=gate_proj names no linear of the model; it can be q_proj"),
        ("moe", {"targets": ("*.experts.fc1",)}, r"names experts, which cannot have adapters"),
        ("llama", {"rank": -1}, "rank=-1 must be at least 1"),
        ("llama", {"separate": True}, "checkpoint.load must say where"),
    ],
)
def test_what_cannot_work_is_refused(
    model: str, lora: dict[str, object], message: str, tokens: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        check(adapted(model, tokens, tmp_path, replace(ALL, **lora)), 1)  # pyright: ignore[reportArgumentType]
