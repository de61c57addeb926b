"""Process-wide CPU settings that a run makes once at start-up: float32 matrix products and malloc."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor

_ONEDNN: Any = torch.backends.mkldnn
_MAX_PROBE_ERROR = 1e-5
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3  # parameter numbers of glibc's mallopt


def set_fp32_gemm(choice: Literal["auto", "ieee", "onednn"]) -> str:
    """Chooses the library of float32 matrix products on the CPU; returns what was chosen and why, for the log.

    oneDNN is about twice as fast as MKL on AMD CPUs, but torch reaches it only through a switch that also *permits*
    bfloat16 inside. So it is used where a probe of the three layouts of a linear layer finds float32 accuracy, never
    on CPUs with AMX. A named "onednn" that fails the probe raises RuntimeError.
    """
    if choice == "ieee":
        _set_precision("ieee")
        return "ieee (asked for)"
    refusal = _onednn_refusal()
    if refusal is None:
        _set_precision("bf16")
        return "onednn (probe passed: float32 accuracy)"
    if choice == "onednn":
        raise RuntimeError(f"kernels.fp32_gemm=onednn is not possible here: {refusal}; use auto or ieee")
    _set_precision("ieee")
    return f"ieee ({refusal})"


def tune_malloc() -> bool:
    """Makes malloc keep large freed blocks instead of handing them back to the kernel; True where that worked.

    Every activation is otherwise mapped, page-faulted and unmapped anew in each step.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # a C library other than glibc
        return False
    settings = ((_M_MMAP_THRESHOLD, 1 << 30), (_M_TRIM_THRESHOLD, 3 << 29), (_M_TOP_PAD, 1 << 26))
    return all([mallopt(parameter, value) == 1 for parameter, value in settings])


def probe_onednn(rows: int = 512, features: int = 512, outputs: int = 1408) -> float:
    """Largest relative error of oneDNN float32 products against float64 in forward, dgrad and wgrad layout."""
    generator = torch.Generator().manual_seed(0)
    x, w, dy = (
        torch.rand(shape, generator=generator) + 1.0
        for shape in ((rows, features), (outputs, features), (rows, outputs))
    )
    with _precision("bf16"):
        return max(_relative_error(a, b) for a, b in ((x, w.t()), (dy, w), (dy.t(), x)))


def _onednn_refusal() -> str | None:
    if not _ONEDNN.is_available():
        return "this torch has no oneDNN"
    if torch.cpu._is_amx_tile_supported():
        return "AMX would compute in bfloat16"
    error = probe_onednn()
    return None if error < _MAX_PROBE_ERROR else f"probe error {error:.1e}, more than {_MAX_PROBE_ERROR:.0e}"


def _relative_error(a: Tensor, b: Tensor) -> float:
    exact = a.double() @ b.double()
    return ((a @ b - exact).abs() / exact.abs()).max().item()


def _set_precision(value: str) -> None:
    _ONEDNN.matmul.fp32_precision = value


@contextmanager
def _precision(value: str) -> Iterator[None]:
    before = _ONEDNN.matmul.fp32_precision
    _set_precision(value)
    try:
        yield
    finally:
        _set_precision(before)
