"""Softmax of scaled scores under a mask: a row in registers, read once and written once."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import launch, launch_row
from .rows import accumulator, rows_of

_WIDEST = 16384


def masked_softmax(scores: Tensor, mask: Tensor | None, scale: float, *, causal: bool = False) -> Tensor:
    """softmax(scale * scores) over the last dim of scores [b, heads, sq, sk], in float32 or wider, in scores' dtype.

    mask: bool, broadcastable to the scores, True where a query sees a key. causal: query i sees keys up to
    i + sk - sq. A query that sees nothing has probabilities 0. ValueError for more than 16384 keys.
    """
    if scores.shape[-1] > _WIDEST:
        raise ValueError(
            f"masked softmax over {scores.shape[-1]} keys: rows of at most {_WIDEST} fit in registers;"
            " use flash attention, or kernels.backend=torch"
        )
    return _softmax(scores, mask, scale, causal)


@torch.library.custom_op("megalite::masked_softmax", mutates_args=())
def _softmax(scores: Tensor, mask: Tensor | None, scale: float, causal: bool) -> Tensor:
    out = torch.empty(scores.shape, dtype=scores.dtype, device=scores.device)
    _, heads, sq, sk = scores.shape
    rows, row = rows_of(scores), launch_row("softmax", scores.dtype, sk)
    bits = None if mask is None else mask.expand(scores.shape).view(torch.uint8)
    block, tile = _tile(sk, row["TILE"])
    launch(
        _softmax_rows, (triton.cdiv(rows.shape[0], tile),), row, rows, bits, out, rows.shape[0], heads, sq, sk,
        rows.stride(0), *((0, 0, 0, 0) if bits is None else bits.stride()),
        SCALE=scale, CAUSAL=causal, ACC=accumulator(scores.dtype), ROWS=tile, BLOCK=block,
    )  # fmt: skip
    return out


@torch.library.custom_op("megalite::masked_softmax_backward", mutates_args=())
def _softmax_backward(dprobs: Tensor, probs: Tensor, scale: float) -> Tensor:
    out = torch.empty(probs.shape, dtype=probs.dtype, device=probs.device)
    dp, p = rows_of(dprobs), rows_of(probs)
    count, width = p.shape
    row = launch_row("softmax", probs.dtype, width)
    block, tile = _tile(width, row["TILE"])
    constants = dict(SCALE=scale, ACC=accumulator(probs.dtype), ROWS=tile, BLOCK=block)
    launch(
        _softmax_rows_grad,
        (triton.cdiv(count, tile),),
        row,
        dp,
        p,
        out,
        count,
        width,
        dp.stride(0),
        p.stride(0),
        **constants,
    )
    return out


_softmax.register_fake(lambda scores, mask, scale, causal: scores.new_empty(scores.shape))
_softmax_backward.register_fake(lambda dprobs, probs, scale: probs.new_empty(probs.shape))


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.scale = inputs[2]
    ctx.save_for_backward(output)


_softmax.register_autograd(
    lambda ctx, dprobs: (_softmax_backward(dprobs, *ctx.saved_tensors, ctx.scale), None, None, None),
    setup_context=_save,
)


def _tile(width: int, elements: int) -> tuple[int, int]:
    """(columns, rows) of a program's tile."""
    block = triton.next_power_of_2(max(1, width))
    return block, max(1, elements // block)


@triton.jit
def _softmax_rows(
    scores, mask, out, count, heads, queries, keys, stride,
    mask_batch_stride, mask_head_stride, mask_query_stride, mask_key_stride,
    SCALE: tl.constexpr, CAUSAL: tl.constexpr, ACC: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    key = tl.arange(0, BLOCK)[None, :]
    query = row % queries
    inside = (row < count) & (key < keys)
    seen, near = inside, inside
    if CAUSAL:
        last = query + keys - queries
        seen = seen & (key <= last)
        # Loads stop at a multiple of 8, or they would not be 128 bits wide.
        near = near & ((key // 8) * 8 <= last)
    if mask is not None:
        head, batch = (row // queries) % heads, row // queries // heads
        place = batch * mask_batch_stride + head * mask_head_stride + query * mask_query_stride + key * mask_key_stride
        seen = seen & (tl.load(mask + place, mask=near, other=0) != 0)
    x = tl.load(scores + row * stride + key, mask=near, other=float("-inf")).to(ACC) * SCALE
    x = tl.where(seen, x, float("-inf"))
    top = tl.max(x, 1, keep_dims=True)
    # A row that sees nothing has no finite maximum to subtract, and no sum to divide by.
    share = tl.exp(x - tl.where(top == float("-inf"), 0.0, top))
    total = tl.sum(share, 1, keep_dims=True)
    tl.store(out + row * keys + key, share / tl.where(total == 0.0, 1.0, total), mask=inside)


@triton.jit
def _softmax_rows_grad(
    dprobs, probs, out, count, width, dprobs_stride, stride,
    SCALE: tl.constexpr, ACC: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    columns = tl.arange(0, BLOCK)[None, :]
    inside = (row < count) & (columns < width)
    p = tl.load(probs + row * stride + columns, mask=inside, other=0.0).to(ACC)
    dp = tl.load(dprobs + row * dprobs_stride + columns, mask=inside, other=0.0).to(ACC)
    tl.store(out + row * width + columns, (dp - tl.sum(p * dp, 1, keep_dims=True)) * p * SCALE, mask=inside)
