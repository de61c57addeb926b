"""ZeRO on a small net: parameters without a gradient, frozen ones, recompute, deferred work, runs as rectangles."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megalite.mpu import ParallelConfig, ParallelState
from megalite.optim.config import OptimConfig
from megalite.optim.optimizer import Optimizer
from megalite.parallel.data import DataParallel, Unit
from megalite.parallel.random import initialize
from megalite.parallel.shard import Cut, Shard, name_parameters
from megalite.parallel.tensor import ColumnParallelLinear, share_queue
from megalite.parallel.wgrad import WeightGradQueue
from megalite.testing.world import World

WIDTH, RANKS = 9, 2


class Block(nn.Module):
    """A linear, a norm's weight, one linear that rank 0 alone uses, one that nobody does, and a frozen one."""

    def __init__(self, mpu: ParallelState):
        super().__init__()
        linears = [ColumnParallelLinear(WIDTH, WIDTH, axis=mpu.tp) for _ in range(4)]
        self.linear, self.sometimes, self.never, self.frozen = linears
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor, used: bool) -> Tensor:
        """Same shape out."""
        y = torch.tanh(self.frozen(self.linear(x) * self.scale))
        return x + y + self.sometimes(x) if used else x + y


class Blocks(nn.Module):
    """Three of them, a unit each."""

    def __init__(self, mpu: ParallelState):
        super().__init__()
        self.queue = WeightGradQueue()
        self.blocks = nn.ModuleList([Block(mpu) for _ in range(3)])
        name_parameters(self)
        self.double()
        initialize(self, seed=1)
        for block in self.blocks:
            nn.init.ones_(block.scale)  # pyright: ignore
        share_queue(self, self.queue)

    def units(self) -> list[Unit]:
        """One for each block."""
        return [Unit(f"blocks.{i}", list(b.parameters()), modules=[b]) for i, b in enumerate(self.blocks)]

    def forward(self, x: Tensor, used: bool, recompute: int) -> Tensor:
        """[rows, WIDTH] -> a scalar; `recompute`: so many blocks at a time run again in backward."""
        blocks = list(self.blocks)
        for begin in range(0, len(blocks), max(recompute, 1)):
            part = nn.Sequential(*(_Used(block, used) for block in blocks[begin : begin + max(recompute, 1)]))
            x = checkpoint(part, x, use_reentrant=False) if recompute else part(x)  # pyright: ignore
        return x.square().sum()


class _Used(nn.Module):
    """A block with its second argument."""

    def __init__(self, block: nn.Module, used: bool):
        super().__init__()
        self.block, self.used = block, used

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x, self.used)


def _train(mpu: ParallelState, recompute: int, deferred: bool) -> Any:
    """Two passes, a step of SGD, a forward; gradients and loss; whether anything divided was left whole."""
    net = Blocks(mpu)
    data_parallel = DataParallel(net.units(), mpu, queue=net.queue)
    optimizer = Optimizer(OptimConfig(name="sgd", lr=0.01), [data_parallel], mpu)
    data_parallel.zero_grad()
    each = data_parallel.reduces_each_pass
    for i in range(2):
        x = torch.sin(torch.arange(4.0 * WIDTH, dtype=torch.float64) * (i + 2 * mpu.dp.rank + 1)).view(4, WIDTH)
        loss = net(x.requires_grad_(), mpu.dp.rank == 0, recompute)
        data_parallel.leave()
        net.queue.deferring, net.queue.microbatch = deferred, i
        if not deferred and (each or i == 1):
            data_parallel.arm(i)
        loss.backward()
        data_parallel.leave()
        net.queue.deferring = False
        if not deferred and (each or i == 1):
            data_parallel.complete()
    for i in range(2) if deferred else ():
        if each or i == 1:
            data_parallel.arm(i)
        net.queue.drain(i)
        if each or i == 1:
            data_parallel.complete()
    data_parallel.finish()
    grads = [(shard, grad.clone()) for shard, grad in data_parallel.gradients()]
    optimizer.step(0.01)
    with torch.no_grad():
        after = float(net(torch.ones(2, WIDTH, dtype=torch.float64), True, recompute))
    data_parallel.leave()
    left = [b.unit for b in data_parallel.buckets if b.zero >= 3 and b.param.untyped_storage().nbytes()]
    return [(s.name, offset, v.clone()) for s, g in grads for offset, _, v in s.pieces(g)], after, left


@pytest.mark.parametrize("recompute", [0, 1, 2])
@pytest.mark.parametrize("deferred", [False, True])
def test_unused_frozen_and_recomputed(world: World, recompute: int, deferred: bool) -> None:
    shapes = {name: p.shape for name, p in Blocks(ParallelState.single()).named_parameters() if p.requires_grad}

    def run(zero: int) -> tuple[dict[str, Tensor], list[float]]:
        layout = ParallelConfig(zero=zero)
        results = world.run(_train, recompute, deferred, layout=layout, ranks=RANKS, timeout=60)
        whole = {name: torch.full(shape, torch.nan, dtype=torch.float64) for name, shape in shapes.items()}
        for pieces, _, left in results:
            assert not left, "a unit stayed whole after the step"
            for name, offset, piece in pieces:
                whole[name][tuple(slice(o, o + n) for o, n in zip(offset, piece.shape, strict=True))] = piece
        return whole, [after for _, after, _ in results]

    expected, after = run(0)
    assert expected["blocks.1.never.weight"].count_nonzero() == 0
    assert expected["blocks.1.sometimes.weight"].count_nonzero() > 0
    for zero in (1, 2, 3):
        found, same = run(zero)
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-12)
        assert same == pytest.approx(after, rel=1e-12)


def _steps(mpu: ParallelState) -> tuple[int, int, float]:
    """A parameter so small that one rank has no part of it: updates counted, elements here, norm."""
    weight = nn.Parameter(torch.ones(64))
    layer = nn.Module()
    layer.weight = weight
    name_parameters(layer)
    data_parallel = DataParallel([Unit("layer", [weight])], mpu, queue=WeightGradQueue())
    optimizer = Optimizer(OptimConfig(), [data_parallel], mpu)
    norm = 0.0
    for _ in range(3):
        data_parallel.zero_grad()
        for bucket in data_parallel.buckets:
            bucket.open_grad()
        weight.main_grad.fill_(1.0)  # pyright: ignore
        data_parallel.finish()
        norm = optimizer.step(0.1).grad_norm
    return optimizer.steps, sum(g.numel() for _, g in data_parallel.gradients()), norm


@pytest.mark.parametrize("zero", [1, 2])
def test_a_rank_without_a_slice_counts_the_same_updates(world: World, zero: int) -> None:
    results = world.run(_steps, layout=ParallelConfig(zero=zero), ranks=2)
    assert [elements for _, elements, _ in results] == [64, 0]
    assert [steps for steps, _, _ in results] == [3, 3] and results[0][2] == results[1][2] == 2 * 8.0


@pytest.mark.parametrize("shape", [(7,), (5, 4), (3, 4, 5), (2, 3, 2, 3), ()])
def test_any_run_is_a_few_rectangles(shape: tuple[int, ...]) -> None:
    whole = torch.arange(max(1, torch.Size(shape).numel())).view(shape)
    flat = whole.flatten()
    for begin, end in itertools.combinations(range(flat.numel() + 1), 2):
        shard = Shard("w", shape, run=(begin, end))
        pieces = list(shard.pieces(flat[begin:end]))
        assert len(pieces) <= max(1, 2 * len(shape) - 1)
        seen = []
        for offset, sizes, view in pieces:
            place = tuple(slice(o, o + n) for o, n in zip(offset, sizes, strict=True))
            assert torch.equal(whole[place], view)
            seen += view.flatten().tolist()
        assert seen == list(range(begin, end))


def test_a_run_of_a_part_in_two_pieces_goes_to_the_right_rows() -> None:
    whole = torch.arange(24).view(8, 3)
    axis = ParallelState.single().tp
    shard = Shard("fused", (8, 3), (Cut(axis, 0, ((1, 2), (5, 2))),))
    part = torch.cat([whole[1:3], whole[5:7]]).flatten()
    for begin, end in itertools.combinations(range(13), 2):
        run = Shard("fused", (8, 3), shard.cuts, run=(begin, end))
        found = []
        for offset, sizes, view in run.pieces(part[begin:end]):
            assert torch.equal(whole[tuple(slice(o, o + n) for o, n in zip(offset, sizes, strict=True))], view)
            found += view.flatten().tolist()
        assert found == part[begin:end].tolist()
