"""Tunes rows of the launch table of the Triton kernels on this GPU: `tune_kernels.py norm_backward --up-to 4096`.

From a row of kernels/triton/launch_table.csv on, candidates that differ in one constant are timed at the sizes of real
models, until none is faster; then the row is rewritten, if it gained enough. Ranks never tune: they read the table.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable
from pathlib import Path

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from megalite.files import replace_text
from megalite.kernels.triton.launch import TABLE, Launch, current_arch
from megalite.testing.gpu_time import gpu_seconds
from megalite.testing.kernel_cases import KernelCase
from megalite.testing.kernel_tuning import Trial, climb, cost_in_cases, described, neighbours, rewritten, rows_of_cases
from megalite.testing.matrix_cases import matrix_cases
from megalite.testing.row_cases import row_cases
from megalite.testing.triton_aot import TARGETS

_TOKENS = 8192


def main() -> None:
    """Finds the rows, and lists or tunes them."""
    parser = _parser()
    arguments = parser.parse_args()
    if not arguments.list and not torch.cuda.is_available():
        parser.error("timing needs a GPU that torch sees, and there is none; --list shows what would be tried")
    arch = arguments.arch if arguments.list else current_arch()
    rows = {
        row: cases
        for row, cases in rows_of_cases([*row_cases(), *matrix_cases()], _target(arch)).items()
        if _is_meant(row, arguments)
    }
    if not rows:
        parser.error(f"no row of {TABLE.name} for {arch} is meant; without arguments --list shows all")
    console = Console()
    if arguments.list:
        for row, cases in rows.items():
            _show_plan(row, cases, console)
        return
    with torch.device("cuda"):
        large = {case.name: case for case in (*row_cases(_TOKENS), *matrix_cases(_TOKENS))}
        for row, cases in rows.items():
            trials = climb(row, cost_in_cases(row, [large[case.name] for case in cases], gpu_seconds))
            _show_ranking(row, trials, console)
            keep(row, trials[0], arguments.gain, arguments.table)


def keep(row: Launch, best: Trial, gain: float, table: Path) -> None:
    """Writes the best trial into the table file, if it is faster than its `row` there by the share `gain`."""
    if best.cost <= 1.0 - gain:
        replace_text(table, rewritten(table.read_text(), best.row))
        print(f"{table.name}: {_name(row)} is {described(best.row)}, {best.row.num_warps} warps now")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tune_kernels.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("kernel", nargs="?", help="only rows of this kernel")
    parser.add_argument("--dtype", help="only rows for this dtype, as the table has it")
    parser.add_argument("--up-to", help="only rows for this size, as the table has it")
    parser.add_argument("--list", action="store_true", help="show the rows and their first candidates, time nothing")
    parser.add_argument("--arch", default="sm90", choices=[_arch(target) for target in TARGETS], help="for --list")
    parser.add_argument("--gain", type=float, default=0.02, help="write a row if it saves this share (default 0.02)")
    parser.add_argument("--table", type=Path, default=TABLE, help="the file to write (default: the installed table)")
    return parser


def _arch(target: str) -> str:
    return target.replace("_", "")


def _target(arch: str) -> str:
    return next(target for target in TARGETS if _arch(target) == arch)


def _is_meant(row: Launch, arguments: argparse.Namespace) -> bool:
    wanted = ((arguments.kernel, row.kernel), (arguments.dtype, row.dtype), (arguments.up_to, _size(row)))
    return all(asked is None or asked == has for asked, has in wanted)


def _size(row: Launch) -> str:
    return "any" if math.isinf(row.up_to) else str(int(row.up_to))


def _name(row: Launch) -> str:
    return f"{row.kernel} on {row.arch}, {row.dtype}, up to {_size(row)}"


def _show_plan(row: Launch, cases: Iterable[KernelCase], console: Console) -> None:
    console.print(f"{_name(row)}, timed in {', '.join(case.name for case in cases)}", highlight=False)
    console.print(_table([row, *neighbours(row)]))


def _show_ranking(row: Launch, trials: Iterable[Trial], console: Console) -> None:
    console.print(_name(row), highlight=False)
    table = _table([])
    table.add_column("time", justify="right")
    for trial in trials:
        cost = "does not run" if math.isinf(trial.cost) else f"{trial.cost:.3f}"
        table.add_row(*_cells(trial.row), cost, style="bold" if trial.row == row else None)
    console.print(table)


def _table(rows: Iterable[Launch]) -> Table:
    table = Table(box=SIMPLE_HEAD)
    table.add_column("constants")
    for column in ("warps", "stages"):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(*_cells(row))
    return table


def _cells(row: Launch) -> tuple[str, str, str]:
    return described(row), str(row.num_warps), str(row.num_stages)


if __name__ == "__main__":
    main()
