"""What is recorded of a step, and how its speed is measured."""

from __future__ import annotations

import math
import resource
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from megalite.nn.router import EXTRA, RouterLoads
from megalite.train.flops import Workload
from megalite.train.step import StepResult

DETERMINISTIC_FIELDS = (
    "step", "loss", "grad_norm", "learning_rate", "tokens", "samples", "loss_tokens", "sample_fingerprint", "skipped",
)  # fmt: skip
"""Fields that are a function of config and seed: bit-equal when a run is repeated or resumed in its layout. With
experts there is `moe`, under fp16 `loss_scale`, with multi-token prediction `losses_ahead`, too."""

TIMING_FIELDS = ("tokens_per_second", "step_seconds", "tflops_per_second", "mfu", "peak_memory_mb")
"""Fields that depend on the machine and the moment."""


@dataclass(frozen=True, kw_only=True, eq=False)
class RouterStats:
    """What the routers of the MoE layers did in one step, over the global batch; one entry a layer, in order."""

    layers: tuple[int, ...]
    """Global layer numbers."""
    tokens: NDArray[np.int64]
    """[layers, num_experts]: choices of each expert, before drops."""
    dropped: tuple[int, ...]
    """Choices that found their expert full."""
    entropy: tuple[float, ...]
    """Mean entropy of the scores of a token, in nats; ln(num_experts) when the router has no opinion."""
    aux_loss: float
    """Balancing losses of all layers, with their coefficient."""
    z_loss: float
    """Router z-losses of all layers, with their coefficient."""

    @staticmethod
    def of(loads: RouterLoads) -> RouterStats:
        """The same as plain numbers."""
        extra = dict(zip(EXTRA, loads.extra.cpu().unbind(1), strict=True))
        return RouterStats(
            layers=loads.layers,
            tokens=loads.tokens.cpu().round().to(torch.int64).numpy(),
            dropped=tuple(int(count) for count in extra["dropped"].round().tolist()),
            entropy=tuple((extra["entropy"] / extra["tokens"].clamp(min=1)).tolist()),
            aux_loss=float(extra["aux_loss"].sum()),
            z_loss=float(extra["z_loss"].sum()),
        )

    @property
    def max_violation(self) -> tuple[float, ...]:
        """(largest - mean) / mean of the experts' tokens: 0 is even, num_experts - 1 is one expert for all."""
        mean = self.tokens.mean(1)
        return tuple(((self.tokens.max(1) - mean) / np.where(mean > 0, mean, 1.0)).tolist())

    @property
    def drop_rate(self) -> float:
        """Dropped choices over all choices, of all layers."""
        return sum(self.dropped) / max(int(self.tokens.sum()), 1)

    def row(self) -> dict[str, Any]:
        """What metrics.jsonl holds of it."""
        return {
            "aux_loss": _finite_or_none(self.aux_loss),
            "z_loss": _finite_or_none(self.z_loss),
            "drop_rate": self.drop_rate,
            "max_violation": list(self.max_violation),
            "entropy": [_finite_or_none(value) for value in self.entropy],
        }


@dataclass(frozen=True, kw_only=True)
class StepMetrics:
    """One row of metrics.jsonl."""

    step: int
    """Optimizer steps done, this one included: the first row is step 1."""
    loss: float
    """Mean loss over the valid tokens of the global batch, before the update."""
    grad_norm: float
    """Global gradient norm before clipping."""
    learning_rate: float
    """The learning rate of this update."""
    tokens: int
    """Tokens consumed since step 1: samples x seq_len, whatever the layout."""
    samples: int
    """Samples consumed since step 1."""
    loss_tokens: int
    """Tokens of this global batch that count in the loss."""
    sample_fingerprint: int
    """A hash of which samples the global batch holds."""
    skipped: bool
    """Whether the update was left out because the gradient was not finite."""
    tokens_per_second: float
    """Tokens of this step / step_seconds, over all ranks."""
    step_seconds: float
    """From the end of the step before to the end of this one, less evaluation and checkpoints."""
    tflops_per_second: float
    """Model TFLOP/s per rank: forward and backward over tokens that are no padding and the pairs of them that attention
    sees, nothing that is computed twice (megalite.train.flops)."""
    mfu: float | None
    """tflops_per_second / the peak of the device; left out where the peak is not known."""
    peak_memory_mb: float
    """Most memory that rank 0 has held so far, in MiB: CUDA allocations, or the process's resident set on the CPU."""
    loss_scale: float | None = None
    """What gradients were multiplied by; left out but for fp16."""
    losses_ahead: tuple[float, ...] = ()
    """Mean loss of each depth of multi-token prediction, without its factor; left out where there are none."""
    moe: RouterStats | None = None
    """What the routers did; left out of a dense model's row."""

    @staticmethod
    def of(result: StepResult, step: int, workload: Workload, speed: Speed, device: torch.device) -> StepMetrics:
        """What the step that was the `step`-th has done."""
        tflops = result.model_flops / speed.seconds / workload.num_ranks / 1e12 if speed.seconds > 0 else 0.0
        peak = workload.peak_tflops
        return StepMetrics(
            step=step,
            loss=result.loss,
            grad_norm=result.grad_norm,
            learning_rate=result.learning_rate,
            tokens=workload.tokens_before(step),
            samples=workload.sizes.before(step),
            loss_tokens=result.num_tokens,
            sample_fingerprint=result.sample_fingerprint,
            skipped=result.skipped,
            loss_scale=result.loss_scale,
            losses_ahead=result.losses_ahead,
            tokens_per_second=speed.tokens_per_second,
            step_seconds=speed.seconds,
            tflops_per_second=tflops,
            mfu=tflops / peak if peak is not None else None,
            peak_memory_mb=peak_memory_mb(device),
            moe=RouterStats.of(result.router_loads) if result.router_loads is not None else None,
        )

    def row(self) -> dict[str, Any]:
        """The JSON object of this step; numbers that JSON cannot hold (nan, infinity) become null."""
        row = {field.name: _finite_or_none(getattr(self, field.name)) for field in fields(self)}
        for name in ("mfu", "loss_scale"):
            if getattr(self, name) is None:
                del row[name]
        del row["moe"], row["losses_ahead"]
        if self.losses_ahead:
            row["losses_ahead"] = [_finite_or_none(loss) for loss in self.losses_ahead]
        return row if self.moe is None else row | {"moe": self.moe.row()}


def _finite_or_none(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


@dataclass(frozen=True)
class Speed:
    """How long some tokens took."""

    tokens: int
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        """Tokens over the time that these same tokens took."""
        return self.tokens / self.seconds if self.seconds > 0 else 0.0


class Meter:
    """Times steps with an injected clock.

    A step lasts from the end of the one before (or from `start`) to its own end; what happens inside `paused`
    (evaluation, checkpoints) belongs to no step. The first step since `start` pays for warm-up: it has its own
    speed but is in neither `recent` nor `average`. Nothing is carried over from before a resume.
    """

    def __init__(self, *, clock: Callable[[], float] = time.perf_counter, window: int = 20):
        self._clock = clock
        self._steps: deque[float] = deque(maxlen=window)
        self._tokens = 0
        self._mark = clock()
        self._num_steps, self._timed_tokens, self._timed_seconds = 0, 0, 0.0

    def start(self) -> None:
        """The first step begins now."""
        self._mark = self._clock()

    def step(self, tokens: int) -> Speed:
        """A step of so many tokens has ended; returns its speed."""
        now = self._clock()
        seconds, self._mark = now - self._mark, now
        if tokens != self._tokens:
            self._steps.clear()
            self._tokens = tokens
        if self._num_steps > 0:
            self._steps.append(seconds)
            self._timed_tokens += tokens
            self._timed_seconds += seconds
        self._num_steps += 1
        return Speed(tokens, seconds)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Time that belongs to no step."""
        begin = self._clock()
        try:
            yield
        finally:
            self._mark += self._clock() - begin

    @property
    def recent(self) -> Speed | None:
        """The last steps of the latest size (their median: one hiccup does not show); None before the second step."""
        return Speed(self._tokens, statistics.median(self._steps)) if self._steps else None

    @property
    def average(self) -> Speed | None:
        """All steps since `start` but the first, or None before the second step."""
        return Speed(self._timed_tokens, self._timed_seconds) if self._num_steps > 1 else None


def peak_memory_mb(device: torch.device) -> float:
    """The most memory this process has held so far, in MiB: on CUDA what the allocator gave out, else resident."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    per_mib = 2**20 if sys.platform == "darwin" else 2**10  # ru_maxrss is in bytes there and in KiB elsewhere
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / per_mib
