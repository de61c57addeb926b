"""Differentiable communication along one `Axis`: each function pairs a forward with its conjugate backward.

The first four are the operators of Megatron-LM (Shoeybi et al., 2019, arXiv:1909.08053); the sequence ones come
from sequence parallelism (Korthikanti et al., 2022, arXiv:2205.05198). A size-1 axis makes each the identity.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megalite.axis import Axis


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.axis.all_reduce(grads[0].clone(memory_format=torch.contiguous_format)), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        return axis.all_reduce(x.clone(memory_format=torch.contiguous_format))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int) -> Tensor:
        ctx.axis, ctx.dim, ctx.sizes = axis, dim, part_sizes(x.shape[dim], axis)
        return x.split(ctx.sizes, dim)[axis.rank].contiguous()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _gather_parts(grads[0], ctx.axis, ctx.dim, ctx.sizes), None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int, sizes: Sequence[int]) -> Tensor:
        ctx.axis, ctx.dim, ctx.sizes = axis, dim, sizes
        return _gather_parts(x, axis, dim, sizes)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return grads[0].split(ctx.sizes, ctx.dim)[ctx.axis.rank].contiguous(), None, None, None


class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        return axis.all_gather(x, dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return ctx.axis.reduce_scatter(grads[0], ctx.dim), None, None


class _ReduceScatterSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        return axis.reduce_scatter(x, dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return ctx.axis.all_gather(grads[0], ctx.dim), None, None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, send: Sequence[int] | None, receive: Sequence[int] | None) -> Tensor:
        ctx.axis, ctx.send, ctx.receive = axis, send, receive
        return axis.all_to_all(x, send, receive)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.axis.all_to_all(grads[0], ctx.receive, ctx.send), None, None, None


def part_sizes(size: int, axis: Axis) -> list[int]:
    """Length of each rank's part when `size` is cut as [r size // n, (r + 1) size // n)."""
    borders = [rank * size // axis.size for rank in range(axis.size + 1)]
    return [end - start for start, end in itertools.pairwise(borders)]


def _gather_parts(x: Tensor, axis: Axis, dim: int, sizes: Sequence[int]) -> Tensor:
    """All-gather of parts that may differ in length: shorter ones travel padded."""
    longest = max(sizes)
    if min(sizes) == longest:
        return axis.all_gather(x.contiguous(), dim).contiguous()
    padded = x.new_zeros((*x.shape[:dim], longest, *x.shape[dim + 1 :])) if dim >= 0 else None
    assert padded is not None, "dim must not be negative here"
    padded.narrow(dim, 0, x.shape[dim]).copy_(x)
    parts = axis.all_gather(padded, dim).split(longest, dim)
    return torch.cat([part.narrow(dim, 0, size) for part, size in zip(parts, sizes, strict=True)], dim)


def copy_to(x: Tensor, axis: Axis) -> Tensor:
    """Identity forward, all-reduce backward: a whole input enters a region that is cut over `axis`."""
    return x if axis.size == 1 else _Copy.apply(x, axis)


def reduce_from(x: Tensor, axis: Axis) -> Tensor:
    """All-reduce forward, identity backward: partial sums leave a region that is cut over `axis`."""
    return x if axis.size == 1 else _Reduce.apply(x, axis)


def scatter_to(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """Keeps this rank's part of `dim`; backward gathers. Parts may differ in length by one."""
    return x if axis.size == 1 else _Scatter.apply(x, axis, dim % x.dim())


def gather_from(x: Tensor, axis: Axis, dim: int, size: int | None = None) -> Tensor:
    """Concatenates the parts along `dim` (`size` in all, if parts differ); backward keeps this rank's part.

    For consumers that do the same work on every rank; otherwise use `gather_sequence`.
    """
    if axis.size == 1:
        return x
    dim = dim % x.dim()
    sizes = part_sizes(size, axis) if size is not None else [x.shape[dim]] * axis.size
    return _Gather.apply(x, axis, dim, sizes)


def gather_sequence(x: Tensor, axis: Axis, dim: int = 0) -> Tensor:
    """All-gather forward, reduce-scatter backward: a cut sequence enters a region that is cut otherwise."""
    return x if axis.size == 1 else _GatherSequence.apply(x, axis, dim)


def reduce_scatter_sequence(x: Tensor, axis: Axis, dim: int = 0) -> Tensor:
    """Reduce-scatter forward, all-gather backward: partial sums leave as a cut sequence."""
    return x if axis.size == 1 else _ReduceScatterSequence.apply(x, axis, dim)


def all_to_all(
    x: Tensor, axis: Axis, send_rows: Sequence[int] | None = None, receive_rows: Sequence[int] | None = None
) -> Tensor:
    """Exchanges rows of dim 0 (see `Axis.all_to_all`); backward sends them home."""
    return x if axis.size == 1 else _AllToAll.apply(x, axis, send_rows, receive_rows)


def enter_parallel(x: Tensor, axis: Axis, sequence_parallel: bool) -> Tensor:
    """The input side of a tensor-parallel region: `gather_sequence` under sequence parallelism, else `copy_to`."""
    return gather_sequence(x, axis) if sequence_parallel else copy_to(x, axis)


def leave_parallel(x: Tensor, axis: Axis, sequence_parallel: bool) -> Tensor:
    """The output side of a tensor-parallel region: `reduce_scatter_sequence` or `reduce_from`."""
    return reduce_scatter_sequence(x, axis) if sequence_parallel else reduce_from(x, axis)


def sequence_part(x: Tensor, axis: Axis, sequence_parallel: bool) -> Tensor:
    """This rank's rows (dim 0) of a tensor that every rank holds whole, when the sequence is cut over `axis`."""
    if not sequence_parallel or axis.size == 1:
        return x
    return x.split(part_sizes(x.shape[0], axis))[axis.rank]
