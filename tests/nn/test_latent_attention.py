"""Latent attention: one rank on every cut, every backend on values that are narrower or wider than keys."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from megalite.kernels.attention import attention
from megalite.kernels.attention_kernel import AttentionKernel, BlockKernel, SameWidthKernel, attend
from megalite.kernels.attention_mask import AttentionMask
from megalite.kernels.backends import Traits
from megalite.kernels.chosen import Kernels
from megalite.kernels.config import KernelConfig
from megalite.kernels.flash_attention import TorchKernel
from megalite.mpu import ParallelState
from megalite.nn.config import ModelConfig
from megalite.nn.latent_attention import LatentAttention
from megalite.testing import World, check_parallel_module
from tests.hugging_face import assert_equal
from tests.nn.test_attention import B, H, S, call, context, packed, values

LATENT = ModelConfig(
    num_layers=4, hidden_size=H, num_heads=4, kv_lora_rank=7, q_lora_rank=5, qk_nope_head_dim=6, qk_rope_head_dim=8,
    v_head_dim=9, rope_interleaved=True, init_std=0.5,
)  # fmt: skip
FORMS = {"latent": LATENT, "direct": dataclasses.replace(LATENT, q_lora_rank=0, v_head_dim=17, rope_interleaved=False)}


def build(config: ModelConfig, mpu: ParallelState, *, backend: Any = "auto") -> LatentAttention:
    return LatentAttention(config, mpu, 0, Kernels(config=KernelConfig(attention=backend)))


@pytest.mark.parametrize("form", FORMS)
def test_one_rank_is_every_cut(form: str, world: World) -> None:
    """Outputs and gradients, of `down` and of norms too, whole and as partial sums; each is owned once."""
    check_parallel_module(
        partial(build, FORMS[form]), inputs=[values(24, B, H)], layouts=["tp2", "tp2+sp"],
        call=partial(call, documents=packed(24)), world=world,
    )  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_backends_agree(form: str) -> None:
    x, dy = values(2, S, B, H)
    results = []
    for backend in ("block", "sdpa"):
        for documents in (None, packed()):
            module = build(FORMS[form], ParallelState.single(), backend=backend).double()
            y, _ = module(entered := x.clone().requires_grad_(), context(documents))
            y.backward(dy)
            results.append([y, entered.grad, *(p.grad for p in module.parameters())])
    for block, sdpa in ((results[0], results[2]), (results[1], results[3])):
        for one, other in zip(block, sdpa, strict=True):
            assert_equal(other, one)
    assert not torch.allclose(results[0][0], results[1][0])


def test_layers_that_positions_do_not_turn() -> None:
    x = values(S, B, H)
    turned, plain = (
        build(config, ParallelState.single()).double()
        for config in (LATENT, dataclasses.replace(LATENT, rope_layers="from:1"))
    )
    assert_equal(plain(x, context())[0], turned(x, context(rope=False))[0])
    assert not torch.allclose(plain(x, context())[0], turned(x, context())[0])


@pytest.mark.parametrize("widths", [(6, 4), (4, 6)], ids=str)
def test_kernels_of_one_width_take_two(widths: tuple[int, int]) -> None:
    d, dv = widths
    places = torch.arange(S)[:, None].expand(S, B)
    mask = AttentionMask(query=places, start=packed(), key=places)

    def run(kernel: AttentionKernel) -> list[Tensor]:
        q, k, v = (values(S, B, n, w, seed=n + w).requires_grad_() for n, w in ((4, d), (2, d), (2, dv)))
        out = attend(q, k, v, mask, kernel, sinks=None)
        assert out.shape == (S, B, 4, dv)
        out.backward(values(*out.shape, seed=9))
        return [out, *(x.grad for x in (q, k, v) if x.grad is not None)]

    found = Kernels(config=KernelConfig(attention="sdpa")).attention(Traits(head_size=d, value_size=dv), 0.3)
    assert isinstance(found, SameWidthKernel) and isinstance(found.inner, TorchKernel) and found.name == "sdpa"
    for one, other in zip(run(BlockKernel(scale=0.3)), run(found), strict=True):
        assert_equal(other, one)
    same = Kernels(config=KernelConfig(attention="sdpa")).attention(Traits(head_size=d, value_size=d), 0.3)
    assert isinstance(same, TorchKernel)


def test_causal_sdpa_takes_two_widths() -> None:
    q, k, v = (values(S, B, 4, width, seed=width) for width in (6, 6, 3))
    block, sdpa = (attention(q, k, v, backend=backend) for backend in ("block", "sdpa"))
    assert_equal(sdpa, block)
