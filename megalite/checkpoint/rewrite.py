"""Writes a checkpoint from tensors that are made one after another, in any number of files, by one process."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megalite.checkpoint.errors import CheckpointError
from megalite.checkpoint.folder import MANIFEST, Draft, Folder
from megalite.checkpoint.manifest import Entry, Manifest, Piece
from megalite.checkpoint.store import LATEST, checkpoints_folder, step_name
from megalite.checkpoint.tensors import FileMark, TensorWriter

LARGEST = 1 << 30
"""Bytes of a stored rectangle, at most: a rank that loads has one or two in memory."""

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""A rectangle of a tensor: its offset and its sizes."""


@dataclass(frozen=True, kw_only=True)
class NewTensor:
    """A whole tensor that is made when its turn comes."""

    key: str
    """`kind/global name`."""
    shape: tuple[int, ...]
    dtype: torch.dtype
    make: Callable[[], Tensor]
    """Returns it; called once."""

    @property
    def nbytes(self) -> int:
        """Its size."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Rectangle:
    """A part of a tensor, and the number of the file that it goes into."""

    file: int
    offset: tuple[int, ...]
    sizes: tuple[int, ...]


Cuts = Mapping[str, Sequence[Rectangle]]
"""By key, the rectangles that make up the tensor."""


def split(box: Box, itemsize: int, largest: int) -> Iterator[Box]:
    """Cuts `box` along its first dims into boxes of at most `largest` bytes (of one element, where that is more)."""
    offset, sizes = box
    dim = next((dim for dim, size in enumerate(sizes) if size > 1), None)
    if dim is None or math.prod(sizes) * itemsize <= largest:
        yield box
        return
    row = math.prod(sizes[dim + 1 :]) * itemsize
    rows = max(1, largest // row) if row else sizes[dim]
    for begin in range(0, sizes[dim], rows):
        part = (*sizes[:dim], min(rows, sizes[dim] - begin), *sizes[dim + 1 :])
        yield from split(((*offset[:dim], offset[dim] + begin, *offset[dim + 1 :]), part), itemsize, largest)


def cut_evenly(tensors: Sequence[NewTensor], num_files: int, largest: int = LARGEST) -> Cuts:
    """Cuts `tensors`, in their order, into `num_files` files of one size, to a row."""
    total = sum(tensor.nbytes for tensor in tensors)
    cuts: dict[str, list[Rectangle]] = {}
    file = begin = 0
    for tensor in tensors:
        dim = next((dim for dim, size in enumerate(tensor.shape) if size > 1), None)
        count = tensor.shape[dim] if dim is not None else 1
        row, at = tensor.nbytes // count, 0
        rectangles = cuts[tensor.key] = []
        while at < count:
            room = total * (file + 1) // num_files - begin
            rows = min(count - at, (room + row // 2) // row) if row and file < num_files - 1 else count - at
            if rows <= 0:
                file += 1
                continue
            box = _rows(tensor.shape, dim, at, rows)
            rectangles += [Rectangle(file, *part) for part in split(box, tensor.dtype.itemsize, largest)]
            begin, at = begin + rows * row, at + rows
    return cuts


def _rows(shape: tuple[int, ...], dim: int | None, at: int, rows: int) -> Box:
    """Of a tensor, `rows` rows along `dim` (None: all of it)."""
    if dim is None:
        return (0,) * len(shape), shape
    offset = tuple(at if i == dim else 0 for i in range(len(shape)))
    return offset, (*shape[:dim], rows, *shape[dim + 1 :])


def cut_by_rank(
    tensors: Sequence[NewTensor], ranks: Sequence[Mapping[str, Sequence[Box]]], largest: int = LARGEST
) -> Cuts:
    """Cuts `tensors` where the ranks of a layout do, a file for each; `ranks` have the boxes by name, of every kind."""
    cuts: dict[str, list[Rectangle]] = {}
    for tensor in tensors:
        name = tensor.key.partition("/")[2]
        cuts[tensor.key] = [
            Rectangle(file, *part)
            for file, boxes in enumerate(ranks)
            for box in boxes.get(name, ())
            for part in split(box, tensor.dtype.itemsize, largest)
        ]
        found = sum(math.prod(rectangle.sizes) for rectangle in cuts[tensor.key])
        if found != math.prod(tensor.shape):
            raise CheckpointError(
                f"{tensor.key} {list(tensor.shape)} is not a tensor of the model that the checkpoint says it is of;"
                " give a number of files instead of a layout"
            )
    return cuts


def write_checkpoint(
    run_dir: str | Path,
    step: int,
    tensors: Sequence[NewTensor],
    cuts: Cuts,
    *,
    state: Mapping[str, Any],
    layout: Mapping[str, Any],
    progress: Callable[[int], None] = lambda count: None,
) -> Path | str:
    """Writes the checkpoint of `step` of <run_dir> (a path or a URL) and makes it the latest; returns its folder.

    Each tensor is made once and cut into its files; memory holds one of them, and one contiguous rectangle. `progress`
    is told the bytes of each tensor that is written. Raises CheckpointError when there is no room, or when the step is
    there already; what was there before stays.
    """
    root, name = checkpoints_folder(run_dir), step_name(step)
    if root.size(f"{name}/{MANIFEST}") is not None:
        raise CheckpointError(f"{root}/{name} is there already; choose another folder, or remove it first")
    with root.lock():
        draft = root.draft(name, sum(tensor.nbytes for tensor in tensors))
        try:
            files, entries = _write(root, draft, _by_file(tensors, cuts), cuts, progress)
            manifest = Manifest(step, dict(layout), dict(state), files, entries)
            root.publish(draft, name, manifest.to_json())
        except BaseException:
            root.discard(draft)
            raise
        root.replace_text(LATEST, name + "\n")
    return root.child(name).address


def _by_file(tensors: Sequence[NewTensor], cuts: Cuts) -> list[NewTensor]:
    """So that few files are open at a time: a file is done when the last of its tensors is."""
    return sorted(tensors, key=lambda tensor: min((box.file for box in cuts[tensor.key]), default=0))


def _write(
    root: Folder, draft: Draft, tensors: Sequence[NewTensor], cuts: Cuts, progress: Callable[[int], None]
) -> tuple[dict[str, FileMark], dict[str, Entry]]:
    """The files' marks, and all tensors with their places."""
    contents: dict[int, dict[str, Tensor]] = {}
    for tensor in tensors:
        for box in cuts[tensor.key]:
            like = torch.empty(box.sizes, dtype=tensor.dtype, device="meta")
            contents.setdefault(box.file, {})[_name(tensor, box)] = like
    left = {file: len(content) for file, content in contents.items()}
    marks: dict[str, FileMark] = {}
    crcs: dict[str, int] = {}
    with ExitStack() as outer:
        opened: dict[int, tuple[TensorWriter, ExitStack]] = {}
        for tensor in tensors:
            whole = tensor.make()
            assert whole.shape == tensor.shape and whole.dtype == tensor.dtype, tensor.key
            for box in cuts[tensor.key]:
                if box.file not in opened:
                    stack = outer.enter_context(ExitStack())
                    file = stack.enter_context(root.writer(draft.path + _file_name(box.file)))
                    opened[box.file] = stack.enter_context(TensorWriter(file, contents[box.file])), stack
                writer, stack = opened[box.file]
                place = tuple(slice(at, at + size) for at, size in zip(box.offset, box.sizes, strict=True))
                writer.add(whole[place])
                left[box.file] -= 1
                if not left[box.file]:
                    stack.close()
                    marks[draft.prefix + _file_name(box.file)] = writer.written.mark
                    crcs |= writer.written.crc32
            del whole
            progress(tensor.nbytes)
    entries = {tensor.key: _entry(tensor, cuts[tensor.key], draft, crcs) for tensor in tensors}
    return marks, entries


def _entry(tensor: NewTensor, boxes: Sequence[Rectangle], draft: Draft, crcs: Mapping[str, int]) -> Entry:
    pieces = tuple(
        Piece(box.offset, box.sizes, draft.prefix + _file_name(box.file), _name(tensor, box), crcs[_name(tensor, box)])
        for box in boxes
    )
    return Entry(tensor.shape, str(tensor.dtype).removeprefix("torch."), pieces)


def _name(tensor: NewTensor, box: Rectangle) -> str:
    return f"{tensor.key}@{','.join(map(str, box.offset))}"


def _file_name(number: int) -> str:
    return f"rank_{number:05d}.safetensors"
