"""Attention, products of experts and their routing at the sizes of real models, for `KernelCase`."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from megalite.kernels.attention_kernel import attend
from megalite.kernels.attention_mask import AttentionMask
from megalite.kernels.attention_rows import AttentionDropout
from megalite.kernels.dropout import dropout_key
from megalite.kernels.routing import Bags
from megalite.kernels.triton import grouped, routing
from megalite.kernels.triton.attention import TritonKernel
from megalite.kernels.triton.linear import accumulate_weight_grad
from megalite.kernels.triton.masked_attention import merge
from megalite.testing.kernel_cases import KernelCase

MMA = {"sm_80": "mma", "sm_90": "wgmma", "gfx942": "mfma"}
"""The matrix instruction of each target."""


def matrix_cases(tokens: int = 256) -> list[KernelCase]:
    """All cases with so many tokens; the first of each operation is the telling one."""
    return [*_attention_cases(tokens), *_expert_cases(tokens)]


def _attention_cases(tokens: int) -> Iterator[KernelCase]:
    """Up to 128 features without spills; what is beyond, or does more, may not get worse."""
    case = partial(KernelCase, mma=MMA, narrow=frozenset({"delta_kernel"}))
    for d in (128, 64, 96):
        yield case(name=f"attention {d}", run=partial(_attention, tokens, d, d))
    for d, dv in ((256, 256), (192, 128)):
        yield case(name=f"attention {d}/{dv}", run=partial(_attention, tokens, d, dv), spills=_WIDE_HEADS)
    yield case(name="attention_softcap 128", run=partial(_attention, tokens, 128, 128, softcap=50.0))
    yield case(name="attention_dropout 128", run=partial(_attention, tokens, 128, 128, p=0.1))
    for d in (64, 256):
        run = partial(_attention, tokens, d, d, dtype=torch.float32)
        yield case(name=f"attention_fp32 {d}", run=run, mma={})
    yield KernelCase(name="attention_merge 128", run=partial(_merge, tokens))


def _expert_cases(tokens: int) -> Iterator[KernelCase]:
    for hidden, ffn in ((4096, 1536), (2048, 768)):
        yield KernelCase(name=f"grouped {hidden}x{ffn}", run=partial(_grouped, tokens, hidden, ffn), mma=MMA)
    yield KernelCase(name="grouped_fp32 2048x768", run=partial(_grouped, tokens, 2048, 768, torch.float32))
    yield KernelCase(name="wgrad 4096x14336", run=partial(_weight_grad, tokens), mma=MMA)
    for experts in (128, 256, 8, 512):
        yield KernelCase(
            name=f"router {experts}", run=partial(_router, tokens, experts), narrow=frozenset({"_choose_kernel"})
        )
    for hidden in (4096, 2880):
        yield KernelCase(name=f"permute {hidden}", run=partial(_permute, tokens, hidden))


_WIDE_HEADS = {("key_grads_kernel", "sm_90"): 26}
"""Heads beyond 128 features may spill so much, and no more."""


def _half(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.zeros(*shape, dtype=dtype)


def _attention(
    tokens: int, d: int, dv: int, softcap: float = 0.0, p: float = 0.0, dtype: torch.dtype = torch.bfloat16
) -> None:  # fmt: skip
    heads, kv_heads = 32, 8
    places = torch.arange(tokens)[:, None]
    mask = AttentionMask(query=places, start=torch.zeros_like(places), key=places)
    shapes = (heads, d), (kv_heads, d), (kv_heads, dv)
    q, k, v = (_half(tokens, 1, *shape, dtype=dtype).requires_grad_() for shape in shapes)
    dropout = AttentionDropout(p=p, key=dropout_key(0, 0, 0), token_index=places) if p else None
    attend(q, k, v, mask, TritonKernel(scale=0.1, softcap=softcap), dropout=dropout).sum().backward()


def _merge(tokens: int) -> None:
    out, lse = torch.zeros(tokens, 1, 32, 128), torch.zeros(tokens, 1, 32)
    merge(out, lse, out.clone(), lse.clone())


def _grouped(tokens: int, hidden: int, ffn: int, dtype: torch.dtype = torch.bfloat16) -> None:
    counts = torch.tensor([tokens * 25 // 64, 0, tokens - tokens * 25 // 64])
    x, weight = _half(tokens, hidden, dtype=dtype), _half(3, ffn, hidden, dtype=dtype)
    main_grad = torch.zeros(3, ffn, hidden)
    dy = grouped.grouped_linear(x, weight, counts)
    grouped.grouped_input_grad(dy, weight, counts)
    grouped.accumulate_grouped_weight_grad(main_grad, dy, x, counts)


def _weight_grad(tokens: int) -> None:
    accumulate_weight_grad(torch.zeros(14336, 4096), _half(tokens, 14336), _half(tokens, 4096))


def _router(tokens: int, experts: int) -> None:
    groups, top_groups = (8, 4) if experts == 256 else (1, 1)
    scores, bias = torch.zeros(tokens, experts), torch.zeros(experts)
    routing.choose_experts(scores, min(8, experts), bias, num_groups=groups, top_groups=top_groups)


def _permute(tokens: int, hidden: int) -> None:
    token = torch.arange(tokens).repeat(2)
    there = routing.permute(_half(tokens, hidden), token)
    routing.unpermute(there, *Bags.of(token, tokens))
