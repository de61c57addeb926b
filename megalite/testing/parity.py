"""A layer of your own, checked: the same on one rank and cut over tp, forward, backward and in what it says of itself.

The layer is built on one rank and under each layout in float64 with layout-invariant initial values, gets the same
global input, and every piece of every tensor is compared with the global tensor of one rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from megalite.layout import Layout, parse_layout
from megalite.mpu import ParallelState
from megalite.parallel.collectives import part_sizes
from megalite.parallel.random import hashed_normal, initialize, normal_
from megalite.parallel.shard import Shard, copies_axis, shard_of
from megalite.testing.world import World

TOLERANCE = 1e-10
_NOISE = 1e-6
"""A tensor that is far smaller than the largest of its kind is measured against this part of the largest."""

Rectangle = tuple[tuple[int, ...], tuple[int, ...]]


class ParityError(AssertionError):
    """A layout's result differs from one rank's, or a shard attribute is wrong; the message names the first tensor."""


@dataclass(frozen=True)
class _Setup:
    """What every rank does."""

    build: Callable[..., nn.Module]
    args: tuple[Any, ...]
    inputs: tuple[Tensor, ...]
    call: Callable[..., Tensor]
    seed: int


@dataclass
class _Reference:
    """One rank's tensors, all global. Values and gradients by parameter name."""

    output: Tensor
    input_grads: list[Tensor | None]
    values: dict[str, Tensor] = field(default_factory=dict)
    grads: dict[str, Tensor] = field(default_factory=dict)
    marks: dict[str, str] = field(default_factory=dict)


@dataclass
class _Observed:
    """What a rank of a layout finds: (tensor, relative difference, remark) in order, and what it holds and owns."""

    differences: list[tuple[str, float, str]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    holds: dict[str, list[Rectangle]] = field(default_factory=dict)
    owns: dict[str, list[Rectangle]] = field(default_factory=dict)


def call_module(module: nn.Module, *inputs: Tensor) -> Tensor:
    """The default `call`: the module itself."""
    return module(*inputs)


def check_parallel_module(
    build: Callable[..., nn.Module],
    *args: Any,
    inputs: Sequence[Tensor],
    layouts: Sequence[str] = ("tp2", "tp2+sp", "tp4"),
    call: Callable[..., Tensor] = call_module,
    world: World | None = None,
    seed: int = 1,
    tolerance: float = TOLERANCE,
    timeout: float = 60.0,
) -> dict[str, float]:
    """Compares `build(*args, mpu)` under each of `layouts` with one rank; returns the largest difference by layout.

    inputs: global tensors [s, b, ..]; floating ones become float64 and, under sequence parallelism, are cut along
    dim 0, others stay whole. call(module, *inputs) returns the output: a tensor, whole or with one dim cut over tp.
    Functions and classes must be importable: at the top of a module. Compared are initial values, output, gradients
    of inputs and of every parameter; checked is that `param.shard` describes the layer: the pieces of all ranks tile
    the global tensor, each element has one owner, `partial` names the axes of partial sums.

    A difference is max|a - b| / max(max|reference|, 1e-6 x the largest of that kind). Raises ParityError that names
    the first tensor above `tolerance`, and ValueError for layouts that cut more than a layer (pp, cp, ep).
    """
    parsed = [parse_layout(text) for text in layouts]
    for text, layout in zip(layouts, parsed, strict=True):
        if layout.num_ranks != layout.parallel.tp * layout.dp or layout.parallel.ep * layout.parallel.etp > 1:
            raise ValueError(f"layout {text!r}: a layer by itself is checked over tp, sp and dp only")
    doubled = tuple(x.detach().double() if x.is_floating_point() else x for x in inputs)
    setup = _Setup(build, args, doubled, call, seed)
    if world is None:
        with World() as own:
            return _check(own, setup, list(zip(layouts, parsed, strict=True)), tolerance, timeout)
    return _check(world, setup, list(zip(layouts, parsed, strict=True)), tolerance, timeout)


def _check(
    world: World, setup: _Setup, layouts: list[tuple[str, Layout]], tolerance: float, timeout: float
) -> dict[str, float]:
    (reference,) = world.run(_run_reference, setup, ranks=1, timeout=timeout)
    worst = {}
    for text, layout in layouts:
        observed = world.run(
            _observe, setup, reference, layout=layout.parallel, ranks=layout.num_ranks, timeout=timeout
        )
        worst[text] = _judge(text, observed, reference, tolerance)
    return worst


def _judge(layout: str, observed: Sequence[_Observed], reference: _Reference, tolerance: float) -> float:
    """Raises for the first thing wrong, ranks in order; returns the largest difference."""
    for rank, found in enumerate(observed):
        if found.problems:
            raise ParityError(f"{layout}, rank {rank}: " + "\n".join(found.problems))
    for name, value in reference.values.items():
        _check_tiling(layout, name, value, observed)
    for place in range(len(observed[0].differences)):
        for rank, found in enumerate(observed):
            name, difference, remark = found.differences[place]
            if not difference <= tolerance:
                raise ParityError(f"{layout}, rank {rank}: {name} differs from one rank by {difference:.1e}{remark}")
    return max((d for found in observed for _, d, _ in found.differences), default=0.0)


def _check_tiling(layout: str, name: str, value: Tensor, observed: Sequence[_Observed]) -> None:
    """Every element is held, and owned exactly once."""
    held, owned = torch.zeros(value.shape, dtype=torch.int32), torch.zeros(value.shape, dtype=torch.int32)
    for found in observed:
        for offset, sizes in found.holds[name]:
            held[_window(offset, sizes)] += 1
        for offset, sizes in found.owns.get(name, []):
            owned[_window(offset, sizes)] += 1
    missing = int((held == 0).sum())
    if missing:
        raise ParityError(
            f"{layout}: {missing} of {value.numel()} elements of {name} are on no rank, by shard.pieces()"
        )
    if not bool((owned == 1).all()):
        wrong = int((owned != 1).sum())
        raise ParityError(
            f"{layout}: {wrong} of {value.numel()} elements of {name} have not exactly one owner;"
            " see shard.cuts and shard.partial"
        )


def _window(offset: tuple[int, ...], sizes: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(start, start + length) for start, length in zip(offset, sizes, strict=True))


def _built(mpu: ParallelState, setup: _Setup) -> nn.Module:
    module = setup.build(*setup.args, mpu).double()
    initialize(module, setup.seed)
    return module


@torch.no_grad()
def _stir(module: nn.Module, seed: int) -> None:
    """Moves every parameter off its initial value: a bias of zero hides that it is added once on every rank."""
    for parameter in module.parameters():
        noise = torch.empty_like(parameter)
        normal_(noise, seed + 1, 0.3, shard_of(parameter))
        parameter += noise


def _output(setup: _Setup, module: nn.Module, inputs: Sequence[Tensor]) -> Tensor:
    output = setup.call(module, *inputs)
    if not isinstance(output, Tensor):
        raise TypeError(
            f"the module returned {type(output).__name__}, not a tensor: pass call=, a function of (module, *inputs)"
            " that returns one tensor"
        )
    return output


def _grad_of_output(shape: torch.Size) -> Tensor:
    return hashed_normal(torch.arange(shape.numel()), "gradient of the output", 0).view(shape)


def _run_reference(mpu: ParallelState, setup: _Setup) -> _Reference:
    module = _built(mpu, setup)
    inputs = [x.clone().requires_grad_(x.is_floating_point()) for x in setup.inputs]
    values = {name: p.detach().clone() for name, p in module.named_parameters()}
    marks = {name: _marks(shard_of(p)) for name, p in module.named_parameters()}
    _stir(module, setup.seed)
    output = _output(setup, module, inputs)
    output.backward(_grad_of_output(output.shape))
    grads = {name: _grad(p).clone() for name, p in module.named_parameters()}
    return _Reference(output.detach(), [x.grad for x in inputs], values, grads, marks)


def _grad(parameter: nn.Parameter) -> Tensor:
    return parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)


def _observe(mpu: ParallelState, setup: _Setup, reference: _Reference) -> _Observed:
    """Runs the layer under this layout and compares this rank's parts of everything."""
    module, found = _built(mpu, setup), _Observed()
    _check_shards(module, reference, found)
    if found.problems:
        return found
    _compare_values(module, mpu, reference, found)
    _stir(module, setup.seed)
    cut = mpu.config.sequence_parallel and mpu.tp.size > 1
    inputs = [_part(x, 0, mpu).clone() if cut and x.is_floating_point() else x.clone() for x in setup.inputs]
    for x in inputs:
        x.requires_grad_(x.is_floating_point())
    output = _output(setup, module, inputs)
    expected, part = _same_part(reference.output, output, mpu)
    if expected is None:
        found.problems.append(
            f"the output has shape {tuple(output.shape)}; one rank's {tuple(reference.output.shape)}, of which it is"
            " neither the whole nor one dim cut evenly over tp"
        )
        return found
    output.backward(_cut(_grad_of_output(reference.output.shape), part, mpu).contiguous())
    difference = _distance(output.detach(), expected) / _scale(reference.output, 0.0)
    found.differences.append(("output", difference, ""))
    _compare_input_grads(inputs, reference, found, cut, mpu)
    _compare_grads(module, mpu, reference, found)
    return found


def _check_shards(module: nn.Module, reference: _Reference, found: _Observed) -> None:
    """Names and global shapes are those of one rank."""
    parameters = dict(module.named_parameters())
    for name in sorted(parameters.keys() ^ reference.values.keys()):
        where = "under this layout" if name in parameters else "on one rank"
        found.problems.append(f"parameter {name} exists {where} only; names must not depend on the layout")
    for name in parameters.keys() & reference.values.keys():
        shard, whole = shard_of(parameters[name]), tuple(reference.values[name].shape)
        if shard.shape != whole:
            found.problems.append(
                f"parameter {name} has the global shape {shard.shape}, but {whole} on one rank;"
                " a layer that cuts it must say so: set_shard(parameter, Shard(name, global shape, cuts))"
            )
        if _marks(shard) != reference.marks[name]:
            found.problems.append(f"shard of {name} has {_marks(shard)}, but {reference.marks[name]} on one rank")
        for cut in shard.cuts:
            if any(start + length > whole[cut.dim] for start, length in cut.segments):
                found.problems.append(f"shard of {name}: segments {cut.segments} leave dim {cut.dim} of {whole}")


def _marks(shard: Shard) -> str:
    """What a shard says beside its shape; no layout changes it."""
    return f"decay={shard.decay}, group={shard.group}, tied_to={shard.tied_to}"


def _compare_values(module: nn.Module, mpu: ParallelState, reference: _Reference, found: _Observed) -> None:
    largest = _largest(reference.values.values())
    for name, parameter in module.named_parameters():
        shard = shard_of(parameter)
        rectangles = [(offset, sizes) for offset, sizes, _ in shard.pieces(parameter)]
        # Ranks with a copy for other data say the same; one of them speaks.
        found.holds[name] = rectangles if copies_axis(shard.group, mpu).is_first else []
        if shard.is_saver(mpu):
            found.owns[name] = rectangles
        difference = _compare_pieces(shard, parameter.detach(), reference.values[name], largest)
        found.differences.append((f"initial value of {name}", difference, ""))


def _compare_input_grads(
    inputs: Sequence[Tensor], reference: _Reference, found: _Observed, cut: bool, mpu: ParallelState
) -> None:
    largest = _largest([grad for grad in reference.input_grads if grad is not None])
    for number, (x, whole) in enumerate(zip(inputs, reference.input_grads, strict=True)):
        if whole is None:
            continue
        grad = x.grad if x.grad is not None else torch.zeros_like(x)
        difference = _distance(grad, _part(whole, 0, mpu) if cut else whole) / _scale(whole, largest)
        found.differences.append((f"gradient of input {number}", difference, ""))


def _compare_grads(module: nn.Module, mpu: ParallelState, reference: _Reference, found: _Observed) -> None:
    largest = _largest(reference.grads.values())
    for name, parameter in module.named_parameters():
        shard, whole = shard_of(parameter), reference.grads[name]
        alone = _grad(parameter).clone(memory_format=torch.contiguous_format)
        summed, over_tp = alone.clone(), alone.clone()
        for axis in shard.partial:
            axis.all_reduce(summed)
        # The shape of an uneven cut differs between ranks; such a parameter is no partial sum over tp.
        if not any(cut.axis.ranks == mpu.tp.ranks for cut in shard.cuts):
            mpu.tp.all_reduce(over_tp)
        difference = _compare_pieces(shard, summed, whole, largest)
        remark = ""
        if _compare_pieces(shard, over_tp, whole, largest) < 1e-9:
            remark = "; it is a partial sum over tp: shard.partial must name mpu.tp"
        elif shard.partial and _compare_pieces(shard, alone, whole, largest) < 1e-9:
            remark = "; it is whole on each rank already: shard.partial must be empty"
        found.differences.append((f"gradient of {name}", difference, remark))


def _compare_pieces(shard: Shard, local: Tensor, whole: Tensor, largest: float) -> float:
    pieces = [(view, whole[_window(offset, sizes)]) for offset, sizes, view in shard.pieces(local)]
    return max((_distance(a, b) for a, b in pieces), default=0.0) / _scale(whole, largest)


def _distance(a: Tensor, b: Tensor) -> float:
    """max|a - b|; infinite for unequal shapes and where anything is not a number."""
    if a.shape != b.shape:
        return math.inf
    distance = float((a - b).abs().max()) if a.numel() else 0.0
    return math.inf if math.isnan(distance) else distance


def _scale(whole: Tensor, largest: float) -> float:
    return max(_largest([whole]), _NOISE * largest, 1e-300)


def _largest(tensors: Iterable[Tensor]) -> float:
    return max((float(t.abs().max()) for t in tensors if t.numel()), default=0.0)


def _part(whole: Tensor, dim: int, mpu: ParallelState) -> Tensor:
    """This tp rank's part of `dim`."""
    return whole.split(part_sizes(whole.shape[dim], mpu.tp), dim)[mpu.tp.rank]


def _cut(whole: Tensor, dim: int | None, mpu: ParallelState) -> Tensor:
    return whole if dim is None else _part(whole, dim, mpu)


def _same_part(whole: Tensor, local: Tensor, mpu: ParallelState) -> tuple[Tensor | None, int | None]:
    """The part of `whole` that `local` should be, by its shape, and the dim that is cut (None: no dim)."""
    if whole.shape == local.shape:
        return whole, None
    for dim in range(whole.dim()):
        part = _part(whole, dim, mpu)
        if part.shape == local.shape:
            return part, dim
    return None, None
