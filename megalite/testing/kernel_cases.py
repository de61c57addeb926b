"""What a production-size launch of a kernel is, and what its machine code must be like."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from megalite.testing.triton_aot import Report, capture


@dataclass(frozen=True, kw_only=True)
class KernelCase:
    """One operation at one size, forward and backward, launched through its public function under `capture`."""

    name: str
    """Operation and size, as tables show it: "rms_norm 4096"."""
    run: Callable[[], object]
    """Launches it on CPU tensors of a few rows with the true widths."""
    mma: Mapping[str, str] = field(default_factory=dict)
    """Target to the matrix instruction that kernels must use there."""
    narrow: frozenset[str] = frozenset()
    """Kernels that move too little for 128-bit loads to matter, and that need no matrix instructions either."""
    spills: Mapping[tuple[str, str], int] = field(default_factory=dict)
    """(kernel, target) to spill instructions that are tolerated: recorded, and may not grow."""

    def compile(self, target: str) -> list[Report]:
        """Reports of all kernels of the case for one target."""
        with capture(target) as reports:
            self.run()
        return reports

    def faults(self, reports: list[Report]) -> list[str]:
        """What is wrong with the case's kernels, in words."""
        found = [] if reports else [f"{self.name}: launches no kernel"]
        for report in reports:
            narrow = report.name in self.narrow
            found += report.faults(
                mma=None if narrow else self.mma.get(report.target),
                wide_loads=not narrow,
                spills=self.spills.get((report.name, report.target), 0),
            )
        return found
