"""The memory of a real training step, counted by the kinds of `megalite.train.memory`: tensors, not an allocator."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from megalite.config import Config
from megalite.mpu import ParallelState
from megalite.nn.experts import Experts
from megalite.parallel.buckets import Bucket
from megalite.pipeline.plan import Action
from megalite.testing.memory import LiveMemory
from megalite.train.build import build_training
from megalite.train.memory import RankMemory, predict
from megalite.train.step import Training, train_step


@dataclass(frozen=True, kw_only=True)
class MeasuredMemory:
    """Bytes of one rank."""

    pp_rank: int
    """Its place in the pipeline."""
    state: dict[str, int]
    """By kind of STATE, after a step."""
    step: int
    """All kinds of STEP together, after the action that leaves most behind."""
    units: dict[str, int]
    """Whole gradients and parameters of units that are divided between uses, at most."""
    peak: int
    """Everything that the step makes at its worst moment, temporaries included."""
    expert_load: float
    """Tokens that came to this rank's experts over an even share; 1 without experts."""


def measure(mpu: ParallelState, config: Config) -> MeasuredMemory:
    """Counts the second of two training steps of `config` on this rank; what the first one makes for good is there."""
    training = build_training(_loading_when_due(config), mpu, torch.device("cpu"))
    train_step(training, 0)
    buckets = [bucket for part in training.data_parallels.values() for bucket in part.buckets]
    live, most = _Watch(buckets), 0

    def note(action: Action, begin: float, end: float) -> None:
        nonlocal most
        if live.now > most:
            gc.collect()  # what only a cycle holds may go at any time
            most = max(most, live.now)

    training.executor.trace = note
    rows = _watch_experts(training)
    with live:
        train_step(training, 1)
    return MeasuredMemory(
        pp_rank=mpu.pp.rank,
        state=_state(training, buckets),
        step=most,
        units={"unit gradients": live.gradients, "unit parameters": live.parameters},
        peak=live.peak,
        expert_load=_over_even_share(sum(rows), mpu),
    )


def beside_predicted(
    config: Config, num_ranks: int, found: Sequence[MeasuredMemory]
) -> list[tuple[RankMemory, MeasuredMemory]]:
    """(predicted, counted) for the first rank at each place of the pipeline; `found` are all ranks' counts.

    Routers send as they have learned, so predictions are made for the loads that these ranks had.
    """
    pairs = []
    for place, member in enumerate(config.parallel.grid(num_ranks).members(0, ("pp",))):
        load = found[member].expert_load
        predicted = predict(_loading_when_due(config), num_ranks, device=torch.device("cpu"), expert_load=load)
        pairs.append((predicted[place], found[member]))
    return pairs


def _loading_when_due(config: Config) -> Config:
    """`config` with the rows of a step loaded by the step itself: those of another thread are not seen."""
    return replace(config, data=replace(config.data, prefetch=0))


def _watch_experts(training: Training) -> list[int]:
    """A list that grows by the tokens of each call of this rank's experts."""
    rows: list[int] = []
    for stage in training.stages.values():
        for module in stage.modules():
            if isinstance(module, Experts):
                module.register_forward_pre_hook(lambda _, args: rows.append(args[0].shape[0]))
    return rows


def _over_even_share(rows: int, mpu: ParallelState) -> float:
    everyone = mpu.ep.gather_objects(rows)
    return rows * len(everyone) / sum(everyone) if sum(everyone) else 1.0


class _Watch(LiveMemory):
    """Looks, after every operation, at what of divided units is whole."""

    def __init__(self, buckets: Sequence[Bucket]):
        super().__init__()
        self._gradients = [bucket.grad.untyped_storage() for bucket in buckets if bucket.zero >= 2]
        self._parameters = [bucket.param.untyped_storage() for bucket in buckets if bucket.zero >= 3]
        self.gradients = self.parameters = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_dispatch__(func, types, args, kwargs)
        self.gradients = max(self.gradients, sum(memory.nbytes() for memory in self._gradients))
        self.parameters = max(self.parameters, sum(memory.nbytes() for memory in self._parameters))
        return out


def _state(training: Training, buckets: Sequence[Bucket]) -> dict[str, int]:
    """Memory that is there between steps, each storage once."""
    states = training.optimizer._states
    learning = [p for part in training.data_parallels.values() for p in part.parameters]
    return {
        "parameters": _bytes_of([*learning, *(bucket.param_shard for bucket in buckets)]),
        "gradients": _bytes_of([tensor for bucket in buckets for tensor in (bucket.grad, bucket.grad_shard)]),
        "master": _bytes_of([state.master for state in states if state.has_master]),
        "optimizer": _bytes_of([moment for state in states for moment in state.moments]),
    }


def _bytes_of(tensors: Iterable[Tensor]) -> int:
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())
