"""Which backend computes each operation: what there is, what each can do, and the choice among them.

`OPERATIONS` lists the backends of an operation in the order in which `auto` tries them. A backend that is named must
work, or the choice is refused with the reason and the fix; only `auto` goes on to the next.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .backends import (
    CAUSAL_SDPA_SUPPORTS,
    SDPA_SUPPORTS,
    Backend,
    Traits,
    apex_backend,
    compiled_backend,
    flash_attn_heads,
    grouped_backends,
    half_on_gpu,
    has_flash_attn,
    is_bf16,
    needs_gpu,
    never,
    no_dropout,
    sdpa_wins,
    torch_backend,
    triton_backend,
    triton_heads,
)
from .config import KernelConfig


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


def _instead(op: str) -> str:
    others = [name for name in ("torch", "block", "loop") if name in OPERATIONS[op]]
    return f"use kernels.{option_of(op)}={others[0]} or auto"


OPERATIONS: Mapping[str, Mapping[str, Backend]] = {
    "rms_norm": {
        "triton": triton_backend("norm:rms_norm"),
        "apex": apex_backend("rms_norm", "fused_layer_norm_cuda"),
        "compiled": compiled_backend("rms_norm"),
        "torch": torch_backend("norm:rms_norm"),
    },
    "layer_norm": {
        "triton": triton_backend("norm:layer_norm"),
        "apex": apex_backend("layer_norm", "fused_layer_norm_cuda"),
        "compiled": compiled_backend("layer_norm", is_bf16),
        "torch": torch_backend("norm:layer_norm"),
    },
    "rms_norm_add": {
        "triton": triton_backend("norm:rms_norm_add"),
        "torch": torch_backend("norm:rms_norm_add"),
    },
    "layer_norm_add": {
        "triton": triton_backend("norm:layer_norm_add"),
        "torch": torch_backend("norm:layer_norm_add"),
    },
    "rope": {
        "triton": triton_backend("rope:apply_rope"),
        "compiled": compiled_backend("apply_rope"),
        "torch": torch_backend("rope:apply_rope"),
    },
    "swiglu": {
        "triton": triton_backend("activation:swiglu_packed"),
        "compiled": compiled_backend("swiglu_packed"),
        "torch": torch_backend("activation:swiglu_packed"),
    },
    "gelu": {
        "triton": triton_backend("activation:gelu"),
        "compiled": compiled_backend("gelu"),
        "torch": torch_backend("activation:gelu"),
    },
    "dropout": {
        "triton": triton_backend("dropout:dropout"),
        "compiled": compiled_backend("dropout"),
        "torch": torch_backend("dropout:dropout"),
    },
    "bias_dropout_add": {
        "triton": triton_backend("dropout:bias_dropout_add"),
        "compiled": compiled_backend("bias_dropout_add"),
        "torch": torch_backend("dropout:bias_dropout_add"),
    },
    "ce_stats": {
        "triton": triton_backend("cross_entropy:ce_stats"),
        "compiled": compiled_backend("ce_stats"),
        "torch": torch_backend("cross_entropy:ce_stats"),
    },
    "ce_grad": {
        "triton": triton_backend("cross_entropy:ce_grad_"),
        "compiled": compiled_backend("ce_grad_"),
        "torch": torch_backend("cross_entropy:ce_grad_"),
    },
    "short_conv": {
        "triton": triton_backend("short_conv:gated_short_conv"),
        "compiled": compiled_backend("gated_short_conv"),
        "torch": torch_backend("short_conv:gated_short_conv"),
    },
    "wgrad": {
        "apex": apex_backend("accumulate_weight_grad", "fused_weight_gradient_mlp_cuda"),
        "triton": triton_backend("linear:accumulate_weight_grad"),
        "torch": torch_backend("linear:accumulate_weight_grad"),
    },
    "adamw": {
        "triton": triton_backend("adamw:fused_adamw_"),
        "apex": apex_backend("fused_adamw_", "amp_C"),
        "torch": torch_backend("adamw:fused_adamw_"),
    },
    "sum_of_squares": {
        "triton": triton_backend("grad_norm:sum_of_squares"),
        "apex": apex_backend("sum_of_squares", "amp_C", never),  # in float32: large gradients overflow
        "torch": torch_backend("grad_norm:sum_of_squares"),
    },
    "weighted_swiglu": {
        "triton": triton_backend("activation:weighted_swiglu"),
        "compiled": compiled_backend("weighted_swiglu"),
        "torch": torch_backend("grouped:weighted_swiglu"),
    },
    "weighted_swiglu_backward": {
        "triton": triton_backend("activation:weighted_swiglu_backward"),
        "compiled": compiled_backend("weighted_swiglu_backward"),
        "torch": torch_backend("grouped:weighted_swiglu_backward"),
    },
    "weighted_clamped_swiglu": {
        "triton": triton_backend("clamped_swiglu:weighted_clamped_swiglu"),
        "torch": torch_backend("clamped_swiglu:weighted_clamped_swiglu"),
    },
    "weighted_clamped_swiglu_backward": {
        "triton": triton_backend("clamped_swiglu:weighted_clamped_swiglu_backward"),
        "torch": torch_backend("clamped_swiglu:weighted_clamped_swiglu_backward"),
    },
    "choose_experts": {
        "triton": triton_backend("routing:choose_experts"),
        "torch": torch_backend("routing:choose_experts"),
    },
    "permute": {
        "triton": triton_backend("routing:permute"),
        "torch": torch_backend("routing:permute"),
    },
    "unpermute": {
        "triton": triton_backend("routing:unpermute"),
        "torch": torch_backend("routing:unpermute"),
    },
    "grouped_linear": grouped_backends("grouped_linear"),
    "grouped_input_grad": grouped_backends("grouped_input_grad"),
    "grouped_weight_grad": grouped_backends("accumulate_grouped_weight_grad"),
    "attention": {
        "flash_attn": Backend(
            path="flash_attention:FlashAttnKernel",
            available=(needs_gpu, has_flash_attn),
            supports=(no_dropout, half_on_gpu, flash_attn_heads),
        ),
        "sdpa": Backend(path="flash_attention:TorchKernel", supports=SDPA_SUPPORTS, wins=lambda traits: traits.on_gpu),
        "triton": triton_backend("attention:TritonKernel", triton_heads),
        "block": torch_backend("attention_kernel:BlockKernel"),
        "cudnn": Backend(
            path="flash_attention:TorchKernel",
            bound={"cudnn": True},
            available=(needs_gpu,),
            supports=SDPA_SUPPORTS,
        ),
    },
    "causal_attention": {
        "sdpa": Backend(
            path="attention:attention",
            bound={"backend": "sdpa"},
            supports=CAUSAL_SDPA_SUPPORTS,
            wins=sdpa_wins,
        ),
        "block": Backend(path="attention:attention", bound={"backend": "block"}),
    },
}
"""Operation -> backend -> how, the best first. `attention` makes an `AttentionKernel`, from `scale` and, where it is
asked for, `softcap`; `causal_attention` is a shorter way for whole rows of one document each."""
