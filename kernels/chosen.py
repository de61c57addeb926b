"""The functions that a model, its loss and its optimizer are built from, after the choice among backends."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from .activation import gelu, swiglu_packed
from .adamw import fused_adamw_
from .attention import CausalBackend
from .attention_kernel import AttentionKernel, SameWidthKernel
from .backends import Traits, compile_problem
from .clamped_swiglu import weighted_clamped_swiglu, weighted_clamped_swiglu_backward
from .config import KernelConfig
from .cross_entropy import ce_grad_, ce_stats
from .dropout import bias_dropout_add, dropout
from .grad_norm import sum_of_squares
from .grouped import (
    accumulate_grouped_weight_grad,
    grouped_input_grad,
    grouped_linear,
    weighted_swiglu,
    weighted_swiglu_backward,
)
from .linear import accumulate_weight_grad
from .norm import layer_norm, layer_norm_add, rms_norm, rms_norm_add
from .registry import OPERATIONS, choice_of, choose, option_of, resolve
from .rope import apply_rope
from .routing import choose_experts, permute, unpermute
from .short_conv import gated_short_conv


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """What computes each operation; by default plain torch, which runs anywhere and in any dtype.

    A field is a function with the signature of its default; its name is that of the operation in `OPERATIONS`.
    Attention depends on the layer and on the call: see `attention` and `causal_attention`.
    """

    config: KernelConfig = field(default_factory=KernelConfig)
    """What was asked for."""
    chosen: Mapping[str, str] = field(default_factory=dict)
    """Operation -> backend, of what was resolved."""
    rms_norm: Callable[[Tensor, Tensor, float], Tensor] = rms_norm
    layer_norm: Callable[[Tensor, Tensor, Tensor, float], Tensor] = layer_norm
    rms_norm_add: Callable[..., tuple[Tensor, Tensor]] = rms_norm_add
    layer_norm_add: Callable[..., tuple[Tensor, Tensor]] = layer_norm_add
    rope: Callable[..., Tensor] = apply_rope
    swiglu: Callable[[Tensor], Tensor] = swiglu_packed
    gelu: Callable[..., Tensor] = gelu
    dropout: Callable[..., Tensor] = dropout
    bias_dropout_add: Callable[..., Tensor] = bias_dropout_add
    ce_stats: Callable[..., Tensor] = ce_stats
    ce_grad: Callable[..., Tensor] = ce_grad_
    short_conv: Callable[..., Tensor] = gated_short_conv
    wgrad: Callable[[Tensor, Tensor, Tensor], None] = accumulate_weight_grad
    adamw: Callable[..., None] = fused_adamw_
    sum_of_squares: Callable[[Tensor], Tensor] = sum_of_squares
    weighted_swiglu: Callable[[Tensor, Tensor], Tensor] = weighted_swiglu
    weighted_swiglu_backward: Callable[..., tuple[Tensor, Tensor, Tensor]] = weighted_swiglu_backward
    weighted_clamped_swiglu: Callable[[Tensor, Tensor, float, float], Tensor] = weighted_clamped_swiglu
    weighted_clamped_swiglu_backward: Callable[..., tuple[Tensor, Tensor, Tensor]] = weighted_clamped_swiglu_backward
    choose_experts: Callable[..., Tensor] = choose_experts
    permute: Callable[..., Tensor] = permute
    unpermute: Callable[[Tensor, Tensor, Tensor], Tensor] = unpermute
    grouped_linear: Callable[..., Tensor] = grouped_linear
    grouped_input_grad: Callable[..., Tensor] = grouped_input_grad
    grouped_weight_grad: Callable[..., None] = accumulate_grouped_weight_grad

    @staticmethod
    def resolve(config: KernelConfig, *, device: torch.device, dtype: torch.dtype, width: int) -> Kernels:
        """The backends that `config` means for activations of `dtype` and rows of `width` features on `device`.

        Raises ValueError, with the reason and the fix, where a named backend cannot do it.
        """
        traits = Traits(device=device, dtype=dtype, width=width, compile=config.compile)
        found = {op: resolve(op, choice_of(op, config), traits) for op in OPERATIONS if option_of(op) != "attention"}
        functions: dict[str, Any] = {op: resolved.fn for op, resolved in found.items()}
        return Kernels(config=config, chosen={op: one.backend for op, one in found.items()}, **functions)

    def attention(self, traits: Traits, scale: float) -> AttentionKernel:
        """What attends to a block of keys with the factor `scale` on q k^T; ValueError as in `resolve`."""
        make = resolve("attention", self.config.attention, traits).fn
        kernel = make(scale=scale, softcap=traits.softcap) if traits.softcap else make(scale=scale)
        differ = traits.value_size not in (0, traits.head_size)
        return SameWidthKernel(inner=kernel) if differ and not kernel.takes_any_widths else kernel

    def attention_backend(self, traits: Traits) -> str:
        """The name of what computes causal attention in whole rows, for the log."""
        causal = self.causal_attention(traits) if not traits.softcap else None
        return causal if causal is not None else choose("attention", self.config.attention, traits)

    def causal_attention(self, traits: Traits) -> CausalBackend | None:
        """The backend for whole rows of one document each, or None where what `attention` makes is to do it."""
        if self.config.attention not in ("auto", *OPERATIONS["causal_attention"]):
            return None
        backend = choose("causal_attention", self.config.attention, traits)
        return "sdpa" if backend == "sdpa" else "block"


def fallback_note(config: KernelConfig, *, device: torch.device, dtype: torch.dtype, width: int) -> str | None:
    """What the log should say where `auto` would have compiled and cannot."""
    wanted = Traits(device=device, dtype=dtype, width=width)
    would = any(
        "compiled" in backends and backends["compiled"].wins(wanted) and device.type == "cpu"
        for backends in OPERATIONS.values()
    )
    problem = compile_problem(replace(wanted, compile=config.compile))
    if config.backend != "auto" or not config.compile or not would or problem is None:
        return None
    return f"kernels.backend=auto uses plain torch on this CPU: torch.compile {problem}"
