"""Where the ranks of a layout would cut a model, without the ranks."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest
import torch

from megalite.checkpoint import store
from megalite.checkpoint.manifest import Manifest
from megalite.config import Config
from megalite.layout import parse_layout
from megalite.mpu import ParallelState
from megalite.parallel.shard import buffer_tensors, shard_of
from megalite.testing.world import World
from megalite.train.build import build_stages, plan_of
from megalite.train.held import stored_boxes
from megalite.train.stages import stage_layers
from tests.tiny import MODELS, config_for


def _save(mpu: ParallelState, config: Config, folder: str) -> None:
    """Parameters and buffers, as a run of that layout saves them."""
    plan = plan_of(mpu.config, 8)
    stages = build_stages(config, mpu, plan, stage_layers(config.model, mpu.config, plan), torch.device("cpu"))
    tensors: dict = {"parameter": []}
    for stage in stages.values():
        tensors["parameter"] += [(shard_of(p), torch.zeros(p.shape)) for p in stage.parameters()]
        for kind, found in buffer_tensors(stage).items():
            tensors.setdefault(kind, []).extend(found)
    store.save(folder, 1, tensors, {}, mpu)


@pytest.mark.parametrize(
    ("model", "text"),
    [("gpt2", "tp2+pp2"), ("moe-bias", "pp2+ep2+etp1+tp2"), ("tied-llama", "pp3+dp2+zero2")],
)
def test_planned_ranks_cut_as_real_ones_do(model: str, text: str, world: World, tmp_path: Path) -> None:
    layout = parse_layout(text)
    config = layout.apply(config_for(model, "unused", tmp_path))
    world.run(_save, config, str(tmp_path / "run"), layout=config.parallel, ranks=layout.num_ranks)
    manifest = Manifest.read(tmp_path / "run/checkpoints/step_00000001")
    real: dict[str, set] = {}
    for key, entry in manifest.tensors.items():
        name = key.partition("/")[2]
        real[name] = {(int(piece.file[5:10]), piece.offset, piece.sizes) for piece in entry.pieces}
    planned: dict[str, set] = {}
    for rank, boxes in enumerate(stored_boxes(config, layout.num_ranks)):
        for name, found in boxes.items():
            planned.setdefault(name, set()).update((rank, *box) for box in found)
    assert planned == real


@pytest.mark.parametrize("text", ["tp4+pp2v2:interleaved+dp2", "pp2:dualpipe", "pp4:zb_v+tp2", "cp2+ep4+etp2+dp4"])
@pytest.mark.parametrize("model", ["moe", "gpt2"])
def test_every_element_is_stored_once(model: str, text: str, tmp_path: Path) -> None:
    layout = parse_layout(text)
    config = layout.apply(config_for(model, "unused", tmp_path))
    config = dataclasses.replace(config, model=dataclasses.replace(MODELS[model], num_layers=8))
    sizes: dict[str, int] = {}
    whole: dict[str, int] = {}
    for boxes in stored_boxes(config, layout.num_ranks):
        for name, found in boxes.items():
            sizes[name] = sizes.get(name, 0) + sum(math.prod(size) for _, size in found)
    for boxes in stored_boxes(parse_layout("single").apply(config), 1):
        whole = {name: sum(math.prod(size) for _, size in found) for name, found in boxes.items()}
    assert sizes == whole
