"""One pass through the pipeline of a model, forward only, for one batch at a time."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from megalite.batch import MicroBatch
from megalite.models.transformer import Transformer
from megalite.mpu import ParallelState
from megalite.nn.cache import Cache


def run_stage(
    stage: Transformer,
    mpu: ParallelState,
    batch: MicroBatch,
    cache: Cache | None = None,
    *,
    keep: Callable[[Tensor], Tensor] | None = None,
) -> Tensor | None:
    """`Transformer.infer` of this rank's stage, between its neighbours; logits on the last stage, else None."""
    pp, x = mpu.pp, None
    if not pp.is_first:
        x = torch.empty(stage.hidden_shape(batch), dtype=stage.hidden_dtype, device=batch.tokens.device)
        pp.receive(x, pp.rank - 1).wait()
    x = stage.infer(x, batch, cache, keep=keep)
    if pp.is_last:
        return x
    pp.send(x.contiguous(), pp.rank + 1).wait()
    return None


def first_of_last_stage(mpu: ParallelState) -> int:
    """The lowest rank that has logits: what it decides, all follow."""
    last = {"pp": mpu.pp.size - 1}
    return next(
        rank
        for rank in range(mpu.world.size)
        if all(place == last.get(axis, 0) for axis, place in mpu.grid.coordinates(rank).items())
    )
