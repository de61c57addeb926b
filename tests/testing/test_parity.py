"""`check_parallel_module`: a user's layer in 20 lines, the layers of the library, and every fault it must name."""

import pytest
import torch
from torch import Tensor, nn

from megalite.mpu import ParallelState
from megalite.nn.config import ModelConfig
from megalite.nn.mlp import ParallelMLP
from megalite.nn.norm import LayerNorm
from megalite.parallel.collectives import copy_to, gather_from, reduce_from
from megalite.parallel.embedding import VocabParallelEmbedding
from megalite.parallel.shard import Cut, Shard, even_cut, set_shard
from megalite.parallel.tensor import ColumnParallelLinear, RowParallelLinear
from megalite.testing import ParityError, World, check_parallel_module

CONFIG = ModelConfig(hidden_size=12, ffn_hidden_size=10, num_heads=4)
X = torch.randn(8, 2, 12, generator=torch.Generator().manual_seed(0))


# A feed-forward block of one's own, and its proof.


class SquaredReluMLP(ParallelMLP):
    """fc2(relu(fc1 x)^2) (So et al., 2021, arXiv:2109.08668)."""

    parts = ("up",)
    bias = True

    def activation(self, x: Tensor) -> Tensor:
        return torch.relu(x).square()


def call_mlp(module: nn.Module, x: Tensor) -> Tensor:
    y, bias = module(x, None)
    return y if bias is None else y + bias


def test_an_own_layer(world: World) -> None:
    check_parallel_module(
        SquaredReluMLP, CONFIG, inputs=[X], layouts=["tp2", "tp2+sp", "tp4+sp"], call=call_mlp, world=world
    )


# The layers of the library.

ALL = ["tp2", "tp2+sp", "tp4", "tp4+sp", "dp2", "tp2+dp2"]


def test_gated_mlp(world: World) -> None:
    worst = check_parallel_module(ParallelMLP, CONFIG, inputs=[X], layouts=ALL, call=call_mlp, world=world)
    assert list(worst) == ALL
    assert 0.0 < max(worst.values()) < 1e-12


def test_layer_norm(world: World) -> None:
    check_parallel_module(LayerNorm, CONFIG, inputs=[X], layouts=ALL, world=world)


def _column(width: int, gather: bool, mpu: ParallelState) -> nn.Module:
    sequence_parallel = mpu.config.sequence_parallel and not gather
    return ColumnParallelLinear(12, width, axis=mpu.tp, gather_output=gather, sequence_parallel=sequence_parallel)


@pytest.mark.parametrize("width", [8, 7])
def test_column_with_its_output_cut(world: World, width: int) -> None:
    check_parallel_module(_column, width, False, inputs=[X], layouts=ALL, world=world)


def test_column_with_its_output_gathered(world: World) -> None:
    check_parallel_module(_column, 7, True, inputs=[X], layouts=["tp2", "tp4"], world=world)


def _row(mpu: ParallelState) -> nn.Module:
    return RowParallelLinear(12, 5, axis=mpu.tp, input_is_parallel=False)


def test_row_of_a_whole_input(world: World) -> None:
    check_parallel_module(_row, inputs=[X], layouts=["tp2", "tp4"], world=world)


def _embedding(mpu: ParallelState) -> nn.Module:
    return VocabParallelEmbedding(13, 6, axis=mpu.tp, sequence_parallel=mpu.config.sequence_parallel)


def test_embedding_of_an_odd_vocabulary(world: World) -> None:
    ids = torch.arange(16).view(8, 2) % 13
    check_parallel_module(_embedding, inputs=[ids], layouts=ALL, world=world)


# Faults.


class Pair(nn.Module):
    """Column then row, with one fault at a time."""

    def __init__(self, fault: str, mpu: ParallelState):
        super().__init__()
        self.fault, self.mpu, axis = fault, mpu, mpu.tp
        part = even_cut(8, axis)
        ((_, length),) = part
        if fault == "overlap" and axis.rank == 1:
            part = ((0, length),)
        self.up = nn.Parameter(torch.empty(length, 12))
        if fault != "no shard":
            set_shard(self.up, Shard("up", (8, 12), (Cut(axis, 0, part),)))
        self.down = nn.Parameter(torch.empty(12, length))
        set_shard(self.down, Shard("down", (12, 8), (Cut(axis, 1, even_cut(8, axis)),)))
        self.scale = nn.Parameter(torch.empty(12, 12))
        partial = (axis,) if fault == "extra partial" and axis.size > 1 else ()
        decay = fault != "decay" or axis.size == 1
        set_shard(self.scale, Shard("scale", (12, 12), partial=partial, decay=decay))
        self.bias = nn.Parameter(torch.zeros(12))
        if fault == "name" and axis.size > 1:
            self.extra = nn.Parameter(torch.empty(1))

    def init_parameters(self, seed: int) -> None:
        for name, parameter in self.named_parameters():
            rank = self.mpu.tp.rank if self.fault == "init" and name == "up" else 0
            nn.init.constant_(parameter, 0.0 if name == "bias" else 0.1 + rank)

    def forward(self, x: Tensor) -> Tensor:
        axis = self.mpu.tp
        x = x @ self.scale
        inside = x if self.fault == "no copy" else copy_to(x, axis)
        y = torch.tanh(inside @ self.up.T) @ self.down.T
        y = y + self.bias if self.fault == "bias before the sum" else y
        y = y if self.fault == "no reduce" else reduce_from(y, axis)
        y = y if self.fault == "bias before the sum" else y + self.bias
        return y * float("nan") if self.fault == "nan" and axis.size > 1 else y


class TwoOutputs(LayerNorm):
    """Returns the normalised input and something else."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().forward(x), x


def test_a_sound_pair_passes(world: World) -> None:
    check_parallel_module(Pair, "none", inputs=[X], layouts=["tp2", "tp4", "dp2"], world=world)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("no shard", r"tp2, rank 0: parameter up has the global shape \(4, 12\), but \(8, 12\) on one rank"),
        ("overlap", r"tp2: 48 of 96 elements of up are on no rank"),
        ("init", r"tp2, rank 1: initial value of up differs from one rank by"),
        ("no reduce", r"tp2, rank 0: output differs from one rank by"),
        ("no copy", r"tp2, rank 0: gradient of input 0 differs from one rank by"),
        ("extra partial", r"gradient of scale differs .*whole on each rank already"),
        ("name", r"parameter extra exists under this layout only"),
        ("nan", r"output differs from one rank by inf"),
        ("bias before the sum", r"tp2, rank 0: output differs from one rank by"),
        ("decay", r"shard of scale has decay=False.*but decay=True"),
    ],
)
def test_a_fault_is_named(world: World, fault: str, message: str) -> None:
    with pytest.raises(ParityError, match=message):
        check_parallel_module(Pair, fault, inputs=[X], layouts=["tp2"], world=world)


def test_a_module_with_two_outputs_needs_a_call(world: World) -> None:
    with pytest.raises(RuntimeError, match="returned tuple, not a tensor: pass call="):
        check_parallel_module(TwoOutputs, CONFIG, inputs=[X], layouts=["tp2"], world=world)


class ForgetfulNorm(LayerNorm):
    """A norm that does not say that its gradient is a partial sum on a cut sequence."""

    def __init__(self, config: ModelConfig, mpu: ParallelState):
        super().__init__(config, mpu)
        set_shard(self.weight, Shard("weight", (config.hidden_size,), decay=False))


def test_a_forgotten_partial_sum_is_named(world: World) -> None:
    check_parallel_module(ForgetfulNorm, CONFIG, inputs=[X], layouts=["tp2"], world=world)
    message = r"gradient of weight differs.*it is a partial sum over tp: shard.partial must name mpu.tp"
    with pytest.raises(ParityError, match=message):
        check_parallel_module(ForgetfulNorm, CONFIG, inputs=[X], layouts=["tp2+sp"], world=world)


class Gathered(nn.Module):
    """Returns neither the whole nor an even part."""

    def __init__(self, mpu: ParallelState):
        super().__init__()
        self.mpu = mpu
        self.weight = nn.Parameter(torch.empty(12, 12))

    def forward(self, x: Tensor) -> Tensor:
        return gather_from(x @ self.weight, self.mpu.tp, 0)


def test_an_output_of_the_wrong_shape_is_named(world: World) -> None:
    with pytest.raises(ParityError, match=r"the output has shape \(16, 2, 12\); one rank's \(8, 2, 12\)"):
        check_parallel_module(Gathered, inputs=[X], layouts=["tp2"], world=world)


def test_layouts_that_cut_more_than_a_layer_are_refused() -> None:
    with pytest.raises(ValueError, match="over tp, sp and dp only"):
        check_parallel_module(LayerNorm, CONFIG, inputs=[X], layouts=["tp2+pp2"])


def test_it_starts_a_world_of_its_own() -> None:
    check_parallel_module(LayerNorm, CONFIG, inputs=[X], layouts=["tp2"])
