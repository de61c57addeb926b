"""What a step is, on one rank and on two: the loss rule, no hidden state, ties that hold."""

from __future__ import annotations

import dataclasses
import gc
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from megalite.config import Config
from megalite.data.gpt_dataset import Sample, SampleSource
from megalite.layout import parse_layout
from megalite.mpu import ParallelConfig, ParallelState
from megalite.parallel.data import main_grad
from megalite.parallel.shard import shard_of
from megalite.testing.memory import LiveMemory
from megalite.testing.world import World
from megalite.train.build import build_training
from megalite.train.flops import step_flops
from megalite.train.run import check_agreement
from megalite.train.step import StepResult, Training, evaluate, train_step
from tests.tiny import config_for

CPU = torch.device("cpu")


def _build(config: Config, mpu: ParallelState | None = None, masks: MaskRows | None = None) -> Training:
    return build_training(config, mpu if mpu is not None else ParallelState.single(), CPU, wrap_data=masks)


def _grads(training: Training) -> dict[str, Tensor]:
    return {shard_of(p).name: main_grad(p).clone() for dp in training.data_parallels.values() for p in dp.parameters}


@dataclasses.dataclass(frozen=True)
class MaskRows:
    """Keeps the first `counts[i]` labels of sample i (0 beyond the list)."""

    counts: tuple[int, ...]
    dataset: SampleSource | None = None

    def __call__(self, dataset: SampleSource) -> SampleSource:
        """Wraps a dataset."""
        return dataclasses.replace(self, dataset=dataset)

    def __len__(self) -> int:
        assert self.dataset is not None
        return len(self.dataset)

    def __getitem__(self, i: int) -> Sample:
        assert self.dataset is not None
        sample = self.dataset[i]
        mask = np.zeros_like(sample.loss_mask)
        mask[: self.counts[i] if i < len(self.counts) else 0] = 1
        return sample._replace(loss_mask=mask)


def _two_rows(config: Config, mpu: ParallelState | None = None) -> StepResult:
    """One step of two rows, with five valid labels and with one."""
    return train_step(_build(config, mpu, MaskRows((5, 1))), 0)


def _on_ranks(mpu: ParallelState, config: Config) -> tuple[StepResult, dict[str, Tensor]]:
    training = _build(config, mpu, MaskRows((5, 1)))
    return train_step(training, 0), _grads(training)


def test_the_loss_is_the_mean_over_all_valid_tokens_not_a_mean_of_means(
    tokens: str, tmp_path: Path, world: World
) -> None:
    config = config_for("llama", tokens, tmp_path, global_batch_size=2, micro_batch_size=1, precision="fp64")
    one_rank = _build(config, masks=MaskRows((5, 1)))
    expected = train_step(one_rank, 0)
    assert expected.num_tokens == 6
    assert expected.model_flops == step_flops(config.model, config.data.seq_len, 2)
    rows = [train_step(_build(config, masks=MaskRows(counts)), 0).loss for counts in ((5,), (0, 1))]
    assert abs(expected.loss - (5 * rows[0] + rows[1]) / 6) < 1e-12
    assert abs(expected.loss - (rows[0] + rows[1]) / 2) > 1e-3, "the case must tell the two means apart"
    for result, grads in world.run(_on_ranks, config, layout=ParallelConfig(), ranks=2):
        assert abs(result.loss - expected.loss) < 1e-12 and result.num_tokens == 6
        assert result.model_flops == expected.model_flops
        for name, grad in _grads(one_rank).items():
            torch.testing.assert_close(grads[name], grad, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("model", ["llama", "gpt2"])
def test_a_batch_without_a_valid_token_gives_a_zero_gradient(model: str, tokens: str, tmp_path: Path) -> None:
    config = config_for(model, tokens, tmp_path, precision="fp64")
    training = _build(config, masks=MaskRows(()))
    result = train_step(training, 0)
    assert (result.loss, result.num_tokens, result.grad_norm) == (0.0, 0, 0.0) and not result.skipped
    assert not any(grad.any() for grad in _grads(training).values())


def test_no_step_draws_from_a_random_stream(tokens: str, tmp_path: Path) -> None:
    training = _build(config_for("gpt2", tokens, tmp_path, eval_every=1, eval_steps=1))
    before, numpy_before = torch.get_rng_state(), str(np.random.get_state())
    train_step(training, 0)
    train_step(training, 1)
    assert torch.equal(torch.get_rng_state(), before)
    assert str(np.random.get_state()) == numpy_before


def test_recompute_changes_no_bit(tokens: str, tmp_path: Path) -> None:
    found = []
    for recompute in ("none", "full"):
        training = _build(config_for("gpt2", tokens, tmp_path, precision="fp32", recompute=recompute))
        train_step(training, 0)
        found.append(_grads(training))
    for name, grad in found[0].items():
        assert torch.equal(grad, found[1][name]), name


def _memory(mpu: ParallelState, config: Config) -> tuple[int, list[int], int]:
    """(bytes of the fourth step at most, bytes left after steps, tensors that a graph made and are left)."""
    training, live, left = _build(config, mpu), LiveMemory(), []
    train_step(training, 0)
    with live:
        for step in range(1, 4):
            live.peak = 0
            train_step(training, step)
            gc.collect()
            left.append(live.now)
    graphs = sum(issubclass(type(o), Tensor) and o.grad_fn is not None for o in gc.get_objects())
    return live.peak, left, graphs


def test_memory_grows_neither_with_steps_nor_with_micro_batches(tokens: str, tmp_path: Path, world: World) -> None:
    """Losses that are collected with their graphs would keep all activations of a step (torchtitan 4430)."""
    peaks = []
    for rows in (8, 32):
        config = config_for("llama", tokens, tmp_path, global_batch_size=rows, num_steps=4)
        data = dataclasses.replace(config.data, prefetch=0)  # what another thread loads would not be seen
        config = dataclasses.replace(config, parallel=ParallelConfig(pp=2), data=data)
        results = world.run(_memory, config, layout=config.parallel, ranks=2, timeout=120)
        for _, left, graphs in results:
            assert len(set(left)) == 1 and graphs == 0
        peaks.append([peak for peak, _, _ in results])
    for few, many in zip(*peaks, strict=True):
        assert many < 1.1 * few


def test_evaluation_changes_nothing(tokens: str, tmp_path: Path) -> None:
    config = config_for("gpt2", tokens, tmp_path, precision="fp32", eval_every=1, eval_steps=1)
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, split="80,20,0"))
    plain, watched = _build(config), _build(config)
    losses = []
    for step in range(2):
        plain_result = train_step(plain, step)
        losses.append(evaluate(watched, 1))
        assert train_step(watched, step) == plain_result
    assert losses[0] != losses[1] and all(0 < loss < 10 for loss in losses)


def test_bf16_follows_float32(tokens: str, tmp_path: Path) -> None:
    losses = {}
    for precision in ("fp32", "bf16"):
        config = config_for("llama", tokens, tmp_path, precision=precision, num_steps=6, global_batch_size=16)
        config = dataclasses.replace(config, optim=dataclasses.replace(config.optim, lr=1e-2))
        training = _build(config)
        losses[precision] = [train_step(training, step).loss for step in range(6)]
    assert losses["fp32"][-1] < losses["fp32"][0] - 0.02
    np.testing.assert_allclose(losses["bf16"], losses["fp32"], rtol=0.01)


TIED_STEPS = 10


def _tied_run(mpu: ParallelState, config: Config) -> list[tuple[list[Tensor], float]]:
    """After each of ten steps, embedding and head as far as they are here, and the gradient norm."""
    training = _build(config, mpu)
    found = []
    for step in range(TIED_STEPS):
        norm = train_step(training, step).grad_norm
        ends = [end for stage in training.stages.values() for end in (stage.embedding, stage.head) if end is not None]
        found.append(([end.weight.detach().clone() for end in ends], norm))
    return found


@pytest.mark.parametrize("layout", ["pp2", "pp2+dp2+tp2", "pp2+dp2+zero1"])
def test_tied_copies_stay_bit_equal(layout: str, tokens: str, tmp_path: Path, world: World) -> None:
    """With weight decay and clipping; the norm is one rank's, so that the weight is in it once."""
    place = parse_layout(layout)
    sizes = {"global_batch_size": 4, "micro_batch_size": 1, "num_steps": TIED_STEPS}
    config = config_for("gpt2", tokens, tmp_path, precision="fp64", **sizes)
    config = dataclasses.replace(config, optim=dataclasses.replace(config.optim, clip_grad=0.1))
    one_rank = _tied_run(ParallelState.single(), config)
    found = world.run(_tied_run, place.apply(config), layout=place.parallel, ranks=place.num_ranks, timeout=90.0)
    tp = place.parallel.tp
    for step, (whole, norm) in enumerate(one_rank):
        here = [rank[step] for rank in found]
        assert all(torch.equal(weight, whole[0]) for weight in whole)
        for rank, (weights, its_norm) in enumerate(here):
            assert len(weights) == 1 and torch.equal(weights[0], here[rank % tp][0][0])
            assert its_norm == pytest.approx(norm, rel=1e-11) and norm > config.optim.clip_grad
        torch.testing.assert_close(torch.cat([weights[0] for weights, _ in here[:tp]]), whole[0], rtol=1e-9, atol=1e-11)
    assert not torch.equal(one_rank[0][0][0], one_rank[-1][0][0]), "the weight must move"


def test_a_tied_head_is_the_embedding(tokens: str, tmp_path: Path) -> None:
    """On one rank there is one parameter, which the optimizer has once."""
    training = _build(config_for("gpt2", tokens, tmp_path))
    (stage,) = training.stages.values()
    assert stage.embedding is not None
    owners = [p for part in training.data_parallels.values() for p in part.parameters if p is stage.embedding.weight]
    assert len(owners) == 1
    assert stage.head is None or stage.head.weight is stage.embedding.weight


def _agreement(mpu: ParallelState, config: Config, differs: str) -> str:
    """What the start-up check says when rank 1 was started with something else."""
    training = _build(config, mpu)
    if mpu.world.rank == 1 and differs == "optim":
        config = dataclasses.replace(config, optim=dataclasses.replace(config.optim, lr=0.5))
    if mpu.world.rank == 1 and differs == "stages":
        training.layers = [range(0, 1), *training.layers[1:]]
    if mpu.world.rank == 1 and differs == "data":
        training.datasets = dataclasses.replace(training.datasets, fingerprint="other")
    try:
        check_agreement(config, training)
    except ValueError as error:
        return str(error)
    return "agreed"


@pytest.mark.parametrize("differs", ["nothing", "optim", "data", "stages"])
def test_ranks_that_do_not_agree_are_stopped(differs: str, tokens: str, tmp_path: Path, world: World) -> None:
    config = parse_layout("tp2").apply(config_for("llama", tokens, tmp_path))
    expected = "agreed" if differs == "nothing" else f"other {differs} on rank 1;"
    for found in world.run(_agreement, config, differs, layout=config.parallel, ranks=2):
        assert expected in found


@pytest.mark.parametrize("model", ["llama", "moe"])
def test_a_step_of_a_ramp_is_one_of_a_run_with_such_batches(model: str, tokens: str, tmp_path: Path) -> None:
    """Loss, balancing terms and gradient are of the rows that there are, not of those that there will be."""
    ramp = config_for(model, tokens, tmp_path, batch_ramp=(4, 4, 30))
    small = config_for(model, tokens, tmp_path, global_batch_size=4)
    found = [train_step(build_training(config, ParallelState.single(), CPU), 0) for config in (ramp, small)]
    assert found[0].grad_norm == found[1].grad_norm and found[0].loss == found[1].loss
    assert found[0].num_tokens == found[1].num_tokens == 4 * 32
