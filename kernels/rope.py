"""Rotary position embedding (Su et al., 2021, arXiv:2104.09864), halves rotated together as in Llama."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

Rope = tuple[Tensor, Tensor]  # cos and sin [s, b, r / 2], from `rope_tables`
RopeKind = Literal["none", "linear", "ntk", "yarn", "llama3"]


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How rotary frequencies are changed for rows `factor` times longer than a model was trained on.

    Names and defaults are those of Hugging Face's `rope_parameters`. linear: all are divided by the factor (Chen et
    al., 2023, arXiv:2306.15595). ntk: theta grows so that the slowest are (what Hugging Face calls dynamic, for rows of
    one fixed `length`). yarn: fast ones are kept, slow ones divided, with a ramp between, and tables are multiplied by
    `table_factor` (Peng et al., 2023, arXiv:2309.00071). llama3: the same idea by wavelength (arXiv:2407.21783).
    """

    kind: RopeKind = "none"
    factor: float = 1.0
    original_positions: int = 0
    """The row length that the model was trained on."""
    length: int = 0
    """The row length that ntk is for."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    attention_factor: float | None = None
    truncate: bool = True

    @property
    def table_factor(self) -> float:
        """What cos and sin are multiplied by, so that attention logits grow by its square (yarn only)."""
        if self.kind != "yarn":
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._growth(self.mscale) / self._growth(self.mscale_all_dim)
        return self._growth(1.0)

    @property
    def score_factor(self) -> float:
        """What DeepSeek multiplies attention scores by, on features that are turned and on others (yarn only)."""
        return self._growth(self.mscale_all_dim) ** 2 if self.kind == "yarn" and self.mscale_all_dim else 1.0

    def _growth(self, mscale: float) -> float:
        return 1.0 + 0.1 * mscale * math.log(self.factor) if self.factor > 1.0 else 1.0

    def frequencies(self, dim: int, theta: float, device: torch.device | None = None) -> Tensor:
        """float64 [dim / 2]: the angle of each pair of features per position, fastest first."""
        if self.kind == "ntk" and dim > 2:
            theta *= (self.factor * self.length / self.original_positions - (self.factor - 1.0)) ** (dim / (dim - 2))
        exponent = torch.arange(0, dim, 2, dtype=torch.float64, device=device) / dim
        plain = theta**-exponent
        if self.kind in ("none", "ntk"):
            return plain
        if self.kind == "linear":
            return plain / self.factor
        kept = self._kept_by_wavelength(plain) if self.kind == "llama3" else self._kept_by_rotations(plain, theta)
        return plain * kept + plain / self.factor * (1.0 - kept)

    def _kept_by_wavelength(self, plain: Tensor) -> Tensor:
        """llama3: 1 where a frequency turns high_freq_factor times and more in a row, 0 from low_freq_factor down."""
        turns = self.original_positions * plain / (2 * math.pi)
        return ((turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)).clamp(0.0, 1.0)

    def _kept_by_rotations(self, plain: Tensor, theta: float) -> Tensor:
        """yarn: 1 up to the feature that turns beta_fast times in a row, 0 from the one that turns beta_slow times."""
        half = len(plain)
        first, last = (
            half * math.log(self.original_positions / (turns * 2 * math.pi)) / math.log(theta)
            for turns in (self.beta_fast, self.beta_slow)
        )
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, 2 * half - 1)
        width = last - first if last != first else 1e-3
        feature = torch.arange(half, dtype=plain.dtype, device=plain.device)
        return 1.0 - ((feature - first) / width).clamp(0.0, 1.0)


PLAIN_ROPE = RopeScaling()


def rope_tables(
    positions: Tensor, dim: int, theta: float, dtype: torch.dtype = torch.float32, scaling: RopeScaling = PLAIN_ROPE
) -> tuple[Tensor, Tensor]:
    """cos and sin of position * theta^(-2i / dim), or scaled frequencies: int64 [s, b] to two tables [s, b, dim / 2].

    Angles are computed in float64, so that far positions keep their phase; dtype should be float32 or wider.
    """
    frequencies = scaling.frequencies(dim, theta, positions.device)
    angle = positions.to(torch.float64).unsqueeze(-1) * frequencies
    cos, sin = (table.mul_(scaling.table_factor).to(dtype).contiguous() for table in (angle.cos(), angle.sin()))
    return cos, sin


def apply_rope(
    x: Tensor, cos: Tensor, sin: Tensor, num_turned: int | None = None, *, interleaved: bool = False
) -> Tensor:
    """Rotates each pair (x[i], x[i + r/2]) of x [s, b, heads, d] by its angle; tables [s, b, r/2], r <= d.

    `interleaved`: pairs are (x[2i], x[2i + 1]). Features from r on pass through, and heads from num_turned on (those
    of values, in a packed product). The result has x's dtype and is contiguous.
    """
    turned = x.shape[2] if num_turned is None else num_turned
    return _Rope.apply(x, cos, sin, turned) if not interleaved else _rope_interleaved(x, cos, sin, turned)


def _rope_interleaved(x: Tensor, cos: Tensor, sin: Tensor, num_turned: int) -> Tensor:
    """Pairs are taken apart, rotated as halves, and put together again."""
    r = 2 * cos.shape[-1]
    turned = _Rope.apply(x[..., :r].unflatten(-1, (-1, 2)).mT.flatten(-2), cos, sin, num_turned)
    return torch.cat((turned.unflatten(-1, (2, -1)).mT.flatten(-2), x[..., r:]), -1)


class _Rope(torch.autograd.Function):
    """A rotation (times a factor, if the tables have one); its gradient is the rotation back (times the same)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, num_turned: int) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.num_turned = num_turned
        return _rotate(x, cos, sin, num_turned, 1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return _rotate(grads[0], cos, sin, ctx.num_turned, -1), None, None, None


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, num_turned: int, direction: int) -> Tensor:
    # Products over whole heads: the inner loops over halves of a head are too short to run fast.
    half, whole = cos.shape[-1], x
    x = x[:, :, :num_turned]
    cos = torch.cat((cos, cos), -1).unsqueeze(2)
    sin = torch.cat((-direction * sin, direction * sin), -1).unsqueeze(2)
    wide = x[..., : 2 * half].to(cos.dtype)
    out = torch.cat((wide[..., half:], wide[..., :half]), -1).mul_(sin).add_(wide * cos).to(x.dtype)
    out = out if x.shape[-1] == 2 * half else torch.cat((out, x[..., 2 * half :]), -1)
    return out if num_turned == whole.shape[2] else torch.cat((out, whole[:, :, num_turned:]), 2)
