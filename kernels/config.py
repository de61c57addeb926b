"""What the kernels section of a run's config chooses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class KernelConfig:
    """Backends of the fused operations, and how the CPU is used."""

    backend: Literal["auto", "torch"] = "auto"
    """Backend of norms, activations, rotary embedding, dropout, loss and optimizer."""
    attention: Literal["auto", "sdpa", "block", "cudnn", "flash_attn"] = "auto"
    """Attention: torch's SDPA (flash kernels), block-wise matrix products (which alone have everything), cuDNN, or the
    flash_attn package; auto takes the fastest that can do what the model asks."""
    grouped: Literal["auto", "loop", "grouped_mm"] = "auto"
    """Matrix products of experts: one after another, or torch's grouped GEMM (no float64); auto takes the faster."""
    fp32_gemm: Literal["auto", "ieee", "onednn"] = "auto"
    """CPU float32 matrix products: MKL, or oneDNN where a start-up probe finds it accurate (onednn: else an error)."""
    malloc_tuning: bool = True
    """Keep freed memory in the process (glibc on Linux): faster CPU steps, peak memory up to a tenth higher."""
