"""Row and elementwise kernels, compiled: no spills, 128-bit loads, on every GPU that we name."""

from __future__ import annotations

import pytest

from megalite.testing.kernel_baseline import BASELINE
from megalite.testing.kernel_cases import KernelCase
from megalite.testing.row_cases import row_cases
from megalite.testing.triton_aot import TARGETS

COMPARED = {public.case for public in BASELINE}


def rows() -> list[object]:
    """sm_90 with the first size of each operation goes into `make test`."""
    seen, table = set[str](), []
    for case in row_cases():
        operation = case.name.split()[0]
        for target in TARGETS:
            marks = [] if operation not in seen and target == "sm_90" else [pytest.mark.full]
            table.append(pytest.param(case, target, id=f"{case.name}-{target}", marks=marks))
        seen.add(operation)
    return table


@pytest.mark.parametrize(("case", "target"), rows())
def test_compiles_well(case: KernelCase, target: str) -> None:
    reports = case.compile(target)
    assert case.faults(reports) == []


@pytest.mark.full
@pytest.mark.parametrize("case", [c for c in row_cases() if c.name in COMPARED], ids=lambda c: c.name)
def test_never_worse_than_the_public_kernels(case: KernelCase) -> None:
    reports = {report.name: report for report in case.compile("sm_90")}
    for public in BASELINE:
        if public.case == case.name:
            assert not public.beats(reports[public.kernel]), f"{public} is better than {reports[public.kernel]}"
