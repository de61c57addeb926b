"""Weights at step 0: stages of a pipeline begin as the parts of one whole model, and no two layers alike."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from torch import Tensor

from megalite.models import MODELS
from megalite.models.transformer import StageSpec
from megalite.mpu import ParallelState
from megalite.parallel.random import initialize
from megalite.parallel.shard import shard_of
from tests.tiny import LLAMA, TIED_LLAMA

NUM_LAYERS = 4


def first_weights(tied: bool, stage: StageSpec | None = None) -> dict[str, Tensor]:
    """What a stage, or the whole model, has before training, by global name; of the tied weight, a copy included."""
    model = dataclasses.replace(TIED_LLAMA if tied else LLAMA, num_layers=NUM_LAYERS)
    network = MODELS[model.name](model, ParallelState.single(), stage)
    initialize(network, seed=1)
    return {shard_of(p).tied_to or shard_of(p).name: p.detach() for p in network.parameters()}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("num_stages", [1, 2, 4])
def test_stages_begin_as_parts_of_the_whole_model(tied: bool, num_stages: int) -> None:
    whole, found, size = first_weights(tied), set(), NUM_LAYERS // num_stages
    for index in range(num_stages):
        layers = range(index * size, (index + 1) * size)
        for name, weight in first_weights(tied, StageSpec(index, num_stages, layers)).items():
            assert torch.equal(weight, whole[name]), name
            found.add(name)
    assert found == whole.keys()


def test_no_two_layers_begin_alike() -> None:
    weights = first_weights(tied=False)
    parts = {
        name.split(".", 2)[2] for name, weight in weights.items() if name.startswith("layers.") and weight.dim() > 1
    }
    assert parts
    for part, (one, other) in itertools.product(parts, itertools.combinations(range(NUM_LAYERS), 2)):
        assert not torch.isclose(weights[f"layers.{one}.{part}"], weights[f"layers.{other}.{part}"]).all(), part
