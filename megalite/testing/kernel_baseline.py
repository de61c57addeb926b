"""Public kernels as the compiler sees them: what ours may not be worse than.

Liger-Kernel (linkedin/Liger-Kernel), launched as its own code launches them, compiled for sm_90 by triton 3.6.0 (ptxas
12.8) with `megalite.testing.triton_aot`.
"""

from __future__ import annotations

from dataclasses import dataclass

from megalite.testing.triton_aot import Report


@dataclass(frozen=True, kw_only=True)
class PublicKernel:
    """One public kernel on sm_90, for one of our kernels at the same size."""

    case: str
    """Name of our `KernelCase`."""
    kernel: str
    """Our kernel's function name."""
    public: str
    """The public kernel."""
    registers: int
    """Registers of a thread."""
    spills: int = 0
    """Instructions that store or load spilled registers."""
    blocks_per_sm: int
    """Blocks that fit on a multiprocessor."""
    num_warps: int
    """Warps of a block."""

    def beats(self, ours: Report) -> bool:
        """Whether it is better than ours: by spills, then by blocks on a multiprocessor, then by registers."""
        assert ours.blocks_per_sm is not None
        return (self.spills, -self.blocks_per_sm, self.registers) < (
            ours.spill_stores + ours.spill_loads,
            -ours.blocks_per_sm,
            ours.registers,
        )


def _row(case: str, kernel: str, public: str, warps: int, registers: int, blocks: int, spills: int = 0) -> PublicKernel:
    return PublicKernel(
        case=case,
        kernel=kernel,
        public=f"Liger {public}",
        registers=registers,
        spills=spills,
        blocks_per_sm=blocks,
        num_warps=warps,
    )


BASELINE = (
    _row("rms_norm 4096", "_norm_rows", "rms_norm forward", 8, 38, 6),
    _row("rms_norm 4096", "_norm_rows_grad", "rms_norm backward", 8, 113, 2),
    _row("rms_norm 8192", "_norm_rows", "rms_norm forward", 16, 39, 3),
    _row("rms_norm 8192", "_norm_rows_grad", "rms_norm backward", 16, 113, 1),
    _row("rms_norm_add 8192", "_norm_rows", "fused_add_rms_norm forward", 16, 40, 3),
    _row("rms_norm_add 8192", "_norm_rows_grad", "fused_add_rms_norm backward", 16, 100, 1),
    _row("layer_norm 8192", "_norm_rows", "layer_norm forward", 16, 53, 2),
    _row("layer_norm 8192", "_norm_rows_grad", "layer_norm backward", 16, 128, 1),
    _row("rope 32x128", "_rotate", "rope", 4, 44, 10),
    _row("swiglu 14336", "_gated_forward", "swiglu forward", 16, 36, 3),
    _row("swiglu 14336", "_gated_grad", "swiglu backward", 16, 64, 2),
    _row("swiglu 28672", "_gated_forward", "swiglu forward", 32, 38, 1),
    _row("swiglu 28672", "_gated_grad", "swiglu backward", 32, 64, 1, 4),
    _row("geglu 28672", "_gated_forward", "geglu forward", 32, 64, 1, 75),
    _row("geglu 28672", "_gated_grad", "geglu backward", 32, 64, 1, 234),
    _row("cross_entropy 32000", "_loss_stats", "cross_entropy", 32, 61, 1),
    _row("cross_entropy 32000", "_loss_grad", "cross_entropy", 32, 61, 1),
    _row("cross_entropy 128256", "_loss_stats", "cross_entropy", 32, 61, 1),
    _row("cross_entropy 128256", "_loss_grad", "cross_entropy", 32, 61, 1),
)
"""Forward and backward of Liger's cross entropy are one kernel."""
