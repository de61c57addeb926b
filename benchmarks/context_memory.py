"""Memory of a training step over long rows, counted: what a rank keeps for backward, and the most that it holds.

A tiny Llama runs forward and backward over one row on every layout; counted are the bytes of all tensors that the step
makes (`megalite.testing.memory`), weights and their gradients aside, of the rank that has most. "x cp" is that times
the ranks over one rank's: 1 is a fall by 1 / cp. The peak has a part that does not depend on the length: the largest
block of scores with its temporaries.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from megalite.batch import MicroBatch
from megalite.files import output_file, replace_json
from megalite.layout import parse_layout
from megalite.models.llama import Llama
from megalite.mpu import ParallelState
from megalite.nn.config import ModelConfig
from megalite.testing.memory import LiveMemory
from megalite.testing.world import World

MODEL = ModelConfig(num_layers=2, hidden_size=32, num_heads=4, num_kv_heads=2, ffn_hidden_size=64, vocab_size=64)
LAYOUTS = ("single", "cp2", "cp4", "cp4:all_gather", "cp4:ulysses", "cp4:ulysses_ring")


def memory_of_a_step(mpu: ParallelState, seq_len: int) -> tuple[int, int]:
    """(bytes kept for backward, most bytes held) on this rank."""
    model = Llama(MODEL, mpu)
    tokens = (torch.arange(seq_len) * 7919 % MODEL.vocab_size)[:, None]
    batch = MicroBatch(
        tokens=tokens, labels=tokens, loss_mask=torch.ones(seq_len, 1), positions=torch.arange(seq_len)[:, None],
        samples=torch.zeros(1, dtype=torch.int64), step=0,
    )  # fmt: skip
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    with LiveMemory() as memory:
        loss = model(None, batch)
        kept = memory.now
        loss.backward()
    return kept, memory.peak


def measure(world: World, layout: str, seq_len: int) -> tuple[int, int]:
    """The same of the rank that has most."""
    parsed = parse_layout(layout)
    found = world.run(memory_of_a_step, seq_len, layout=parsed.parallel, ranks=parsed.num_ranks, timeout=1800.0)
    return max(kept for kept, _ in found), max(peak for _, peak in found)


def rows_of(world: World, lengths: list[int], layouts: list[str]) -> Iterator[dict[str, Any]]:
    """A row for each length and layout, beside one rank."""
    for seq_len in lengths:
        alone = measure(world, "single", seq_len)
        for layout in layouts:
            found = alone if layout == "single" else measure(world, layout, seq_len)
            row: dict[str, Any] = {"seq_len": seq_len, "layout": layout}
            for name, value, one in zip(("kept", "peak"), found, alone, strict=True):
                row |= {name: value, f"{name}_times_cp": value * parse_layout(layout).parallel.cp / one}
            yield row


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seq-len", type=int, nargs="+", default=[8192, 16384, 32768])
    parser.add_argument("--layouts", nargs="+", default=list(LAYOUTS))
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write the figures")
    arguments = parser.parse_args()
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in ("tokens", "layout", "kept MB", "x cp", "peak MB", "x cp"):
        table.add_column(column, justify="left" if column == "layout" else "right")
    rows: list[dict[str, Any]] = []
    with World(max(parse_layout(layout).num_ranks for layout in arguments.layouts)) as world:
        for row in rows_of(world, arguments.seq_len, arguments.layouts):
            rows.append(row)
            figures = (f"{row[n] / 1e6:.1f}" if n in ("kept", "peak") else f"{row[n]:.2f}" for n in list(row)[2:])
            table.add_row(str(row["seq_len"]), row["layout"], *figures)
    Console(width=110).print(table)
    if arguments.json is not None:
        replace_json(arguments.json, rows)


if __name__ == "__main__":
    main()
