"""The optimizer: float32 master weights, clipping and one update rule over the flat segments of all stages."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megalite.kernels.chosen import Kernels
from megalite.mpu import ParallelState
from megalite.optim.clip import GradNorm, clip_coefficient
from megalite.optim.config import OptimConfig
from megalite.optim.groups import Group, Run, runs_of
from megalite.optim.rounding import store_rounded
from megalite.optim.rules import update_rule
from megalite.optim.scaler import LossScaler
from megalite.parallel.data import DataParallel, Segment
from megalite.parallel.shard import Shard

logger = logging.getLogger("megalite")

_CHUNK = 1 << 19
"""Elements updated at a time on the CPU: scaled gradient and fresh weights stay in the cache. A multiple of the
segment alignment, so that every element goes through the same vector code wherever it lies."""
_CUDA_CHUNK = 1 << 25


class NonFiniteGradient(RuntimeError):
    """The gradient holds a nan or an infinity and `optim.nonfinite` is stop; raised by all ranks alike."""


@dataclass(frozen=True)
class StepResult:
    """What became of a step. grad_norm: global, before clipping. skipped: nothing was changed."""

    grad_norm: float
    skipped: bool = False


@dataclass(frozen=True)
class _SegmentState:
    """Optimizer state of a segment. master: the weights that are updated; the parameters themselves if wide enough, or
    if there are no others. runs: what is updated alike."""

    segment: Segment
    master: Tensor
    moments: dict[str, Tensor]
    runs: tuple[Run, ...]

    @property
    def has_master(self) -> bool:
        return self.master is not self.segment.param


class _Copies:
    """Copies of tensors, in memory that is kept from step to step."""

    def __init__(self) -> None:
        self._memory: list[Tensor] = []

    def keep(self, tensors: Sequence[Tensor]) -> None:
        """Copies the values of `tensors`."""
        if not self._memory:
            self._memory = [torch.empty_like(tensor) for tensor in tensors]
        for copy, tensor in zip(self._memory, tensors, strict=True):
            copy.copy_(tensor)

    def restore(self, tensors: Sequence[Tensor]) -> None:
        """Gives `tensors` the values back."""
        for copy, tensor in zip(self._memory, tensors, strict=True):
            tensor.copy_(copy)


class Optimizer:
    """Updates the parameters of all stages on this rank from their main gradients.

    Parameters narrower than float32 get float32 master weights, taken from their values now: initialise before.
    State exists for this rank's slices of the parameters alone, where these are divided (`parallel.zero`).
    Main gradients are left as backward made them, also when the update is clipped. `steps` counts the updates made,
    the same number on every rank. With a `scaler`, gradients arrive multiplied by `loss_scale`. `seed` decides how
    weights without masters are rounded.
    """

    def __init__(
        self,
        config: OptimConfig,
        data_parallels: Sequence[DataParallel],
        mpu: ParallelState,
        *,
        scaler: LossScaler | None = None,
        seed: int = 0,
        kernels: Kernels | None = None,
    ):
        self.kernels = kernels if kernels is not None else Kernels()
        self.config, self.data_parallels, self.mpu = config, tuple(data_parallels), mpu
        self.scaler, self.seed, self.steps = scaler, seed, 0
        self._groups = tuple(map(Group.parse, config.groups))
        self._rule = update_rule(config, self.kernels.adamw)
        self._copies = _Copies()
        self._buckets = [
            (bucket, [self._fresh(segment) for segment in bucket.segments])
            for data_parallel in self.data_parallels
            for bucket in data_parallel.buckets
        ]
        self._states = [state for _, states in self._buckets for state in states]

    def _fresh(self, segment: Segment) -> _SegmentState:
        wide = torch.promote_types(segment.param.dtype, torch.float32)
        master = segment.param if self.config.master_weights == "none" else segment.param.to(wide)
        moments = {name: torch.zeros_like(master, dtype=wide) for name in self._rule.moments}
        return _SegmentState(segment, master, moments, tuple(runs_of(segment, self._groups, self.config.weight_decay)))

    @property
    def loss_scale(self) -> float:
        """What the gradients of the next step must be multiplied by."""
        return self.scaler.scale if self.scaler is not None else 1.0

    @torch.no_grad()
    def step(self, lr: float) -> StepResult:
        """One update with learning rate `lr`, after all gradients have been summed over their ranks.

        When the gradient is not finite, parameters, moments and `steps` stay as they are on every rank, and the
        result says so or NonFiniteGradient is raised, as configured; with a loss scale, which then shrinks, it is
        raised only when the scale is at its floor.
        """
        result = self._step(lr)
        self._finish_gathers()
        return result

    def _step(self, lr: float) -> StepResult:
        norm = GradNorm(self.data_parallels, self.mpu, self.kernels.sum_of_squares)
        if self.config.post_validation and self._leaves_as_it_is(float(norm.of_rank) / self.loss_scale):
            result = self._update_then_validate(norm, lr)
        else:
            result = self._update_by(float(norm.wait()) / self.loss_scale, lr)
        if self.scaler is not None:
            self._move_scale(self.scaler, result)
        return result

    def _move_scale(self, scaler: LossScaler, result: StepResult) -> None:
        before = scaler.scale
        scaler.update(overflow=result.skipped)
        if result.skipped:
            logger.warning("gradients overflowed at loss scale %g; the next step uses %g", before, scaler.scale)

    def _leaves_as_it_is(self, norm: float) -> bool:
        """Whether a gradient of this norm is neither clipped nor refused."""
        return math.isfinite(norm) and clip_coefficient(norm, self.config.clip_grad) == 1.0

    def _update_by(self, norm: float, lr: float) -> StepResult:
        """The update for a gradient of the given global norm."""
        if not math.isfinite(norm):
            if self.scaler.at_floor if self.scaler is not None else self.config.nonfinite == "stop":
                raise NonFiniteGradient(self._where_not_finite())
            return StepResult(norm, skipped=True)
        self._update_all(clip_coefficient(norm, self.config.clip_grad) / self.loss_scale, lr)
        return StepResult(norm)

    def _update_then_validate(self, norm: GradNorm, lr: float) -> StepResult:
        """The update in the hope that the global norm will demand nothing else (Qi et al., 2023, section 4).

        Weights and moments come back from copies when it does: an inverted update would not give the same bits.
        """
        self._copies.keep(self._state_memory())
        self._update_all(1.0 / self.loss_scale, lr)
        total = float(norm.wait()) / self.loss_scale
        if self._leaves_as_it_is(total):
            return StepResult(total)
        self._finish_gathers()
        self._copies.restore(self._state_memory())
        for bucket, _ in self._buckets:
            bucket.publish()
        self._finish_gathers()
        self.steps -= 1
        return self._update_by(total, lr)

    def _state_memory(self) -> list[Tensor]:
        """All tensors that an update changes."""
        return [
            tensor
            for state in self._states
            for tensor in (state.master, *state.moments.values(), *((state.segment.param,) if state.has_master else ()))
        ]

    def _update_all(self, scale: float, lr: float) -> None:
        """Updates this rank's slices; whole parameters are gathered from all ranks' while the next ones are updated."""
        self.steps += 1
        for bucket, states in self._buckets:
            for state in states:
                self._update(state, scale, lr)
            bucket.publish()

    def _finish_gathers(self) -> None:
        for bucket, _ in self._buckets:
            bucket.finish_gather()

    def _update(self, state: _SegmentState, scale: float, lr: float) -> None:
        segment = state.segment
        size = _CUDA_CHUNK if segment.param.is_cuda else _CHUNK
        scratch = torch.empty_like(segment.main_grad[:size]) if scale != 1.0 else None
        for run in state.runs:
            for begin in range(run.start, run.stop, size):
                part = slice(begin, min(begin + size, run.stop))
                grad, weight = segment.main_grad[part], state.master[part].to(segment.main_grad.dtype)
                if scratch is not None:
                    grad = torch.mul(grad, scale, out=scratch[: grad.numel()])
                moments = [moment[part] for moment in state.moments.values()]
                self._rule.update(weight, grad, moments, lr=lr * run.lr, weight_decay=run.weight_decay, step=self.steps)
                self._store(weight, state, part)

    def _store(self, weight: Tensor, state: _SegmentState, part: slice) -> None:
        """Rounds updated weights into narrower parameters; others are updated in place."""
        param = state.segment.param
        if param.dtype == weight.dtype:
            return
        if not state.has_master and self.config.stochastic_rounding:
            store_rounded(weight, state.segment, part.start, self.seed, self.steps)
        else:
            param[part].copy_(weight)

    def state_tensors(self) -> dict[str, list[tuple[Shard, Tensor]]]:
        """Master weights and moments as a checkpoint keeps them: kind -> (shard, this rank's part).

        The tensors are views of the live state; a checkpoint is loaded by copying into them.
        """
        tensors: dict[str, list[tuple[Shard, Tensor]]] = {}
        for state in self._states:
            kinds = ({"master": state.master} if state.has_master else {}) | state.moments
            for kind, flat in kinds.items():
                views = [(span.shard, span.of(flat)) for span in state.segment.spans]
                tensors.setdefault(kind, []).extend(views)
        return tensors

    def refresh_master(self) -> None:
        """Takes the master weights from the parameters again, after these were changed by something else."""
        for state in self._states:
            if state.has_master:
                state.master.copy_(state.segment.param)

    def _where_not_finite(self) -> str:
        """The same message on every rank: the first parameter with a nan or an infinity, and where it is."""
        mine = next(
            (
                f"{shard.name} on rank {self.mpu.rank}"
                for dp in self.data_parallels
                for shard, grad in dp.gradients()
                if not grad.isfinite().all()
            ),
            None,
        )
        found = [place for place in self.mpu.world.gather_objects(mine) if place is not None]
        what = f"the gradient is not finite, first in {found[0]}" if found else "the gradient norm overflows"
        if self.scaler is not None:
            return (
                f"{what} (update {self.steps + 1}), although the loss scale is at its floor,"
                f" optim.min_loss_scale={self.config.min_loss_scale:g}; nothing was changed. Lower optim.lr, raise"
                " optim.warmup_steps, or use train.precision=bf16"
            )
        return (
            f"{what} (update {self.steps + 1}); nothing was changed. Lower optim.lr, raise optim.warmup_steps,"
            " or leave such steps out with optim.nonfinite=skip"
        )
