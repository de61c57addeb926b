"""Run folders of tiny models with random weights."""

from __future__ import annotations

from pathlib import Path

import torch

from megalite.checkpoint import store
from megalite.config import Config, save_config
from megalite.models.transformer import StageSpec, Transformer
from megalite.mpu import ParallelState
from megalite.parallel.shard import buffer_tensors, shard_of
from megalite.train.build import build_stage


def write_run(path: Path, config: Config, step: int = 3) -> Transformer:
    """A run folder with one checkpoint; returns the model in it, as it trains."""
    mpu = ParallelState.single()
    save_config(config, path / "config.yaml")
    layers = range(config.model.num_layers)
    stage = build_stage(config, mpu, StageSpec(0, 1, layers), torch.device("cpu"))
    for name, buffer in stage.named_buffers():
        if name.endswith("expert_bias"):
            buffer.copy_(torch.linspace(-0.2, 0.2, len(buffer)))
    weights = [(shard_of(p), p.data) for p in stage.parameters()]
    store.save(path, step, {"parameter": weights} | buffer_tensors(stage), {}, mpu)
    return stage.eval()
