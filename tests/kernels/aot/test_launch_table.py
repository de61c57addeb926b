"""The launch table: every row is one that the cases of `make test-all` compile, and lookups find the right one."""

from __future__ import annotations

import pytest
import torch
from triton.runtime import driver

from megalite.kernels.triton import launch
from megalite.kernels.triton.launch import launch_row, launch_table
from megalite.testing.kernel_tuning import rows_of_cases
from megalite.testing.matrix_cases import matrix_cases
from megalite.testing.row_cases import row_cases
from megalite.testing.triton_aot import TARGETS, stub_driver


@pytest.mark.parametrize("target", TARGETS)
def test_every_row_is_compiled(target: str) -> None:
    used = rows_of_cases([*row_cases(), *matrix_cases()], target).keys()
    groups = [rows for (_, arch, _), rows in launch_table().items() if arch == target.replace("_", "")]
    assert {row for rows in groups for row in rows} == used


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
