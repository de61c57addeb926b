"""Putting together what the same queries got from different keys, in one pass."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .launch import launch, launch_row


def merge(out: Tensor, lse: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """`masked_attention.merge`: (out, lse), changed in place; one pass over out and out_b.

    out [sq, b, heads, dv] and lse [sq, b, heads] are in float32 or wider and may be any views; out_b may be narrower.
    """
    sq, b, heads, dv = out.shape
    block = triton.next_power_of_2(dv)
    row = launch_row("attention_merge", out.dtype, block)
    count = sq * b * heads
    launch(
        _merge_kernel, (triton.cdiv(count, row["ROWS"]),), row, out, lse, out_b, lse_b, count, b, heads,
        *out.stride(), *lse.stride(), *out_b.stride(), *lse_b.stride(),
        DV=dv, BLOCK=block,
    )  # fmt: skip
    return out, lse


@triton.jit
def _merge_kernel(
    out, lse, out_b, lse_b, count, num_batch, heads,
    out_s, out_n, out_h, out_d, lse_s, lse_n, lse_h, other_s, other_n, other_h, other_d, log_s, log_n, log_h,
    DV: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    number = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    here, column = number < count, tl.arange(0, BLOCK)
    head, place, batch = number % heads, number // heads // num_batch, number // heads % num_batch
    log_a = lse + place * lse_s + batch * lse_n + head * lse_h
    a = tl.load(log_a, mask=here, other=0.0)
    b = tl.load(lse_b + place * log_s + batch * log_n + head * log_h, mask=here, other=0.0).to(a.dtype)
    top = tl.maximum(a, b)
    # Where neither has seen a key, both are -inf, and so is their sum.
    shift = tl.where(top == float("-inf"), 0.0, top)
    weight_a, weight_b = tl.exp(a - shift), tl.exp(b - shift)
    total = weight_a + weight_b
    total = tl.where(total == 0.0, 1.0, total)
    inverse = 1.0 / total
    tl.store(log_a, top + tl.log(total), mask=here)
    inside = here[:, None] & (column < DV)[None, :]
    at = out + (place * out_s + batch * out_n + head * out_h)[:, None] + column[None, :] * out_d
    other = out_b + (place * other_s + batch * other_n + head * other_h)[:, None] + column[None, :] * other_d
    mine = tl.load(at, mask=inside, other=0.0)
    theirs = tl.load(other, mask=inside, other=0.0).to(mine.dtype)
    tl.store(at, mine * (weight_a * inverse)[:, None] + theirs * (weight_b * inverse)[:, None], mask=inside)
