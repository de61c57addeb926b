"""The gradient norm when every rank has slices: each element of the model once, whatever it is and wherever it lies."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megalite.mpu import ParallelConfig, ParallelState
from megalite.optim.clip import clip_coefficient, grad_norm
from megalite.optim.config import OptimConfig
from megalite.optim.optimizer import Optimizer
from megalite.parallel.data import DataParallel, Unit
from megalite.parallel.shard import shard_of
from megalite.parallel.wgrad import WeightGradQueue
from megalite.testing.world import World
from tests.parallel.parameters import cut_experts, cut_rows, whole

WIDE = torch.float64
SHAPES = {"words": (37, 3), "0.norm": (5,), "0.fc": (11, 7), "0.experts": (4, 5, 3), "1.norm": (5,), "1.fc": (11, 7)}
"""Of the global model; `words` is tied: both ends of the pipeline hold it."""
CLIP = 0.5


def _gradients() -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(3)
    return {name: torch.randn(shape, dtype=WIDE, generator=g) for name, shape in SHAPES.items()}


class _Use(nn.Module):
    """What a unit's parameters are used in: the gradient of each is what is given, cut as it is."""

    def __init__(self, parameters: list[nn.Parameter], grads: list[Tensor]):
        super().__init__()
        self.held, self.grads = nn.ParameterList(parameters), grads

    def forward(self, x: Tensor) -> Tensor:
        """The scalar x, grown by a sum of products."""
        return x + sum((p * g).sum() for p, g in zip(self.held, self.grads, strict=True))


def _stage(mpu: ParallelState) -> tuple[DataParallel, list[_Use]]:
    """This rank's layers, and the words at both ends; dense gradients are divided among the ranks that sum them."""
    grads, dense = _gradients(), mpu.dp_cp.size

    def cut(name: str, parameter: nn.Parameter, share: float) -> tuple[nn.Parameter, Tensor]:
        local = torch.empty(parameter.shape, dtype=WIDE)
        for offset, sizes, view in shard_of(parameter).pieces(local):
            view.copy_(grads[name][tuple(slice(o, o + n) for o, n in zip(offset, sizes, strict=True))])
        return parameter, local * share

    zeros = {name: torch.zeros(shape, dtype=WIDE) for name, shape in SHAPES.items()}
    tied = None if mpu.pp.is_first else "words"
    held = {"tied": [cut("words", cut_rows("words", zeros["words"], mpu, tied_to=tied), 1 / dense / mpu.embd.size)]}
    for layer in range(2) if mpu.pp.size == 1 else [mpu.pp.rank]:
        norm = whole(f"{layer}.norm", zeros[f"{layer}.norm"], partial=(mpu.tp,))  # sequence parallel: a part on each
        held[str(layer)] = [cut(f"{layer}.norm", norm, 1 / dense / mpu.tp.size)]
        held[str(layer)].append(cut(f"{layer}.fc", cut_rows(f"{layer}.fc", zeros[f"{layer}.fc"], mpu), 1 / dense))
        if layer == 0:
            held["0"].append(cut("0.experts", cut_experts("0.experts", zeros["0.experts"], mpu), 1 / mpu.edp.size))
    uses = {name: _Use([p for p, _ in pairs], [g for _, g in pairs]) for name, pairs in held.items()}
    units = [Unit(name, list(use.held), tied=name == "tied", modules=[use]) for name, use in uses.items()]
    return DataParallel(units, mpu, queue=WeightGradQueue()), list(uses.values())


def _backward(part: DataParallel, uses: list[_Use], spoil: float | None) -> None:
    """One pass; `spoil` is added to an element of each of this rank's first gradients."""
    part.zero_grad()
    if spoil is not None:
        uses[0].grads[0].view(-1)[-1] += spoil
    x = torch.zeros((), dtype=WIDE, requires_grad=True)
    for use in uses:
        x = use(x)
    part.leave()
    part.arm(0)
    x.backward()
    part.leave()
    part.complete()
    part.finish()


def _norms(mpu: ParallelState) -> Any:
    """(norm, clipped norm, largest change of a weight over that of its gradient) for every rank."""
    part, uses = _stage(mpu)
    optimizer = Optimizer(OptimConfig(name="sgd", momentum=0.0, weight_decay=0.0, clip_grad=CLIP), [part], mpu)
    _backward(part, uses, None)
    direct = float(grad_norm([part], mpu))
    before = [w.clone() for _, w in part.weights()]
    grads = {(s.name, s.run): g.clone() for s, g in part.gradients()}
    stepped = optimizer.step(1.0).grad_norm
    factors = [
        (old - new).abs().max() / grads[s.name, s.run].abs().max()
        for old, (s, new) in zip(before, part.weights(), strict=True)
        if (s.name, s.run) in grads
    ]
    return direct, stepped, [float(factor) for factor in factors]


LAYOUTS = [
    (ParallelConfig(), 2),
    (ParallelConfig(tp=2, sequence_parallel=True), 4),
    (ParallelConfig(pp=2), 4),
    (ParallelConfig(ep=2), 4),
    (ParallelConfig(tp=2, sequence_parallel=True, pp=2, ep=2), 8),
]


@pytest.mark.parametrize(("layout", "ranks"), LAYOUTS)
@pytest.mark.parametrize("options", [{"zero": 1}, {"zero": 2}, {"zero": 3}, {"zero": 3, "zero_persistent": 9},
                                     {"zero": 2, "zero_shard_size": 1}], ids=str)  # fmt: skip
def test_every_element_counts_once(layout: ParallelConfig, ranks: int, options: dict[str, Any], world: World) -> None:
    """Tied words, norms that tp ranks share, experts, parameters that stay whole: the norm is that of one rank.

    Leaving out experts (DeepSpeed 8613) or a norm for each group of ranks (NeMo Automodel 3816) would show here.
    """
    expected = math.sqrt(sum(float(g.square().sum()) for g in _gradients().values()))
    results = world.run(_norms, layout=replace(layout, **options), ranks=ranks)
    assert len({norm for norm, _, _ in results}) == 1, "the same bits everywhere"
    for norm, stepped, factors in results:
        assert norm == stepped == pytest.approx(expected, rel=1e-13)
        assert factors == pytest.approx([clip_coefficient(expected, CLIP)] * len(factors), rel=1e-12)


def _spoilt(mpu: ParallelState, bad_rank: int, value: float) -> tuple[float, bool, bool]:
    """(norm, skipped, whether the weights are as before) of a step with `value` in one rank's contribution."""
    part, uses = _stage(mpu)
    optimizer = Optimizer(OptimConfig(nonfinite="skip"), [part], mpu)
    before = [w.clone() for _, w in part.weights()]
    _backward(part, uses, value if mpu.world.rank == bad_rank else None)
    result = optimizer.step(1.0)
    return result.grad_norm, result.skipped, all(map(torch.equal, before, [w for _, w in part.weights()]))


@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_what_is_not_finite_on_one_rank_is_seen_on_all(zero: int, value: float, world: World) -> None:
    layout = ParallelConfig(zero=zero, pp=2, ep=2)
    for bad_rank in (0, 3):
        for norm, skipped, same in world.run(_spoilt, bad_rank, value, layout=layout, ranks=4):
            assert not math.isfinite(norm) and skipped and same
