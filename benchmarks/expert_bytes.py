"""Bytes that the experts of a training step send, with and without DeepSpeed-TED's duplicate-token drop.

Where experts are cut over the tensor-parallel ranks and the sequence is not, every such rank holds all tokens. Sending
them from each (`etp2:whole`) costs tp times the all-to-all of sending each token once (the default), which adds
gathers over tp and etp instead. One step of configs/moe_demo.yaml runs on gloo ranks in each layout; payload bytes are
those that `Axis.stats` counts, summed over the ranks.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections import Counter
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from megalite.config import Config, load_config
from megalite.files import output_file, replace_json
from megalite.layout import parse_layout
from megalite.mpu import ParallelState
from megalite.testing.world import World
from megalite.train.build import build_training
from megalite.train.step import train_step

CONFIG = Path(__file__).parents[1] / "configs" / "moe_demo.yaml"
LAYOUTS = ("tp2+etp2+ep2+dp2", "tp4+etp4+ep2+dp2")
OF_EXPERTS = ("nn.moe", "_Scatter", "_Gather")  # in the backward pass, the function that asks is its own site
EXCHANGE = "ep all_to_all"


def count(mpu: ParallelState, config: Config) -> dict[str, int]:
    """Bytes that this rank's MoE layers send in a step, by axis and operation."""
    training = build_training(config, mpu, torch.device("cpu"))
    train_step(training, 0)  # whatever is agreed on once is behind us
    mpu.reset_stats()
    train_step(training, 1)
    found: Counter[str] = Counter()
    for name in ("ep", "etp", "tp"):
        axis = getattr(mpu, name)
        for site, stats in axis.stats.by_site.items():
            function, _, operation = site.rpartition(":")
            if name != "tp" or function.startswith(OF_EXPERTS):
                found[f"{name} {operation}"] += stats.bytes_sent
    return dict(found)


def measure(config: Config) -> list[dict[str, object]]:
    """A row for each layout and way of sending; `share`: all-to-all bytes over those of whole tokens."""
    rows: list[dict[str, object]] = []
    with World(max_ranks=8) as world:
        for text in LAYOUTS:
            whole, cut = (total(world, config, way) for way in (text.replace("+ep", ":whole+ep"), text))
            for tokens, sent in (("cut", cut), ("whole", whole)):
                share = sent[EXCHANGE] / whole[EXCHANGE]
                rows.append({"layout": text, "tokens": tokens, "share": share, "bytes": dict(sent)})
    return rows


def total(world: World, config: Config, text: str) -> Counter[str]:
    """The bytes of all ranks of a layout."""
    layout = parse_layout(text)
    applied = layout.apply(config)
    summed: Counter[str] = Counter()
    for part in world.run(count, applied, layout=applied.parallel, ranks=layout.num_ranks, timeout=300):
        summed.update(part)
    return summed


def main() -> None:
    """Counts and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=output_file, metavar="FILE", help="also write the table as JSON")
    arguments = parser.parse_args()
    config = load_config(["--config", str(CONFIG)])
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, precision="fp32"))
    rows = measure(config)
    table = Table(title="Bytes of a step's experts, summed over the ranks")
    for column in ("layout", "tokens", "all-to-all over ep", "of whole", "other"):
        table.add_column(column, justify="left" if column in ("layout", "tokens") else "right")
    for row in rows:
        sent = row["bytes"]
        assert isinstance(sent, dict)
        others = ", ".join(f"{name} {value:,}" for name, value in sorted(sent.items()) if name != EXCHANGE)
        table.add_row(str(row["layout"]), str(row["tokens"]), f"{sent[EXCHANGE]:,}", f"{row['share']:.4f}", others)
    (Console() if sys.stdout.isatty() else Console(width=150)).print(table)
    if arguments.json is not None:
        replace_json(arguments.json, rows)


if __name__ == "__main__":
    main()
