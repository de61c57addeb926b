"""Where each tensor of a model is in a checkpoint of Hugging Face: rules that are read in both directions.

A table gives for each module of ours, named without its layer and without `.weight` or `.bias`, the place of its
tensors. Whoever imports makes a tensor of ours and copies their parts into it; whoever exports does the reverse: both
by the same pair of views, so that one direction cannot be right and the other wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megalite.nn.config import ModelConfig

View = Callable[[Tensor], Tensor]
Shape = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Link:
    """A part of a tensor of ours that is a part of one of theirs: views of one shape."""

    ours: str
    theirs: str
    of_ours: View
    of_theirs: View


@dataclass(frozen=True)
class Links:
    """How a whole model lies in theirs."""

    links: tuple[Link, ...]
    shapes: Mapping[str, Shape]
    """Their tensors."""


@dataclass(frozen=True)
class Place:
    """The tensor `name` of theirs; several of ours with one place lie in it one after another, in the table's order.

    dim: the one along which they do, in the views.
    """

    name: str
    dim: int = 0

    def of_ours(self, tensor: Tensor, model: ModelConfig) -> Tensor:
        """A view of one of ours in which it is a slice along `dim` of the view of theirs."""
        return tensor

    def of_theirs(self, tensor: Tensor, model: ModelConfig) -> Tensor:
        """A view of theirs, of which ours are slices."""
        return tensor

    def shape(self, view: Shape) -> Shape:
        """Their shape, if their view has that one."""
        return view


class Transposed(Place):
    """Matrices lie as [in, out] (GPT-2's Conv1D); biases are what they are."""

    def of_theirs(self, tensor: Tensor, model: ModelConfig) -> Tensor:
        """[out, in]."""
        return tensor.t() if tensor.dim() == 2 else tensor

    def shape(self, view: Shape) -> Shape:
        """[in, out]."""
        return tuple(reversed(view))


@dataclass(frozen=True)
class PerHead(Place):
    """Each head has its part of each of ours in turn: q, k and v of the first head, those of the second (GPT-NeoX)."""

    dim: int = 1

    def of_ours(self, tensor: Tensor, model: ModelConfig) -> Tensor:
        """[heads, rows of a head, ..]."""
        return tensor.unflatten(0, (model.num_heads, -1))

    def of_theirs(self, tensor: Tensor, model: ModelConfig) -> Tensor:
        """[heads, rows of a head, ..]."""
        return tensor.unflatten(0, (model.num_heads, -1))

    def shape(self, view: Shape) -> Shape:
        """[rows, ..]."""
        return (view[0] * view[1], *view[2:])


@dataclass(frozen=True)
class Viewed(Place):
    """Theirs is `view` of ours, such as one with another dim of size 1. For a tensor that has theirs for itself."""

    view: View = lambda tensor: tensor

    def of_ours(self, tensor: Tensor, model: ModelConfig) -> Tensor:
        """As theirs."""
        return self.view(tensor)


@dataclass(frozen=True)
class Experts:
    """One tensor for each expert and each of `parts` (gate, up); ours [E, sum of parts, ..] has all in one.

    parts: their names, with {} for the number of the expert. stacked: what another version of theirs calls the same
    tensor as ours; read, and written where it was read.
    """

    parts: tuple[str, ...]
    stacked: str | None = None


Spot = str | Place | Experts
Table = Mapping[str, Spot]
"""Our module (or tensor, where it is neither a weight nor a bias) -> its place; a str is a `Place`."""


@dataclass(frozen=True)
class _Ours:
    """A tensor of ours, its place, and the name of that."""

    name: str
    shape: Shape
    place: Place | Experts
    theirs: str
    """The prefix of its layer."""
    suffix: str


def find_links(
    tensors: Mapping[str, Shape],
    model: ModelConfig,
    *,
    outside: Table,
    layer: Callable[[ModelConfig, int], Table],
    prefix: str,
    known: frozenset[str] | None = None,
) -> Links:
    """Looks all of our `tensors` up.

    outside, layer: the tables of what is in no layer, and of a layer. prefix: of the names of a layer, with {} for its
    number. known: the names that there are, where a table gives a choice. Raises KeyError for one that has no place.
    """
    found = [_look_up(name, shape, model, outside, layer, prefix) for name, shape in tensors.items()]
    links: list[Link] = []
    shapes: dict[str, Shape] = {}
    together: dict[str, list[_Ours]] = {}
    for one in found:
        if isinstance(one.place, Place):
            together.setdefault(one.theirs + one.place.name + one.suffix, []).append(one)
    for one in found:
        if isinstance(one.place, Experts):
            _link_experts(one, one.place, known, links, shapes)
        elif (group := together.pop(one.theirs + one.place.name + one.suffix, None)) is not None:
            _link_group(one.theirs + one.place.name + one.suffix, group, model, links, shapes)
    return Links(tuple(links), shapes)


def _look_up(
    name: str,
    shape: Shape,
    model: ModelConfig,
    outside: Table,
    layer: Callable[[ModelConfig, int], Table],
    prefix: str,
) -> _Ours:
    table, rest, before = outside, name, ""
    if name.startswith("layers."):
        _, number, rest = name.split(".", 2)
        table, before = layer(model, int(number)), prefix.format(number)
    module, _, kind = rest.rpartition(".")
    suffix = f".{kind}"
    if rest in table or kind not in ("weight", "bias"):
        module, suffix = rest, ""
    place = table[module]
    return _Ours(name, shape, Place(place) if isinstance(place, str) else place, before, suffix)


def _link_group(
    theirs: str, group: Sequence[_Ours], model: ModelConfig, links: list[Link], shapes: dict[str, Shape]
) -> None:
    place = group[0].place
    assert isinstance(place, Place) and all(one.place == place for one in group), f"{theirs} has two rules"
    views = [place.of_ours(_empty(one.shape), model).shape for one in group]
    total = list(views[0])
    total[place.dim] = sum(view[place.dim] for view in views) if total else 0
    shapes[theirs] = place.shape(tuple(total))
    begin = 0
    for one, view in zip(group, views, strict=True):
        links.append(
            Link(
                ours=one.name,
                theirs=theirs,
                of_ours=lambda tensor, place=place: place.of_ours(tensor, model),
                of_theirs=_slice(place, model, begin, view[place.dim]),
            )
        )
        begin += view[place.dim]


def _slice(place: Place, model: ModelConfig, begin: int, size: int) -> View:
    return lambda tensor: place.of_theirs(tensor, model).narrow(place.dim, begin, size)


def _link_experts(
    one: _Ours, place: Experts, known: frozenset[str] | None, links: list[Link], shapes: dict[str, Shape]
) -> None:
    stacked = one.theirs + (place.stacked or "")
    if place.stacked is not None and known is not None and stacked in known:
        shapes[stacked] = one.shape
        links.append(Link(ours=one.name, theirs=stacked, of_ours=_whole, of_theirs=_whole))
        return
    size = one.shape[1] // len(place.parts)
    for expert in range(one.shape[0]):
        for number, part in enumerate(place.parts):
            theirs = one.theirs + part.format(expert)
            shapes[theirs] = (size, *one.shape[2:])
            links.append(Link(ours=one.name, theirs=theirs, of_ours=_of_expert(expert, number, size), of_theirs=_whole))


def _of_expert(expert: int, part: int, size: int) -> View:
    return lambda tensor: tensor[expert].narrow(0, part * size, size)


def _whole(tensor: Tensor) -> Tensor:
    return tensor


def _empty(shape: Shape) -> Tensor:
    return torch.empty(shape, device="meta")


def by_ours(links: Links) -> Iterator[tuple[str, list[Link]]]:
    """Each tensor of ours with its links."""
    found: dict[str, list[Link]] = {}
    for link in links.links:
        found.setdefault(link.ours, []).append(link)
    yield from found.items()


def by_theirs(links: Links) -> Iterator[tuple[str, list[Link]]]:
    """Each tensor of theirs with its links."""
    found: dict[str, list[Link]] = {}
    for link in links.links:
        found.setdefault(link.theirs, []).append(link)
    yield from found.items()
