"""The optimizer: float32 master weights, clipping and one update rule over the flat segments of all stages."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from megalite.kernels.chosen import Kernels
from megalite.mpu import ParallelState
from megalite.optim.clip import GradNorm, clip_coefficient
from megalite.optim.config import OptimConfig
from megalite.optim.groups import Group, Run, runs_of
from megalite.optim.rounding import store_rounded
from megalite.optim.rules import MatrixRule, UpdateRule, is_matrix, matrix_rule, update_rule
from megalite.optim.scaler import LossScaler
from megalite.parallel.data import Bucket, DataParallel, Segment, Span
from megalite.parallel.matrices import WholeMatrices
from megalite.parallel.shard import Shard

logger = logging.getLogger("megalite")

_CHUNK = 1 << 19
"""Elements updated at a time on the CPU: scaled gradient and fresh weights stay in the cache. A multiple of the
segment alignment, so that every element goes through the same vector code wherever it lies."""
_CUDA_CHUNK = 1 << 25


MASTER = "master"
"""What a checkpoint calls master weights."""


class NonFiniteGradient(RuntimeError):
    """The gradient holds a nan or an infinity and `optim.nonfinite` is stop; raised by all ranks alike."""


@dataclass(frozen=True)
class StepResult:
    """What became of a step. grad_norm: global, before clipping. skipped: nothing was changed."""

    grad_norm: float
    skipped: bool = False


@dataclass(frozen=True)
class _RunState:
    """What is updated alike, and its moments, by name."""

    run: Run
    moments: dict[str, Tensor]


@dataclass(frozen=True)
class _SegmentState:
    """Optimizer state of a segment. master: the weights that are updated; the parameters themselves if wide enough, or
    if there are no others."""

    segment: Segment
    master: Tensor
    runs: tuple[_RunState, ...]

    @property
    def has_master(self) -> bool:
        return self.master is not self.segment.param

    @property
    def moments(self) -> list[Tensor]:
        return [moment for of_run in self.runs for moment in of_run.moments.values()]

    def places(self) -> Iterator[tuple[Span, _RunState]]:
        """The spans, and the run that each is in."""
        for span in self.segment.spans:
            yield span, next(r for r in self.runs if r.run.start <= span.start < r.run.stop)


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
        self._rule: UpdateRule = update_rule(config, self.kernels.adamw)
        self._matrix_rule: MatrixRule | None = matrix_rule(config)
        self._copies = _Copies()
        self._buckets = [
            (bucket, [self._fresh(segment) for segment in bucket.segments])
            for data_parallel in self.data_parallels
            for bucket in data_parallel.buckets
        ]
        self._states = [state for _, states in self._buckets for state in states]
        self._matrices = {
            bucket: WholeMatrices(bucket, lambda shard: is_matrix(shard, config))
            for bucket, _ in (self._buckets if self._matrix_rule is not None else ())
        }

    def _fresh(self, segment: Segment) -> _SegmentState:
        wide = torch.promote_types(segment.param.dtype, torch.float32)
        master = segment.param if self.config.master_weights == "none" else segment.param.to(wide)
        runs = runs_of(segment, self._groups, self.config.weight_decay, lambda shard: is_matrix(shard, self.config))
        return _SegmentState(segment, master, tuple(_RunState(run, self._moments(run, master, wide)) for run in runs))

    def _moments(self, run: Run, weights: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
        rule = self._matrix_rule if run.is_matrix else self._rule
        assert rule is not None
        return {name: torch.zeros_like(weights[run.start : run.stop], dtype=dtype) for name in rule.moments}

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
            for tensor in (state.master, *state.moments, *((state.segment.param,) if state.has_master else ()))
        ]

    def _update_all(self, scale: float, lr: float) -> None:
        """Updates this rank's slices; whole parameters are gathered from all ranks' while the next ones are updated."""
        self.steps += 1
        for bucket, states in self._buckets:
            for state in states:
                self._update(state, scale, lr)
            if self._matrix_rule is not None:
                self._update_matrices(self._matrix_rule, bucket, states, scale, lr)
            bucket.publish()

    def _finish_gathers(self) -> None:
        for bucket, _ in self._buckets:
            bucket.finish_gather()

    def _update(self, state: _SegmentState, scale: float, lr: float) -> None:
        segment = state.segment
        size = _CUDA_CHUNK if segment.param.is_cuda else _CHUNK
        scratch = torch.empty_like(segment.main_grad[:size]) if scale != 1.0 else None
        for of_run in state.runs:
            run = of_run.run
            for begin in range(run.start, run.stop, size) if not run.is_matrix else ():
                part = slice(begin, min(begin + size, run.stop))
                grad, weight = segment.main_grad[part], state.master[part].to(segment.main_grad.dtype)
                if scratch is not None:
                    grad = torch.mul(grad, scale, out=scratch[: grad.numel()])
                inside = slice(part.start - run.start, part.stop - run.start)
                moments = [moment[inside] for moment in of_run.moments.values()]
                self._rule.update(weight, grad, moments, lr=lr * run.lr, weight_decay=run.weight_decay, step=self.steps)
                self._store(weight, state, part)

    def _update_matrices(
        self, rule: MatrixRule, bucket: Bucket, states: Sequence[_SegmentState], scale: float, lr: float
    ) -> None:
        """Gathers directions, so that each rank makes the steps of the matrices of which it keeps a part."""
        whole = self._matrices[bucket]
        if not len(whole):
            return
        directions = torch.zeros_like(bucket.grad_shard)
        mine: dict[nn.Parameter, list[tuple[_SegmentState, Run, Span]]] = {}
        begin = 0
        for state in states:
            for of_run in state.runs:
                run = of_run.run
                if run.is_matrix:
                    grad = state.segment.main_grad[run.start : run.stop] * scale
                    moments = list(of_run.moments.values())
                    directions[begin + run.start : begin + run.stop] = rule.direction(grad, moments)
            for span, of_run in state.places():
                if of_run.run.is_matrix:
                    mine.setdefault(span.parameter, []).append((state, of_run.run, span))
            begin += state.segment.param.numel()
        for parameter, matrix in whole.gather(directions):
            if parameter in mine:
                step = rule.step(matrix)
                for state, run, span in mine[parameter]:
                    part = slice(span.start, span.end)
                    weight = state.master[part].to(step.dtype)
                    weight.mul_(1 - lr * run.lr * run.weight_decay)
                    weight.add_(whole.slice_of(span, step), alpha=-lr * run.lr)
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
            for span, of_run in state.places():
                if state.has_master:
                    tensors.setdefault(MASTER, []).append((span.shard, span.of(state.master)))
                in_run = replace(span, start=span.start - of_run.run.start)
                for kind, moment in of_run.moments.items():
                    tensors.setdefault(kind, []).append((span.shard, in_run.of(moment)))
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
