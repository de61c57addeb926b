"""Units of a stage with experts: each layer's own, with buffers for both kinds of parameters."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megalite.batch import MicroBatch
from megalite.kernels.chosen import Kernels
from megalite.models.llama import Llama
from megalite.models.transformer import TransformerLayer
from megalite.mpu import ParallelConfig, ParallelState
from megalite.nn.config import ModelConfig
from megalite.nn.context import Context
from megalite.parallel.data import DataParallel
from megalite.parallel.random import initialize
from megalite.parallel.shard import Cut, Shard, even_cut, set_shard, shard_of
from megalite.testing.world import World

MODEL = ModelConfig(
    num_layers=3, hidden_size=16, num_heads=4, ffn_hidden_size=24, vocab_size=31, num_experts=4, moe_layers="1,2"
)


class AllExperts(nn.Module):
    """Every token uses the mean of the experts of its rank: enough of an MoE layer to have parameters."""

    def __init__(self, config: ModelConfig, mpu: ParallelState, layer: int, kernels: Kernels):
        super().__init__()
        shape = (config.num_experts, config.hidden_size, config.hidden_size)
        segments = even_cut(config.num_experts, mpu.ep)
        shard = Shard("experts", shape, (Cut(mpu.ep, 0, segments),), group="expert")
        self.router = nn.Parameter(torch.empty(config.num_experts, config.hidden_size))
        self.experts = set_shard(nn.Parameter(torch.empty(shard.local_shape)), shard)
        self.register_buffer("fractions", torch.zeros(config.num_experts))

    def forward(self, x: Tensor, context: Context) -> tuple[Tensor, None]:
        """[s, b, h]."""
        return x @ self.experts.mean(0) + (x @ self.router.t()).mean(-1, keepdim=True), None


class Layer(TransformerLayer):
    """With those experts."""

    moe_cls = AllExperts


class Model(Llama):
    """Of such layers."""

    layer_cls = Layer


def _batch() -> MicroBatch:
    ids = torch.arange(16).view(8, 2) % MODEL.vocab_size
    return MicroBatch(
        tokens=ids, labels=ids, loss_mask=torch.ones(8, 2), positions=torch.arange(8)[:, None].expand(8, 2),
        samples=torch.arange(2), step=0,
    )  # fmt: skip


def _segments(mpu: ParallelState) -> tuple[list[tuple[str, str, list[str]]], int, int]:
    model = Model(MODEL, mpu).double()
    initialize(model, seed=1)
    data_parallel = DataParallel(model.units(), mpu, queue=model.queue)
    mpu.reset_stats()
    data_parallel.zero_grad()
    data_parallel.arm()
    model(None, _batch()).backward()
    started = mpu.dp_cp.stats.calls, mpu.edp.stats.calls
    data_parallel.finish()
    found = [
        (s.unit, s.group, [shard_of(span.parameter).name for span in s.spans])
        for s in data_parallel.segments
        if s.decay
    ]
    return found, *started


def test_experts_stay_in_the_unit_of_their_layer(world: World) -> None:
    for segments, dense, experts in world.run(_segments, layout=ParallelConfig(ep=2), ranks=4):
        assert [unit for unit, _, _ in segments] == [
            "embedding", "layers.0", "layers.1", "layers.1", "layers.2", "layers.2", "head",
        ]  # fmt: skip
        of_experts = [(unit, names) for unit, group, names in segments if group == "expert"]
        assert of_experts == [(f"layers.{i}", [f"layers.{i}.mlp.experts"]) for i in (1, 2)]
        assert any("layers.1.mlp.router" in names for _, group, names in segments if group == "dense")
        assert (dense, experts) == (5, 2), "all reductions start during backward"
