"""Resuming a mixture of experts: weights, optimizer state and what routers remember, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from megalite.checkpoint.manifest import Manifest
from megalite.config import Config, check
from megalite.layout import parse_layout
from megalite.mpu import ParallelState
from megalite.parallel.shard import buffer_tensors
from megalite.testing.world import World
from megalite.train.build import build_training
from megalite.train.checkpoints import RunCheckpoints
from megalite.train.step import Training, train_step
from tests.tiny import config_for

CPU = torch.device("cpu")


def _values(training: Training) -> dict[str, Tensor]:
    """Everything that a step depends on."""
    parts = [part.state_tensors() for part in training.data_parallels.values()]
    parts += [buffer_tensors(stage) for stage in training.stages.values()]
    parts.append(training.optimizer.state_tensors())
    return {
        f"{kind}/{shard.tied_to or shard.name}/{number}": tensor.clone()
        for number, part in enumerate(parts)
        for kind, of_kind in part.items()
        for shard, tensor in of_kind
    }


def _resumed(mpu: ParallelState, config: Config, folder: str) -> tuple[list[str], int]:
    """What differs between three steps and one, a save, a load elsewhere and two; and how many buffers there are."""
    straight = build_training(config, mpu, CPU)
    for step in range(3):
        train_step(straight, step)
    begun = build_training(config, mpu, CPU)
    train_step(begun, 0)
    RunCheckpoints(config, begun, Path(folder)).save(1)
    again = build_training(config, mpu, CPU)
    for step in range(2):  # so that it holds other values
        train_step(again, step)
    checkpoints = RunCheckpoints(config, again, Path(folder))
    for step in range(checkpoints.load(Path(folder)), 3):
        train_step(again, step)
    expected, found = _values(straight), _values(again)
    assert expected.keys() == found.keys()
    return [key for key in expected if not torch.equal(expected[key], found[key])], sum(
        "buffer/" in key for key in found
    )


@pytest.mark.parametrize(
    "layout",
    [
        "ep2",
        pytest.param("ep2+dp4+mbs1", marks=pytest.mark.full),
        "tp2+etp2+ep2+dp2",
        pytest.param("ep2+pp2:dualpipe+mbs1", marks=pytest.mark.full),
    ],
)
def test_a_resumed_mixture_of_experts_goes_on_bit_for_bit(
    layout: str, tokens: str, tmp_path: Path, world: World
) -> None:
    config = config_for("moe-bias", tokens, tmp_path / "cache", precision="bf16", device="cpu", num_steps=3)
    parsed = parse_layout(layout)
    config = parsed.apply(config)
    check(config, parsed.num_ranks)
    run = str(tmp_path / "run")
    results = world.run(_resumed, config, run, layout=config.parallel, ranks=parsed.num_ranks, timeout=120)
    assert [differing for differing, _ in results] == [[]] * parsed.num_ranks
    assert all(count > 0 for _, count in results)
    _assert_stored_once(Path(run) / "checkpoints" / "step_00000001", config)


def _assert_stored_once(folder: Path, config: Config) -> None:
    """Each element of each tensor is in one file, once, and the routers' buffers are there."""
    manifest = Manifest.read(folder)
    moe = [layer for layer in range(config.model.num_layers) if config.model.is_moe_layer(layer)]
    buffers = {f"buffer/layers.{i}.mlp.router.{name}" for i in moe for name in ("expert_bias", "fractions")}
    assert {key for key in manifest.tensors if key.startswith("buffer/")} == buffers
    for entry in manifest.tensors.values():
        count = torch.zeros(entry.shape)
        for piece in entry.pieces:
            count[tuple(slice(o, o + n) for o, n in zip(piece.offset, piece.sizes, strict=True))] += 1
        assert count.eq(1).all()
    files = {path.name: load_file(path) for path in folder.glob("*.safetensors")}
    assert sum(len(entry.pieces) for entry in manifest.tensors.values()) == sum(map(len, files.values()))
    for key in buffers:
        (piece,) = manifest.tensors[key].pieces
        stored = files[piece.file][piece.name]
        assert stored.dtype == torch.float32 and stored.count_nonzero() > stored.numel() // 2  # 0: an even load
