"""Attention, products and routing, compiled: matrix instructions, no spills up to 128 features, 128-bit loads."""

from __future__ import annotations

import pytest

from megalite.testing.kernel_cases import KernelCase
from megalite.testing.matrix_cases import matrix_cases
from megalite.testing.triton_aot import TARGETS


def rows() -> list[object]:
    """sm_90 with the first size of the plain operations goes into `make test`."""
    seen, table = {"attention_softcap", "attention_dropout", "attention_fp32", "grouped_fp32"}, []
    for case in matrix_cases():
        operation = case.name.split()[0]
        for target in TARGETS:
            marks = [] if operation not in seen and target == "sm_90" else [pytest.mark.full]
            table.append(pytest.param(case, target, id=f"{case.name}-{target}", marks=marks))
        seen.add(operation)
    return table


@pytest.mark.parametrize(("case", "target"), rows())
def test_compiles_well(case: KernelCase, target: str) -> None:
    assert case.faults(case.compile(target)) == []
