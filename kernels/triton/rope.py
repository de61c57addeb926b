"""Rotary position embedding by tables: one pass over memory, a few tokens with all their heads a program."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import launch, launch_row
from .rows import accumulator


def apply_rope(
    x: Tensor, cos: Tensor, sin: Tensor, num_turned: int | None = None, *, interleaved: bool = False
) -> Tensor:
    """Rotates each pair (x[i], x[i + r/2]) of x [s, b, heads, d] by its angle; tables [s, b, r/2], r <= d.

    `interleaved`: pairs are (x[2i], x[2i + 1]). Features from r on pass through, and heads from num_turned on. The
    result has x's dtype and is contiguous.
    """
    return _rope(x, cos, sin, x.shape[2] if num_turned is None else num_turned, interleaved, False)


@torch.library.custom_op("megalite::rope", mutates_args=())
def _rope(x: Tensor, cos: Tensor, sin: Tensor, num_turned: int, interleaved: bool, back: bool) -> Tensor:
    """`back`: by minus the angle."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    x = x if x.stride(3) == 1 else x.contiguous()
    length, batch, heads, dim = x.shape
    half = cos.shape[-1]
    row = launch_row("rope", x.dtype, dim)
    pairs = triton.next_power_of_2(max(1, half))
    head_block = min(triton.next_power_of_2(max(1, heads)), max(1, row["TILE"] // pairs))
    token_block = max(1, row["TILE"] // (pairs * head_block))
    grid = triton.cdiv(length * batch, token_block), triton.cdiv(heads, head_block)
    launch(
        _rotate, grid, row, x, cos.contiguous(), sin.contiguous(), out, length * batch, batch, heads, num_turned, dim,
        half, *x.stride()[:3], PART=num_turned < heads, INTERLEAVED=interleaved, BACK=back, ACC=accumulator(cos.dtype),
        TOKENS=token_block, HEADS=head_block, PAIRS=pairs,
        REST=triton.next_power_of_2(dim - 2 * half) if dim > 2 * half else 0,
    )  # fmt: skip
    return out


@_rope.register_fake
def _(x: Tensor, cos: Tensor, sin: Tensor, num_turned: int, interleaved: bool, back: bool) -> Tensor:
    return x.new_empty(x.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, cos, sin, ctx.num_turned, ctx.interleaved, ctx.back = inputs
    ctx.save_for_backward(cos, sin)


def _backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
    """A rotation (times a factor, if the tables have one): its gradient is the rotation back (times the same)."""
    dx = _rope(dout, *ctx.saved_tensors, ctx.num_turned, ctx.interleaved, not ctx.back)
    return dx, None, None, None, None, None


_rope.register_autograd(_backward, setup_context=_save)


@triton.jit
def _rotate(
    x, cos, sin, out, count, batch, heads, num_turned, dim, half, length_stride, batch_stride, head_stride,
    PART: tl.constexpr, INTERLEAVED: tl.constexpr, BACK: tl.constexpr, ACC: tl.constexpr,
    TOKENS: tl.constexpr, HEADS: tl.constexpr, PAIRS: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)[:, None, None]
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[None, :, None]
    pair = tl.arange(0, PAIRS)[None, None, :]
    source = x + (token // batch) * length_stride + (token % batch) * batch_stride + head.to(tl.int64) * head_stride
    target = out + (token * heads + head) * dim
    present = (token < count) & (head < heads)
    angle, known = token * half + pair, (token < count) & (pair < half)
    cosine = tl.load(cos + angle, mask=known, other=0.0).to(ACC)
    sine = tl.load(sin + angle, mask=known, other=0.0).to(ACC)
    if BACK:
        sine = -sine
    inside = present & (pair < half)
    if INTERLEAVED:
        place = tl.arange(0, 2 * PAIRS)[None, None, :]
        within = present & (place < 2 * half)
        both = tl.load(source + place, mask=within, other=0.0).to(ACC)
        first, second = tl.split(tl.reshape(both, [TOKENS, HEADS, PAIRS, 2]))
        turned = tl.reshape(
            tl.join(first * cosine - second * sine, second * cosine + first * sine), [TOKENS, HEADS, 2 * PAIRS]
        )
        if PART:  # chosen, not multiplied by 1 and 0: infinities pass through
            turned = tl.where(head < num_turned, turned, both)
        tl.store(target + place, turned, mask=within)
    else:
        first = tl.load(source + pair, mask=inside, other=0.0).to(ACC)
        second = tl.load(source + half + pair, mask=inside, other=0.0).to(ACC)
        turned_first, turned_second = first * cosine - second * sine, second * cosine + first * sine
        if PART:
            turned_first = tl.where(head < num_turned, turned_first, first)
            turned_second = tl.where(head < num_turned, turned_second, second)
        tl.store(target + pair, turned_first, mask=inside)
        tl.store(target + half + pair, turned_second, mask=inside)
    if REST > 0:
        place = 2 * half + tl.arange(0, REST)[None, None, :]
        within = present & (place < dim)
        tl.store(target + place, tl.load(source + place, mask=within), mask=within)
