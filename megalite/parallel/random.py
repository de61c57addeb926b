"""Layout-invariant initial values: each element is a function of (seed, global name, flat global index) alone.

A rank draws exactly its shard and the global tensor is the same for every layout and on every device
(`torch.randn` is not: its stream depends on the sizes drawn and on the vector width of the CPU). Stateless dropout
follows the same idea and lives in `megalite.kernels.dropout`.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from megalite.parallel.shard import Segments, Shard, name_parameters, shard_of

_CHUNK = 1 << 16
"""Elements drawn at a time on the CPU, so that their float64 and int64 temporaries stay in the cache."""
_CUDA_CHUNK = 1 << 22
_DEFAULT_STD = 0.02


def _signed(value: int) -> int:
    """The 64-bit pattern of `value` as the int64 that torch wants."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value


def _mix(x: Tensor) -> Tensor:
    """The finaliser of splitmix64 (Steele et al., 2014, doi:10.1145/2660193.2660195) on int64, in place."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x.bitwise_xor_((x >> shift).bitwise_and_((1 << (64 - shift)) - 1)).mul_(_signed(factor))
    return x.bitwise_xor_((x >> 31).bitwise_and_((1 << 33) - 1))


def _uniform(bits: Tensor) -> Tensor:
    """float64 in (0, 1): the upper 52 bits, centred in their cell so that 0 and 1 never come."""
    return ((bits >> 12).bitwise_and_((1 << 52) - 1)).to(torch.float64).add_(0.5).mul_(2.0**-52)


def hashed_normal(index: Tensor, name: str, seed: int) -> Tensor:
    """Standard normal float64 values for int64 `index`: a 64-bit hash and Box-Muller."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=16).digest()
    key, second_key = (int.from_bytes(digest[i : i + 8], "little") for i in (0, 8))
    first = _mix(index * _signed(0x9E3779B97F4A7C15) + _signed(key))
    second = _mix(first ^ _signed(second_key))
    radius = _uniform(first).log_().mul_(-2.0).sqrt_()
    return radius.mul_(_uniform(second).mul_(2.0 * math.pi).cos_())


def _flat_index(
    offset: tuple[int, ...], sizes: tuple[int, ...], shape: tuple[int, ...], device: torch.device
) -> Tensor:
    """Flat global index of every element of a rectangle."""
    index = torch.zeros((), dtype=torch.int64, device=device)
    for dim, (start, length) in enumerate(zip(offset, sizes, strict=True)):
        stride = math.prod(shape[dim + 1 :])
        place = torch.arange(start, start + length, device=device) * stride
        index = index[..., None] + place
    return index


def element_index(shard: Shard, start: int, stop: int, device: torch.device) -> Tensor:
    """int64 [stop - start]: the flat global index of elements `start` to `stop` of this rank's part, as they lie."""
    rest, local = torch.arange(start, stop, device=device), shard.local_shape
    runs = {cut.dim: cut.segments for cut in shard.cuts}
    index, stride = torch.zeros_like(rest), 1
    for dim in reversed(range(len(local))):
        place = rest % local[dim] if dim else rest
        rest = rest // local[dim] if dim else rest
        index += _uncut(place, runs[dim]) * stride if dim in runs else place * stride
        stride *= shard.shape[dim]
    return index


def _uncut(place: Tensor, segments: Segments) -> Tensor:
    """Global places along a dim of which a rank holds `segments`."""
    if len(segments) == 1:
        return place + segments[0][0]
    starts, lengths = torch.tensor(segments, device=place.device).unbind(1)
    ends = lengths.cumsum(0)
    segment = torch.searchsorted(ends, place, right=True)
    return place + (starts - ends + lengths)[segment]


@torch.no_grad()
def normal_(parameter: Tensor, seed: int, std: float, shard: Shard | None = None) -> None:
    """Fills this rank's part of a parameter with its elements of the global N(0, std^2) tensor.

    Where the part is about to be divided (`shard.kept`), it fills what this rank keeps alone.
    """
    shard = shard if shard is not None else shard_of(parameter)
    if shard.kept is not None:
        parameter, shard = parameter.view(-1)[slice(*shard.kept)], replace(shard, run=shard.kept, kept=None)
    chunk = _CUDA_CHUNK if parameter.is_cuda else _CHUNK
    name = shard.tied_to or shard.name
    for offset, sizes, view in shard.pieces(parameter):
        rows = sizes[0] if sizes else 1
        step = max(1, chunk // max(1, math.prod(sizes[1:])))
        for row in range(0, rows, step):
            count = min(step, rows - row)
            place = (offset[0] + row, *offset[1:]) if sizes else ()
            index = _flat_index(place, (count, *sizes[1:]) if sizes else (), shard.shape, parameter.device)
            (view.narrow(0, row, count) if sizes else view).copy_(hashed_normal(index, name, seed).mul_(std))


@runtime_checkable
class Initializable(Protocol):
    """A module that knows the initial values of its own parameters."""

    def init_parameters(self, seed: int) -> None:
        """Fills the parameters that this module itself holds, by their global names."""
        ...


@torch.no_grad()
def _default_init(module: nn.Module, seed: int) -> None:
    """For modules that say nothing: matrices N(0, 0.02^2), biases 0, other vectors 1."""
    for name, parameter in module.named_parameters(recurse=False):
        if parameter.dim() > 1:
            normal_(parameter, seed, _DEFAULT_STD)
        else:
            parameter.fill_(0.0 if name.endswith("bias") else 1.0)


def initialize(module: nn.Module, seed: int, prefix: str = "") -> None:
    """Names every parameter by its path in `module` and fills it; the same global model results on every layout."""
    name_parameters(module, prefix)
    for child in module.modules():
        _fill(child, seed)


def initialize_held(modules: Sequence[nn.Module], parameters: Sequence[nn.Parameter], seed: int) -> None:
    """As `initialize` for a part of a model that has names: the modules in `modules` that hold `parameters`.

    Without parameters, those that hold none, but buffers. A module may not hold others beside.
    """
    left = set(parameters)
    for child in dict.fromkeys(child for module in modules for child in module.modules()):
        own = set(child.parameters(recurse=False))
        if own <= left if own else not parameters:
            _fill(child, seed)
            left -= own
        else:
            assert own.isdisjoint(left), f"parameters of one {type(child).__name__} are in several units"


def _fill(module: nn.Module, seed: int) -> None:
    """What the module itself holds."""
    if isinstance(module, Initializable):
        module.init_parameters(seed)
    else:
        _default_init(module, seed)
