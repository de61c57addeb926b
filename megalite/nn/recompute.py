"""Activation checkpointing (Chen et al., 2016, arXiv:1604.06174): backward computes again what forward does not keep.

A region is a call whose saved tensors are dropped and made again, all at once, when backward needs the first of them.
Masks are stateless and routers deterministic, so the second run gives the same bits with no generator to restore. It
stops at the last tensor that is needed, and can reuse the results of the first run's collectives (DeepSpeed-TED, Singh
et al., 2023, arXiv:2303.06318). The input that is kept can be cut over ranks that all have it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from megalite.axis import Axis, LastCall, Stash
from megalite.kernels.saved import Saved, chain, region_saved

T = TypeVar("T")

PARTS = ("attention", "mlp", "norm")
"""What `selective` can name: of each layer what mixes positions, the feed-forward or experts, and the two norms."""

_COUNTED = re.compile(r"(every|block):([1-9]\d*)")


def recompute_problem(text: str) -> str | None:
    """Why `text` is not a `train.recompute`, if it is not."""
    kind, _, parts = text.partition(":")
    if text in ("none", "full", "selective") or _COUNTED.fullmatch(text):
        return None
    if kind == "selective" and parts and set(parts.split(",")) <= set(PARTS):
        return None
    return (
        f"train.recompute={text!r} should be none, full, every:K, block:N (whole numbers from 1), selective, or"
        f" selective: with some of {','.join(PARTS)}"
    )


@dataclass(frozen=True)
class Recompute:
    """What backward computes again, of the layers of a stage.

    every: layers to a region, from whose one input they are computed again; 0 if there are no such regions.
    first: how many layers of the stage are in regions (None: all). parts: what is, of each layer outside of regions.
    line: the rank's collectives, if their results are kept for the second run. cut_over: ranks that have the same
    inputs, if each keeps its part of them alone.
    """

    every: int = 0
    first: int | None = None
    parts: frozenset[str] = field(default_factory=frozenset)
    line: LastCall | None = None
    cut_over: Axis | None = None

    @staticmethod
    def parse(text: str, line: LastCall | None = None, cut_over: Axis | None = None) -> Recompute:
        """From `train.recompute`; raises ValueError."""
        if (problem := recompute_problem(text)) is not None:
            raise ValueError(problem)
        kind, _, detail = text.partition(":")
        if kind == "selective":
            parts = frozenset(detail.split(",") if detail else ["attention"])
            return Recompute(parts=parts, line=line, cut_over=cut_over)
        if kind == "block":
            return Recompute(every=1, first=int(detail), line=line, cut_over=cut_over)
        return Recompute(every=int(detail or 1) if kind != "none" else 0, line=line, cut_over=cut_over)

    def run(self, layers: Iterable[Callable[[Tensor, T], Tensor]], x: Tensor, context: T) -> Tensor:
        """x through all layers, in regions as far as they are asked for."""
        left = iter(layers)
        in_regions = islice(left, self.first) if self.every else iter(())
        while group := tuple(islice(in_regions, self.every)):
            x = region(_through, x, group, context, line=self.line, cut_over=self.cut_over)
        return _through(x, tuple(left), context)

    def branch(
        self, part: str, norm: Callable[[Tensor], Tensor], block: Callable[[Tensor, T], Any], x: Tensor, context: T
    ) -> Any:
        """block(norm(x), context), where `part` names the block; what `parts` has of it is computed again."""
        again = part in self.parts
        if again and "norm" in self.parts:
            return region(lambda x: block(norm(x), context), x, line=self.line, cut_over=self.cut_over)
        if again:
            return region(block, norm(x), context, line=self.line, cut_over=self.cut_over)
        if "norm" in self.parts:
            return without_keeping(norm, x, lambda y: block(y, context))
        return block(norm(x), context)

    def run_saved(self, layers: Sequence[Saved], entering: int) -> Saved:
        """What `run` keeps of layers that declare `layers`, each of which takes a tensor of `entering` bytes."""
        in_regions = min(len(layers), self.first if self.first is not None else len(layers)) if self.every else 0
        regions = [
            layers[begin : min(begin + self.every, in_regions)] for begin in range(0, in_regions, self.every or 1)
        ]
        return chain(*(self._region(chain(*group), entering) for group in regions), *layers[in_regions:])

    def branch_saved(self, part: str, norm: Saved, block: Saved, entering: int) -> Saved:
        """What `branch` keeps of a norm and a block that take a tensor of `entering` bytes."""
        again = part in self.parts
        if again and "norm" in self.parts:
            return self._region(chain(norm, block), entering)
        if again:
            return chain(norm, self._region(block, entering))
        if "norm" in self.parts:
            return chain(norm, replace(block, input=0, again=max(block.again, block.input)))
        return chain(norm, block)

    def block_saved(self, part: str, block: Saved, entering: int) -> Saved:
        """The same of a block that takes the tensor as it is, without a norm."""
        return self._region(block, entering) if part in self.parts else block

    def _region(self, inside: Saved, entering: int) -> Saved:
        saved = region_saved(inside, entering, stashes=self.line is not None)
        if self.cut_over is None or self.cut_over.size == 1:
            return saved
        # A part of the input is a copy of its own, and the whole of it comes again.
        part = entering // self.cut_over.size
        return replace(saved, input=0, own=saved.own + part, again=saved.again + entering)


def _through(x: Tensor, layers: Iterable[Callable[[Tensor, T], Tensor]], context: T) -> Tensor:
    for layer in layers:
        x = layer(x, context)
    return x


def region(
    function: Callable[..., T], x: Tensor, *rest: Any, line: LastCall | None = None, cut_over: Axis | None = None
) -> T:
    """function(x, *rest), of which only `x` is kept for backward; what else enters must not change until then.

    With `line`, the results of its sums and exchanges are kept, too, and the second run does not communicate them.
    With `cut_over`, whose ranks must all have the same x, each keeps a part of it and gathers it for the second run.
    Backward can go through it once. Without gradients it is a plain call.
    """
    if not torch.is_grad_enabled():
        return function(x, *rest)
    kept = _Part(x, cut_over) if cut_over is not None and cut_over.size > 1 else _Whole(x)
    made = _Region(lambda x: function(x, *rest), kept, x.requires_grad, line)
    with saved_tensors_hooks(made.pack, made.unpack), made.first_run():
        return function(x, *rest)


class _Enough(Exception):
    """The second run has made the last tensor that backward needs."""


class _Whole:
    """An input as it is. Not x itself: its graph would keep the region, and the region its graph."""

    def __init__(self, x: Tensor):
        self._x, self._version = x.detach(), x._version

    def __call__(self) -> Tensor:
        assert self._x._version == self._version, "the input of a recomputed region was changed in place"
        return self._x.detach()


class _Part:
    """This rank's part of an input that all ranks of `axis` have (Korthikanti et al., 2022, arXiv:2205.05198)."""

    def __init__(self, x: Tensor, axis: Axis):
        self._axis, self._shape = axis, x.shape
        size = -(-x.numel() // axis.size)
        mine = x.detach().reshape(-1)[axis.rank * size : (axis.rank + 1) * size]
        self._part = x.new_zeros(size)
        self._part[: mine.numel()] = mine

    def __call__(self) -> Tensor:
        return self._axis.all_gather(self._part)[: self._shape.numel()].view(self._shape)


class _Region:
    """The tensors that a call saves, by number, while they are not there and after they have come again."""

    def __init__(
        self, function: Callable[[Tensor], Any], kept: Callable[[], Tensor], needs_grad: bool, line: LastCall | None
    ):
        self._function, self._kept, self._needs_grad = function, kept, needs_grad
        self._line, self._stash, self._num_results = line, Stash() if line is not None else None, 0
        self._shapes: list[torch.Size] = []
        self._again: dict[int, Tensor] | None = None

    @contextmanager
    def first_run(self) -> Iterator[None]:
        """Collects the results of collectives that the second run will ask for."""
        with self._stashing():
            yield
        if self._stash is not None:
            self._stash.truncate(self._num_results)  # the second run ends before the others

    @contextmanager
    def _stashing(self) -> Iterator[None]:
        if self._line is None:
            yield
            return
        before, self._line.stash = self._line.stash, self._stash
        try:
            yield
        finally:
            self._line.stash = before

    def pack(self, tensor: Tensor) -> int:
        """Drops a tensor that the call saves; returns its number."""
        self._shapes.append(tensor.shape)
        self._num_results = len(self._stash) if self._stash is not None else 0
        return len(self._shapes) - 1

    def unpack(self, number: int) -> Tensor:
        """The tensor, made again with all others when it is the first one asked for; each is given away once."""
        if self._again is None:
            self._again = self._second_run()
        if number not in self._again:
            raise RuntimeError("backward went a second time through what it computes again (train.recompute)")
        return self._again.pop(number)

    def _second_run(self) -> dict[int, Tensor]:
        made: dict[int, Tensor] = {}

        def pack(tensor: Tensor) -> None:
            number = len(made)
            expected = self._shapes[number]
            assert tensor.shape == expected, f"the second run saves {tensor.shape} where the first saved {expected}"
            made[number] = tensor.detach()
            if len(made) == len(self._shapes):
                raise _Enough

        if self._stash is not None:
            self._stash.replay()
        x = self._kept().requires_grad_(self._needs_grad)
        with torch.enable_grad(), saved_tensors_hooks(pack, _never), self._stashing(), suppress(_Enough):
            self._function(x)
        if len(made) < len(self._shapes):
            raise RuntimeError(f"the second run of a region saves {len(made)} tensors, the first {len(self._shapes)}")
        self._stash = None
        return made


def _never(_: None) -> Tensor:
    raise AssertionError("the graph of a second run has no backward pass")


def without_keeping(function: Callable[[Tensor], Tensor], x: Tensor, consumer: Callable[[Tensor], T]) -> T:
    """consumer(function(x)), where what the consumer saves of function's result is made again from x in backward.

    For cheap functions that keep their input anyway; nothing else of the consumer is computed again.
    """
    y = function(x)
    if not y.requires_grad:
        return consumer(y)
    kept, version, memory = x.detach(), x._version, y.untyped_storage()._cdata

    def pack(tensor: Tensor) -> Tensor | _Place:
        if tensor.untyped_storage()._cdata != memory:
            return tensor
        return _Place(tensor.shape, tensor.stride(), int(tensor.storage_offset()))

    def unpack(packed: Tensor | _Place) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        assert kept._version == version, "the input of a recomputed norm was changed in place"
        with torch.no_grad():
            return function(kept).as_strided(packed.shape, packed.stride, packed.offset)

    with saved_tensors_hooks(pack, unpack):
        return consumer(y)


@dataclass(frozen=True)
class _Place:
    """A view of memory that is not kept."""

    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
