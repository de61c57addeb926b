"""What ranks do with a model of Hugging Face; they need not import transformers, which takes seconds."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch
from torch import Tensor

from megalite.batch import MicroBatch
from megalite.checkpoint.hf import HFFolder
from megalite.models import MODELS
from megalite.models.transformer import StageSpec, Transformer
from megalite.mpu import ParallelState
from megalite.nn.config import ModelConfig
from megalite.parallel.shard import Shard, buffer_tensors, copies_axis, name_parameters, shard_of
from megalite.train.hf import import_model, load_weights
from tests.hugging_face import assert_equal

S, B, V = 11, 2, 37


def batch() -> MicroBatch:
    """Random tokens and labels."""
    ids, labels = torch.randint(V, (2, S, B), generator=torch.Generator().manual_seed(4))
    return MicroBatch(
        tokens=ids, labels=labels, loss_mask=torch.ones(S, B), positions=torch.arange(S)[:, None].expand(S, B),
        samples=torch.arange(B), step=0,
    )  # fmt: skip


def read(folder: Path) -> tuple[ModelConfig, dict[str, Tensor]]:
    """What is in a folder: the model (without a balancing loss), and our whole tensors by name."""
    with HFFolder(folder) as source:
        found = import_model(source)
        tensors = {tensor.key.partition("/")[2]: tensor.make() for tensor in found.tensors}
    return dataclasses.replace(found.model, aux_loss="none"), tensors


def ours(folder: Path, mpu: ParallelState, stage: StageSpec | None = None) -> Transformer:
    """This rank's part of our model, in float64, with the weights in a folder."""
    with HFFolder(folder) as source, torch.no_grad():
        found = import_model(source)
        model = dataclasses.replace(found.model, aux_loss="none")
        network = MODELS[model.name](model, mpu, stage).double()
        name_parameters(network)
        weights = [(shard_of(parameter), parameter.data) for parameter in network.parameters()]
        load_weights(found, {"parameter": weights} | buffer_tensors(network))
    return network


def parts_of(whole: Tensor, shard: Shard) -> list[Tensor]:
    """What a rank holds of a whole tensor, as `Shard.pieces` has it."""
    local = torch.empty(shard.local_shape, dtype=whole.dtype)
    return [
        whole[tuple(slice(at, at + size) for at, size in zip(offset, sizes, strict=True))]
        for offset, sizes, _ in shard.pieces(local)
    ]


def assert_gradients(network: Transformer, wanted: dict[str, Tensor], mpu: ParallelState) -> None:
    """Those of the parts that this rank holds. Some are zero: a key bias, an expert that no token went to."""
    floor = 1e-10 * max(float(tensor.abs().max()) for tensor in wanted.values())
    for name, parameter in network.named_parameters():
        shard = shard_of(parameter)
        grad = parameter.grad
        assert grad is not None, name
        for axis in (*shard.partial, copies_axis(shard.group, mpu)):
            grad = axis.all_reduce(grad.clone())
        for (_, _, mine), theirs in zip(shard.pieces(grad), parts_of(wanted[shard.name], shard), strict=True):
            if max(float(mine.abs().max()), float(theirs.abs().max())) > floor:
                assert_equal(mine, theirs, name)


def one_rank(folder: Path) -> Transformer:
    return ours(folder, ParallelState.single())


def tensor_parallel(mpu: ParallelState, folder: Path, loss: Tensor, wanted: dict[str, Tensor]) -> None:
    network = ours(folder / "weights", mpu)
    found = network(None, batch())
    assert_equal(found, loss, "loss")
    found.backward()
    assert_gradients(network, wanted, mpu)
