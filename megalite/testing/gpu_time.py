"""How long a GPU takes for a call."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch


def gpu_seconds(call: Callable[[], Any], budget: float = 0.15) -> float:
    """Median duration of `call` on the GPU, caches cold, after a warm-up that compiles what must be."""
    for _ in range(3):
        call()
    # More than any L2 cache, and long enough to hide the launch of what is timed.
    flush = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    once = _timed(call, flush)
    return statistics.median(_timed(call, flush) for _ in range(min(50, max(5, int(budget / max(once, 1e-6))))))


def _timed(call: Callable[[], Any], flush: torch.Tensor) -> float:
    flush.zero_()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3
