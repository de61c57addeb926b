"""One training step, and one evaluation: what every layout does, in order."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from megalite.batch import BatchTotals
from megalite.data.build import Datasets
from megalite.data.loader import Prefetcher
from megalite.data.sampler import GlobalBatches, LocalBatch, fold_fingerprint
from megalite.models.transformer import Transformer
from megalite.mpu import ParallelState
from megalite.nn.config import ModelConfig
from megalite.nn.multi_token import count_ahead
from megalite.nn.router import Router, RouterLoads, finish_step
from megalite.optim.lr import lr_at
from megalite.optim.optimizer import Optimizer
from megalite.parallel.data import DataParallel
from megalite.pipeline.executor import Executor
from megalite.train.flops import batch_flops, batch_pairs, windows


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step reports, the same on every rank.

    loss: the sum over all valid tokens of the global batch / their number, which is what was optimised.
    grad_norm: global, before clipping. num_tokens: valid tokens. sample_fingerprint: of the samples consumed.
    model_flops: of the global batch (`megalite.train.flops`). router_loads: of the mixture-of-experts layers, if there
    are any. loss_scale: what the gradients were multiplied by. losses_ahead: the mean loss of each depth of multi-token
    prediction, over its own valid tokens; `loss` is that of the next token alone.
    """

    loss: float
    grad_norm: float
    learning_rate: float
    num_tokens: int
    skipped: bool
    sample_fingerprint: int
    model_flops: int
    router_loads: RouterLoads | None = None
    loss_scale: float | None = None
    losses_ahead: tuple[float, ...] = ()


@dataclass(kw_only=True)
class Training:
    """Everything a step touches on this rank, built by `megalite.train.build`."""

    mpu: ParallelState
    device: torch.device
    layers: Sequence[range]
    """The layers of each stage of the model, the same on every rank."""
    stages: dict[int, Transformer]
    data_parallels: dict[int, DataParallel]
    executor: Executor
    optimizer: Optimizer
    batches: GlobalBatches
    validation: GlobalBatches | None
    """What `evaluate` reads."""
    datasets: Datasets
    num_steps: int
    model: ModelConfig
    each_validation: dict[str, GlobalBatches] = field(default_factory=dict)
    """Validation data of each dataset alone, by its name."""
    loader: Prefetcher = field(default_factory=lambda: Prefetcher(depth=0))
    """What loads training batches ahead."""
    routers: list[Router] = field(default_factory=list)
    """Of this rank's stages."""
    num_skipped: int = 0
    """Steps of the run whose update was left out: they consume samples and do not move the learning rate."""
    skipped_samples: int = 0
    """What these steps have consumed."""

    def learning_rate(self, step: int) -> float:
        """The learning rate that the step after `step` others uses."""
        config, samples_before = self.optimizer.config, self.batches.sizes.before
        if config.schedule_unit == "samples":
            return lr_at(config, samples_before(step + 1) - self.skipped_samples, samples_before(self.num_steps))
        return lr_at(config, step + 1 - self.num_skipped, self.num_steps)

    def skip(self, step: int) -> None:
        """Counts the step after `step` others as one whose update was left out."""
        self.num_skipped += 1
        self.skipped_samples += self.batches.sizes.of(step)


def train_step(training: Training, step: int) -> StepResult:
    """Forward, backward and update of one global batch."""
    mpu = training.mpu
    local = training.loader.load(training.batches, step)

    # The loss is a mean over the valid tokens of the whole global batch. Their number is known before the first
    # backward, so micro-batches, accumulation and data parallelism drop out of every gradient.
    totals, ahead, flops = _global_totals(training, local)
    num_tokens, fingerprint = int(totals[0]), fold_fingerprint(int(totals[2]))
    num_rows, scale = training.batches.sizes.of(step), training.optimizer.loss_scale
    of_batch = BatchTotals(
        num_rows=num_rows, num_tokens=int(totals[1]), loss_scale=scale, num_labels=num_tokens, ahead=ahead
    )
    microbatches = [replace(microbatch, totals=of_batch) for microbatch in local.microbatches]

    if training.model.num_experts and training.model.aux_loss == "global_exact":
        training.executor.evaluate(microbatches)  # only to see what the routers choose
        _finish_routers(training, updated=False, survey=True)
    for data_parallel in training.data_parallels.values():
        data_parallel.zero_grad()
    loss_sum = training.executor.run(microbatches, grad_scale=scale / max(num_tokens, 1))
    learning_rate = training.learning_rate(step)
    update = training.optimizer.step(learning_rate)
    if update.skipped:
        training.skip(step)
    loads = _finish_routers(training, updated=not update.skipped)
    sums = torch.cat((loss_sum.reshape(1).to(torch.float64), _sums_ahead(training, loss_sum.device)))
    loss, *losses_ahead = _global_means(sums, [num_tokens, *(num_labels for num_labels, _ in ahead)], mpu)
    scale = scale if training.optimizer.scaler is not None else None
    return StepResult(
        loss, update.grad_norm, learning_rate, num_tokens, update.skipped, fingerprint, flops, loads, scale,
        tuple(losses_ahead),
    )  # fmt: skip


def _global_totals(training: Training, local: LocalBatch) -> tuple[Tensor, list[tuple[int, int]], int]:
    """Of the global batch, on every rank: (`LocalBatch.totals`, those of each depth of multi-token prediction, the
    FLOPs that the model needs)."""
    mine, seen = local.totals(), windows(training.model)
    ahead = count_ahead(local.microbatches, training.model.mtp_layers)
    pairs = torch.tensor([batch_pairs(local.microbatches, window) for window in seen], dtype=torch.int64)
    totals = training.mpu.dp.all_reduce(torch.cat((mine, ahead.flatten(), pairs)).to(training.mpu.dp.device))
    mine, ahead, pairs = totals.split([len(mine), ahead.numel(), len(pairs)])
    by_window = dict(zip(seen, pairs.tolist(), strict=True))
    by_depth = [(num_labels, num_tokens) for num_labels, num_tokens in ahead.view(-1, 2).tolist()]
    return mine, by_depth, batch_flops(training.model, int(totals[1]), by_window)


def _sums_ahead(training: Training, device: torch.device) -> Tensor:
    """float64 [depths]: the summed losses of further tokens over this rank's micro-batches; forgets them."""
    sums = torch.zeros(training.model.mtp_layers, dtype=torch.float64, device=device)
    for stage in training.stages.values():
        for of_microbatch in stage.losses_ahead.values():
            sums += torch.stack(list(of_microbatch)).to(torch.float64)
        stage.losses_ahead.clear()
    return sums


def _finish_routers(training: Training, *, updated: bool, survey: bool = False) -> RouterLoads | None:
    if not training.model.num_experts:
        return None
    return finish_step(training.routers, training.model, training.mpu, updated=updated, survey=survey)


def evaluate(training: Training, num_steps: int) -> float:
    """The mean loss over `num_steps` global batches of the validation data, without dropout."""
    assert training.validation is not None, "there is no validation data"
    _set_training(training.stages.values(), False)
    try:
        totals = torch.zeros(2, dtype=torch.float64, device=training.mpu.dp.device)
        for step in range(num_steps):
            local = training.validation.load(step)
            loss_sum = training.executor.evaluate(local.microbatches)
            totals += torch.stack((loss_sum.to(totals), torch.tensor(local.num_valid_tokens).to(totals)))
    finally:
        _set_training(training.stages.values(), True)
    num_tokens = training.mpu.dp.all_reduce(totals[1:].clone())
    (loss,) = _global_means(totals[:1], [int(num_tokens)], training.mpu)
    return loss


def _global_means(sums: Tensor, counts: Sequence[int], mpu: ParallelState) -> list[float]:
    """The sums over the data-parallel ranks of the last stage / `counts`, on every rank."""
    totals = mpu.pp.all_reduce(mpu.dp_cp.all_reduce(sums.to(mpu.dp.device, torch.float64).clone()))
    return [total / max(count, 1) for total, count in zip(totals.tolist(), counts, strict=True)]


def _set_training(stages: Iterable[nn.Module], training: bool) -> None:
    for stage in stages:
        stage.train(training)
