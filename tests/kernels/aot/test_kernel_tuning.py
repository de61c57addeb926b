"""The search for rows of the launch table with a clock that is made up, and `tools/tune_kernels.py` without a GPU."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from megalite.kernels.triton import launch
from megalite.kernels.triton.launch import TABLE, Launch, launch_table
from megalite.testing.kernel_cases import KernelCase
from megalite.testing.kernel_tuning import climb, cost_in_cases, neighbours, rewritten, rows_of_cases
from megalite.testing.matrix_cases import matrix_cases
from megalite.testing.row_cases import row_cases

ROOT = Path(__file__).parents[3]


def row_of(kernel: str, dtype: str = "any", place: int = 0) -> Launch:
    return launch_table()[kernel, "sm90", dtype][place]


def distance(**best: int) -> Callable[[Launch], float]:
    """A valley: the further from `best`, in factors of two, the slower."""

    def cost(row: Launch) -> float:
        has = {**row.constants, "num_warps": row.num_warps}
        return 1.0 + sum(abs(math.log2(has[name] / value)) for name, value in best.items())

    return cost


def test_the_search_ends_at_the_fastest() -> None:
    trials = climb(row_of("gelu"), distance(ROWS=16, BLOCK=128, num_warps=8))
    assert (dict(trials[0].row.constants), trials[0].row.num_warps) == ({"ROWS": 16, "BLOCK": 128}, 8)
    assert [trial.cost for trial in trials] == sorted(trial.cost for trial in trials)
    assert len({trial.row for trial in trials}) == len(trials), "nothing is timed twice"


def test_the_table_stays_where_nothing_is_faster() -> None:
    row = row_of("gelu")
    trials = climb(row, lambda candidate: 1.0)
    assert trials[0].row == row and len(trials) == 1 + len(neighbours(row))


def test_candidates_are_ones_that_kernels_take() -> None:
    """Powers of two, tiles of products not below what tl.dot takes, at most 16 warps."""
    for rows in launch_table().values():
        for row in rows:
            for one in neighbours(row):
                values = [*one.constants.values(), one.num_warps]
                assert one != row and min(values) >= 1 and one.num_warps <= 16 and 1 <= one.num_stages <= 5
                changed = [name for name in row.constants if one[name] != row[name]]
                assert len(changed) + (one.num_warps != row.num_warps) + (one.num_stages != row.num_stages) == 1
                assert "BLOCK_N" not in row.constants or one.constants.get("BLOCK_M", 16) >= 16


def test_the_cost_is_the_mean_over_cases_of_the_gain() -> None:
    """The candidate is what launches look up meanwhile, and afterwards no longer; what does not run costs infinity."""
    row = row_of("norm", place=1)
    launched: list[Launch] = []

    def case(name: str) -> KernelCase:
        def run() -> None:
            launched.append(launch._find("norm", "sm90", "bf16", 4096))
            if launched[-1]["TILE"] > 4096:
                raise RuntimeError("out of resources")

        return KernelCase(name=name, run=run)

    def seconds(run: Callable[[], object]) -> float:
        run()
        return {2048: 1.0, 4096: 0.5}[launched[-1]["TILE"]]

    cost = cost_in_cases(row, [case("one"), case("two")], seconds)
    larger = replace(row, constants={**row.constants, "TILE": 4096})
    assert cost(row) == 1.0 and cost(larger) == pytest.approx(0.5) and launched[-1] == larger
    assert cost(replace(row, constants={**row.constants, "TILE": 8192})) == math.inf
    assert launch._find("norm", "sm90", "bf16", 4096) == row


def test_one_line_of_the_table_is_rewritten() -> None:
    table, row = TABLE.read_text(), row_of("norm", place=1)
    assert rewritten(table, row) == table
    changed = rewritten(table, replace(row, constants={"TILE": 4096, "PROGRAMS": 264}, num_warps=16, num_stages=2))
    pairs = zip(table.splitlines(), changed.splitlines(), strict=True)
    assert [new for old, new in pairs if new != old] == ["norm,sm90,any,4096,TILE=4096 PROGRAMS=264,16,2"]


def test_each_row_has_cases_of_its_own_name() -> None:
    """Large cases are found by the names of small ones."""
    cases = [*row_cases(), *matrix_cases()]
    assert len({case.name for case in cases}) == len(cases)
    users = rows_of_cases([case for case in cases if case.name.startswith("rms_norm ")], "sm_90")
    assert [case.name for case in users[row_of("norm", place=1)]] == ["rms_norm 4096", "rms_norm 2880"]


def run_tool(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "tools" / "tune_kernels.py"), *arguments]
    environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "HOME": str(Path.home()), "COLUMNS": "120"}
    return subprocess.run(
        command, capture_output=True, text=True, timeout=300, env=environment | {"CUDA_VISIBLE_DEVICES": ""}
    )


def test_without_a_gpu_the_tool_says_so_and_lists() -> None:
    before = TABLE.read_text()
    refused = run_tool("norm")
    assert refused.returncode == 2 and "timing needs a GPU" in refused.stderr and "--list" in refused.stderr
    listed = run_tool("grouped_product", "--up-to", "1024", "--list")
    assert listed.returncode == 0, listed.stderr
    assert "grouped_product on sm90, any, up to 1024, timed in grouped 2048x768" in " ".join(listed.stdout.split())
    assert "BLOCK_M=256 BLOCK_N=128 BLOCK_K=64 GROUP=8" in listed.stdout
    nothing = run_tool("nothing", "--list")
    assert nothing.returncode == 2 and "no row" in nothing.stderr
    assert TABLE.read_text() == before
