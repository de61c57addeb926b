"""Production-size launches of the row and elementwise kernels: a few rows of the widths of 8B and 70B models."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from megalite.kernels.cross_entropy import CrossEntropyConfig
from megalite.kernels.triton import (
    activation,
    adamw,
    clamped_swiglu,
    cross_entropy,
    dropout,
    grad_norm,
    norm,
    rope,
    short_conv,
    softmax,
)
from megalite.testing.kernel_cases import KernelCase


def row_cases(rows: int = 4) -> list[KernelCase]:
    """All cases with so many rows; the first of each operation has the sizes of an 8B model."""
    return [
        *_activation_cases(rows),
        *_norm_cases(rows),
        *_dropout_cases(rows),
        *_loss_cases(rows),
        *_optimizer_cases(rows),
        *_attention_cases(rows),
        *_conv_cases(rows),
    ]


def _activation_cases(rows: int) -> list[KernelCase]:
    gated = {"swiglu": activation.swiglu_packed, "geglu": activation.geglu_packed}
    cases = [
        _case(f"{name} {width}", function, [_rows(rows, 2 * width)])
        for name, function in gated.items()
        for width in (14336, 28672)
    ]
    gate_up, probs = torch.zeros(rows, 2 * 1536, dtype=torch.bfloat16), torch.zeros(rows)
    dout = torch.zeros(rows, 1536, dtype=torch.bfloat16)
    clamp: dict[str, Any] = {"alpha": 1.702, "limit": 7.0}
    return [
        *cases,
        _case("weighted_swiglu 1536", activation.weighted_swiglu, [gate_up, probs]),
        _case("weighted_swiglu_backward 1536", activation.weighted_swiglu_backward, [dout, gate_up, probs]),
        _case("clamped_swiglu 1536", clamped_swiglu.weighted_clamped_swiglu, [gate_up, probs], **clamp),
        _case(
            "clamped_swiglu_backward 1536",
            clamped_swiglu.weighted_clamped_swiglu_backward,
            [dout, gate_up, probs],
            **clamp,
        ),
        _case("bias-gelu 16384", activation.gelu, [_rows(rows, 16384), _vector(16384)]),
        _case("gelu 16384", activation.gelu, [_rows(rows, 16384)]),
    ]


def _norm_cases(rows: int) -> list[KernelCase]:
    cases = []
    for width in (4096, 128, 2880, 8192, 16384):
        x, residual, weight, bias = _rows(rows, width), _rows(rows, width), _vector(width), _vector(width)
        cases += [
            _case(f"rms_norm {width}", norm.rms_norm, [x, weight], eps=1e-5),
            _case(f"layer_norm {width}", norm.layer_norm, [x, weight, bias], eps=1e-5),
            _case(f"rms_norm_add {width}", norm.rms_norm_add, [x, residual, weight], eps=1e-5),
            _case(f"layer_norm_add {width}", norm.layer_norm_add, [x, residual, weight, bias], eps=1e-5),
        ]
    return cases


def _dropout_cases(rows: int) -> list[KernelCase]:
    key, tokens = torch.zeros(2, dtype=torch.int32), torch.arange(rows)
    x, residual, bias = _rows(rows, 4096), _rows(rows, 4096), _vector(4096)

    def with_bias(x: Tensor, residual: Tensor, bias: Tensor) -> Tensor:
        return dropout.bias_dropout_add(x, bias, residual, 0.1, key, tokens)

    def plain(x: Tensor, residual: Tensor) -> Tensor:
        return dropout.bias_dropout_add(x, None, residual, 0.1, key, tokens)

    return [
        _case("bias_dropout_add 4096", with_bias, [x, residual, bias]),
        _case("dropout_add 4096", plain, [x, residual]),
    ]


def _loss_cases(rows: int) -> list[KernelCase]:
    targets, row = torch.zeros(rows, dtype=torch.int64), torch.zeros(rows)

    def loss(logits: Tensor, terms: CrossEntropyConfig) -> None:
        cross_entropy.ce_stats(logits, targets, terms)
        cross_entropy.ce_grad_(logits, targets, row, row, terms)

    cases = []
    for width in (32000, 128256):
        logits = torch.zeros(rows, width, dtype=torch.bfloat16)
        plain = CrossEntropyConfig(vocab_size=width)
        smooth = CrossEntropyConfig(vocab_size=width, label_smoothing=0.1, z_loss=1e-4)
        cases += [
            _case(f"cross_entropy {width}", loss, [logits], narrow=["_merge_stats"], terms=plain),
            _case(f"cross_entropy_smooth {width}", loss, [logits], narrow=["_merge_stats"], terms=smooth),
        ]
    return cases


def _optimizer_cases(rows: int) -> list[KernelCase]:
    size = rows << 14
    state = [torch.zeros(size) for _ in range(4)]
    numbers: dict[str, Any] = dict(lr=1e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, step=1)
    lowp, scalar = torch.zeros(size, dtype=torch.bfloat16), torch.ones(())
    key, elements = torch.zeros(2, dtype=torch.int32), torch.arange(size)
    return [
        _case("adamw", adamw.fused_adamw_, state, lowp_copy=lowp, grad_scale=scalar, found_inf=scalar, **numbers),
        _case("round_stochastically", adamw.round_stochastically, [state[0], key, elements]),
        _case("sum_of_squares", grad_norm.sum_of_squares, [state[0]], narrow=["_total"]),
    ]


def _attention_cases(rows: int) -> list[KernelCase]:
    tables = [torch.zeros(rows, 1, 64) for _ in range(2)]
    partial = [torch.zeros(rows, 1, 16) for _ in range(2)]
    queries, keys, packed = (
        torch.zeros(rows, 1, n, 128, dtype=torch.bfloat16, requires_grad=True) for n in (32, 8, 48)
    )
    cases = [
        _case("rope 32x128", rope.apply_rope, [queries, *tables]),
        _case("rope 8x128", rope.apply_rope, [keys, *tables]),
        _case("rope_packed 48x128", rope.apply_rope, [packed, *tables], num_turned=40),
        _case("rope_interleaved 32x128", rope.apply_rope, [queries, *tables], interleaved=True),
        _case("rope_partial 32x128", rope.apply_rope, [queries, *partial]),
    ]
    for width in (2048, 8192, 16384):
        scores = torch.zeros(1, 1, rows, width, dtype=torch.bfloat16, requires_grad=True)
        mask = torch.ones(1, 1, rows, width, dtype=torch.bool)
        cases.append(
            _case(f"causal_softmax {width}", softmax.masked_softmax, [scores], mask=None, scale=0.1, causal=True)
        )
        cases.append(_case(f"masked_softmax {width}", softmax.masked_softmax, [scores], mask=mask, scale=0.1))
    return cases


def _conv_cases(rows: int) -> list[KernelCase]:
    """Rows of one document each, and rows of several that are cut over ranks."""
    hidden, taps = 2048, 3
    bcx, weight = torch.zeros(rows, 2, 3 * hidden, dtype=torch.bfloat16, requires_grad=True), _vector(hidden * taps)
    sources = torch.full((taps - 1, 2 * rows), -2, dtype=torch.int32)
    slot, fetched = torch.zeros(2 * rows, dtype=torch.int32), torch.zeros(3, hidden)

    def cut(bcx: Tensor, weight: Tensor) -> None:
        out = short_conv.convolve(bcx, weight, sources, fetched)
        short_conv.convolve_backward(out, bcx, weight, sources, fetched, slot, fetched)

    weight = weight.view(hidden, taps)
    return [
        _case(f"short_conv {hidden}", short_conv.gated_short_conv, [bcx, weight]),
        _case(f"short_conv_cut {hidden}", cut, [bcx.detach(), weight.detach()]),
    ]


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


def _rows(rows: int, width: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.zeros(rows, width, dtype=dtype, requires_grad=True)


def _vector(width: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.zeros(width, dtype=dtype, requires_grad=True)
