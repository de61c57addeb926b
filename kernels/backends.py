"""What a backend of an operation is: where its function lies, whether it can run here, and what it can do.

A check gives a reason against a backend, with the fix if there is one. Functions are imported when they are chosen, so
that nothing of Triton or an optional package is loaded elsewhere.
"""

from __future__ import annotations

import importlib
import os
import shutil
import sysconfig
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from .products import HALF, has_instructions

_GROUPED_MM_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_BLOCK_WINS_TO = 1024  # on CPUs with AVX-512, forward and backward: 1.1 to 1.6 times SDPA at 512, level at 2048
_TRITON_HEAD = 256
_FLASH_ATTN_HEAD = 256
_COMPILE_FROM = 512  # features; below, a call costs more than it saves, and a small run is over before it is compiled


@dataclass(frozen=True, kw_only=True)
class Traits:
    """What is asked of an operation, and where, as far as it is known; None (or 0) is not known, or not asked for."""

    device: torch.device | None = None
    dtype: torch.dtype | None = None
    """Of the activations."""
    width: int = 0
    """Features of a row."""
    compile: bool = True
    """Whether torch.compile may be used."""
    seq_len: int = 0
    """Positions of a row, for attention."""
    dropout: float = 0.0
    """Dropout probability on attention probabilities."""
    softcap: float = 0.0
    """Bound of attention scores."""
    window: int = 0
    """Sliding window of attention."""
    head_size: int = 0
    """Features of a query or key head of attention."""
    value_size: int = 0
    """Features of a value head, where it is not head_size."""

    @property
    def widest_head(self) -> int:
        """Features of the widest head."""
        return max(self.head_size, self.value_size)

    @property
    def on_gpu(self) -> bool:
        """Whether it is known to be on a GPU."""
        return self.device is not None and self.device.type == "cuda"


Check = Callable[[Traits], "str | None"]
"""A reason against a backend, or None; with the fix, if there is one."""


def _always(traits: Traits) -> bool:
    return True


def never(traits: Traits) -> bool:
    """Of a backend that `auto` never takes."""
    return False


@dataclass(frozen=True, kw_only=True)
class Backend:
    """One way to compute an operation."""

    path: str
    """"module:name" of the function, in this package."""
    bound: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments that are always given."""
    available: tuple[Check, ...] = ()
    """Whether it can run in this process: the package, the compiler, the device."""
    supports: tuple[Check, ...] = ()
    """Whether it can do what is asked."""
    wins: Callable[[Traits], bool] = _always
    """Whether `auto` may take it: where it is the fastest, of those after it in the list."""

    @property
    def fn(self) -> Any:
        """The function, imported now."""
        module, _, name = self.path.partition(":")
        function = getattr(importlib.import_module(f".{module}", __package__), name)
        return partial(function, **self.bound) if self.bound else function

    def problems(self, traits: Traits) -> list[str]:
        """All that speaks against it."""
        found = (check(traits) for check in (*self.supports, *self.available))
        return [problem for problem in found if problem is not None]


def compile_problem(traits: Traits) -> str | None:
    """Why torch.compile cannot make CPU code here."""
    if not traits.compile:
        return "is ruled out by kernels.compile=false"
    compiler = os.environ.get("CXX", "g++")  # where torch looks, too
    if shutil.which(compiler) is None:
        return f"needs a C++ compiler, and there is no {compiler} (apt install g++, or set CXX)"
    if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        return "needs Python.h to compile against (apt install python3-dev)"
    return None


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _package_problem(package: str, how: str) -> str | None:
    """`find_spec` alone would miss a package that is there and cannot be loaded."""
    try:
        importlib.import_module(package)
    except (ImportError, OSError) as error:
        found = find_spec(package.partition(".")[0]) is not None
        return f"cannot load {package} ({error})" if found else f"needs the package {package.partition('.')[0]} ({how})"
    return None


def needs_gpu(traits: Traits) -> str | None:
    """Runs on GPUs alone."""
    if traits.device is None or traits.on_gpu:
        return None
    return f"needs a GPU, and this run is on the {traits.device.type}"


def half_on_gpu(traits: Traits) -> str | None:
    """On a GPU it computes in 16 bits alone."""
    if traits.on_gpu and traits.dtype is not None and traits.dtype not in HALF:
        return f"computes in bf16 or fp16 on a GPU, not in {_name(traits.dtype)}"
    return None


def _interpreted() -> bool:
    """Whether Triton's own switch makes it interpret kernels on the CPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def _triton_device(traits: Traits) -> str | None:
    problem = None if _interpreted() else needs_gpu(traits)
    return problem and f"{problem} (to debug kernels on a CPU, very slowly: TRITON_INTERPRET=1)"


def _has_triton(traits: Traits) -> str | None:
    return _package_problem("triton", "pip install triton")


def _no_float64(traits: Traits) -> str | None:
    return "does not compute in float64" if traits.dtype == torch.float64 else None


def triton_backend(path: str, *supports: Check) -> Backend:
    """A Triton kernel, `module:name` in kernels/triton; `auto` takes it on GPUs, but in float64."""
    return Backend(
        path=f"triton.{path}",
        available=(_triton_device, _has_triton),
        supports=supports,
        wins=lambda traits: traits.on_gpu and traits.dtype != torch.float64,
    )


def _for_cpus(traits: Traits) -> str | None:
    if traits.device is not None and traits.device.type != "cpu":
        return f"is for CPUs, and this run is on {traits.device.type}"
    return None


def _compile_wins(traits: Traits) -> bool:
    """Not in float64, whose runs are small proofs."""
    known = traits.device is not None and traits.dtype in (torch.float32, torch.bfloat16)
    return known and traits.width >= _COMPILE_FROM


def is_bf16(traits: Traits) -> bool:
    """Where it wins in bf16 alone."""
    return traits.dtype == torch.bfloat16


def compiled_backend(name: str, wins: Callable[[Traits], bool] = _always) -> Backend:
    """The reference under torch.compile, for CPUs; `auto` takes it from some width on, where `wins` agrees."""
    return Backend(
        path=f"compiled:{name}",
        available=(_for_cpus, compile_problem),
        wins=lambda traits: _compile_wins(traits) and wins(traits),
    )


def _has_apex(extension: str, traits: Traits) -> str | None:
    try:
        importlib.import_module(extension)
    except (ImportError, OSError) as error:
        return (
            f"needs NVIDIA's apex with its CUDA extensions ({error}): build it from github.com/NVIDIA/apex, the package"
            " apex on PyPI is another one"
        )
    return None


def apex_backend(name: str, extension: str, wins: Callable[[Traits], bool] = _always) -> Backend:
    """NVIDIA apex's function, which needs this CUDA extension of it."""
    return Backend(
        path=f"apex_kernels:{name}",
        available=(needs_gpu, partial(_has_apex, extension)),
        supports=(_no_float64,),
        wins=wins,
    )


def no_dropout(traits: Traits) -> str | None:
    """Attention without stateless dropout."""
    if traits.dropout > 0.0:
        return f"has no layout-invariant dropout (attention_dropout={traits.dropout}; 0 would do)"
    return None


def _no_softcap(traits: Traits) -> str | None:
    return f"has no soft-capping (attention_softcap={traits.softcap}; 0 would do)" if traits.softcap else None


def _no_window(traits: Traits) -> str | None:
    return f"has no sliding window (window={traits.window}; 0 would do)" if traits.window else None


def triton_heads(traits: Traits) -> str | None:
    """The widths of heads that Triton attention has room for."""
    if traits.widest_head <= _TRITON_HEAD:
        return None
    return f"has no room for heads of {traits.widest_head} features, only for {_TRITON_HEAD}"


def flash_attn_heads(traits: Traits) -> str | None:
    """The widths of heads that Dao-AILab's package takes."""
    if traits.widest_head % 8 == 0 and traits.widest_head <= _FLASH_ATTN_HEAD:
        return None
    return f"takes heads of 8, 16, 24 up to {_FLASH_ATTN_HEAD} features, not of {traits.widest_head}"


def has_flash_attn(traits: Traits) -> str | None:
    """Dao-AILab's package is installed and loads."""
    return _package_problem("flash_attn.flash_attn_interface", "pip install flash-attn")


def sdpa_wins(traits: Traits) -> bool:
    """Whether torch attention is faster than `block`, which wins on CPUs up to a row length.

    Without 16-bit products `block` wins at any length: torch's backward takes ten times as long there.
    """
    slow = traits.dtype in HALF and not has_instructions(traits.dtype)
    return traits.on_gpu or (traits.seq_len > _BLOCK_WINS_TO and not slow)


def _has_grouped_mm(traits: Traits) -> str | None:
    if hasattr(torch.nn.functional, "grouped_mm"):
        return None
    return f"is not in torch {torch.__version__} (torch.nn.functional.grouped_mm)"


def _grouped_mm_dtype(traits: Traits) -> str | None:
    if traits.dtype is not None and traits.dtype not in _GROUPED_MM_DTYPES:
        return f"takes no {_name(traits.dtype)}, only float32, bfloat16 and float16"
    return None


def _grouped_mm_wins(traits: Traits) -> bool:
    """Where it is one kernel; elsewhere torch itself loops."""
    if not traits.on_gpu or traits.dtype != torch.bfloat16:
        return False
    return torch.cuda.get_device_capability(traits.device)[0] >= 8


def grouped_backends(name: str) -> dict[str, Backend]:
    """The backends of an operation on grouped experts."""
    return {
        "grouped_mm": Backend(
            path=f"grouped:{name}",
            bound={"backend": "grouped_mm"},
            available=(_has_grouped_mm,),
            supports=(_grouped_mm_dtype,),
            wins=_grouped_mm_wins,
        ),
        "triton": triton_backend(f"grouped:{name}"),
        "loop": Backend(path=f"grouped:{name}", bound={"backend": "loop"}),
    }


CAUSAL_SDPA_SUPPORTS: tuple[Check, ...] = (no_dropout, _no_softcap, _no_window)
"""torch's own choice among its kernels, one of which takes any dtype."""
SDPA_SUPPORTS: tuple[Check, ...] = (*CAUSAL_SDPA_SUPPORTS, half_on_gpu)
"""The flash kernels alone."""


def torch_backend(path: str) -> Backend:
    """The reference, or what torch itself has."""
    return Backend(path=path)
