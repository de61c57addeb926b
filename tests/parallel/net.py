"""A small net with all kinds of contribution to gradients, for tests of what gathers them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megalite.mpu import ParallelState
from megalite.parallel.data import DataParallel, Unit, main_grad
from megalite.parallel.embedding import VocabParallelEmbedding
from megalite.parallel.random import initialize
from megalite.parallel.shard import materialize, name_parameters
from megalite.parallel.tensor import (
    ColumnParallelLinear,
    FusedColumnParallelLinear,
    OutputPart,
    RowParallelLinear,
    share_queue,
)
from megalite.parallel.wgrad import WeightGradQueue

ROWS, WIDTH, VOCAB = 8, 6, 11


class Net(nn.Module):
    """All kinds of contribution: fused linears, a weight used twice, an embedding used as head too, a norm weight."""

    def __init__(self, mpu: ParallelState, dtype: torch.dtype = torch.float64):
        super().__init__()
        self.queue = WeightGradQueue()
        with torch.device("meta"):
            self.words = VocabParallelEmbedding(VOCAB, WIDTH, axis=mpu.tp)
            parts = {"q": OutputPart(4), "k": OutputPart(4), "v": OutputPart(4)}
            self.qkv = FusedColumnParallelLinear(WIDTH, parts, axis=mpu.tp)
            self.out = RowParallelLinear(4, WIDTH, axis=mpu.tp)
            self.twice = ColumnParallelLinear(WIDTH, WIDTH, axis=mpu.tp, gather_output=True)
            self.scale = nn.Parameter(torch.ones(WIDTH))
            self.unused = nn.Parameter(torch.ones(3))
        name_parameters(self)
        materialize(self, torch.device("cpu"), dtype)
        initialize(self, seed=1)
        nn.init.ones_(self.scale)
        share_queue(self, self.queue)

    def units(self) -> list[Unit]:
        """Embedding; attention; the rest, with the parameter that nothing uses."""
        rest = [*self.twice.parameters(), self.scale, self.unused]
        return [
            Unit("words", list(self.words.parameters())),
            Unit("attention", [*self.qkv.parameters(), *self.out.parameters()]),
            Unit("rest", rest),
        ]

    def attend(self, ids: Tensor) -> Tensor:
        """[rows] -> [rows, WIDTH], cut over tp in the middle."""
        x = self.words(ids)
        q, k, v = self.qkv(x).split(self.qkv.sizes, dim=-1)
        return x + self.out(q * k + v)

    def forward(self, ids: Tensor) -> Tensor:
        """[rows] -> a scalar."""
        x = self.attend(ids)
        x = self.twice(torch.tanh(self.twice(x))) * self.scale
        return (x.tanh() @ self.words.weight.t()).square().sum()


def token_ids(rows: int = ROWS) -> Tensor:
    return torch.arange(rows) * 7 % VOCAB


def grads_of(net: nn.Module) -> dict[str, Tensor]:
    return {n: main_grad(p).clone() for n, p in net.named_parameters() if p.requires_grad}


def accumulate(
    net: Net, data_parallel: DataParallel, ids: Tensor, num_microbatches: int, *, deferred: bool = False
) -> dict[str, Tensor]:
    """Backward over micro-batches of `ids`, with the weight gradients split off when `deferred`."""
    data_parallel.zero_grad()
    parts = ids.chunk(num_microbatches)
    net.queue.deferring = deferred
    for i, part in enumerate(parts):
        net.queue.microbatch = i
        if i == len(parts) - 1 and not deferred:
            data_parallel.arm()
        net(part).backward()
    if deferred:
        for i in range(len(parts)):
            if i == len(parts) - 1:
                data_parallel.arm()
            net.queue.drain(i)
    net.queue.deferring = False
    data_parallel.finish()
    return grads_of(net)


def autograd_sums(ids: Tensor) -> dict[str, Tensor]:
    """What plain accumulation in .grad gives, without any bucket."""
    net = Net(ParallelState.single())
    for row in ids:
        net(row.view(1)).backward()
    return {n: p.grad if p.grad is not None else torch.zeros_like(p) for n, p in net.named_parameters()}


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-12) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        difference = (found[name] - value).abs().max()
        assert difference <= tolerance * value.abs().max(), f"{name}: {difference}"
