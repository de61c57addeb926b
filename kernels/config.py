"""What the kernels section of a run's config chooses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

BackendChoice = Literal["auto", "torch", "compiled", "triton", "apex"]
AttentionChoice = Literal["auto", "sdpa", "block", "cudnn", "flash_attn", "triton"]
GroupedChoice = Literal["auto", "loop", "grouped_mm", "triton"]


@dataclass(frozen=True, kw_only=True)
class KernelConfig:
    """Backends of the fused operations, and how the CPU is used."""

    backend: BackendChoice = "auto"
    """Norms, activations, rotary embedding, dropout, loss, optimizer and weight gradients: plain torch, torch.compile
    (CPU), Triton (GPU), or NVIDIA's apex, which has some of them; auto takes the fastest for the device."""
    attention: AttentionChoice = "auto"
    """Attention: torch's SDPA (flash kernels), block-wise matrix products (which alone have everything), cuDNN, the
    flash_attn package, or Triton; auto takes the fastest that can do what the model asks."""
    grouped: GroupedChoice = "auto"
    """Matrix products of experts: one after another, torch's grouped GEMM (no float64), or Triton; auto takes the
    fastest."""
    compile: bool = True
    """Whether torch.compile may be used: some seconds an operation in the first run, kept on disk for later ones."""
    fp32_gemm: Literal["auto", "ieee", "onednn"] = "auto"
    """CPU float32 matrix products: MKL, or oneDNN where a start-up probe finds it accurate (onednn: else an error)."""
    malloc_tuning: bool = True
    """Keep freed memory in the process (glibc on Linux): faster CPU steps, peak memory up to a tenth higher."""
