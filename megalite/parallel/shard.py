"""What a parameter is in the global model: the one attribute that init, reduction, clipping and checkpoints read.

A layer that cuts a parameter sets `param.shard`; nothing else marks tensors. Buffers that a checkpoint keeps have one
too.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, Literal, Self, TypeVar

import torch
from torch import Tensor, nn
from torch.utils import swap_tensors

from megalite.axis import Axis
from megalite.mpu import ParallelState

_T = TypeVar("_T", bound=Tensor)

Segments = tuple[tuple[int, int], ...]
"""Global (start, length) runs along one dim, in local order."""

Group = Literal["dense", "expert"]
"""Which of the two factorings of a stage's ranks cuts a parameter: tp x cp x dp, or etp x ep x edp."""


@dataclass(frozen=True)
class Cut:
    """How one dim of a parameter is cut over `axis`: this rank holds `segments` of the global dim, in order."""

    axis: Axis
    dim: int
    segments: Segments


@dataclass(frozen=True)
class Shard:
    """A parameter's place in the global model.

    name: layout-free global name. shape: global shape. cuts: how it is cut (a dim not named is whole here).
    partial: axes over which its gradient is a partial sum; after summing, the first rank of each owns it.
    group: which ranks share it, dense (dp x cp) or expert (edp), see `copies_axis`. tied_to: the name of the parameter
    that this one is a copy of (on another stage; its own name when the whole stage is a copy). decay: whether weight
    decay applies. run: elements [begin, end) of this rank's part, flattened, where the part itself is divided among the
    ranks with the same one (ZeRO); the tensor is then those elements, [end - begin]. kept: those of a whole part that
    this rank will keep, while it is about to be divided: no others need an initial value.
    """

    name: str
    shape: tuple[int, ...]
    cuts: tuple[Cut, ...] = ()
    partial: tuple[Axis, ...] = ()
    group: Group = "dense"
    tied_to: str | None = None
    decay: bool = True
    run: tuple[int, int] | None = None
    kept: tuple[int, int] | None = None

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of this rank's part."""
        return (self.run[1] - self.run[0],) if self.run is not None else self._part_shape

    @property
    def _part_shape(self) -> tuple[int, ...]:
        shape = list(self.shape)
        for cut in self.cuts:
            shape[cut.dim] = sum(length for _, length in cut.segments)
        return tuple(shape)

    def pieces(self, local: Tensor) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], Tensor]]:
        """(global offset, sizes, view of `local`) of each rectangle of the global tensor that `local` holds.

        A run of a matrix is at most three rectangles of this rank's part: the rest of a row, whole rows, the beginning
        of one.
        """
        assert local.shape == self.local_shape, f"{self.name}: {tuple(local.shape)} is not {self.local_shape}"
        runs: list[Segments] = [((0, size),) for size in self.shape]
        for cut in self.cuts:
            runs[cut.dim] = cut.segments
        if self.run is None:
            yield from _rectangles(local, runs, 0, (), ())
            return
        for offset, box in _boxes(local, self._part_shape, self.run[0]):
            here = [_within(run, begin, size) for run, begin, size in zip(runs, offset, box.shape, strict=True)]
            yield from _rectangles(box, here, 0, (), ())

    def is_owner(self, mpu: ParallelState) -> bool:
        """Whether this rank counts the parameter in norms and saves it (among the ranks of one model copy).

        Each element of the global model has exactly one owner: copies on model-parallel ranks and tied copies
        on other stages have none.
        """
        if self.tied_to is not None:
            return False
        model_axes = (mpu.etp, mpu.ep) if self.group == "expert" else (mpu.tp,)
        cut_over = {cut.axis.ranks for cut in self.cuts}
        copied_over = [axis for axis in model_axes if axis.ranks not in cut_over]
        return all(axis.rank == 0 for axis in (*copied_over, *self.partial))

    def is_saver(self, mpu: ParallelState) -> bool:
        """Whether this rank, of all ranks, is the one that stores the parameter (its own run of it, if divided)."""
        same = replicas_axis(self.group, mpu) if self.run is not None else copies_axis(self.group, mpu)
        return same.is_first and self.is_owner(mpu)


def copies_axis(group: Group, mpu: ParallelState) -> Axis:
    """The ranks that hold the same part of a parameter of `group` for different data: its gradient is their sum."""
    return mpu.edp if group == "expert" else mpu.dp_cp


def slices_axis(group: Group, mpu: ParallelState) -> Axis:
    """Of these ranks, those among which ZeRO divides the part."""
    return mpu.expert_shard if group == "expert" else mpu.shard


def replicas_axis(group: Group, mpu: ParallelState) -> Axis:
    """Of these ranks, those that have the same slice of the part."""
    return mpu.expert_shard_replica if group == "expert" else mpu.shard_replica


def _rectangles(
    local: Tensor, runs: Sequence[Segments], dim: int, offset: tuple[int, ...], sizes: tuple[int, ...]
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], Tensor]]:
    if dim == len(runs):
        yield offset, sizes, local
        return
    begin = 0
    for start, length in runs[dim]:
        part = local.narrow(dim, begin, length)
        yield from _rectangles(part, runs, dim + 1, (*offset, start), (*sizes, length))
        begin += length


def _boxes(flat: Tensor, shape: tuple[int, ...], begin: int) -> Iterator[tuple[tuple[int, ...], Tensor]]:
    """(offset, view) of the rectangles, in order, that make up elements [begin, begin + flat.numel()) of a `shape`."""
    if len(shape) <= 1:
        yield ((begin,), flat) if shape else ((), flat.view(()))
        return
    row = math.prod(shape[1:])
    end = begin + flat.numel()
    first, last = -(-begin // row), end // row
    if first > last:  # within one row
        yield from _in_row(flat, shape, begin)
        return
    if begin < first * row:
        yield from _in_row(flat[: first * row - begin], shape, begin)
    if first < last:
        yield (first, *(0 for _ in shape[1:])), flat[first * row - begin : last * row - begin].view(-1, *shape[1:])
    if last * row < end:
        yield from _in_row(flat[last * row - begin :], shape, last * row)


def _in_row(flat: Tensor, shape: tuple[int, ...], begin: int) -> Iterator[tuple[tuple[int, ...], Tensor]]:
    index, inside = divmod(begin, math.prod(shape[1:]))
    for offset, box in _boxes(flat, shape[1:], inside):
        yield (index, *offset), box[None]


def _within(segments: Segments, begin: int, size: int) -> Segments:
    """The global runs of local elements [begin, begin + size) of a dim that is cut into `segments`."""
    found, at = [], 0
    for start, length in segments:
        low, high = max(begin, at), min(begin + size, at + length)
        if low < high:
            found.append((start + low - at, high - low))
        at += length
    return tuple(found)


def even_cut(size: int, axis: Axis, unit: int = 1) -> Segments:
    """This rank's run when `size` units are cut over `axis` as [r size // n, (r + 1) size // n), times `unit`."""
    start, end = axis.rank * size // axis.size, (axis.rank + 1) * size // axis.size
    return ((start * unit, (end - start) * unit),)


def shard_of(parameter: Tensor) -> Shard:
    """The `shard` of a parameter; an assertion names a parameter that no layer described."""
    shard = getattr(parameter, "shard", None)
    assert isinstance(shard, Shard), f"parameter of shape {tuple(parameter.shape)} has no shard; set param.shard"
    return shard


def set_shard(tensor: _T, shard: Shard) -> _T:
    """Marks a parameter or a buffer; returns it."""
    assert tensor.shape == shard.local_shape, f"{shard.name}: {tuple(tensor.shape)} is not {shard.local_shape}"
    tensor.shard = shard  # pyright: ignore[reportAttributeAccessIssue]
    return tensor


def persistent_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(path, buffer) of every buffer in `module` that belongs to its state."""
    for path, child in module.named_modules():
        for name, buffer in child._buffers.items():
            if buffer is not None and name not in child._non_persistent_buffers_set:
                yield f"{path}.{name}" if path else name, buffer


def name_parameters(module: nn.Module, prefix: str = "") -> None:
    """Gives every parameter and persistent buffer its path in `module` as global name.

    One without a shard is whole everywhere.
    """
    for path, tensor in (*module.named_parameters(), *persistent_buffers(module)):
        name = f"{prefix}{path}"
        if getattr(tensor, "shard", None) is None:
            set_shard(tensor, Shard(name, tuple(tensor.shape), decay=tensor.dim() > 1))
        else:
            set_shard(tensor, replace(shard_of(tensor), name=name))


def freeze(module: nn.Module, patterns: Sequence[str], *, but: bool = False) -> None:
    """Parameters in `module` whose global name is like one of `patterns` do not learn, or all `but` them.

    A tied one has one name.
    """
    for parameter in module.parameters():
        if is_like(parameter, patterns) != but:
            parameter.requires_grad_(False)


def is_like(parameter: Tensor, patterns: Sequence[str]) -> bool:
    """Whether a parameter's global name, or that of what it is tied to, is like one of `patterns`, as in a shell."""
    shard = shard_of(parameter)
    return any(fnmatchcase(shard.tied_to or shard.name, pattern) for pattern in patterns)


def mark_copies(module: nn.Module) -> None:
    """Says of all state in `module` that it is a copy of what has the same name on another rank, which owns it."""
    for tensor in (*module.parameters(), *(buffer for _, buffer in persistent_buffers(module))):
        shard = shard_of(tensor)
        set_shard(tensor, replace(shard, tied_to=shard.tied_to or shard.name))


def buffer_tensors(module: nn.Module) -> dict[str, list[tuple[Shard, Tensor]]]:
    """The persistent buffers as a checkpoint keeps them: kind `buffer` -> (shard, this rank's part); views, not copies.

    A module without any has no such kind.
    """
    found = [(shard_of(buffer), buffer) for _, buffer in persistent_buffers(module)]
    return {"buffer": found} if found else {}


def storage_groups(parameters: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Parameters that were created as views of one storage (q, k, v; gate, up), in storage order; others alone."""
    groups: dict[int, list[nn.Parameter]] = {}
    for parameter in parameters:
        groups.setdefault(parameter.untyped_storage()._cdata, []).append(parameter)
    return [sorted(group, key=lambda p: p.storage_offset()) for group in groups.values()]


class ShardedModule(nn.Module):
    """Base of layers that hold marked parameters: `copy.deepcopy` keeps the marks, and neighbours in memory adjacent.

    torch copies the values of a parameter and drops its attributes. A copy has no gradients, main or other, and
    shares the axes of the original.
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        for group in storage_groups([p for p in self.parameters() if id(p) not in memo]):
            for old, new in zip(group, _side_by_side(group, group[0].device, group[0].dtype), strict=True):
                memo[id(old)] = new
                new.data.copy_(old.data)
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        copied.__setstate__(copy.deepcopy(self.__dict__, memo))
        return copied


def materialize(module: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Gives every meta parameter and buffer of `module` memory on `device`, parameters in `dtype`.

    Parameters that shared a storage share one again, in the same places. What they hold is zero.
    """
    for group in storage_groups([p for p in module.parameters() if p.is_meta]):
        give_memory(group, torch.zeros(sum(p.numel() for p in group), device=device, dtype=dtype))
    materialize_buffers(module, device, dtype)


def materialize_buffers(module: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Gives every meta buffer zeros in at least float32, integers in their own dtype; who made it gives it values."""
    wide = torch.promote_types(dtype, torch.float32)
    for child in module.modules():
        for name, buffer in child._buffers.items():
            if buffer is not None and buffer.is_meta:
                child._buffers[name] = _real_buffer(buffer, device, wide)


def give_memory(parameters: Sequence[nn.Parameter], memory: Tensor) -> None:
    """Lays meta parameters one after another into flat `memory`; each stays the same object for all who refer to it."""
    for parameter, part in zip(parameters, memory.split([p.numel() for p in parameters]), strict=True):
        # .data: a change of the memory is not a change of the parameter in the eyes of autograd
        real = nn.Parameter(part.view(parameter.shape).data, parameter.requires_grad)
        for name, mark in vars(parameter).items():
            setattr(real, name, mark)  # attributes are swapped as well
        swap_tensors(parameter, real)


def _real_buffer(meta: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Zeros in the place of a meta buffer, which stand for the same part of the global model."""
    real = torch.zeros_like(meta, device=device, dtype=dtype if meta.is_floating_point() else meta.dtype)
    shard = getattr(meta, "shard", None)
    return real if shard is None else set_shard(real, shard)


def _side_by_side(group: Sequence[nn.Parameter], device: torch.device, dtype: torch.dtype) -> list[nn.Parameter]:
    """New parameters of zeros with the shapes and marks of `group`, in one storage in this order."""
    memory = torch.zeros(sum(p.numel() for p in group), device=device, dtype=dtype)
    parts = memory.split([p.numel() for p in group])
    new = [nn.Parameter(part.view(p.shape), p.requires_grad) for part, p in zip(parts, group, strict=True)]
    for parameter, old in zip(new, group, strict=True):
        if getattr(old, "shard", None) is not None:
            set_shard(parameter, shard_of(old))
    return new


def adjacent(tensors: Sequence[Tensor]) -> Tensor | None:
    """One view over tensors that lie one after another in memory, concatenated along dim 0; None if they do not."""
    first = tensors[0]
    if len(tensors) == 1:
        return first
    end = first.data_ptr()
    for tensor in tensors:
        if tensor.data_ptr() != end or not tensor.is_contiguous():
            return None
        end += tensor.nbytes
    rows = sum(t.shape[0] for t in tensors)
    inner = first.shape[1:]
    strides = [math.prod(inner[i + 1 :]) for i in range(len(inner))]
    return first.as_strided((rows, *inner), (math.prod(inner), *strides))
