"""Long rows of tokens as windows that a model can see, and windows as batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from megalite.batch import MicroBatch

T = TypeVar("T")


@dataclass(frozen=True)
class Window:
    """Tokens of a row, of which the last `num_scored` are predicted from all before them; at least one is not."""

    tokens: NDArray[np.int64]
    num_scored: int

    def __len__(self) -> int:
        """Tokens that the model sees: all but the last one."""
        return len(self.tokens) - 1


def windows(tokens: NDArray[np.int64], context: int, stride: int) -> Iterator[Window]:
    """Windows of at most `context` inputs that score every token of a row but the first, once each.

    The first is scored whole. Each later one scores `stride` tokens (the last one: those that are left) after as many
    as fit before them: a smaller stride gives each token more context and costs more.
    """
    assert 0 < stride <= context, f"stride {stride} of {context}"
    scored, count = 0, len(tokens) - 1
    while scored < count:
        end = min(scored + (stride if scored else context), count)
        yield Window(tokens[max(0, end - context) : end + 1], end - scored)
        scored = end


def micro_batch(rows: Sequence[Window]) -> MicroBatch:
    """The windows side by side, padded on the right; without any, one row that scores nothing."""
    length, size = max(map(len, rows), default=1), max(1, len(rows))
    tokens, labels = torch.zeros(2, length, size, dtype=torch.int64)
    real, scored = torch.zeros(length, size, dtype=torch.bool), torch.zeros(length, size)
    for row, window in enumerate(rows):
        ids, n = torch.from_numpy(window.tokens), len(window)
        tokens[:n, row], labels[:n, row], real[:n, row] = ids[:-1], ids[1:], True
        scored[n - window.num_scored : n, row] = 1.0
    positions = torch.arange(length)[:, None].expand(length, size)
    return MicroBatch(
        tokens=tokens, labels=labels, loss_mask=scored, positions=positions, samples=torch.arange(size), step=0,
        token_mask=None if bool(real.all()) else real,
    )  # fmt: skip


def of_similar_length(rows: Iterator[Window], size: int, look_ahead: int = 64) -> Iterator[list[Window]]:
    """Batches of `size` windows; `look_ahead` batches at a time are put in order of length, for little padding."""
    while several := list(islice(rows, size * look_ahead)):
        several.sort(key=len, reverse=True)
        yield from (several[begin : begin + size] for begin in range(0, len(several), size))
