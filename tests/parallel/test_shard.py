"""Copies of layers: marks, neighbours in memory, and gradients of their own."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from megalite.models.transformer import Transformer
from megalite.mpu import ParallelConfig, ParallelState
from megalite.nn.config import ModelConfig
from megalite.nn.norm import LayerNorm
from megalite.nn.position import PositionEmbedding
from megalite.parallel.data import DataParallel, Unit, main_grad
from megalite.parallel.embedding import VocabParallelEmbedding
from megalite.parallel.random import initialize
from megalite.parallel.shard import adjacent, name_parameters, shard_of
from megalite.parallel.tensor import (
    ColumnParallelLinear,
    FusedColumnParallelLinear,
    OutputPart,
    RowParallelLinear,
    share_queue,
)
from megalite.parallel.wgrad import WeightGradQueue
from megalite.testing.world import World

WIDTH = 8


class Block(nn.Module):
    """One layer of each kind; a plain module, as a user would write it."""

    def __init__(self, mpu: ParallelState):
        super().__init__()
        config = ModelConfig(hidden_size=WIDTH, max_positions=6)
        self.queue = WeightGradQueue()
        self.words = VocabParallelEmbedding(11, WIDTH, axis=mpu.tp)
        self.positions = PositionEmbedding(config, mpu)
        self.norm = LayerNorm(config, mpu)
        self.qkv = FusedColumnParallelLinear(WIDTH, {n: OutputPart(4) for n in "qkv"}, axis=mpu.tp)
        self.out = RowParallelLinear(4, WIDTH, axis=mpu.tp)
        self.column = ColumnParallelLinear(WIDTH, WIDTH, axis=mpu.tp, gather_output=True)
        self.twin = self.column  # a module used twice stays one
        share_queue(self, self.queue)
        name_parameters(self)
        initialize(self, seed=1)

    def forward(self, ids: Tensor) -> Tensor:
        """[s, b] -> a scalar."""
        x = self.norm(self.words(ids) + self.positions(torch.arange(ids.shape[0])[:, None]))
        q, k, v = self.qkv(x).split(self.qkv.sizes, dim=-1)
        return self.twin(self.column(x + self.out(q * k + v))).square().sum()


def _adopted(mpu: ParallelState) -> Block:
    block = Block(mpu)
    DataParallel([Unit("block", list(block.parameters()))], mpu, queue=block.queue)
    return block


def _parts(block: Block) -> list[list[Tensor]]:
    parts = [block.qkv.part(name) for name in "qkv"]
    return [[p.weight.data for p in parts], [p.bias.data for p in parts if p.bias is not None]]


def _copy(mpu: ParallelState, adopted: bool) -> tuple[Block, Block]:
    """A block after a backward pass, and its copy after one of its own."""
    block = _adopted(mpu) if adopted else Block(mpu)
    ids = torch.arange(6).view(6, 1)
    block(ids).backward()
    block.queue.deferring = adopted  # the copy defers nothing
    before = [p.detach().clone() for p in block.parameters()]
    copied = copy.deepcopy(block)
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.zero_()
    copied(ids).backward()
    for old, new in zip(before, copied.parameters(), strict=True):
        assert torch.equal(old, new)
    return block, copied


def _check(mpu: ParallelState, adopted: bool) -> None:
    block, copied = _copy(mpu, adopted)
    names = dict(copied.named_parameters())
    assert len(names) == len(dict(block.named_parameters())) == 14
    for name, old in block.named_parameters():
        assert shard_of(names[name]) == shard_of(old) and shard_of(old).name == name
        torch.testing.assert_close(names[name].grad, main_grad(old) if adopted else old.grad)  # one contribution each
        assert not hasattr(names[name], "main_grad")
    for tensors in _parts(copied):
        assert adjacent(tensors) is not None
    assert copied.twin is copied.column
    assert copied.queue is copied.out.queue and copied.queue is not block.queue
    assert copied.out.axis is mpu.tp


@pytest.mark.parametrize("adopted", [False, True])
def test_a_copied_module_keeps_its_marks_and_has_gradients_of_its_own(adopted: bool) -> None:
    _check(ParallelState.single(), adopted)


def test_a_copied_module_stays_on_its_axes(world: World) -> None:
    world.run(_check, True, layout=ParallelConfig(tp=2))


def test_a_copied_model_ties_its_own_weights() -> None:
    config = ModelConfig(num_layers=2, hidden_size=16, num_heads=2, vocab_size=11, tie_embeddings=True)
    model = Transformer(config, ParallelState.single())
    assert model.embedding is not None and model.head is not None
    model.head.weight = model.embedding.weight
    name_parameters(model)
    copied = copy.deepcopy(model)
    assert copied.embedding is not None and copied.head is not None
    assert copied.head.weight is copied.embedding.weight is not model.embedding.weight
    assert [shard_of(p) for p in copied.parameters()] == [shard_of(p) for p in model.parameters()]
    assert {id(m.queue) for m in copied.modules() if hasattr(m, "queue")} == {id(copied.queue)}
    assert copied.mpu is model.mpu


def test_a_layer_is_copied_alone() -> None:
    norm = LayerNorm(ModelConfig(hidden_size=WIDTH), ParallelState.single())
    norm.weight.requires_grad_(False)
    norm.extra = nn.Parameter(torch.ones(2))  # without a mark
    copied = copy.deepcopy(norm.train(False))
    assert shard_of(copied.weight) == shard_of(norm.weight)
    assert not copied.weight.requires_grad and copied.bias.requires_grad and not copied.training
    assert not hasattr(copied.extra, "shard") and copied.weight.data_ptr() != norm.weight.data_ptr()
    both = copy.deepcopy({"layer": norm, "weight": norm.weight})  # what else refers to the parameter follows
    assert both["weight"] is both["layer"].weight
