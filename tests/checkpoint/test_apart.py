"""Checkpoints that hold more tensors, or fewer, than the model that reads them."""

from __future__ import annotations

from pathlib import Path

import torch

from megalite.checkpoint import store
from megalite.mpu import ParallelState
from megalite.parallel.shard import Shard
from tests.checkpoint.state import fill, make_state, values_of

MPU = ParallelState.single()


def test_weights_alone_of_a_model_with_further_layers(tmp_path: Path) -> None:
    state = make_state(1.0)
    further = {kind: [*of_kind, (Shard("mtp.0.weight", (2, 2)), torch.ones(2, 2))] for kind, of_kind in state.items()}
    path = store.save(tmp_path, 1, further, {}, MPU)
    weights = {"parameter": make_state(0.0)["parameter"]}
    store.load(path, weights, MPU, apart=["mtp.*"])
    assert values_of(weights) == {1.0}


def test_what_is_frozen_here_and_was_not_there(tmp_path: Path) -> None:
    path = store.save(tmp_path, 1, make_state(1.0), {}, MPU)
    state = make_state(0.0)
    fill(state, 0.0)
    weights = {"parameter": state["parameter"]}
    store.load(path, weights, MPU, frozen={"layers.0.weight"})
    assert values_of(weights) == {1.0}
