"""Weights without masters: no update is lost on average, and no layout rounds another way."""

from __future__ import annotations

import torch
from torch import Tensor

from megalite.mpu import ParallelConfig, ParallelState
from megalite.optim.config import OptimConfig
from megalite.optim.optimizer import Optimizer
from megalite.optim.rounding import round_stochastically, rounding_noise
from megalite.parallel.random import element_index
from megalite.parallel.shard import Cut, Shard, even_cut
from megalite.testing.world import World
from tests.parallel.parameters import adopt, cut_experts, cut_rows, set_grads, whole

SINGLE = ParallelState.single()
CPU = torch.device("cpu")


def _noise(name: str, size: int, step: int = 1, seed: int = 3) -> Tensor:
    return rounding_noise(Shard(name, (size,)), 0, size, seed, step, CPU)


def test_rounding_is_to_a_neighbour_and_unbiased() -> None:
    size = 200_000
    for value in (1.001, -1.001, 3.1e-5, 1e-30, 777.7):
        values = torch.full((size,), value)
        rounded = round_stochastically(values, _noise("w", size)).float()
        low, high = sorted(rounded.unique().tolist())
        bits = torch.tensor([low, high]).bfloat16().view(torch.int16).tolist()
        assert low < value < high and abs(bits[0] - bits[1]) == 1, "neighbours"
        chance = (value - low) / (high - low)
        error = (rounded == high).double().mean() - chance
        assert abs(error) < 5 * (chance * (1 - chance) / size) ** 0.5, (value, float(error))


def test_what_bf16_holds_stays_as_it_is() -> None:
    values = torch.randn(4096).bfloat16().float()
    values[:3] = torch.tensor([0.0, -0.0, 1.0])
    assert torch.equal(round_stochastically(values, _noise("w", 4096)).float(), values)


def test_the_choice_depends_on_seed_step_name_and_element() -> None:
    base = _noise("w", 4096) & 0xFFFF
    for other in (_noise("v", 4096), _noise("w", 4096, step=2), _noise("w", 4096, seed=4), base.roll(1)):
        agreement = ((base >= 1 << 15) == ((other & 0xFFFF) >= 1 << 15)).double().mean()
        assert 0.45 < agreement < 0.55
    assert torch.equal(_noise("w", 4096) & 0xFFFF, base)


def _moved(rounding: bool, steps: int = 1000) -> Tensor:
    weight = whole("norm", torch.ones(512, dtype=torch.bfloat16))
    config = OptimConfig(
        name="sgd", weight_decay=0.0, clip_grad=0.0, master_weights="none", stochastic_rounding=rounding
    )
    optimizer = Optimizer(config, [adopt(SINGLE, weight)], SINGLE, seed=5)
    assert "master" not in optimizer.state_tensors()
    set_grads({weight: 1.0})
    for _ in range(steps):
        optimizer.step(0.001)
    return weight.detach().float()


def test_updates_below_half_a_step_are_taken_on_average() -> None:
    assert _moved(rounding=False).eq(1.0).all(), "to nearest, they are lost"
    found = _moved(rounding=True)
    assert abs(float(found.mean())) < 0.01 and found.std() > 0


def _updated(mpu: ParallelState) -> list[Tensor]:
    """This rank's part of parameters after steps from the same global gradients."""

    def value(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape))).bfloat16()

    parameters = [cut_rows("a", value(7, 5), mpu), cut_experts("b", value(4, 6, 3), mpu, dim=2), whole("c", value(9))]
    config = OptimConfig(name="adamw", clip_grad=0.0, master_weights="none")
    optimizer = Optimizer(config, [adopt(mpu, *parameters)], mpu, seed=5)
    for _ in range(5):
        set_grads(dict.fromkeys(parameters, 0.5))
        optimizer.step(0.01)
    return [p.detach() for p in parameters]


def test_layouts_round_alike(world: World) -> None:
    one = _updated(SINGLE)
    assert all(not torch.equal(p, torch.zeros_like(p)) for p in one)
    ranks = world.run(_updated, layout=ParallelConfig(tp=2, ep=2, etp=2), ranks=4)
    for rank, (a, b, c) in enumerate(ranks):
        assert torch.equal(a, one[0][(0, 3)[rank % 2] : (3, 7)[rank % 2]]) and torch.equal(c, one[2])
        experts, columns = _place(b, one[1])
        assert torch.equal(b, one[1][experts : experts + 2, :, columns : columns + b.shape[2]])
    assert {_place(b, one[1]) for _, b, _ in ranks} == {(0, 0), (0, 1), (2, 0), (2, 1)}


def _place(part: Tensor, whole: Tensor) -> tuple[int, int]:
    """Where `part` [2, 6, n] lies in `whole` [4, 6, 3]: (expert, column)."""
    for experts in (0, 2):
        for columns in (0, 3 - part.shape[2]):
            if torch.equal(part, whole[experts : experts + 2, :, columns : columns + part.shape[2]]):
                return experts, columns
    raise AssertionError("no part of the whole")


def test_element_index_is_where_the_pieces_lie() -> None:
    axis = SINGLE.tp
    cuts = [
        (),
        (Cut(axis, 0, ((1, 2),)),),
        (Cut(axis, 0, ((0, 1), (4, 2), (2, 1))),),
        (Cut(axis, 1, ((3, 1), (0, 2))),),
        (Cut(axis, 0, even_cut(6, axis)), Cut(axis, 2, ((1, 1),))),
        (Cut(axis, 2, ((2, 1), (0, 1))), Cut(axis, 0, ((5, 1),))),
    ]
    everything = torch.arange(6 * 4 * 3).view(6, 4, 3)
    for cut in cuts:
        shard = Shard("w", (6, 4, 3), cut)
        local = torch.empty(shard.local_shape, dtype=torch.int64)
        for offset, sizes, view in shard.pieces(local):
            view.copy_(everything[tuple(slice(o, o + n) for o, n in zip(offset, sizes, strict=True))])
        flat = local.flatten()
        for start, stop in ((0, len(flat)), (1, len(flat) - 1)):
            assert torch.equal(element_index(shard, start, stop, CPU), flat[start:stop]), cut
    assert element_index(Shard("s", ()), 0, 1, CPU).tolist() == [0]
