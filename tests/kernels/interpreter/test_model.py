"""A whole training step on Triton's kernels, in the interpreter, equals the step on plain torch."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megalite.config import Config
from megalite.kernels.config import KernelConfig
from megalite.mpu import ParallelState
from megalite.train.build import build_training, kernels_of
from megalite.train.step import train_step
from tests.tiny import config_for, write_tokens

CPU = torch.device("cpu")
PLAIN = KernelConfig(backend="torch", attention="block", grouped="loop")
TRITON = KernelConfig(backend="triton", attention="triton", grouped="triton")


def steps(config: Config) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and gradient norms of two steps, and the weights and gradients after them."""
    training = build_training(config, ParallelState.single(), CPU)
    numbers: list[float] = []
    for step in range(2):
        result = train_step(training, step)
        numbers += [result.loss, result.grad_norm]
    tensors: dict[str, Tensor] = {}
    for data_parallel in training.data_parallels.values():
        tensors |= {f"grad {shard.name}": grad.clone() for shard, grad in data_parallel.gradients()}
        tensors |= {f"weight {shard.name}": weight.detach().clone() for shard, weight in data_parallel.weights()}
    return numbers, tensors


@pytest.mark.parametrize(
    "model",
    [pytest.param("llama", marks=pytest.mark.full), "gpt2", "moe", pytest.param("lfm2", marks=pytest.mark.full)],
)
def test_a_training_step_equals_torch(model: str, tmp_path: Path) -> None:
    """In float32; dropout, tied embeddings, label smoothing and z-loss included."""
    tokens = write_tokens(tmp_path / "tokens")
    config = config_for(model, tokens, tmp_path, precision="fp32", global_batch_size=2, micro_batch_size=2)
    # Adam would raise a gradient that is zero but for rounding (a key bias) to the size of a step.
    optim = dataclasses.replace(config.optim, eps=1e-3)
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, num_layers=2), optim=optim)
    chosen = kernels_of(dataclasses.replace(config, kernels=TRITON), CPU).chosen
    assert set(chosen.values()) == {"triton"}
    (wanted, exact), (found, ours) = (
        steps(dataclasses.replace(config, kernels=kernels)) for kernels in (PLAIN, TRITON)
    )
    assert found == pytest.approx(wanted, rel=1e-5)
    assert exact.keys() == ours.keys()
    for name, tensor in exact.items():
        bound = 1e-5 * float(tensor.abs().max()) + 1e-7
        torch.testing.assert_close(ours[name], tensor, rtol=1e-4, atol=bound, msg=partial("{}: {}".format, name))
