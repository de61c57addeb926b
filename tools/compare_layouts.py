"""Proves that layouts do not change a run: `compare_layouts.py --config configs/demo.yaml --layouts tp2 pp2+dp2 ...`.

Starts the ranks itself, runs some steps of the config's own model in float64 with ragged loss masks, SGD and AdamW, and
compares loss, every gradient before clipping, gradient norm and stepped weights with one rank. Exits with 1 when
any relative difference is above 1e-9, naming the first tensor that differs. All other options are those of
pretrain_gpt.py.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from megalite.config import Config, ConfigError, check, load_config
from megalite.files import output_file, replace_json
from megalite.layout import Layout, parse_layout
from megalite.testing.layouts import TOLERANCE, LayoutDifference, proof_config, prove_layouts
from megalite.testing.world import World

DEFAULT_LAYOUTS = (
    "tp2+mbs4", "tp4+mbs1", "tp2+sp+mbs4", "pp2+mbs4", "pp4+mbs1", "pp2:gpipe", "dp2+mbs4", "dp4+mbs1",
    "pp2v2:interleaved", "pp4:zb_h1", "pp2:zb_v+mbs1", "pp4:dualpipe", "tp2+pp2+mbs4", "tp2+dp2+recompute:full",
    "tp2+pp2+dp2", "tp2+sp+pp2+dp2+mbs1", "cp2+mbs4", "cp4:all_gather+mbs1", "cp2:ulysses+tp2+sp", "dp2+zero1+mbs4",
    "pp2:zb_h1+dp2+zero3+mbs1", "tp2+dp2+zero2+recompute:selective",
)  # fmt: skip
EXPERT_LAYOUTS = ("ep2+mbs4", "ep4+tp2+mbs1", "ep2+etp2+tp2+dp2", "ep2+pp2:zb_v+mbs1", "cp2+ep2+dp2+zero3")
"""More of them, for a model with experts."""

_PLAIN_WIDTH = 120
"""Columns of the table in a file or a pipe."""


def main() -> None:
    """Runs the proof and prints its table."""
    arguments, rest = _parser().parse_known_args()
    try:
        config = load_config(rest, prog="compare_layouts.py")
        layouts = [parse_layout(text) for text in arguments.layouts or _default_layouts(config)]
        _check(config, layouts, arguments.num_steps)
    except (ConfigError, ValueError) as error:
        sys.exit(f"compare_layouts.py: {error}")
    console = Console() if sys.stdout.isatty() else Console(width=_PLAIN_WIDTH)
    rows = _prove(config, layouts, arguments, console)
    console.print(_table(rows))
    if arguments.json is not None:
        replace_json(arguments.json, [row.as_row() for row in rows])
    failed = [row for row in rows if not row.passed]
    for row in failed:
        console.print(f"{row.layout} differs first in {row.first_diff}", style="red", highlight=False)
    sys.exit(1 if failed else 0)


def _prove(
    config: Config, layouts: Sequence[Layout], arguments: argparse.Namespace, console: Console
) -> list[LayoutDifference]:
    """Runs every layout, telling how far it is."""
    rows: list[LayoutDifference] = []
    world = World(max_ranks=max((layout.num_ranks for layout in layouts), default=1))
    with world, tempfile.TemporaryDirectory() as folder, console.status("starting") as status:
        proofs = prove_layouts(
            config,
            layouts,
            world,
            Path(folder),
            num_steps=arguments.num_steps,
            timeout=arguments.timeout,
            on_start=lambda name: status.update(f"running {name} ({len(rows)} of {len(layouts)} layouts done)"),
        )
        for row in proofs:
            rows.append(row)
            if not console.is_terminal:
                print(f"{row.layout}: {'pass' if row.passed else 'FAIL'} in {row.seconds:.0f} s", flush=True)
    return rows


def _default_layouts(config: Config) -> tuple[str, ...]:
    return (*DEFAULT_LAYOUTS, *EXPERT_LAYOUTS) if config.model.num_experts else DEFAULT_LAYOUTS


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument(
        "--layouts",
        nargs="+",
        metavar="LAYOUT",
        help=f"such as tp2+sp+pp2; by default {' '.join(DEFAULT_LAYOUTS)}, and for a model with experts"
        f" {' '.join(EXPERT_LAYOUTS)}",
    )
    parser.add_argument("--num-steps", type=int, default=3, help="steps with each optimizer (default 3)")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds a layout may take (default 900)")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="also write the table as JSON")
    return parser


def _check(config: Config, layouts: Sequence[Layout], num_steps: int) -> None:
    """Every layout that cannot run is refused before any rank starts."""
    problems = []
    for layout in layouts:
        try:
            check(proof_config(layout.apply(config), num_steps), layout.num_ranks)
        except ConfigError as error:
            problems += [f"{layout}: {problem}" for problem in error.problems]
    problems += _micro_batch_problems(config, layouts)
    if problems:
        raise ConfigError(problems)


def _micro_batch_problems(config: Config, layouts: Sequence[Layout]) -> list[str]:
    """Layouts that change what is computed: a balancing loss of micro-batches depends on their size by definition."""
    model, size = config.model, config.train.micro_batch_size
    if not (model.num_experts and model.aux_loss == "micro_batch" and model.aux_loss_coeff):
        return []
    return [
        f"{layout}: model.aux_loss=micro_batch depends on the micro-batch size, which is {size} in the reference;"
        f" leave out mbs{layout.micro_batch_size}, or use aux_loss=sequence"
        for layout in layouts
        if layout.micro_batch_size not in (None, size)
    ]


def _table(rows: Sequence[LayoutDifference]) -> Table:
    table = Table(title=f"Largest relative difference from one rank, float64 (limit {TOLERANCE:.0e})")
    for column in ("layout", "loss", "grads", "grad norm", "weights", "seconds", ""):
        if column == "layout":  # the one that gives way in a narrow terminal
            table.add_column(column, overflow="fold")
        else:
            table.add_column(column, justify="right" if column else "left", no_wrap=True, min_width=len(column))
    for row in rows:
        numbers = (f"{value:.1e}" for value in (row.loss, row.grads, row.grad_norm, row.weights))
        verdict = "[green]pass" if row.passed else "[red]FAIL"
        table.add_row(row.layout, *numbers, f"{row.seconds:.0f}", verdict)
    return table


if __name__ == "__main__":
    main()
