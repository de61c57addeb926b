"""The launch table: every row is one that the cases of `make test-all` compile, and lookups find the right one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from megalite.kernels.triton import launch
from megalite.kernels.triton.launch import Launch, launch_row, launch_table
from megalite.testing.kernel_cases import KernelCase
from megalite.testing.matrix_cases import matrix_cases
from megalite.testing.row_cases import row_cases
from megalite.testing.triton_aot import TARGETS, stub_driver


def rows_used(cases: list[KernelCase], target: str, monkeypatch: pytest.MonkeyPatch) -> set[tuple[Any, ...]]:
    """(kernel, arch, dtype, up_to) of the rows that launches of these cases look up."""
    used, find = set[tuple[Any, ...]](), launch._find

    def recorded(*key: Any) -> Launch:
        row = find(*key)
        used.add((row.kernel, row.arch, row.dtype, row.up_to))
        return row

    monkeypatch.setattr(launch, "_find", recorded)
    monkeypatch.setattr(JITFunction, "run", lambda self, *args, **kwargs: None)
    monkeypatch.setattr(driver, "_active", stub_driver(target))
    for case in cases:
        case.run()
    return used


@pytest.mark.parametrize("target", TARGETS)
def test_every_row_is_compiled(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    used = rows_used([*row_cases(), *matrix_cases()], target, monkeypatch)
    groups = [rows for (_, arch, _), rows in launch_table().items() if arch == target.replace("_", "")]
    table = [row for rows in groups for row in rows]
    assert {(row.kernel, row.arch, row.dtype, row.up_to) for row in table} == used


def test_lookup(monkeypatch: pytest.MonkeyPatch) -> None:
    """The dtype's own rows go first, then the smallest size that suffices; nothing suitable is an error."""
    monkeypatch.setattr(launch, "current_arch", lambda: "sm90")
    assert launch_row("norm", torch.bfloat16, 1024).up_to == 1024
    assert launch_row("norm", torch.bfloat16, 1025).up_to == 4096
    assert launch_row("norm", torch.float64, 10**6).up_to == float("inf")
    with pytest.raises(LookupError, match="no row for nothing on sm90, bf16, size 5"):
        launch_row("nothing", torch.bfloat16, 5)


def test_launching_for_an_unknown_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Newer data-centre GPUs take the rows of sm_90, small ones those of sm_80."""
    for target, arch in (("sm_100", "sm90"), ("sm_120", "sm80"), ("sm_89", "sm80"), ("gfx950", "gfx942")):
        monkeypatch.setattr(driver, "_active", stub_driver(target))
        assert launch.current_arch() == arch
