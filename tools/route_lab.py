"""Replays router logits through other rules: `route_lab.py runs/x --rule capacity_factor=1.25 --rule expert_bias=true`.

Takes what a run with `train.record_router` wrote (or `--synthetic` logits with popular and unpopular experts), routes
it as the model would under each rule, and puts side by side how even the experts are used, what is dropped and
what has to travel between `--ep` ranks. A rule overrides fields of the model's mixture-of-experts section; without
any, a few usual ones are compared. Nothing learns here, so a balancing loss only changes its own value; an expert bias
moves with every step, and `--repeat` goes through the steps several times. Figures are of the last time, over all
layers; rows of the global batch are dealt out to the ranks in turn.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, fields
from pathlib import Path

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from megalite.config.check_moe import moe_problems
from megalite.config.sections import Config
from megalite.files import output_file, replace_bytes, replace_json
from megalite.nn.config import MoEConfig
from megalite.train.heat_map import LoadHistory, Panel, draw
from megalite.train.router_record import Recording, read_recording, recorded_files
from megalite.train.router_replay import (
    Figures,
    ReplayError,
    Rule,
    StepOutcome,
    Synthetic,
    figures_of,
    parse_rule,
    simulate,
)

USUAL_RULES = (
    "bias: routing=top_k expert_bias=true capacity_factor=0",
    "capacity 1: routing=top_k capacity_factor=1.0",
    "capacity 1.25: routing=top_k capacity_factor=1.25",
    "sinkhorn: routing=sinkhorn capacity_factor=0 aux_loss=none expert_bias=false",
    "expert choice: routing=expert_choice capacity_factor=0 router_normalize=false expert_bias=false",
)


def main() -> None:
    """Compares the rules."""
    arguments = _parser().parse_args()
    try:
        _compare(arguments)
    except (ReplayError, OSError) as error:
        sys.exit(f"route_lab.py: {error}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("path", type=Path, nargs="?", help="a run folder, its router_logits, or one step of them")
    parser.add_argument("--rule", action="append", metavar="'[NAME:] FIELD=VALUE ...'", help="may be given repeatedly")
    parser.add_argument("--repeat", type=int, default=1, help="times to go through the steps")
    parser.add_argument("--ep", type=int, default=8, help="expert-parallel ranks (default 8)")
    parser.add_argument("--bytes-per-value", type=int, default=2, help="of what travels (default 2: bf16)")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write the figures")
    parser.add_argument("--png", type=output_file, metavar="FILE", help="write heat maps of the loads")
    group = parser.add_argument_group("logits of no run")
    group.add_argument("--synthetic", action="store_true", help="make them up")
    for name, value, text in (
        ("experts", 64, "number of experts"), ("top-k", 8, "experts of a token"), ("hidden-size", 2048, "width"),
        ("layers", 2, "MoE layers"), ("steps", 50, "steps"), ("rows", 16, "rows of a global batch"),
        ("seq-len", 64, "tokens of a row"), ("seed", 1, "seed"),
    ):  # fmt: skip
        group.add_argument(f"--{name}", type=int, default=value, help=f"{text} (default {value})")
    group.add_argument("--skew", type=float, default=0.5, help="how much better known some experts are (default 0.5)")
    group.add_argument(
        "--topics", type=float, default=0.3, help="how alike the tokens of a row are, 0 to 1 (default 0.3)"
    )
    return parser


def _compare(arguments: argparse.Namespace) -> None:
    if (arguments.path is None) != arguments.synthetic:
        raise ReplayError("give either the folder of a run or --synthetic")
    if min(arguments.repeat, arguments.ep, arguments.bytes_per_value) < 1:
        raise ReplayError("--repeat, --ep and --bytes-per-value must be at least 1")
    recorded_rule = Rule("synthetic" if arguments.synthetic else "as recorded")
    rules = [recorded_rule, *map(parse_rule, arguments.rule or USUAL_RULES)]
    by_rule: list[list[list[list[StepOutcome]]]] = [[] for _ in rules]
    hidden_size, sizes = 0, ""
    for recordings in _synthetic(arguments) if arguments.synthetic else _recorded(arguments.path):
        _check_ep(recordings[0], arguments.ep)
        for rule in rules:
            _check_rule(rule, recordings[0].moe)
        first = recordings[0]
        hidden_size = first.hidden_size
        sizes = f"{first.moe.num_experts} experts, {len(recordings)} steps of {first.mask.numel()} tokens"
        for outcomes, rule in zip(by_rule, rules, strict=True):
            outcomes.append(simulate(rule, recordings, ep=arguments.ep, repeat=arguments.repeat))
    figures = [
        figures_of(rule.name, outcomes, bytes_per_token=hidden_size * arguments.bytes_per_value)
        for rule, outcomes in zip(rules, by_rule, strict=True)
    ]
    layers = f"{len(by_rule[0])} layer{'s'[: len(by_rule[0]) > 1]}"
    Console().print(_table(figures, f"{layers} of {sizes}, ep {arguments.ep}"))
    if arguments.json is not None:
        replace_json(arguments.json, [asdict(row) for row in figures])
    if arguments.png is not None:
        replace_bytes(arguments.png, _picture(rules, by_rule))


def _recorded(path: Path) -> Iterator[list[Recording]]:
    """The recordings of a run, layer by layer."""
    files = recorded_files(path) if path.is_dir() else {}
    if not files:
        raise ReplayError(f"no router logits in {path}: was the run made with --train.record-router STEP ...?")
    for steps in files.values():
        yield [read_recording(file) for file in steps]


def _check_rule(rule: Rule, moe: MoEConfig) -> None:
    """Refuses what a run would refuse."""
    problems = moe_problems(Config(model=rule.model(moe)))
    if problems:
        raise ReplayError(f"rule {rule.name!r}: {'; '.join(problems)}")


def _synthetic(arguments: argparse.Namespace) -> Iterator[list[Recording]]:
    names = [item.name for item in fields(Synthetic)]
    sizes = [name for name in names if name not in ("skew", "topics", "seed")]
    wrong = [f"--{name.replace('_', '-')}={getattr(arguments, name)}" for name in sizes if getattr(arguments, name) < 1]
    if wrong or not 0 <= arguments.topics <= 1:
        raise ReplayError(f"{', '.join(wrong) or f'--topics={arguments.topics}'} must be at least 1 (topics: 0 to 1)")
    return Synthetic(**{name: getattr(arguments, name) for name in names}).recordings()


def _check_ep(recording: Recording, ep: int) -> None:
    experts, rows = recording.moe.num_experts, recording.mask.shape[0]
    if experts % ep or rows % ep:
        both = math.gcd(experts, rows)
        legal = ", ".join(str(size) for size in range(1, both + 1) if both % size == 0)
        raise ReplayError(
            f"--ep {ep} must divide num_experts={experts} and the {rows} rows of a step; it can be {legal}"
        )


def _table(figures: Sequence[Figures], title: str) -> Table:
    caption = (
        "viol.: max violation, mean and of the last step; none: tokens without an expert;"
        " ranks: fullest / mean; MB: hidden states sent to other ranks in a step, and if a token went once to a rank"
    )
    table = Table(title=title, caption=caption, box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("rule", min_width=13)
    for column in ("viol.\nmean", "viol.\nlast", "dead", "load\nentropy", "drop", "none", "ranks", "MB", "MB\nonce"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in figures:
        table.add_row(
            row.rule, *(f"{x:.2f}" for x in (row.max_violation, row.max_violation_last)),
            str(row.dead_experts), f"{row.load_entropy:.3f}", f"{row.drop_rate:.1%}", f"{row.unserved_rate:.1%}",
            f"{row.rank_load:.2f}", f"{row.dispatch_bytes / 1e6:.4g}", f"{row.dispatch_bytes_once / 1e6:.4g}",
        )  # fmt: skip
    return table


def _picture(rules: Sequence[Rule], by_rule: Sequence[list[list[list[StepOutcome]]]]) -> bytes:
    """The heat maps of all rules, one below the other, layers side by side."""
    panels, steps_per_bin = [], 1
    for rule, layers in zip(rules, by_rule, strict=True):
        for layer in layers:
            steps = [step for time in layer for step in time]
            number, tokens = steps[0].stats.layers[0], steps[0].stats.tokens
            history = LoadHistory((number,), tokens.shape[1])
            for count, step in enumerate(steps, 1):
                history.add(count, step.stats.tokens)
            used = np.sum([step.stats.tokens[0] for step in layer[-1]], axis=0)
            dead = np.flatnonzero(used == 0).tolist()
            panels.append(Panel(title=f"{rule.name}: layer {number}", tokens=history.of_layer(0), dead=dead))
            steps_per_bin = history.steps_per_bin
    return draw(panels, title="Expert load by rule", steps_per_bin=steps_per_bin, columns=len(by_rule[0]))


if __name__ == "__main__":
    main()
