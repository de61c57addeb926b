"""The gated short convolution: LFM2's own block on one rank, and one rank on every cut."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor
from transformers import Lfm2Config
from transformers.models.lfm2.modeling_lfm2 import Lfm2ShortConv

from megalite.batch import MicroBatch
from megalite.kernels.config import KernelConfig
from megalite.mpu import ParallelState
from megalite.nn.config import ModelConfig
from megalite.nn.context import Context
from megalite.nn.short_conv import GatedShortConv
from megalite.parallel.random import initialize
from megalite.testing import World, check_parallel_module
from tests.hugging_face import assert_equal, fill, float64

S, B, H = 8, 2, 20
CONFIG = ModelConfig(name="lfm2", num_layers=2, hidden_size=H, num_heads=2, init_std=0.5)


def padding() -> Tensor:
    """Rows that begin and end with padding."""
    mask = torch.ones(S, B, dtype=torch.bool)
    mask[:2, 0] = mask[6:, 1] = False
    return mask


def context_of(mask: Tensor | None) -> Context:
    ids = torch.zeros(S, B, dtype=torch.int64)
    batch = MicroBatch(
        tokens=ids, labels=ids, loss_mask=torch.ones(S, B), positions=ids, samples=torch.arange(B), step=0,
        token_mask=mask,
    )  # fmt: skip
    return Context.uncut(batch)


def build(mpu: ParallelState) -> GatedShortConv:
    return GatedShortConv(CONFIG, mpu, 0, KernelConfig())


def call(mask: Tensor | None, module: GatedShortConv, x: Tensor) -> Tensor:
    y, bias = module(x, context_of(mask))
    assert bias is None
    return y


def inputs() -> Tensor:
    return torch.randn(S, B, H, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@pytest.mark.parametrize("mask", [None, padding()], ids=["whole", "padded"])
def test_one_rank_is_every_cut(mask: Tensor | None, world: World) -> None:
    check_parallel_module(
        build, inputs=[inputs()], layouts=["tp2", "tp2+sp", "tp4", "tp4+sp"], call=partial(call, mask), world=world
    )


@pytest.mark.parametrize("mask", [None, padding()], ids=["whole", "padded"])
def test_equals_the_block_of_lfm2(mask: Tensor | None) -> None:
    with float64():
        theirs = Lfm2ShortConv(Lfm2Config(hidden_size=H, num_hidden_layers=1, full_attn_idxs=[]), 0)
    fill(theirs)
    ours = build(ParallelState.single()).double()
    with torch.no_grad():
        for name, weight in zip("bcx", theirs.in_proj.weight.chunk(3), strict=True):
            ours.in_proj.part(name).weight.copy_(weight)
        ours.conv.copy_(theirs.conv.weight.squeeze(1))
        ours.proj.weight.copy_(theirs.out_proj.weight)

    x, x_theirs = inputs().requires_grad_(), inputs().transpose(0, 1).contiguous().requires_grad_()
    with float64():
        wanted = theirs(x_theirs, attention_mask=None if mask is None else mask.t())
    y = call(mask, ours, x)
    assert_equal(y, wanted.transpose(0, 1), "output")
    dy = inputs().flip(0)
    y.backward(dy)
    wanted.backward(dy.transpose(0, 1))
    assert x.grad is not None and ours.conv.grad is not None and theirs.in_proj.weight.grad is not None
    assert_equal(x.grad.transpose(0, 1), x_theirs.grad, "input")
    for name, grad in zip("bcx", theirs.in_proj.weight.grad.chunk(3), strict=True):
        assert_equal(ours.in_proj.part(name).weight.grad, grad, name)
    assert_equal(ours.conv.grad[:, None], theirs.conv.weight.grad, "conv")
    assert_equal(ours.proj.weight.grad, theirs.out_proj.weight.grad, "out_proj")


def test_a_token_sees_no_later_one_and_no_padding() -> None:
    ours = build(ParallelState.single()).double()
    initialize(ours, seed=2)
    x = inputs().requires_grad_()
    (dx,) = torch.autograd.grad(call(padding(), ours, x)[3].abs().sum(), x)
    sees = dx.abs().sum(-1) > 0
    assert sees[:, 0].tolist() == [False, False, True, True, False, False, False, False]
    assert sees[:, 1].tolist() == [False, True, True, True, False, False, False, False]
