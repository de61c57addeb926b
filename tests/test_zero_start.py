"""Starting up under ZeRO: a model comes into being unit by unit, so that it may be larger than a device."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import megalite.parallel.random as random_module
from megalite.checkpoint import store
from megalite.config import Config
from megalite.mpu import ParallelConfig, ParallelState
from megalite.parallel.shard import Shard
from megalite.testing.memory import LiveMemory
from megalite.testing.world import World
from megalite.train.build import build_training
from megalite.train.step import Training
from tests.tiny import config_for

CPU = torch.device("cpu")
DRAWING = 96 * 65536
"""Bytes of temporaries while numbers are drawn."""


def _training(config: Config, mpu: ParallelState) -> Training:
    return build_training(dataclasses.replace(config, parallel=mpu.config), mpu, CPU)


def _weights(training: Training) -> list[tuple[Shard, Tensor]]:
    return [pair for part in training.data_parallels.values() for pair in part.weights()]


def _build(mpu: ParallelState, config: Config) -> tuple[int, int, int, int]:
    """Bytes at most and afterwards; of a whole unit's parameters, and of all parameters."""
    with LiveMemory() as memory:
        training = _training(config, mpu)
    units: dict[str, int] = {}
    for part in training.data_parallels.values():
        for bucket in part.buckets:
            units[bucket.unit] = units.get(bucket.unit, 0) + bucket.param.numel() * bucket.param.element_size()
    return memory.peak, memory.now, max(units.values()), sum(units.values())


def _large(tokens: str, folder: Path, num_layers: int) -> Config:
    """SGD in float32: parameters and gradients are all the state."""
    config = config_for("llama", tokens, folder, precision="fp32")
    model = dataclasses.replace(config.model, num_layers=num_layers, hidden_size=256, ffn_hidden_size=1024)
    return dataclasses.replace(config, model=model, optim=dataclasses.replace(config.optim, name="sgd"))


def test_at_the_start_one_unit_is_whole_at_a_time(tokens: str, tmp_path: Path, world: World) -> None:
    config = _large(tokens, tmp_path, 8)
    for peak, now, unit, total in world.run(_build, config, layout=ParallelConfig(zero=3), ranks=4):
        assert 2 * total // 4 <= now < 2 * total // 4 + (1 << 20)
        assert peak < now + unit + DRAWING < total


def test_whole_parameters_exist_once_under_the_other_stages(tokens: str, tmp_path: Path, world: World) -> None:
    config = _large(tokens, tmp_path, 2)
    for zero, kept in ((1, 8), (2, 5)):  # quarters of all parameters
        for peak, now, unit, total in world.run(_build, config, layout=ParallelConfig(zero=zero), ranks=4):
            assert kept * total // 4 <= now < kept * total // 4 + (1 << 20)
            assert peak < now + unit + DRAWING


Pieces = dict[tuple[str, tuple[int, ...]], Tensor]


def _initial(mpu: ParallelState, config: Config) -> tuple[Pieces, int]:
    """This rank's parts of the initial weights, and how many numbers it drew."""
    drawn, draw = [0], random_module.hashed_normal

    def counted(index: Tensor, name: str, seed: int) -> Tensor:
        drawn[0] += index.numel()
        return draw(index, name, seed)

    random_module.hashed_normal = counted
    try:
        training = _training(config, mpu)
    finally:
        random_module.hashed_normal = draw
    pieces = {
        (shard.tied_to or shard.name, offset): view.clone()
        for shard, local in _weights(training)
        for offset, _, view in shard.pieces(local)
    }
    return pieces, drawn[0]


@pytest.mark.parametrize(
    ("model", "layout", "copies"),
    [
        ("llama", ParallelConfig(), 0),
        ("moe-gpt2", ParallelConfig(ep=2, tp=2, etp=2), None),  # routers are on both tp ranks
        ("tied-llama", ParallelConfig(pp=2, schedule="zb_v"), 61 * 48),  # what two stages share stays whole
        ("lfm2", ParallelConfig(pp=2), 61 * 48),  # the tied weight, at both ends
    ],
)
def test_each_number_is_drawn_by_the_rank_that_keeps_it(
    model: str, layout: ParallelConfig, copies: int | None, tokens: str, tmp_path: Path, world: World
) -> None:
    config = config_for(model, tokens, tmp_path, precision="bf16")
    (whole, drawn), *_ = world.run(_initial, config, ranks=1)
    divided = dataclasses.replace(layout, zero=3)
    results = world.run(_initial, config, layout=divided, ranks=4)
    names = {name: value for (name, _), value in whole.items()}
    found = {name: torch.full_like(value, torch.nan) for name, value in names.items()}
    for pieces, _ in results:
        for (name, offset), piece in pieces.items():
            found[name][tuple(slice(o, o + n) for o, n in zip(offset, piece.shape, strict=True))] = piece
    for name, value in names.items():
        assert torch.equal(found[name], value), name
    if copies is not None:
        assert sum(drawn_here for _, drawn_here in results) == drawn + copies


class _LargestCopy(TorchDispatchMode):
    """Bytes of the largest thing that was copied from."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            self.largest = max(self.largest, args[1].untyped_storage().nbytes())
        return func(*args, **(kwargs or {}))


def _load(mpu: ParallelState, config: Config, folder: str) -> tuple[int, int]:
    """Bytes of the largest tensor that is read from a checkpoint, and of the largest parameter."""
    training = _training(config, mpu)
    store.save(folder, 1, {"parameter": _weights(training)}, {}, mpu)
    with _LargestCopy() as read:
        store.load(folder, {"parameter": _weights(_training(config, mpu))}, mpu)
    return read.largest, max(4 * p.numel() for part in training.data_parallels.values() for p in part.parameters)


def test_a_checkpoint_is_read_slice_by_slice(tokens: str, tmp_path: Path, world: World) -> None:
    config = _large(tokens, tmp_path, 2)
    results = world.run(_load, config, str(tmp_path / "run"), layout=ParallelConfig(zero=3), ranks=4)
    for read, parameter in results:
        assert 0 < read <= parameter
