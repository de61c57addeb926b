"""Attention by the flash kernels of torch and of the flash_attn package."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from megalite.kernels.attention_kernel import AttentionKernel, BlockKernel, attend
from megalite.kernels.backends import Traits
from megalite.kernels.chosen import Kernels
from megalite.kernels.config import AttentionChoice, KernelConfig
from megalite.kernels.flash_attention import FlashAttnKernel, TorchKernel
from megalite.kernels.registry import choose, problems
from tests.kernels import flash_attn_package
from tests.kernels.masked import (
    HEADS,
    MASKS,
    SCALE,
    close,
    detached,
    inputs,
    reference,
)

pytestmark = pytest.mark.usefixtures("small_blocks")


@pytest.mark.parametrize("name", ["documents", "causal", "one token", "zigzag", "keys of another rank", "nothing"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_torch_kernels(name: str, dtype: torch.dtype) -> None:
    mask = MASKS[name]()
    leaves, dout = inputs(mask, dtype, dim=8)
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2}[dtype]
    wanted, wanted_lse = reference(*leaves, mask)
    kernel = TorchKernel(scale=SCALE)
    out, lse = kernel.forward(*detached(leaves), mask, None)
    assert out.dtype == lse.dtype == torch.promote_types(dtype, torch.float32)
    close(out, wanted, tolerance)
    close(lse, wanted_lse, tolerance)
    ours = torch.autograd.grad(attend(*leaves, mask, kernel), leaves, dout)
    for grad, wanted_grad in zip(ours, torch.autograd.grad(wanted, leaves, dout.double()), strict=True):
        close(grad, wanted_grad, tolerance)


@pytest.mark.parametrize("name", [name for name in MASKS if name != "no rows"])
def test_flash_attn_is_asked_for_the_right_sequences(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package's calls, answered by its definition in plain torch."""
    flash_attn_package.install(monkeypatch)
    mask = MASKS[name]()
    leaves, dout = inputs(mask, dim=8)
    sinks = torch.linspace(-1.0, 1.0, HEADS, dtype=torch.float64)
    kernel = FlashAttnKernel(scale=SCALE, softcap=2.0)
    ours = attend(*leaves, mask, kernel, sinks=sinks)
    wanted, _ = reference(*leaves, mask, softcap=2.0, sinks=sinks)
    close(ours, wanted)
    grads = torch.autograd.grad(wanted, leaves, dout)
    for grad, wanted_grad in zip(torch.autograd.grad(ours, leaves, dout), grads, strict=True):
        close(grad, wanted_grad)


def test_flash_attn_is_there_with_its_package_and_takes_heads_of_eights(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Traits(device=torch.device("cuda"), dtype=torch.bfloat16, head_size=128)
    flash_attn_package.install(monkeypatch)
    assert problems("attention", "flash_attn", gpu) == [] and choose("attention", "auto", gpu) == "flash_attn"
    for size in (100, 264):
        other = dataclasses.replace(gpu, head_size=size)
        assert f"not of {size}" in problems("attention", "flash_attn", other)[0]
        assert choose("attention", "auto", other) != "flash_attn"


def test_the_choice_of_a_backend() -> None:
    cpu = Traits(device=torch.device("cpu"), dtype=torch.float64)
    gpu = Traits(device=torch.device("cuda"), dtype=torch.bfloat16)

    def resolve(choice: AttentionChoice, traits: Traits = cpu) -> AttentionKernel:
        return Kernels(config=KernelConfig(attention=choice)).attention(traits, SCALE)

    softcap, window, dropout = (
        dataclasses.replace(cpu, **{name: value}) for name, value in (("softcap", 5.0), ("window", 5), ("dropout", 0.1))
    )
    assert resolve("block", softcap) == BlockKernel(scale=SCALE, softcap=5)
    assert resolve("auto", window) == BlockKernel(scale=SCALE)
    assert resolve("sdpa") == TorchKernel(scale=SCALE)
    for traits in (softcap, window, dropout):
        with pytest.raises(ValueError, match=r"kernels\.attention=block or auto"):
            resolve("sdpa", traits)
    with pytest.raises(ValueError, match="needs a GPU, and this run is on the cpu"):
        resolve("cudnn")
    with pytest.raises(ValueError, match="needs the package flash_attn"):
        resolve("flash_attn")
    assert "not in float32" in problems("attention", "sdpa", dataclasses.replace(gpu, dtype=torch.float32))[0]
    assert problems("attention", "sdpa", gpu) == []
    assert resolve("auto", gpu) == TorchKernel(scale=SCALE)
    assert choose("attention", "auto", dataclasses.replace(gpu, dropout=0.1)) == "triton"
