"""The local halves of a vocabulary-parallel cross entropy: one reading pass for statistics, one pass in place.

Rows are cut into pieces, a program each, because the loss comes in chunks of fewer rows than a GPU runs programs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megalite.kernels.cross_entropy import CrossEntropyConfig

from .launch import launch, launch_row
from .rows import accumulator, accumulator_dtype, row_and_columns


def ce_stats(logits: Tensor, targets: Tensor, config: CrossEntropyConfig) -> Tensor:
    """Per row of logits [n, v]: max, sum of exp(x - max), target logit, sum of logits; [4, n], float32 or wider.

    targets: int64 [n], the target's column, or negative where another rank (or nobody) has it, which gives 0. The sum
    of logits is 0 without label smoothing. No column may be padding; v may be 0 (max -inf).
    """
    return _ce_stats(logits, targets, config.smoothing > 0.0)


def ce_grad_(logits: Tensor, targets: Tensor, lse: Tensor, grad: Tensor, config: CrossEntropyConfig) -> Tensor:
    """Overwrites logits [n, v] with their gradient and returns them.

    targets as in `ce_stats`; lse [n], merged; grad [n], the gradient of each row's loss. A row with grad 0 gets a
    gradient of exactly 0, whatever its logits.
    """
    _ce_grad_(logits, targets, lse, grad, config.smoothing, config.vocab_size, config.z_loss)
    return logits


@torch.library.custom_op("megalite::ce_stats", mutates_args=())
def _ce_stats(logits: Tensor, targets: Tensor, with_sum: bool) -> Tensor:
    count, width = logits.shape
    rows, row = _contiguous_rows(logits), launch_row("ce_stats", logits.dtype, width)
    pieces = max(1, triton.cdiv(width, row["PIECE"]))
    stats = torch.empty(4, count, dtype=accumulator_dtype(logits.dtype), device=logits.device)
    partial = stats if pieces == 1 else torch.empty(pieces, *stats.shape, dtype=stats.dtype, device=stats.device)
    sizes = count, width, rows.stride(0)
    constants = dict(WITH_SUM=with_sum, ACC=accumulator(logits.dtype))
    launch(_loss_stats, (count, pieces), row, rows, targets.contiguous(), partial, *sizes, **constants)
    if pieces > 1:
        merge = launch_row("ce_merge", logits.dtype)
        launch(_merge_stats, (triton.cdiv(count, merge["BLOCK"]),), merge, partial, stats, count, pieces)
    return stats


@_ce_stats.register_fake
def _(logits: Tensor, targets: Tensor, with_sum: bool) -> Tensor:
    return logits.new_empty(4, logits.shape[0], dtype=accumulator_dtype(logits.dtype))


@torch.library.custom_op("megalite::ce_grad_", mutates_args=("logits",))
def _ce_grad_(
    logits: Tensor, targets: Tensor, lse: Tensor, grad: Tensor, smoothing: float, vocab_size: int, z_loss: float
) -> None:
    rows, row = _contiguous_rows(logits), launch_row("ce_grad", logits.dtype, logits.shape[1])
    count, width = rows.shape
    grid = (count * triton.cdiv(width, row["BLOCK"]),)
    launch(
        _loss_grad, grid, row, rows, targets.contiguous(), lse.contiguous(), grad.contiguous(), width, rows.stride(0),
        SMOOTHING=smoothing, EVERYWHERE=smoothing / vocab_size, Z_LOSS=z_loss, ACC=accumulator(lse.dtype),
    )  # fmt: skip
    if rows.data_ptr() != logits.data_ptr():
        logits.copy_(rows)


@_ce_grad_.register_fake
def _(
    logits: Tensor, targets: Tensor, lse: Tensor, grad: Tensor, smoothing: float, vocab_size: int, z_loss: float
) -> None:
    pass


def _contiguous_rows(logits: Tensor) -> Tensor:
    return logits if logits.stride(1) == 1 or logits.shape[1] <= 1 else logits.contiguous()


@triton.jit
def _exp(x):
    return tl.exp2(x * 1.4426950408889634)


@triton.jit
def _loss_stats(
    logits, targets, partial, count, width, stride,
    WITH_SUM: tl.constexpr, ACC: tl.constexpr, PIECE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    first = tl.program_id(1) * PIECE
    last = tl.minimum(first + PIECE, width)
    top = tl.full([1], float("-inf"), ACC)
    scaled = tl.zeros([1], ACC)
    total = tl.zeros([1], ACC)
    for start in range(first, last, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        x = tl.load(logits + columns, mask=columns < last, other=float("-inf")).to(ACC)
        higher = tl.maximum(top, tl.max(x, 0))
        # A row of -inf has no finite maximum to subtract; the maximum of nothing but NaN matters to nobody.
        shift = tl.where(higher == float("-inf"), 0.0, higher)
        scaled = scaled * _exp(top - shift) + tl.sum(_exp(x - shift), 0)
        top = higher
        if WITH_SUM:
            total += tl.sum(tl.where(columns < last, x, 0.0), 0)
    target = tl.load(targets + row)
    here = (target >= first) & (target < last)
    picked = tl.load(logits + target, mask=here, other=0.0).to(ACC)
    place = partial + tl.program_id(1).to(tl.int64) * 4 * count + row + tl.arange(0, 1)
    tl.store(place, top)
    tl.store(place + count, scaled)
    tl.store(place + 2 * count, picked)
    tl.store(place + 3 * count, total)


@triton.jit
def _merge_stats(partial, stats, count, pieces, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = row < count
    top = tl.load(partial + row, mask=inside, other=0.0)
    scaled = tl.load(partial + count + row, mask=inside, other=0.0)
    picked = tl.load(partial + 2 * count + row, mask=inside, other=0.0)
    total = tl.load(partial + 3 * count + row, mask=inside, other=0.0)
    for _ in range(1, pieces):
        partial += 4 * count
        other = tl.load(partial + row, mask=inside, other=0.0)
        higher = tl.maximum(top, other)
        shift = tl.where(higher == float("-inf"), 0.0, higher)
        scaled = scaled * _exp(top - shift)
        scaled += tl.load(partial + count + row, mask=inside, other=0.0) * _exp(other - shift)
        top = higher
        picked += tl.load(partial + 2 * count + row, mask=inside, other=0.0)
        total += tl.load(partial + 3 * count + row, mask=inside, other=0.0)
    tl.store(stats + row, top, mask=inside)
    tl.store(stats + count + row, scaled, mask=inside)
    tl.store(stats + 2 * count + row, picked, mask=inside)
    tl.store(stats + 3 * count + row, total, mask=inside)


@triton.jit
def _loss_grad(
    logits, targets, lse, grad, width, stride,
    SMOOTHING: tl.constexpr, EVERYWHERE: tl.constexpr, Z_LOSS: tl.constexpr, ACC: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, columns = row_and_columns(width, BLOCK)
    inside = columns < width
    weight = tl.load(grad + row).to(ACC)
    log_sum = tl.load(lse + row)
    x = tl.load(logits + row * stride + columns, mask=inside, other=0.0).to(ACC)
    slope = _exp(x - log_sum) * (weight * (1.0 + 2.0 * Z_LOSS * log_sum)) - EVERYWHERE * weight
    slope += tl.where(columns == tl.load(targets + row), (SMOOTHING - 1.0) * weight, 0.0)
    tl.store(logits + row * stride + columns, tl.where(weight == 0.0, 0.0, slope), mask=inside)
