"""SwiGLU, GeGLU (Shazeer, 2020, arXiv:2002.05202) and GELU (tanh form), saving nothing but their inputs.

On a CPU the work goes through a cacheful of rows at a time, so temporaries never reach memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .saved import Saved, size_of

_CHUNK = 1 << 18  # elements in a cacheful


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, [..., f] each; the two may be strided halves of one tensor."""
    return _SwiGLU.apply(gate, up)


def swiglu_packed(gate_up: Tensor) -> Tensor:
    """silu(gate) * up for gate_up [..., 2f] that holds gate, then up: its gradient comes in one tensor too."""
    return _PackedSwiGLU.apply(gate_up)


def geglu(gate: Tensor, up: Tensor) -> Tensor:
    """gelu(gate) * up in the tanh form, [..., f] each; the two may be strided halves of one tensor."""
    return gelu(gate) * up


def geglu_packed(gate_up: Tensor) -> Tensor:
    """gelu(gate) * up in the tanh form for gate_up [..., 2f] that holds gate, then up."""
    return _PackedGeGLU.apply(gate_up)


def gelu(x: Tensor, bias: Tensor | None = None) -> Tensor:
    """gelu(x + bias) in the tanh form, for x [..., f] and bias [f]."""
    return _Gelu.apply(x, bias)


def activation_saved(shape: Sequence[int], dtype: torch.dtype) -> Saved:
    """What each of them keeps of the tensor that enters: that tensor."""
    return Saved(input=size_of(shape, dtype))


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        out = torch.empty_like(gate, memory_format=torch.contiguous_format)
        _swiglu_forward(gate, up, out)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        gate, up = ctx.saved_tensors
        dgate, dup = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (gate, up))
        _swiglu_backward(grads[0], gate, up, dgate, dup)
        return dgate, dup


class _PackedSwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        gate, up = gate_up.chunk(2, -1)
        out = torch.empty_like(gate, memory_format=torch.contiguous_format)
        _swiglu_forward(gate, up, out)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        dgate_up = torch.empty_like(gate_up, memory_format=torch.contiguous_format)
        _swiglu_backward(grads[0], *gate_up.chunk(2, -1), *dgate_up.chunk(2, -1))
        return dgate_up


class _PackedGeGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        gate, up = gate_up.chunk(2, -1)
        out = torch.empty_like(gate, memory_format=torch.contiguous_format)
        for gate_part, up_part, out_part in row_chunks(gate, up, out):
            torch.mul(F.gelu(gate_part.contiguous(), approximate="tanh"), up_part, out=out_part)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        dgate_up = torch.empty_like(gate_up, memory_format=torch.contiguous_format)
        parts = *gate_up.chunk(2, -1), *dgate_up.chunk(2, -1)
        for dy, gate, up, dgate, dup in row_chunks(grads[0], *parts):
            gate = gate.contiguous()
            torch.mul(F.gelu(gate, approximate="tanh"), dy, out=dup)
            dgate.copy_(torch.ops.aten.gelu_backward(dy * up, gate, approximate="tanh"))
        return dgate_up


class _Gelu(torch.autograd.Function):
    """Adds the bias again in backward instead of keeping the sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, bias)
        return F.gelu(x if bias is None else x + bias, approximate="tanh")

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, bias = ctx.saved_tensors
        dx = torch.ops.aten.gelu_backward(grads[0], x if bias is None else x + bias, approximate="tanh")
        if bias is None:
            return dx, None
        dbias = dx.flatten(0, -2).sum(0, dtype=torch.promote_types(dx.dtype, torch.float32))
        return dx, dbias.to(bias.dtype)


def _swiglu_forward(gate: Tensor, up: Tensor, out: Tensor) -> None:
    for gate_part, up_part, out_part in row_chunks(gate, up, out):
        # torch's CPU silu runs at half speed on strided rows: a copy is cheaper.
        torch.mul(F.silu(gate_part.contiguous()), up_part, out=out_part)


def _swiglu_backward(dout: Tensor, gate: Tensor, up: Tensor, dgate: Tensor, dup: Tensor) -> None:
    for dy, gate_part, up_part, dgate_part, dup_part in row_chunks(dout, gate, up, dgate, dup):
        gate_part = gate_part.contiguous()
        torch.mul(F.silu(gate_part), dy, out=dup_part)
        dgate_part.copy_(torch.ops.aten.silu_backward(dy * up_part, gate_part))


def row_chunks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Matching row slices of tensors [..., f], as matrices; one slice of everything off the CPU."""
    width = tensors[0].shape[-1]
    rows = [x.flatten(0, -2) if x.ndim > 1 else x.unsqueeze(0) for x in tensors]
    count = rows[0].shape[0]
    step = max(1, _CHUNK // max(1, width)) if tensors[0].device.type == "cpu" else max(1, count)
    for start in range(0, count, step):
        yield tuple(x[start : start + step] for x in rows)
