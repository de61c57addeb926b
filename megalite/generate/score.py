"""How likely a model finds given ends of rows, row by row."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megalite.generate.pipe import first_of_last_stage, run_stage
from megalite.generate.windows import Window, micro_batch
from megalite.models.transformer import Transformer
from megalite.mpu import ParallelState

_LOGITS = 1 << 27
"""Logits that are there at a time at most, unless one window has more."""


class Score(NamedTuple):
    """The log-probability of the scored tokens, and whether each of them is the likeliest one."""

    log_prob: float
    is_greedy: bool


@torch.inference_mode()
def score(
    rows: Sequence[Window], stage: Transformer, mpu: ParallelState, device: torch.device, *, batch_size: int
) -> list[Score]:
    """The score of each window; every rank calls it with the same ones, and gets all scores.

    On a layout of generation, see `inference_layout`.
    """
    found: list[Score | None] = [None] * len(rows)
    source = first_of_last_stage(mpu)
    for numbers in _batches(rows, batch_size, stage.config.vocab_size):
        batch = micro_batch([rows[i] for i in numbers]).to(device)
        wanted = batch.loss_mask.bool()
        logits = run_stage(stage, mpu, batch, keep=lambda hidden, wanted=wanted: hidden[wanted])
        sums = torch.zeros(2, len(numbers), dtype=torch.float64, device=mpu.world.device)
        if logits is not None:
            sums.copy_(_by_row(logits, batch.labels[wanted], wanted.nonzero()[:, 1], len(numbers)))
        log_probs, misses = mpu.world.broadcast(sums, source).tolist()
        for i, log_prob, missed in zip(numbers, log_probs, misses, strict=True):
            found[i] = Score(log_prob, not missed)
    return [one for one in found if one is not None]


def _batches(rows: Sequence[Window], size: int, vocab_size: int) -> Iterator[list[int]]:
    """Numbers of windows of similar length, the longest first."""
    batch: list[int] = []
    for i in sorted(range(len(rows)), key=lambda i: (-len(rows[i]), i)):
        logits = sum(rows[j].num_scored for j in (*batch, i)) * vocab_size
        if batch and (len(batch) == size or logits > _LOGITS):
            yield batch
            batch = []
        batch.append(i)
    if batch:
        yield batch


def _by_row(logits: Tensor, labels: Tensor, row: Tensor, num_rows: int) -> Tensor:
    """float64 [2, rows]: sums of log-probabilities and of labels that are not the likeliest; logits [n, vocab]."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    log_prob = logits.log_softmax(-1).gather(-1, labels[:, None]).squeeze(-1)
    values = torch.stack((log_prob.to(torch.float64), (logits.argmax(-1) != labels).to(torch.float64)))
    return values.new_zeros(2, num_rows).index_add_(1, row, values)
