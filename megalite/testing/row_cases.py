"""Production-size launches of the row and elementwise kernels: a few rows of the widths of 8B and 70B models."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from megalite.kernels.triton import activation, norm
from megalite.testing.kernel_cases import KernelCase

_ROWS = 4


def row_cases() -> list[KernelCase]:
    """All cases; the first of each operation has the sizes of an 8B model."""
    return [*_activation_cases(), *_norm_cases(), *_dropout_cases()]


def _activation_cases() -> list[KernelCase]:
    gated = {"swiglu": activation.swiglu_packed, "geglu": activation.geglu_packed}
    cases = [
        _case(f"{name} {width}", function, [_rows(2 * width)])
        for name, function in gated.items()
        for width in (14336, 28672)
    ]
    return [
        *cases,
        _case("bias-gelu 16384", activation.gelu, [_rows(16384), _vector(16384)]),
        _case("gelu 16384", activation.gelu, [_rows(16384)]),
    ]


def _norm_cases() -> list[KernelCase]:
    cases = []
    for width in (4096, 128, 2880, 8192, 16384):
        x, residual, weight, bias = _rows(width), _rows(width), _vector(width), _vector(width)
        cases += [
            _case(f"rms_norm {width}", norm.rms_norm, [x, weight], eps=1e-5),
            _case(f"layer_norm {width}", norm.layer_norm, [x, weight, bias], eps=1e-5),
            _case(f"rms_norm_add {width}", norm.rms_norm_add, [x, residual, weight], eps=1e-5),
            _case(f"layer_norm_add {width}", norm.layer_norm_add, [x, residual, weight, bias], eps=1e-5),
        ]
    return cases


def _case(
    name: str, function: Callable[..., Any], inputs: Sequence[Tensor], narrow: Iterable[str] = (), **options: Any
) -> KernelCase:
    """`function(*inputs, **options)`, and its backward if an input has a gradient."""

    def run() -> None:
        outputs = function(*inputs, **options)
        if any(x.requires_grad for x in inputs):
            outputs = outputs if isinstance(outputs, tuple) else (outputs,)
            torch.autograd.backward(outputs, [torch.zeros_like(y) for y in outputs])

    return KernelCase(name=name, run=run, narrow=frozenset(narrow))


def _rows(width: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.zeros(_ROWS, width, dtype=dtype, requires_grad=True)


def _vector(width: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.zeros(width, dtype=dtype, requires_grad=True)
