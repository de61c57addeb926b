"""The gradient norm with experts: known faults of other frameworks, and every layout against one rank."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from megalite.grid import ParallelConfig
from megalite.mpu import ParallelState
from megalite.optim.clip import clip_coefficient, grad_norm
from megalite.optim.config import OptimConfig
from megalite.optim.optimizer import Optimizer
from megalite.parallel.data import DataParallel, Unit, main_grad
from megalite.parallel.shard import shard_of
from megalite.parallel.wgrad import WeightGradQueue
from megalite.testing.world import World
from tests.parallel.parameters import adopt, cut_experts, cut_rows, set_grads, whole

WIDE = torch.float64


def _fill(data_parallel: DataParallel, grads: dict[str, Tensor]) -> None:
    """This rank's part of global gradients, by name, as if it were summed already."""
    for parameter in data_parallel.parameters:
        shard = shard_of(parameter)
        for offset, sizes, view in shard.pieces(main_grad(parameter)):
            view.copy_(grads[shard.name][tuple(slice(o, o + n) for o, n in zip(offset, sizes, strict=True))])


def _experts_only(mpu: ParallelState) -> tuple[float, Tensor]:
    """Two experts with squared gradient norms 20 and 100 and nothing else, then a clipped step of SGD."""
    experts = cut_experts("experts", torch.zeros(2, 4, dtype=WIDE), mpu)
    data_parallel = adopt(mpu, experts)
    grads = torch.tensor([[math.sqrt(5.0)] * 4, [5.0] * 4], dtype=WIDE)
    _fill(data_parallel, {"experts": grads})
    optimizer = Optimizer(OptimConfig(name="sgd", clip_grad=1.0, momentum=0.0, weight_decay=0.0), [data_parallel], mpu)
    norm = optimizer.step(1.0).grad_norm
    return norm, mpu.etp_ep.all_gather(experts.data)[:2]


@pytest.mark.parametrize("layout", [ParallelConfig(ep=2), ParallelConfig(tp=2, ep=2), ParallelConfig()])
def test_experts_differ_between_ranks_and_their_squares_add_up(world: World, layout: ParallelConfig) -> None:
    """sqrt(20 + 100), wherever the experts live; a mean over ranks gives 7.2361 (DeepSpeed 8475)."""
    expected = -torch.tensor([[math.sqrt(5.0)] * 4, [5.0] * 4], dtype=WIDE) / math.sqrt(120)
    results = world.run(_experts_only, layout=layout, ranks=2)
    for norm, updated in results:
        assert norm == pytest.approx(10.9545, abs=5e-5) and norm == pytest.approx(math.sqrt(120), rel=1e-14)
        torch.testing.assert_close(updated, expected, rtol=1e-14, atol=0.0)
    assert results[0][0] == results[1][0]


def _dense_and_experts(mpu: ParallelState, dtype: torch.dtype, options: dict[str, Any]) -> float:
    """Four dense gradients of 3 and four of experts of 4."""
    dense, experts = (
        whole("dense", torch.ones(4, dtype=dtype)),
        cut_experts("experts", torch.ones(4, 1, dtype=dtype), mpu),
    )
    data_parallel = adopt(mpu, dense, experts)
    set_grads({dense: 3.0, experts: 4.0})
    optimizer = Optimizer(OptimConfig(**options), [data_parallel], mpu)
    return optimizer.step(0.1).grad_norm


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("options", [{}, {"name": "sgd"}, {"clip_grad": 0.0}, {"post_validation": True}], ids=str)
def test_shared_parameters_and_experts_both_count_on_every_path(
    world: World, dtype: torch.dtype, options: dict[str, Any]
) -> None:
    """10; without the experts 6 (DeepSpeed 8613)."""
    assert _dense_and_experts(ParallelState.single(), dtype, options) == 10.0
    assert world.run(_dense_and_experts, dtype, options, layout=ParallelConfig(ep=2)) == [10.0, 10.0]


def _vector_of_heads(mpu: ParallelState) -> float:
    """A vector cut over tp, of norm 4 on each rank, and a whole one of norm 3."""
    sink, norm = cut_rows("sink", torch.zeros(8, dtype=WIDE), mpu), whole("norm", torch.zeros(9, dtype=WIDE))
    data_parallel = adopt(mpu, sink, norm)
    set_grads({sink: 2.0, norm: 1.0})
    return float(grad_norm([data_parallel], mpu))


def test_a_cut_vector_counts_on_every_rank_and_a_whole_one_once(world: World) -> None:
    """sqrt(9 + 32); 5 when the vector counts once, 7.0711 when the whole one counts twice (Megatron-LM 7530)."""
    for norm in world.run(_vector_of_heads, layout=ParallelConfig(tp=2)):
        assert norm == pytest.approx(6.4031, abs=5e-5) and norm == pytest.approx(math.sqrt(41), rel=1e-14)


def _uneven_experts(mpu: ParallelState) -> tuple[float, float, Tensor, Tensor]:
    """A dense vector cut over both ranks; expert gradients of norm 40 on one and 0.4 on the other."""
    dense, experts = (
        cut_rows("dense", torch.zeros(4, dtype=WIDE), mpu),
        cut_experts("e", torch.zeros(2, 4, dtype=WIDE), mpu),
    )
    data_parallel = adopt(mpu, dense, experts)
    set_grads({dense: 0.5, experts: (20.0, 0.2)[mpu.ep.rank]})
    optimizer = Optimizer(OptimConfig(name="sgd", clip_grad=1.0, momentum=0.0, weight_decay=0.0), [data_parallel], mpu)
    norm = optimizer.step(1.0).grad_norm
    return norm, clip_coefficient(norm, 1.0), dense.detach().clone(), experts.detach().clone()


def test_all_ranks_clip_by_one_factor(world: World) -> None:
    """A norm for each expert-parallel group would scale the two dense halves a factor 100 apart (Automodel 3816)."""
    (norm, factor, dense, experts), second = world.run(_uneven_experts, layout=ParallelConfig(tp=2, ep=2))
    assert norm == pytest.approx(math.sqrt(1.0 + 1600.0 + 0.16), rel=1e-14)
    assert (norm, factor) == second[:2]
    assert torch.equal(dense, second[2]) and torch.equal(dense, torch.full((2,), -0.5 * factor, dtype=WIDE))
    torch.testing.assert_close(
        torch.cat((experts, second[3]))[:, 0].div(-factor), torch.tensor([20.0, 0.2], dtype=WIDE)
    )


def _infinite_on_one_rank(mpu: ParallelState, bad_rank: int, expert: bool, values: list[float]) -> dict[str, Any]:
    """A step whose gradient is `values` on one rank alone, before it is summed over the others."""
    dense = whole(f"layers.{mpu.pp.rank}.dense", torch.ones(3, dtype=torch.bfloat16))
    experts = cut_experts(f"layers.{mpu.pp.rank}.experts", torch.ones(2, 3, dtype=torch.bfloat16), mpu)
    data_parallel = adopt(mpu, dense, experts)
    optimizer = Optimizer(OptimConfig(nonfinite="skip"), [data_parallel], mpu)

    def state() -> list[Tensor]:
        kept = [t for of_kind in optimizer.state_tensors().values() for _, t in of_kind]
        return [t.detach().clone() for t in (dense, experts, *kept)]

    before = state()
    data_parallel.zero_grad()
    if mpu.world.rank == bad_rank:
        main_grad(experts if expert else dense)[...] = torch.tensor(values)
    data_parallel.finish()
    result = optimizer.step(0.1)
    after = state()
    return {
        "norm": result.grad_norm, "skipped": result.skipped, "updates": optimizer.steps,
        "same": all(map(torch.equal, before, after)), "finite": all(bool(t.isfinite().all()) for t in after),
    }  # fmt: skip


@pytest.mark.parametrize("expert", [False, True])
@pytest.mark.parametrize("layout", [ParallelConfig(pp=2), ParallelConfig(pp=2, ep=2), ParallelConfig(tp=2, pp=2, ep=2)])
def test_an_infinity_on_one_rank_skips_the_step_everywhere(world: World, layout: ParallelConfig, expert: bool) -> None:
    """[inf, 1, 1] on one of 4 ranks: nothing is changed and no nan is written (PyTorch 46849)."""
    for bad_rank in (0, 3):
        results = world.run(_infinite_on_one_rank, bad_rank, expert, [math.inf, 1.0, 1.0], layout=layout, ranks=4)
        for result in results:
            assert not math.isfinite(result.pop("norm"))
            assert result == {"skipped": True, "updates": 0, "same": True, "finite": True}


def test_finite_gradients_whose_squares_overflow_float32_are_clipped(world: World) -> None:
    for expert, copies in ((False, 3), (True, 3)):
        for result in world.run(
            _infinite_on_one_rank, 0, expert, [1e20] * 3, layout=ParallelConfig(pp=2, ep=2), ranks=4
        ):
            assert result["norm"] == pytest.approx(1e20 * math.sqrt(copies), rel=1e-6)
            assert result["finite"] and not result["skipped"] and result["updates"] == 1


def _bad_copy(mpu: ParallelState) -> float:
    """An expert vector that all etp ranks hold, not a number on one that does not count it."""
    bias = cut_experts("bias", torch.zeros(2, 3, dtype=WIDE), mpu)
    data_parallel = adopt(mpu, bias)
    set_grads({bias: math.nan if mpu.etp.rank == 1 and mpu.ep.rank == 1 else 1.0})
    return float(grad_norm([data_parallel], mpu))


def test_what_is_not_finite_in_a_copy_of_an_expert_is_seen(world: World) -> None:
    assert all(math.isnan(norm) for norm in world.run(_bad_copy, layout=ParallelConfig(tp=2, ep=2, etp=2), ranks=4))


SHAPES = {"words": (8, 3), "norm": (5,), "fc1": (4, 8, 3), "fc2": (4, 3, 8), "bias": (4, 3)}


def _gradients() -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(0)
    return {
        f"{stage}.{name}": torch.randn(shape, dtype=WIDE, generator=g)
        for stage in range(2)
        for name, shape in SHAPES.items()
    }


def _whole_model(mpu: ParallelState) -> tuple[float, float]:
    """Two layers with every kind of cut. Returns the norm, and the squares of what the ranks would save."""
    grads, data_parallels = _gradients(), []
    for stage in range(2) if mpu.pp.size == 1 else [mpu.pp.rank]:
        zeros = {name: torch.zeros(shape, dtype=WIDE) for name, shape in SHAPES.items()}
        dense = [cut_rows(f"{stage}.words", zeros["words"], mpu)]
        dense.append(whole(f"{stage}.norm", zeros["norm"], partial=(mpu.tp,)))
        experts = [cut_experts(f"{stage}.fc1", zeros["fc1"], mpu, 1), cut_experts(f"{stage}.fc2", zeros["fc2"], mpu, 2)]
        experts.append(cut_experts(f"{stage}.bias", zeros["bias"], mpu, partial=(mpu.etp,)))
        units = [Unit(f"layer {stage}", [dense[0], experts[0], dense[1], *experts[1:]])]
        data_parallels.append(DataParallel(units, mpu, queue=WeightGradQueue()))
        _fill(data_parallels[-1], grads)
    saved = sum(
        float(main_grad(p).square().sum()) for dp in data_parallels for p in dp.parameters if shard_of(p).is_saver(mpu)
    )
    norm = float(grad_norm(data_parallels, mpu))
    return norm, float(mpu.world.all_reduce(torch.tensor(saved, dtype=WIDE)))


LAYOUTS = [
    (ParallelConfig(ep=2), 2),
    (ParallelConfig(ep=2), 8),
    (ParallelConfig(ep=4, tp=2), 4),
    (ParallelConfig(ep=2, etp=2, tp=2), 4),
    (ParallelConfig(ep=2, etp=2), 8),
    (ParallelConfig(etp=2, tp=2), 4),
    (ParallelConfig(ep=2, pp=2), 4),
    (ParallelConfig(ep=2, etp=2, tp=2, pp=2), 8),
    (ParallelConfig(ep=2, tp=4, pp=2), 8),
    (ParallelConfig(ep=2, cp=2, tp=2), 8),
    (ParallelConfig(ep=2, etp=2, tp=2, order="dp-ep-tp-cp-pp"), 8),
    (ParallelConfig(ep=2, etp=2, tp=2, pp=2, order="pp-ep-dp-tp-cp"), 8),
]


@pytest.mark.parametrize(("layout", "ranks"), LAYOUTS)
def test_the_norm_is_one_number_in_every_layout(world: World, layout: ParallelConfig, ranks: int) -> None:
    expected = math.sqrt(sum(float(g.square().sum()) for g in _gradients().values()))
    results = world.run(_whole_model, layout=layout, ranks=ranks)
    assert len({norm for norm, _ in results}) == 1
    assert results[0][0] == pytest.approx(expected, rel=1e-13)
    assert results[0][1] == pytest.approx(expected**2, rel=1e-13)  # one rank of all saves each element
