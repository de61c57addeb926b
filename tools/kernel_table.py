"""Shows what the compiler makes of the Triton kernels, without a GPU: `kernel_table.py --target sm_90,gfx942`.

For each kernel at production sizes: registers of a thread, spilled ones, shared memory, blocks on a multiprocessor,
widest loads, matrix instructions; beside them the public kernel of the same operation and size, where one is recorded.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Iterable, Iterator

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from megalite.files import output_file, replace_json
from megalite.testing.kernel_baseline import BASELINE, PublicKernel
from megalite.testing.kernel_cases import KernelCase
from megalite.testing.matrix_cases import matrix_cases
from megalite.testing.row_cases import row_cases
from megalite.testing.triton_aot import LIMITS, TARGETS, Report


def main() -> None:
    """Compiles, prints, and exits with 1 if a kernel has a fault or a public one is better."""
    arguments = _parser().parse_args()
    targets = arguments.target.split(",")
    unknown = [target for target in targets if target not in LIMITS]
    if unknown:
        sys.exit(f"kernel_table.py: --target {unknown[0]} is unknown; known are {', '.join(LIMITS)}")
    cases = [case for case in (*row_cases(), *matrix_cases()) if arguments.case in case.name]
    rows = list(_compile(cases, targets))
    _print(rows, Console(width=None if sys.stdout.isatty() else 160))
    if arguments.json is not None:
        replace_json(arguments.json, [_as_json(case, report) for case, report in rows])
    faults = [*_faults(cases, rows), *_losses(rows)]
    print(*faults, sep="\n")
    sys.exit(1 if faults else 0)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--target", default=",".join(TARGETS), help=f"comma-separated (default {','.join(TARGETS)})")
    parser.add_argument("--case", default="", help="only cases whose name contains this")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write all reports there too")
    return parser


def _compile(cases: Iterable[KernelCase], targets: Iterable[str]) -> Iterator[tuple[KernelCase, Report]]:
    for target in targets:
        for case in cases:
            yield from ((case, report) for report in case.compile(target))


def _print(rows: Iterable[tuple[KernelCase, Report]], console: Console) -> None:
    table = Table(box=SIMPLE_HEAD)
    for column in ("case", "kernel", "target", "warps", "registers", "spills", "shared", "blocks/SM", "loads", "mma"):
        table.add_column(column, justify="left" if column in ("case", "kernel", "target", "mma") else "right")
    table.add_column("public (sm_90)")
    for case, report in rows:
        spills = report.spill_stores + report.spill_loads
        numbers = report.num_warps, report.registers, spills, report.shared_bytes, report.blocks_per_sm or "-"
        loads = report.widest_load, report.mma or "-", _described(_public(case, report))
        table.add_row(case.name, report.name, report.target, *map(str, (*numbers, *loads)))
    console.print(table)


def _public(case: KernelCase, report: Report) -> PublicKernel | None:
    if report.target != "sm_90":
        return None
    return next((row for row in BASELINE if (row.case, row.kernel) == (case.name, report.name)), None)


def _described(public: PublicKernel | None) -> str:
    if public is None:
        return ""
    spills = f", {public.spills} spills" if public.spills else ""
    size = f"{public.num_warps} warps, {public.registers} registers{spills}, {public.blocks_per_sm} blocks"
    return f"{public.public}: {size}"


def _as_json(case: KernelCase, report: Report) -> dict[str, object]:
    public = _public(case, report)
    return {
        "case": case.name,
        **dataclasses.asdict(report),
        "public": dataclasses.asdict(public) if public is not None else None,
    }


def _faults(cases: Iterable[KernelCase], rows: list[tuple[KernelCase, Report]]) -> Iterator[str]:
    for case in cases:
        yield from case.faults([report for owner, report in rows if owner is case])


def _losses(rows: Iterable[tuple[KernelCase, Report]]) -> Iterator[str]:
    for case, report in rows:
        public = _public(case, report)
        if public is not None and public.beats(report):
            yield f"{case.name}, {report.name}: {_described(public)} is better"


if __name__ == "__main__":
    main()
