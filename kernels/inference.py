"""Operations without autograd, for a token at a time on a CPU: there each call costs more than what it computes."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from .chosen import Kernels
from .linear import linear


def for_inference(kernels: Kernels, device: torch.device) -> Kernels:
    """`kernels` for a model that nobody differentiates; results are the same but for rounding."""
    if device.type != "cpu":
        return kernels
    plain = {"rms_norm": rms_norm, "layer_norm": layer_norm, "rope": Turn(), "swiglu": swiglu_packed, "gelu": gelu}
    return replace(kernels, **plain, chosen={**kernels.chosen, **dict.fromkeys(plain, "inference")})


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `kernels.norm.rms_norm`."""
    return F.rms_norm(x, weight.shape, weight, eps)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """See `kernels.norm.layer_norm`."""
    return F.layer_norm(x, weight.shape, weight, bias, eps)


def swiglu_packed(x: Tensor) -> Tensor:
    """See `kernels.activation.swiglu_packed`."""
    gate, up = x.chunk(2, -1)
    return F.silu(gate).mul_(up)


def gelu(x: Tensor, bias: Tensor | None = None) -> Tensor:
    """See `kernels.activation.gelu`."""
    return F.gelu(x if bias is None else x + bias, approximate="tanh")


_PACKED_SIZE = 1 << 18
"""Elements that a matrix has at least, where products of a few rows gain by blocks more than each call costs."""


class Matrix:
    """x weight^T + bias with a matrix [outputs, inputs] that no longer changes, as it lies in memory."""

    def __init__(self, weight: Tensor):
        self.weight: Tensor | None = weight
        """None where it is nothing that other operations could read."""

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """[.., inputs] -> [.., outputs]."""
        assert self.weight is not None
        return linear(x, self.weight, bias)


class PackedMatrix(Matrix):
    """The same from the blocks that oneDNN would else make in every call, as torch.compile has it for inference.

    A product of 2 to 16 rows takes a fifth to a half less time, one of a single row up to a half more.
    """

    def __init__(self, weight: Tensor, rows: int):
        self.weight = None
        self._blocks: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), rows)

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """[.., inputs] -> [.., outputs]."""
        return torch.ops.mkldnn._linear_pointwise(x, self._blocks, bias, "none", [], "")


def matrix_for(weight: Tensor, rows: int = 1) -> Matrix:
    """A matrix for products that mostly have `rows` rows: packed where that is faster, else laid out for one row."""
    is_plain = weight.device.type == "cpu" and weight.dtype == torch.float32
    has_blocks = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
    if rows > 1 and is_plain and has_blocks and weight.numel() >= _PACKED_SIZE:
        return PackedMatrix(weight, rows)
    return Matrix(for_few_rows(weight))


def for_few_rows(weight: Tensor) -> Tensor:
    """The same matrix [outputs, inputs], laid out so that a linear of few rows reads it fastest.

    On a CPU a float32 matrix with more outputs than inputs is then one whose outputs are neighbours in memory.
    """
    if weight.device.type != "cpu" or weight.dtype != torch.float32 or weight.shape[0] <= weight.shape[1]:
        return weight
    return weight.t().contiguous().t()


class Turn:
    """`kernels.rope.apply_rope`; keeps what it made of the tables of its last call: the layers of a step share them."""

    def __init__(self) -> None:
        self._tables: tuple[Tensor, Tensor] | None = None
        self._whole: tuple[Tensor, Tensor] | None = None

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, num_turned: int | None = None) -> Tensor:
        """x [s, b, heads, d] turned by tables [s, b, r / 2], r <= d, but for heads from num_turned on."""
        if num_turned is not None and num_turned < x.shape[2]:
            return torch.cat((self(x[:, :, :num_turned], cos, sin), x[:, :, num_turned:]), 2)
        if self._whole is None or self._tables is None or self._tables[0] is not cos or self._tables[1] is not sin:
            self._tables = (cos, sin)
            self._whole = torch.cat((cos, cos), -1).unsqueeze(2), torch.cat((-sin, sin), -1).unsqueeze(2)
        cos, sin = self._whole
        size = cos.shape[-1]
        part = x if x.shape[-1] == size else x[..., :size]
        part = part.to(cos.dtype)
        out = (part * cos).addcmul_(part.roll(size // 2, -1), sin).to(x.dtype)
        return out if x.shape[-1] == size else torch.cat((out, x[..., size:]), -1)
