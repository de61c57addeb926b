"""What operations keep from their forward to their backward pass: declared beside each of them, and added up.

An operation keeps the tensor that enters it, the one that leaves it, both or neither, and tensors of its own. Two
neighbours share the tensor between them, so that it counts once if either keeps it: that is all there is to `chain`.
Parameters do not count, nor what all layers of a stage share (rotary tables, token numbers).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class Saved:
    """Bytes that an operation keeps of one micro-batch."""

    input: int = 0
    """The size of the tensor that enters, if it is kept."""
    own: int = 0
    """Tensors that nobody else keeps."""
    output: int = 0
    """The size of the tensor that leaves, if it is kept."""
    held: int = 0
    """What attributes of a Function's context keep, out of autograd's sight and of a recompute's reach."""
    work: int = 0
    """What weight gradients that are put off keep until they run: inputs, and gradients of outputs."""
    results: int = 0
    """Results of sums and exchanges between ranks that a recompute would ask for again."""
    last_results: int = 0
    """Those after the last tensor that is kept: a recompute ends before them."""
    again: int = 0
    """The most that a recompute makes at once in backward, and drops."""

    @property
    def total(self) -> int:
        """Everything from forward to backward."""
        return self.input + self.own + self.output + self.held


def chain(*operations: Saved) -> Saved:
    """Operations of which each takes the output of the one before it."""
    all_saved = Saved()
    for position, saved in enumerate(operations):
        all_saved = _then(all_saved, saved) if position else saved
    return all_saved


def _then(first: Saved, second: Saved) -> Saved:
    goes_on = second.own + second.input + second.output + second.results > 0
    return Saved(
        input=first.input,
        own=first.own + max(first.output, second.input) + second.own,
        output=second.output,
        held=first.held + second.held,
        work=first.work + second.work,
        results=first.results + second.results + (first.last_results if goes_on else 0),
        last_results=second.last_results + (0 if goes_on else first.last_results),
        again=max(first.again, second.again),
    )


def beside(*operations: Saved) -> Saved:
    """Operations that take the same tensor; what they make is put together by one that keeps nothing of it."""
    return Saved(
        input=max((saved.input for saved in operations), default=0),
        own=sum(saved.own + saved.output for saved in operations),
        held=sum(saved.held for saved in operations),
        work=sum(saved.work for saved in operations),
        results=sum(saved.results for saved in operations),
        last_results=sum(saved.last_results for saved in operations),
        again=max((saved.again for saved in operations), default=0),
    )


def region_saved(inside: Saved, entering: int, *, stashes: bool = False) -> Saved:
    """A call that is computed again from its input of `entering` bytes; `stashes`: with the results of collectives."""
    return Saved(
        input=entering,
        own=inside.results if stashes else 0,
        held=inside.held,
        work=inside.work,
        last_results=inside.last_results + inside.results,
        again=inside.own + inside.output + inside.again,
    )


def size_of(shape: Sequence[int], dtype: torch.dtype) -> int:
    """Bytes of a tensor."""
    return math.prod(shape) * dtype.itemsize


def wide(dtype: torch.dtype) -> torch.dtype:
    """What statistics of tensors in `dtype` are kept in."""
    return torch.promote_types(dtype, torch.float32)
