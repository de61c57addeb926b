"""What a run says of itself before it starts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from megalite.config import Config
from megalite.kernels.chosen import Kernels
from megalite.kernels.config import KernelConfig
from megalite.layout import parse_layout
from megalite.mpu import ParallelConfig, ParallelState
from megalite.nn.attention import ParallelAttention
from megalite.parallel.data import DataParallel, Unit
from megalite.parallel.wgrad import WeightGradQueue
from megalite.testing.world import World
from megalite.train.build import build_training
from megalite.train.run import attention_kinds, check_kernels, count_parameters
from megalite.train.step import Training
from tests.parallel.parameters import cut_experts, cut_rows, whole
from tests.tiny import config_for


def _count(mpu: ParallelState) -> tuple[int, int]:
    """Two layers: a cut matrix of 24 elements, a whole vector of 5; experts of 4 x 48 and their biases of 4 x 6."""
    data_parallels = {}
    for stage in range(2) if mpu.pp.size == 1 else [mpu.pp.rank]:
        parameters = [
            cut_rows(f"{stage}.words", torch.zeros(8, 3), mpu), whole(f"{stage}.norm", torch.zeros(5)),
            cut_experts(f"{stage}.fc", torch.zeros(4, 8, 6), mpu, 1), cut_experts(f"{stage}.b", torch.zeros(4, 6), mpu),
        ]  # fmt: skip
        data_parallels[stage] = DataParallel([Unit(f"{stage}", parameters)], mpu, queue=WeightGradQueue())
    return count_parameters(cast(Training, SimpleNamespace(mpu=mpu, data_parallels=data_parallels)))


@pytest.mark.parametrize(
    ("layout", "ranks"),
    [
        (ParallelConfig(), 1),
        (ParallelConfig(ep=2), 4),
        (ParallelConfig(tp=2, ep=2, etp=2), 8),
        (ParallelConfig(tp=2, pp=2, ep=4), 8),
    ],
)
def test_parameters_are_those_of_the_global_model(world: World, layout: ParallelConfig, ranks: int) -> None:
    assert world.run(_count, layout=layout, ranks=ranks) == [(2 * 29, 2 * 4 * 54)] * ranks


def _kinds(mpu: ParallelState, config: Config) -> str:
    return attention_kinds(config, build_training(config, mpu, torch.device("cpu")))


WINDOWS: dict[str, Any] = {"window": 8, "window_layers": "but_every:2"}


@pytest.mark.parametrize(
    ("model", "changes", "documents", "layout", "said"),
    [
        ("llama", {}, False, "single", "block"),
        ("llama", {}, False, "pp2", "block"),
        ("lfm2", {}, True, "cp2", "block by ring"),
        ("llama", WINDOWS, False, "single", "block in a window of 8 (layers 0, 2, 4), block (layers 1, 3)"),
        (
            "llama",
            WINDOWS,
            False,
            "pp2+cp2:ring,but_every:2=all_gather",
            "block in a window of 8 by all_gather (layers 0, 2, 4), block by ring (layers 1, 3)",
        ),
    ],
)
def test_the_log_says_what_each_kind_of_layer_attends_with(
    model: str, changes: dict[str, Any], documents: bool, layout: str, said: str,
    tokens: str, tmp_path: Path, world: World,
) -> None:  # fmt: skip
    config = config_for(model, tokens, tmp_path)
    config = replace(
        config,
        model=replace(config.model, **changes),
        data=replace(config.data, reset_attention=documents),
    )
    parsed = parse_layout(layout)
    config = parsed.apply(config)
    assert world.run(_kinds, config, layout=config.parallel, ranks=parsed.num_ranks) == [said] * parsed.num_ranks


def test_long_whole_rows_and_packed_ones_have_other_backends(tokens: str, tmp_path: Path) -> None:
    config = config_for("llama", tokens, tmp_path)
    module = ParallelAttention(config.model, ParallelState.single(), 0)
    device, dtype = torch.device("cpu"), torch.float32
    assert module.describe(device, dtype, 1024, documents=False) == "block"
    assert module.describe(device, dtype, 4096, documents=False) == "sdpa"
    assert module.describe(device, dtype, 4096, documents=True) == "block"
    kernels = Kernels(config=KernelConfig(attention="sdpa"))
    named = ParallelAttention(config.model, ParallelState.single(), 0, kernels)
    assert named.describe(device, dtype, 64, documents=True) == "sdpa"


def _differing(mpu: ParallelState) -> str:
    check_kernels({"rms_norm": "torch", "gelu": "torch"}, mpu)
    try:
        check_kernels({"rms_norm": "torch" if mpu.rank == 1 else "compiled", "gelu": "torch"}, mpu)
    except ValueError as error:
        return str(error)
    return ""


def test_ranks_must_choose_the_same_kernels(world: World) -> None:
    for message in world.run(_differing, ranks=2):
        assert "rms_norm is 'torch' on rank 1 and 'compiled' on rank 0" in message and "gelu" not in message
