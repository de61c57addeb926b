"""The learning rate as a pure function of the place in the run.

There is no scheduler object and so no state to advance twice, to save or to restore: the rate of a step depends on
the step's number alone, not on micro-batches, layout or resumes.
"""

from __future__ import annotations

import math

from megalite.optim.config import OptimConfig


def lr_at(config: OptimConfig, position: int, run_length: int) -> float:
    """The learning rate that the step which ends at `position` uses.

    position: optimizer steps (or samples, under `schedule_unit` samples) done once this step is done, so the first
    step is at 1 (or at its batch size) and the last one of the decay is exactly at min_lr. run_length: length of the
    run in the same unit, where the decay ends unless `decay_steps` says otherwise. After the decay: min_lr.
    """
    warmup = config.warmup_steps
    if position < warmup:
        return config.lr * position / warmup
    end = config.decay_steps if config.decay_steps is not None else run_length
    return config.min_lr + (config.lr - config.min_lr) * _height(config, position, warmup, end)


def _height(config: OptimConfig, position: int, warmup: int, end: int) -> float:
    """Between 1, the peak, and 0, the minimum."""
    if config.schedule == "constant":
        return 1.0
    if config.schedule == "inverse_sqrt":
        return _inverse_sqrt(config, position, max(warmup, 1))
    begin, shape = warmup, config.schedule
    if config.schedule == "wsd":
        final = config.wsd_decay_steps if config.wsd_decay_steps is not None else max(end // 10, 1)
        begin, shape = max(warmup, end - final), config.wsd_decay
    done = _fraction(position, begin, end)
    if shape == "cosine":
        return 0.5 * (1 + math.cos(math.pi * done))
    if shape == "exponential":
        return 2 * 0.5**done - 1
    if shape == "minus_sqrt":
        return 1 - math.sqrt(done)
    return 1 - done


def _inverse_sqrt(config: OptimConfig, position: int, warmup: int) -> float:
    """lr sqrt(warmup / position), as a height above min_lr and never below it; it has no end."""
    if config.lr == config.min_lr:
        return 1.0
    rate = config.lr * math.sqrt(warmup / max(position, warmup))
    return max(rate - config.min_lr, 0.0) / (config.lr - config.min_lr)


def _fraction(position: int, begin: int, end: int) -> float:
    """How much of [begin, end] lies behind `position`."""
    if position >= end:
        return 1.0
    return max(position - begin, 0) / (end - begin)
