"""Parameter groups by name: the same as torch's, in as few calls as the flat memory allows."""

from __future__ import annotations

import pytest
import torch

from megalite.mpu import ParallelState
from megalite.optim.config import OptimConfig
from megalite.optim.groups import Group, runs_of
from megalite.optim.optimizer import Optimizer
from tests.parallel.parameters import adopt, set_grads, whole

SINGLE = ParallelState.single()


def test_parsing() -> None:
    assert Group.parse("*.router.*:lr=0.1") == Group("*.router.*", 0.1, None)
    assert Group.parse("embedding.weight:weight_decay=0,lr=2") == Group("embedding.weight", 2.0, 0.0)
    for text in ("x", "x:", ":lr=1", "x:lr", "x:lr=a", "x:lr=-1", "x:lr=nan", "x:lr=1,lr=2", "x:beta=1"):
        assert OptimConfig(groups=(text,)).problems(), text


def test_runs_are_few_and_cover_the_segment() -> None:
    names = ("layers.0.a", "layers.0.b", "layers.1.a", "layers.1.b")
    (segment,) = adopt(SINGLE, *(whole(name, torch.ones(3, 5)) for name in names)).segments
    (run,) = runs_of(segment, (), 0.1, lambda shard: False)
    assert (run.start, run.stop, run.lr, run.weight_decay) == (0, segment.param.numel(), 1.0, 0.1)
    runs = runs_of(segment, [Group("layers.0.*", 2.0), Group("*.a", 3.0, 0.0)], 0.1, lambda shard: False)
    assert [(run.start, run.stop, run.lr, run.weight_decay) for run in runs] == [
        (0, 128, 2.0, 0.1), (128, 192, 3.0, 0.0), (192, 256, 1.0, 0.1),
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_groups_equal_those_of_torch(name: str) -> None:
    shapes = {"embedding.weight": (6, 3), "router.weight": (4, 3), "norm.weight": (5,), "head.weight": (6, 3)}
    values = {key: torch.randn(*shape, dtype=torch.float64) for key, shape in shapes.items()}
    ours = {key: whole(key, value) for key, value in values.items()}
    theirs = {key: torch.nn.Parameter(value.clone()) for key, value in values.items()}
    config = OptimConfig(
        name=name,  # pyright: ignore[reportArgumentType]
        clip_grad=0.0,
        weight_decay=0.1,
        groups=("router.*:lr=0.1", "norm.*:weight_decay=0.5", "emb*:lr=2,weight_decay=0"),
    )
    settings = {
        "embedding.weight": (2.0, 0.0),
        "router.weight": (0.1, 0.1),
        "norm.weight": (1.0, 0.5),
        "head.weight": (1.0, 0.1),
    }
    groups = [
        {"params": [theirs[key]], "lr": 0.01 * lr, "weight_decay": decay} for key, (lr, decay) in settings.items()
    ]
    reference = torch.optim.AdamW(groups) if name == "adamw" else torch.optim.SGD(groups)
    optimizer = Optimizer(config, [adopt(SINGLE, *ours.values())], SINGLE)
    for step in range(4):
        for key, parameter in ours.items():
            gradient = theirs[key].grad = torch.sin(values[key] * (step + 1))
            set_grads({parameter: gradient})
        optimizer.step(0.01)
        reference.step()
    for key, parameter in ours.items():
        torch.testing.assert_close(parameter.detach(), theirs[key].detach(), rtol=1e-12, atol=1e-14)
