"""Shows what a training step needs on each rank, by kind, before anything runs:

`memory.py --config configs/llama3_8b.yaml --num-ranks 8 --parallel.zero 3 --capacity 80`

The bytes follow from the configuration alone: parameters and buckets as the run lays them out, activations as every
block declares them, in the order of the pipeline's plan. There is a row for each place in the pipeline, for the first
of its ranks, at the moment of the step when it has most. `--compare` puts variants side by side: ZeRO stages, or ways
of recomputing. `--measure` also runs the configuration on the CPU (small ones), starting its own ranks, and counts.

All other options are those of pretrain_gpt.py. Temporaries inside an operation, and what allocators and communication
libraries keep, come on top.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from megalite.config import Config, check, load_config
from megalite.files import output_file, replace_bytes, replace_json
from megalite.layout import parse_layout
from megalite.testing.step_memory import MeasuredMemory, beside_predicted, measure
from megalite.testing.world import World, fewest_ranks
from megalite.train.memory import KINDS, STATE, RankMemory, predict
from megalite.train.memory_picture import memory_png

VARIANTS = {
    "zero": ("parallel", "zero", (0, 1, 2, 3)),
    "recompute": ("train", "recompute", ("none", "selective", "selective:attention,mlp,norm", "full", "every:2")),
}
"""What `--compare` varies: a field, and its values."""

TOLERANCE = 0.05
"""How far a count may be from the prediction."""


def main() -> None:
    """Prints what was asked for."""
    arguments, rest = _parser().parse_known_args()
    try:
        config = load_config(rest, prog="memory.py")
        if arguments.layout is not None:
            layout = parse_layout(arguments.layout)
            config = layout.apply(config)
            arguments.num_ranks = arguments.num_ranks or layout.num_ranks
        num_ranks = arguments.num_ranks or fewest_ranks(config.parallel)
        check(config, num_ranks)
        passed = _show(config, num_ranks, arguments)
    except (ValueError, TypeError) as error:
        sys.exit(f"memory.py: {error}")
    sys.exit(0 if passed else 1)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--num-ranks", type=int, help="ranks of the run (default: the fewest that hold the layout)")
    parser.add_argument("--layout", metavar="LAYOUT", help="a layout string, such as tp2+pp4:zb_v+dp4+zero2")
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), help="kind of device (default: as train.device; auto is cuda)"
    )
    parser.add_argument(
        "--capacity", type=_positive, metavar="GB", help="memory of a device in 10^9 bytes, to be compared"
    )
    parser.add_argument(
        "--expert-load", type=_positive, default=1.0, help="tokens of a rank's experts over an even share (default 1)"
    )
    parser.add_argument("--compare", choices=tuple(VARIANTS), help="variants of one option side by side")
    parser.add_argument("--measure", action="store_true", help="run two steps on CPU ranks and count")
    parser.add_argument(
        "--timeout", type=_positive, default=600.0, help="seconds that --measure may take (default 600)"
    )
    parser.add_argument("--png", type=output_file, metavar="FILE", help="draw the bytes by kind")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write the figures")
    return parser


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} must be a finite number above 0")
    return value


def _show(config: Config, num_ranks: int, arguments: argparse.Namespace) -> bool:
    """Everything that was asked for; whether what was measured is near what was predicted."""
    console = Console() if sys.stdout.isatty() else Console(width=130)
    device = _device(config, arguments)
    capacity = round(arguments.capacity * 1e9) if arguments.capacity is not None else None
    if arguments.compare is not None:
        columns = list(_variants(config, num_ranks, device, arguments))
        title = f"The fullest rank of {num_ranks}, by {arguments.compare}"
    else:
        ranks = predict(config, num_ranks, device=device, expert_load=arguments.expert_load)
        columns = [(f"pp {rank.pp_rank}", rank) for rank in ranks]
        title = f"{num_ranks} ranks"
    console.print(_kind_table(title, columns, capacity))
    if arguments.compare is None:
        console.print(_stage_table([rank for _, rank in columns]))
    console.print(_verdict(columns, capacity), highlight=False)
    figures: dict[str, Any] = {"num_ranks": num_ranks, "ranks": [_figures(name, rank) for name, rank in columns]}
    passed = True
    if arguments.measure:
        pairs = _measured(config, num_ranks, arguments.timeout)
        rows = [row for rank, counted in pairs for row in _compared(rank, counted)]
        console.print(_measured_table(rows, [counted.expert_load for _, counted in pairs]))
        figures["measured"] = rows
        passed = all(row["near"] for row in rows)
    if arguments.png is not None:
        name = f"{_name(config)}, {num_ranks} ranks"
        bars = [(label, rank.kinds) for label, rank in columns]
        replace_bytes(arguments.png, memory_png(name, bars, capacity))
    if arguments.json is not None:
        replace_json(arguments.json, figures)
    return passed


def _name(config: Config) -> str:
    return Path(config.train.run_dir).name if config.train.run_dir is not None else config.model.name


def _device(config: Config, arguments: argparse.Namespace) -> torch.device:
    if arguments.measure:
        if arguments.device == "cuda" or arguments.compare is not None:
            raise ValueError("--measure runs one layout on the CPU; leave out --compare and --device cuda")
        return torch.device("cpu")
    chosen = arguments.device or config.train.device
    return torch.device("cpu" if chosen == "cpu" else "cuda")


def _variants(
    config: Config, num_ranks: int, device: torch.device, arguments: argparse.Namespace
) -> list[tuple[str, RankMemory]]:
    """(value, its fullest rank) for each value of the option."""
    section, field, values = VARIANTS[arguments.compare]
    found = []
    for value in values:
        changed = dataclasses.replace(getattr(config, section), **{field: value})
        variant = dataclasses.replace(config, **{section: changed})
        check(variant, num_ranks)
        ranks = predict(variant, num_ranks, device=device, expert_load=arguments.expert_load)
        label = f"{field} {value}" if isinstance(value, int) else value
        found.append((label, max(ranks, key=lambda rank: rank.total)))
    return found


def _kind_table(title: str, columns: Sequence[tuple[str, RankMemory]], capacity: int | None) -> Table:
    shown = [kind for kind in KINDS if any(rank.kinds[kind] for _, rank in columns)]
    largest = max(rank.total for _, rank in columns)
    table = Table(title=title, box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("bytes of")
    for name, rank in columns:
        table.add_column(name, justify="right", style="bold" if rank.total == largest else None)
    for kind in shown:
        table.add_row(kind, *(_text(rank.kinds[kind]) for _, rank in columns))
    table.add_section()
    totals = ((_text(rank.total), capacity is not None and rank.total > capacity) for _, rank in columns)
    table.add_row("total", *(f"[red]{text}" if too_much else text for text, too_much in totals))
    table.add_row("at", *(rank.peak_action for _, rank in columns))
    return table


def _stage_table(ranks: Sequence[RankMemory]) -> Table:
    table = Table(title="One micro-batch on a stage", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in ("pp", "stage", "layers", "activations", "put-off work", "message", "most at a time"):
        table.add_column(column, justify="right")
    for rank in ranks:
        for stage in rank.stages:
            layers = f"{stage.layers.start}-{stage.layers.stop - 1}" if len(stage.layers) else "-"
            sizes = (stage.activations, stage.deferred, stage.message)
            table.add_row(str(rank.pp_rank), str(stage.number), layers, *map(_text, sizes), str(stage.peak))
    return table


def _verdict(columns: Sequence[tuple[str, RankMemory]], capacity: int | None) -> str:
    name, rank = max(columns, key=lambda column: column[1].total)
    text = f"{name} is the largest: {_text(rank.total)} in {rank.peak_action}"
    if capacity is None:
        return text + "."
    share = rank.total / capacity
    return text + f", {share:.0%} of a device of {capacity / 1e9:g} GB{'' if share <= 1 else ': it does not fit'}."


def _text(size: int) -> str:
    for unit, power in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if size >= 1 << power:
            return f"{size / (1 << power):.2f} {unit}"
    return f"{size} B" if size else "-"


def _figures(name: str, rank: RankMemory) -> dict[str, Any]:
    stages = [
        {
            "stage": stage.number,
            "layers": [stage.layers.start, stage.layers.stop],
            "activations": stage.activations,
            "deferred": stage.deferred,
            "recompute": stage.saved.again,
            "message": stage.message,
            "peak_microbatches": stage.peak,
        }
        for stage in rank.stages
    ]
    return {
        "name": name,
        "pp_rank": rank.pp_rank,
        "total": rank.total,
        "peak_action": rank.peak_action,
        "kinds": dict(rank.kinds),
        "stages": stages,
    }


# ---- counted


def _measured(config: Config, num_ranks: int, timeout: float) -> list[tuple[RankMemory, MeasuredMemory]]:
    """(predicted, counted) at each place in the pipeline."""
    with World(max_ranks=num_ranks) as world:
        found = world.run(measure, config, layout=config.parallel, ranks=num_ranks, timeout=timeout)
    return beside_predicted(config, num_ranks, found)


def _compared(rank: RankMemory, found: MeasuredMemory) -> list[dict[str, Any]]:
    pairs: list[tuple[str, int, int]] = [(kind, rank.kinds[kind], found.state[kind]) for kind in STATE]
    pairs.append(("between actions", sum(rank.settled.values()), found.step))
    pairs += [(kind, rank.kinds[kind], size) for kind, size in found.units.items()]
    return [
        {
            "pp_rank": rank.pp_rank,
            "kind": kind,
            "predicted": predicted,
            "measured": measured,
            "near": abs(predicted - measured) <= TOLERANCE * measured,
        }
        for kind, predicted, measured in pairs
        if predicted or measured
    ]


def _measured_table(rows: Sequence[Mapping[str, Any]], expert_loads: Sequence[float]) -> Table:
    caption = (
        "between actions: batch, activations, loss, deferred, messages (and reductions under way), where most is left"
    )
    if set(expert_loads) != {1.0}:
        shares = ", ".join(f"{load:.2f}" for load in expert_loads)
        caption += f"; predicted for the loads that experts had, {shares} times an even share"
    table = Table(title="Predicted and counted in a step", caption=caption, box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in ("pp", "bytes of", "predicted", "counted", "difference", ""):
        table.add_column(column, justify="left" if column in ("bytes of", "") else "right")
    for row in rows:
        predicted, measured = row["predicted"], row["measured"]
        difference = f"{predicted / measured - 1:+.2%}" if measured else "-"
        verdict = "" if row["near"] else f"[red]more than {TOLERANCE:.0%}"
        table.add_row(str(row["pp_rank"]), row["kind"], f"{predicted:,}", f"{measured:,}", difference, verdict)
    return table


if __name__ == "__main__":
    main()
