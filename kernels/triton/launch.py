"""How kernels are launched: a table of constants by kernel, architecture, dtype and size; nothing is measured.

There is no autotuning: ranks that choose by stopwatch may choose differently, and then sum in a different order.
`launch_table.csv` has one row per choice, made with what the compiler says of it (`tools/kernel_table.py`).
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from triton import knobs
from triton.runtime import driver

TABLE = Path(__file__).with_name("launch_table.csv")
"""Columns: kernel; arch (sm80, sm90, gfx942); dtype (bf16, fp16, fp32, fp64 or any); largest size that the row is for
(or any); constants, "BLOCK=1024 ROWS=4"; num_warps; num_stages."""

_DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float64: "fp64"}


@dataclass(frozen=True, kw_only=True)
class Launch:
    """One row of the table: how a kernel is compiled and launched."""

    kernel: str
    """Name of the kernel in the table."""
    arch: str
    """sm80, sm90 or gfx942."""
    dtype: str
    """bf16, fp16, fp32, fp64 or any."""
    up_to: float
    """The largest size that the row is for (infinite: any)."""
    constants: Mapping[str, int] = field(default_factory=dict, hash=False)
    """The kernel's constexpr arguments that tuning decides."""
    num_warps: int
    """Warps of a program."""
    num_stages: int
    """Depth of the software pipeline."""

    def __getitem__(self, constant: str) -> int:
        return self.constants[constant]

    @property
    def options(self) -> dict[str, int | bool]:
        """Launch options: `kernel[grid](..., **row.options)`."""
        # Fused multiply-add is the default of today's triton only.
        return {"num_warps": self.num_warps, "num_stages": self.num_stages, "enable_fp_fusion": True}


def launch_row(kernel: str, dtype: torch.dtype, size: int = 0) -> Launch:
    """The row for this kernel, the current device's architecture, `dtype` and `size`; LookupError if there is none.

    What `size` is, is the kernel's affair: a row's width, as a rule. A row for the dtype goes before one for any, and
    among these the one with the least sufficient `up_to`.
    """
    return _find(kernel, current_arch(), _DTYPES[dtype], size)


def launch(kernel: Any, grid: tuple[int, ...], row: Launch, *args: Any, **constants: Any) -> None:
    """Launches `kernel` with the constants given, else the row's, and the row's options; nothing on an empty grid.

    Constants of the row that the kernel does not take are the launching code's own.
    """
    if 0 not in grid:
        taken = {name: value for name, value in row.constants.items() if name in kernel.arg_names}
        kernel[grid](*args, **{**taken, **constants}, **row.options)


def current_arch() -> str:
    """The table's name for the architecture of the current device; the interpreter counts as sm90."""
    if knobs.runtime.interpret:
        return "sm90"
    target: Any = driver.active.get_current_target()
    if target.backend == "hip":
        return "gfx942"
    # Consumer Blackwell (sm_120) has the shared memory of the older ones.
    return "sm90" if 90 <= int(target.arch) < 120 else "sm80"


@cache
def launch_table() -> dict[tuple[str, str, str], tuple[Launch, ...]]:
    """All rows by (kernel, arch, dtype), the smallest size first."""
    rows: dict[tuple[str, str, str], list[Launch]] = {}
    with TABLE.open(newline="") as file:
        for line in csv.DictReader(file):
            row = _parse(line)
            rows.setdefault((row.kernel, row.arch, row.dtype), []).append(row)
    return {key: tuple(sorted(group, key=lambda row: row.up_to)) for key, group in rows.items()}


@cache
def _find(kernel: str, arch: str, dtype: str, size: int) -> Launch:
    for key in ((kernel, arch, dtype), (kernel, arch, "any")):
        for row in launch_table().get(key, ()):
            if size <= row.up_to:
                return row
    raise LookupError(f"no row for {kernel} on {arch}, {dtype}, size {size} in {TABLE.name}; add one")


def _parse(line: Mapping[str, str]) -> Launch:
    constants = dict(item.split("=") for item in line["constants"].split())
    return Launch(
        kernel=line["kernel"],
        arch=line["arch"],
        dtype=line["dtype"],
        up_to=float("inf") if line["up_to"] == "any" else float(line["up_to"]),
        constants={name: int(value) for name, value in constants.items()},
        num_warps=int(line["num_warps"]),
        num_stages=int(line["num_stages"]),
    )
