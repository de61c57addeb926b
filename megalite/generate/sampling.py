"""The choice of the next token from logits: a function of (seed, row, position) and of that row's logits alone.

No generator has a state, so that neither the layout nor the other rows of a batch change what a row says.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is chosen; what is applied comes in the order of the fields."""

    repetition_penalty: float = 1.0
    """Logits of tokens that the row has already are divided by it, or multiplied where negative (CTRL,
    arXiv:1909.05858); 1 leaves them."""
    temperature: float = 0.8
    """Divides the logits: lower is safer, 0 always takes the likeliest token (the lowest id of several)."""
    top_k: int = 50
    """Sample among this many likeliest tokens only; 0 is all."""
    top_p: float = 1.0
    """Sample among the fewest likeliest tokens whose probabilities sum to this (arXiv:1904.09751); 1 is all."""
    min_p: float = 0.0
    """Sample among tokens at least this share as probable as the likeliest (arXiv:2407.01082); 0 is all."""
    seed: int = 0
    """The same seed gives the same text, in every layout and batch."""

    def problems(self) -> list[str]:
        """Everything that cannot work."""
        found = [
            f"--{name.replace('_', '-')}={getattr(self, name)} must be at least 0"
            for name in ("temperature", "top_k", "seed")
            if not getattr(self, name) >= 0
        ]
        if not 0 < self.top_p <= 1:
            found.append(f"--top-p={self.top_p} must be above 0 and at most 1 (all tokens)")
        if not 0 <= self.min_p <= 1:
            found.append(f"--min-p={self.min_p} must be from 0 (all tokens) to 1")
        if not self.repetition_penalty > 0:
            found.append(f"--repetition-penalty={self.repetition_penalty} must be above 0; 1 is none")
        return found


def uniform(seed: int, row: int, position: int) -> float:
    """A number in (0, 1) of 48 random bits."""
    digest = hashlib.blake2b(f"{seed}/{row}/{position}".encode(), digest_size=6).digest()
    return (int.from_bytes(digest, "little") + 0.5) * 2.0**-48


def choose(
    logits: Tensor, sampling: Sampling, rows: Sequence[int], positions: Sequence[int], seen: Tensor | None = None
) -> Tensor:
    """int64 [b]: the next tokens of rows with these numbers, at these positions, from logits [b, vocab].

    seen: bool [b, vocab], the tokens that each row has, for the repetition penalty.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if seen is not None and sampling.repetition_penalty != 1.0:
        penalty = sampling.repetition_penalty
        logits = torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)
    if sampling.temperature == 0.0:
        return logits.argmax(-1)
    logits, ids = logits / sampling.temperature, None
    if 0 < sampling.top_k < logits.shape[-1]:
        ids = logits.topk(sampling.top_k, sorted=False).indices.sort(-1).values
        logits = logits.gather(-1, ids)
    probs = _filtered(logits.softmax(-1), sampling)
    below = probs.to(torch.float64).cumsum(-1)
    draws = [uniform(sampling.seed, row, position) for row, position in zip(rows, positions, strict=True)]
    target = torch.tensor(draws, dtype=torch.float64, device=probs.device)[:, None] * below[:, -1:]
    index = torch.searchsorted(below, target, right=True)
    return (index if ids is None else ids.gather(-1, index)).squeeze(-1)


def _filtered(probs: Tensor, sampling: Sampling) -> Tensor:
    """Zeros for what top_p and min_p leave out."""
    if sampling.top_p < 1.0:
        ordered, order = probs.sort(dim=-1, descending=True, stable=True)
        beyond = ordered.to(torch.float64).cumsum(-1) - ordered >= sampling.top_p
        probs = probs.masked_fill(torch.zeros_like(beyond).scatter_(-1, order, beyond), 0.0)
    if sampling.min_p > 0.0:
        probs = probs.masked_fill(probs < sampling.min_p * probs.amax(-1, keepdim=True), 0.0)
    return probs
