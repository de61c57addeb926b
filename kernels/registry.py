"""Which backend computes each operation: what there is, what each can do, and the choice among them.

`OPERATIONS` lists the backends of an operation in the order in which `auto` tries them. A backend that is named must
work, or the choice is refused with the reason and the fix; only `auto` goes on to the next. Functions are imported
when they are chosen, so that nothing of Triton or an optional package is loaded elsewhere.
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

from .config import KernelConfig

_HALF = (torch.float16, torch.bfloat16)
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


def _never(traits: Traits) -> bool:
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


@dataclass(frozen=True)
class Resolved:
    """The backend of an operation and its function."""

    backend: str
    fn: Any


def problems(op: str, choice: str, traits: Traits) -> list[str]:
    """Why `choice` cannot be what computes `op`; empty for auto, and where the operation has no such backend."""
    backend = OPERATIONS[op].get(choice)
    found = backend.problems(traits) if backend is not None else []
    return [f"kernels.{option_of(op)}={choice} {problem}; {_instead(op)}" for problem in found]


def choose(op: str, choice: str, traits: Traits) -> str:
    """The backend of `op`: the named backend, which works or raises ValueError, or the first that `auto` finds.

    An operation that does not have the named backend (apex has some operations only) is chosen as by auto.
    """
    if found := problems(op, choice, traits):
        raise ValueError("\n".join(found))
    backends = OPERATIONS[op]
    if choice not in backends:
        choice = next(name for name, one in backends.items() if one.wins(traits) and not one.problems(traits))
    return choice


def resolve(op: str, choice: str, traits: Traits) -> Resolved:
    """`choose`, and the function of what was chosen."""
    backend = choose(op, choice, traits)
    return Resolved(backend, OPERATIONS[op][backend].fn)


def option_of(op: str) -> str:
    """The field of `KernelConfig` that chooses among the backends of `op`."""
    if op.startswith("grouped_"):
        return "grouped"
    return "attention" if op.endswith("attention") else "backend"


def choice_of(op: str, config: KernelConfig) -> str:
    """What `config` says of `op`."""
    return getattr(config, option_of(op))


def config_problems(config: KernelConfig, traits: Traits, *, experts: bool = False) -> list[str]:
    """Everything that `config` names and that cannot be, each reason once."""
    ops = [op for op in OPERATIONS if experts or option_of(op) != "grouped"]
    return list(dict.fromkeys(problem for op in ops for problem in problems(op, choice_of(op, config), traits)))


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


def _instead(op: str) -> str:
    others = [name for name in ("torch", "block", "loop") if name in OPERATIONS[op]]
    return f"use kernels.{option_of(op)}={others[0]} or auto"


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


def _needs_gpu(traits: Traits) -> str | None:
    if traits.device is None or traits.on_gpu:
        return None
    return f"needs a GPU, and this run is on the {traits.device.type}"


def _half_on_gpu(traits: Traits) -> str | None:
    if traits.on_gpu and traits.dtype is not None and traits.dtype not in _HALF:
        return f"computes in bf16 or fp16 on a GPU, not in {_name(traits.dtype)}"
    return None


def _interpreted() -> bool:
    """Whether Triton's own switch makes it interpret kernels on the CPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def _triton_device(traits: Traits) -> str | None:
    problem = None if _interpreted() else _needs_gpu(traits)
    return problem and f"{problem} (to debug kernels on a CPU, very slowly: TRITON_INTERPRET=1)"


def _has_triton(traits: Traits) -> str | None:
    return _package_problem("triton", "pip install triton")


def _no_float64(traits: Traits) -> str | None:
    return "does not compute in float64" if traits.dtype == torch.float64 else None


def _triton(path: str, *supports: Check) -> Backend:
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


def _is_bf16(traits: Traits) -> bool:
    return traits.dtype == torch.bfloat16


def _compiled(name: str, wins: Callable[[Traits], bool] = _always) -> Backend:
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


def _apex(name: str, extension: str, wins: Callable[[Traits], bool] = _always) -> Backend:
    return Backend(
        path=f"apex_kernels:{name}",
        available=(_needs_gpu, partial(_has_apex, extension)),
        supports=(_no_float64,),
        wins=wins,
    )


def _no_dropout(traits: Traits) -> str | None:
    if traits.dropout > 0.0:
        return f"has no layout-invariant dropout (attention_dropout={traits.dropout}; 0 would do)"
    return None


def _no_softcap(traits: Traits) -> str | None:
    return f"has no soft-capping (attention_softcap={traits.softcap}; 0 would do)" if traits.softcap else None


def _no_window(traits: Traits) -> str | None:
    return f"has no sliding window (window={traits.window}; 0 would do)" if traits.window else None


def _triton_heads(traits: Traits) -> str | None:
    if traits.widest_head <= _TRITON_HEAD:
        return None
    return f"has no room for heads of {traits.widest_head} features, only for {_TRITON_HEAD}"


def _flash_attn_heads(traits: Traits) -> str | None:
    if traits.widest_head % 8 == 0 and traits.widest_head <= _FLASH_ATTN_HEAD:
        return None
    return f"takes heads of 8, 16, 24 up to {_FLASH_ATTN_HEAD} features, not of {traits.widest_head}"


def _has_flash_attn(traits: Traits) -> str | None:
    return _package_problem("flash_attn.flash_attn_interface", "pip install flash-attn")


def _block_wins_up_to_a_length(traits: Traits) -> bool:
    return traits.on_gpu or traits.seq_len > _BLOCK_WINS_TO


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


def _grouped(name: str) -> dict[str, Backend]:
    return {
        "grouped_mm": Backend(
            path=f"grouped:{name}",
            bound={"backend": "grouped_mm"},
            available=(_has_grouped_mm,),
            supports=(_grouped_mm_dtype,),
            wins=_grouped_mm_wins,
        ),
        "triton": _triton(f"grouped:{name}"),
        "loop": Backend(path=f"grouped:{name}", bound={"backend": "loop"}),
    }


_SDPA_SUPPORTS: tuple[Check, ...] = (_no_dropout, _no_softcap, _no_window, _half_on_gpu)


def _torch(path: str) -> Backend:
    return Backend(path=path)


OPERATIONS: Mapping[str, Mapping[str, Backend]] = {
    "rms_norm": {
        "triton": _triton("norm:rms_norm"),
        "apex": _apex("rms_norm", "fused_layer_norm_cuda"),
        "compiled": _compiled("rms_norm"),
        "torch": _torch("norm:rms_norm"),
    },
    "layer_norm": {
        "triton": _triton("norm:layer_norm"),
        "apex": _apex("layer_norm", "fused_layer_norm_cuda"),
        "compiled": _compiled("layer_norm", _is_bf16),
        "torch": _torch("norm:layer_norm"),
    },
    "rms_norm_add": {
        "triton": _triton("norm:rms_norm_add"),
        "torch": _torch("norm:rms_norm_add"),
    },
    "layer_norm_add": {
        "triton": _triton("norm:layer_norm_add"),
        "torch": _torch("norm:layer_norm_add"),
    },
    "rope": {
        "triton": _triton("rope:apply_rope"),
        "compiled": _compiled("apply_rope"),
        "torch": _torch("rope:apply_rope"),
    },
    "swiglu": {
        "triton": _triton("activation:swiglu_packed"),
        "compiled": _compiled("swiglu_packed"),
        "torch": _torch("activation:swiglu_packed"),
    },
    "gelu": {
        "triton": _triton("activation:gelu"),
        "compiled": _compiled("gelu"),
        "torch": _torch("activation:gelu"),
    },
    "dropout": {
        "triton": _triton("dropout:dropout"),
        "compiled": _compiled("dropout"),
        "torch": _torch("dropout:dropout"),
    },
    "bias_dropout_add": {
        "triton": _triton("dropout:bias_dropout_add"),
        "compiled": _compiled("bias_dropout_add"),
        "torch": _torch("dropout:bias_dropout_add"),
    },
    "ce_stats": {
        "triton": _triton("cross_entropy:ce_stats"),
        "compiled": _compiled("ce_stats"),
        "torch": _torch("cross_entropy:ce_stats"),
    },
    "ce_grad": {
        "triton": _triton("cross_entropy:ce_grad_"),
        "compiled": _compiled("ce_grad_"),
        "torch": _torch("cross_entropy:ce_grad_"),
    },
    "short_conv": {
        "triton": _triton("short_conv:gated_short_conv"),
        "compiled": _compiled("gated_short_conv", _is_bf16),
        "torch": _torch("short_conv:gated_short_conv"),
    },
    "wgrad": {
        "apex": _apex("accumulate_weight_grad", "fused_weight_gradient_mlp_cuda"),
        "triton": _triton("linear:accumulate_weight_grad"),
        "torch": _torch("linear:accumulate_weight_grad"),
    },
    "adamw": {
        "triton": _triton("adamw:fused_adamw_"),
        "apex": _apex("fused_adamw_", "amp_C"),
        "torch": _torch("adamw:fused_adamw_"),
    },
    "sum_of_squares": {
        "triton": _triton("grad_norm:sum_of_squares"),
        "apex": _apex("sum_of_squares", "amp_C", _never),  # in float32: large gradients overflow
        "torch": _torch("grad_norm:sum_of_squares"),
    },
    "weighted_swiglu": {
        "triton": _triton("activation:weighted_swiglu"),
        "compiled": _compiled("weighted_swiglu"),
        "torch": _torch("grouped:weighted_swiglu"),
    },
    "weighted_swiglu_backward": {
        "triton": _triton("activation:weighted_swiglu_backward"),
        "compiled": _compiled("weighted_swiglu_backward"),
        "torch": _torch("grouped:weighted_swiglu_backward"),
    },
    "weighted_clamped_swiglu": {
        "triton": _triton("clamped_swiglu:weighted_clamped_swiglu"),
        "torch": _torch("clamped_swiglu:weighted_clamped_swiglu"),
    },
    "weighted_clamped_swiglu_backward": {
        "triton": _triton("clamped_swiglu:weighted_clamped_swiglu_backward"),
        "torch": _torch("clamped_swiglu:weighted_clamped_swiglu_backward"),
    },
    "choose_experts": {
        "triton": _triton("routing:choose_experts"),
        "torch": _torch("routing:choose_experts"),
    },
    "permute": {
        "triton": _triton("routing:permute"),
        "torch": _torch("routing:permute"),
    },
    "unpermute": {
        "triton": _triton("routing:unpermute"),
        "torch": _torch("routing:unpermute"),
    },
    "grouped_linear": _grouped("grouped_linear"),
    "grouped_input_grad": _grouped("grouped_input_grad"),
    "grouped_weight_grad": _grouped("accumulate_grouped_weight_grad"),
    "attention": {
        "flash_attn": Backend(
            path="flash_attention:FlashAttnKernel",
            available=(_needs_gpu, _has_flash_attn),
            supports=(_no_dropout, _half_on_gpu, _flash_attn_heads),
        ),
        "sdpa": Backend(path="flash_attention:TorchKernel", supports=_SDPA_SUPPORTS, wins=lambda traits: traits.on_gpu),
        "triton": _triton("attention:TritonKernel", _triton_heads),
        "block": _torch("attention_kernel:BlockKernel"),
        "cudnn": Backend(
            path="flash_attention:TorchKernel",
            bound={"cudnn": True},
            available=(_needs_gpu,),
            supports=_SDPA_SUPPORTS,
        ),
    },
    "causal_attention": {
        "sdpa": Backend(
            path="attention:attention",
            bound={"backend": "sdpa"},
            supports=_SDPA_SUPPORTS,
            wins=_block_wins_up_to_a_length,
        ),
        "block": Backend(path="attention:attention", bound={"backend": "block"}),
    },
}
"""Operation -> backend -> how, the best first. `attention` makes an `AttentionKernel`, from `scale` and, where it is
asked for, `softcap`; `causal_attention` is a shorter way for whole rows of one document each."""
