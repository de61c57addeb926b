"""Which attention backend a layer gets: what each of them can do, and the choice among them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from .attention_kernel import AttentionKernel, BlockKernel
from .flash_attention import FlashAttnKernel, TorchKernel, has_flash_attn

AttentionChoice = Literal["auto", "sdpa", "block", "cudnn", "flash_attn"]
AttentionBackend = Literal["sdpa", "block", "cudnn", "flash_attn"]

_BLOCK_WINS_TO = 1024  # on CPUs with AVX-512, forward and backward: 1.1 to 1.6 times SDPA at 512, level at 2048
_HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, kw_only=True)
class AttentionNeeds:
    """What a layer asks of its attention beside causal order and documents, which every backend has."""

    scale: float
    """Factor on q k^T."""
    dropout: float = 0.0
    """Dropout probability on attention probabilities."""
    softcap: float = 0.0
    """Bound of the scores, see `BlockKernel`; 0 is none."""
    window: int = 0
    """Sliding window; 0 is none."""


def backend_problems(
    backend: AttentionChoice,
    needs: AttentionNeeds,
    *,
    device: torch.device | None = None,
    dtype: torch.dtype | None = None,
) -> list[str]:
    """Why `backend` cannot do what a layer needs, on `device` in `dtype` (where known); empty when it can."""
    if backend in ("auto", "block"):
        return []
    found, other = [], "use kernels.attention=block or auto"
    if needs.dropout > 0.0:
        found.append(
            f"has no layout-invariant dropout (attention_dropout={needs.dropout}); {other}, or attention_dropout=0"
        )
    if needs.softcap and backend != "flash_attn":
        found.append(f"has no soft-capping (attention_softcap={needs.softcap}); {other}, or attention_softcap=0")
    if needs.window and backend != "flash_attn":
        found.append(f"has no sliding window (window={needs.window}); {other}, or window=0")
    if device is not None and device.type != "cuda" and backend != "sdpa":
        found.append(f"needs a GPU, not {device.type}; {other}")
    on_gpu = backend != "sdpa" or (device is not None and device.type == "cuda")
    if dtype is not None and on_gpu and dtype not in _HALF:
        found.append(f"computes in bf16 or fp16 on a GPU, not in {str(dtype).removeprefix('torch.')}; {other}")
    if backend == "flash_attn" and not has_flash_attn():
        found.append(f"needs the package flash_attn (pip install flash-attn); {other}")
    return [f"kernels.attention={backend} {problem}" for problem in found]


def resolve_attention(
    choice: AttentionChoice,
    *,
    device: torch.device,
    dropout: float,
    seq_len: int,
) -> AttentionBackend:
    """The backend of causal attention in whole rows that `choice` means; ValueError if a named one cannot do it."""
    problems = backend_problems(choice, AttentionNeeds(scale=1.0, dropout=dropout), device=device)
    if problems:
        raise ValueError("\n".join(problems))
    if choice != "auto":
        return choice
    on_block = dropout > 0.0 or (device.type == "cpu" and seq_len <= _BLOCK_WINS_TO)
    return "block" if on_block else "sdpa"


def resolve_kernel(
    choice: AttentionChoice, needs: AttentionNeeds, *, device: torch.device, dtype: torch.dtype
) -> AttentionKernel:
    """The kernel for rows that are cut, or hold documents, or have a window; a named one works or raises ValueError."""
    if choice == "auto":
        choice = next(
            backend
            for backend in _preferred(device)
            if not backend_problems(backend, needs, device=device, dtype=dtype)
        )
    elif problems := backend_problems(choice, needs, device=device, dtype=dtype):
        raise ValueError("\n".join(problems))
    if choice == "block":
        return BlockKernel(scale=needs.scale, softcap=needs.softcap)
    if choice == "flash_attn":
        return FlashAttnKernel(scale=needs.scale, softcap=needs.softcap)
    return TorchKernel(scale=needs.scale, cudnn=choice == "cudnn")


def _preferred(device: torch.device) -> tuple[AttentionBackend, ...]:
    """What auto tries, the best first; the last one can do everything."""
    return ("flash_attn", "sdpa", "block") if device.type == "cuda" else ("block",)
