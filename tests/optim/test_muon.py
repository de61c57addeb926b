"""Muon: orthogonal steps of whole matrices, whatever slices and cuts they are kept in."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megalite.layout import parse_layout
from megalite.mpu import ParallelConfig, ParallelState
from megalite.optim.config import OptimConfig
from megalite.optim.optimizer import Optimizer
from megalite.optim.rules import is_matrix, orthogonalize
from megalite.parallel.data import DataParallel, Unit
from megalite.parallel.matrices import WholeMatrices
from megalite.parallel.shard import Shard, name_parameters
from megalite.parallel.tensor import ColumnParallelLinear
from megalite.parallel.wgrad import WeightGradQueue
from megalite.testing.layouts import prove_layouts
from megalite.testing.world import World
from tests.parallel.parameters import adopt, set_grads, whole
from tests.tiny import config_for

SINGLE = ParallelState.single()
MUON = OptimConfig(name="muon", weight_decay=0.1, clip_grad=0.0)


def _random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("shape", [(7, 5), (5, 7), (6, 6), (3, 4, 9)])
def test_singular_values_come_near_one(shape: tuple[int, ...]) -> None:
    matrix = _random(*shape)
    found = orthogonalize(matrix)
    values = torch.linalg.svdvals(found)
    assert found.shape == matrix.shape and values.min() > 0.6 and values.max() < 1.25
    u, _, vh = torch.linalg.svd(matrix, full_matrices=False)
    in_directions = u.mT @ found @ vh.mT
    diagonal = in_directions.diagonal(dim1=-2, dim2=-1)
    torch.testing.assert_close(in_directions, torch.diag_embed(diagonal), atol=1e-9, rtol=0)
    torch.testing.assert_close(diagonal.sort(descending=True).values, values, atol=1e-9, rtol=0)
    assert not orthogonalize(torch.zeros(3, 4)).any()


def test_three_steps_by_hand() -> None:
    """A matrix, an embedding and a bias: the last two follow AdamW."""
    names = {"layers.0.w": (6, 4), "embedding.weight": (5, 4), "layers.0.bias": (4,)}
    ours = [whole(name, _random(*shape, seed=i)) for i, (name, shape) in enumerate(names.items())]
    start = [p.detach().clone() for p in ours]
    rest = [torch.nn.Parameter(p.clone()) for p in start[1:]]
    groups = [{"params": [rest[0]], "weight_decay": 0.1}, {"params": [rest[1]], "weight_decay": 0.0}]
    reference = torch.optim.AdamW(groups, lr=0.1, foreach=False)
    optimizer = Optimizer(MUON, [adopt(SINGLE, *ours)], SINGLE)
    expected, momentum = start[0].clone(), torch.zeros(6, 4, dtype=torch.float64)
    for step in range(3):
        grads = [_random(*p.shape, seed=10 * step + i) for i, p in enumerate(ours)]
        set_grads(dict(zip(ours, grads, strict=True)))
        momentum = 0.95 * momentum + grads[0]
        update = orthogonalize(grads[0] + 0.95 * momentum) * 0.2 * 6**0.5
        expected = expected * (1 - 0.1 * 0.1) - 0.1 * update
        for parameter, grad in zip(rest, grads[1:], strict=True):
            parameter.grad = grad
        reference.step()
        optimizer.step(0.1)
    for found, value in zip(ours, [expected, *rest], strict=True):
        torch.testing.assert_close(found, value, rtol=1e-10, atol=1e-10, check_dtype=False)
    kinds = {kind: {shard.name for shard, _ in views} for kind, views in optimizer.state_tensors().items()}
    assert kinds["momentum"] == {"layers.0.w"} and kinds["exp_avg_sq"] == {"embedding.weight", "layers.0.bias"}


def test_what_is_a_matrix() -> None:
    for name, shape, expected in (
        ("layers.0.mlp.fc1.weight", (4, 3), True), ("layers.0.mlp.experts.fc1", (4, 3, 5), True),
        ("layers.0.mlp.router.weight", (4, 3), False), ("head.weight", (4, 3), False), ("norm.weight", (4,), False),
        ("layers.0.mlp.shared_gate.weight", (1, 3), False),
    ):  # fmt: skip
        assert is_matrix(Shard(name, shape), MUON) == expected
        assert not is_matrix(Shard(name, shape), OptimConfig())


def _gathered(mpu: ParallelState) -> tuple[bool, bool]:
    """A matrix out of the slices of an uneven cut, and back."""
    layer = ColumnParallelLinear(5, 7, axis=mpu.tp, bias=False).double()
    name_parameters(layer)
    value = torch.arange(35.0, dtype=torch.float64).view(7, 5)
    ((_, _, view),) = [(o, s, v) for o, s, v in layer.weight.shard.pieces(layer.weight.data)]  # pyright: ignore
    ((start, length),) = layer.weight.shard.cuts[0].segments if layer.weight.shard.cuts else ((0, 7),)  # pyright: ignore
    view.copy_(value[start : start + length])
    (bucket,) = DataParallel([Unit("u", [layer.weight])], mpu, queue=WeightGradQueue()).buckets
    matrices = WholeMatrices(bucket, lambda shard: True)
    ((_, found),) = matrices.gather(bucket.param_shard)
    back = all(
        torch.equal(matrices.slice_of(span, found * 2), span.of(segment.param).reshape(-1) * 2)
        for segment in bucket.segments
        for span in segment.spans
    )
    return torch.equal(found, value), back


@pytest.mark.parametrize("zero", [0, 1])
def test_a_matrix_comes_out_of_its_slices_and_goes_back(zero: int, world: World) -> None:
    assert set(world.run(_gathered, layout=ParallelConfig(tp=2, zero=zero), ranks=4)) == {(True, True)}


ROWS = [
    ("moe", "tp2+sp+ep2+etp2+dp2+zero3"),
    pytest.param("tied-llama", "pp2:zb_v+dp2+zero2", marks=pytest.mark.full),
    pytest.param("gpt2", "tp2+dp4+zero1:shard2+mbs1", marks=pytest.mark.full),
    pytest.param("llama", "tp4+sp", marks=pytest.mark.full),  # ranks share KV heads
    pytest.param("lfm2-moe", "cp2+ep2+zero3", marks=pytest.mark.full),
]


@pytest.mark.parametrize(("model", "layout"), ROWS)
def test_muon_is_the_same_on_every_layout(model: str, layout: str, tokens: str, tmp_path: Path, world: World) -> None:
    config = config_for(model, tokens, tmp_path)
    config = dataclasses.replace(config, optim=dataclasses.replace(config.optim, name="muon"))
    (difference,) = prove_layouts(config, [parse_layout(layout)], world, tmp_path, num_steps=2, timeout=300.0)
    assert difference.passed, difference.first_diff
