"""The search for better rows of the launch table: what to try, how, and how a row is written."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

from triton.runtime import driver
from triton.runtime.jit import JITFunction

from megalite.kernels.triton import launch
from megalite.kernels.triton.launch import Launch
from megalite.testing.kernel_cases import KernelCase
from megalite.testing.triton_aot import stub_driver

_MOST_WARPS, _MOST_STAGES = 16, 5
_LEAST_OF_A_PRODUCT = 16
"""Rows, columns and depth of the tiles that `tl.dot` takes at least."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One candidate for a row, measured."""

    row: Launch
    cost: float
    """Its time over that of the table's row; infinite if it does not run."""


def climb(row: Launch, cost: Callable[[Launch], float], *, most_rounds: int = 8) -> list[Trial]:
    """All candidates tried, the best first: from `row` to its best neighbour, on from there, until none is better.

    Of equally good ones the first tried, which is `row` itself where nothing beats it.
    """
    tried = {row: cost(row)}
    for _ in range(most_rounds):
        best = min(tried, key=tried.__getitem__)
        for candidate in neighbours(best):
            if candidate not in tried:
                tried[candidate] = cost(candidate)
        if min(tried.values()) >= tried[best]:
            break
    return [Trial(row=one, cost=tried[one]) for one in sorted(tried, key=tried.__getitem__)]


def neighbours(row: Launch) -> list[Launch]:
    """Rows with one constant, or the number of warps, halved or doubled, or one stage more or less."""
    is_product = "BLOCK_N" in row.constants
    found = []
    for name, value in row.constants.items():
        least = _LEAST_OF_A_PRODUCT if is_product and name.startswith("BLOCK_") else 1
        for changed in (value // 2, value * 2):
            if changed >= least:
                found.append(replace(row, constants={**row.constants, name: changed}))
    for warps in (row.num_warps // 2, row.num_warps * 2):
        if 1 <= warps <= _MOST_WARPS:
            found.append(replace(row, num_warps=warps))
    for stages in (row.num_stages - 1, row.num_stages + 1) if is_product else ():
        if 1 <= stages <= _MOST_STAGES:
            found.append(replace(row, num_stages=stages))
    return found


def cost_in_cases(
    row: Launch, cases: Iterable[KernelCase], seconds: Callable[[Callable[[], object]], float]
) -> Callable[[Launch], float]:
    """The cost of a candidate for `row`: the geometric mean, over `cases`, of its time over that of `row`.

    A case is timed as a whole, forward and backward; all its other launches stay as the table has them.
    """
    timed = list(cases)

    def times(candidate: Launch) -> list[float]:
        with _in_place_of(row, candidate):
            return [seconds(case.run) for case in timed]

    before = times(row)

    def cost(candidate: Launch) -> float:
        try:
            after = before if candidate == row else times(candidate)
        except Exception:  # too much shared memory, too many registers, a size that the compiler refuses
            return math.inf
        return math.exp(sum(math.log(new / old) for new, old in zip(after, before, strict=True)) / len(before))

    return cost


def rows_of_cases(cases: Iterable[KernelCase], target: str) -> dict[Launch, list[KernelCase]]:
    """Each row that launches of the cases look up on `target`, and which cases do; nothing is compiled or run."""
    found: dict[Launch, list[KernelCase]] = {}
    find = launch._find

    for case in cases:

        def recorded(*key: Any, case: KernelCase = case) -> Launch:
            row = find(*key)
            users = found.setdefault(row, [])
            if case not in users:
                users.append(case)
            return row

        with (
            patch.object(launch, "_find", recorded),
            patch.object(JITFunction, "run", lambda *args, **kwargs: None),
            patch.object(driver, "_active", stub_driver(target)),
        ):
            case.run()
    return found


@contextmanager
def _in_place_of(row: Launch, candidate: Launch) -> Iterator[None]:
    find = launch._find

    def found(*key: Any) -> Launch:
        row_found = find(*key)
        return candidate if row_found == row else row_found

    with patch.object(launch, "_find", found):
        yield


def rewritten(table: str, row: Launch) -> str:
    """The text of the launch table with the line of the kernel, architecture, dtype and size of `row` replaced."""
    lines = list(csv.DictReader(io.StringIO(table)))
    new = _line(row)
    key = ("kernel", "arch", "dtype", "up_to")
    matching = [line for line in lines if all(line[name] == new[name] for name in key)]
    assert len(matching) == 1, f"{len(matching)} lines for {new}"
    matching[0].update(new)
    out = io.StringIO()
    writer = csv.DictWriter(out, list(new), lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return out.getvalue()


def _line(row: Launch) -> Mapping[str, str]:
    return {
        "kernel": row.kernel,
        "arch": row.arch,
        "dtype": row.dtype,
        "up_to": "any" if math.isinf(row.up_to) else str(int(row.up_to)),
        "constants": described(row),
        "num_warps": str(row.num_warps),
        "num_stages": str(row.num_stages),
    }


def described(row: Launch) -> str:
    """Its constants as the table has them: "ROWS=4 BLOCK=512"."""
    return " ".join(f"{name}={value}" for name, value in row.constants.items())
