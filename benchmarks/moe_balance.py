"""What balancing does to a small mixture of experts, and what experts are worth: several seeds of each arm.

Trains configs/moe_demo.yaml under each rule, and a dense model with the same matrix products for a token, on the same
tokens, through pretrain_moe.py and pretrain_gpt.py. Prints, over the seeds, the mean and the standard deviation of the
validation loss, and how unevenly the experts were used over the last tenth of the run: max violation is
(most loaded - mean) / mean. Runs go side by side, one thread each.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn
from rich.table import Table

from megalite.config import load_config
from megalite.files import output_file, replace_json

ROOT = Path(__file__).parents[1]
CONFIG = "configs/moe_demo.yaml"


@dataclass(frozen=True)
class Arm:
    """One way to train: options over the demo's."""

    name: str
    options: tuple[str, ...]
    script: str = "pretrain_moe.py"


def arms() -> list[Arm]:
    """Balancing rules, then a dense model whose tokens multiply as many weights."""
    model = load_config(["--config", str(ROOT / CONFIG)]).model
    active = model.top_k * model.expert_ffn_size
    none = ("--model.aux-loss", "none")
    return [
        Arm("no balancing", none),
        Arm("aux loss 0.01, by row", ("--model.aux-loss", "sequence", "--model.aux-loss-coeff", "0.01")),
        Arm("aux loss 0.01, by batch", ("--model.aux-loss", "global", "--model.aux-loss-coeff", "0.01")),
        Arm("expert bias 0.01", (*none, "--model.expert-bias", "--model.expert-bias-rate", "0.01")),
        Arm(
            f"dense, width {active} in the layers with experts",
            ("--model.num-experts", "1", "--model.top-k", "1", "--model.expert-ffn-hidden-size", str(active), *none,
             "--model.no-router-normalize"),
        ),
    ]  # fmt: skip


def train(arm: Arm, seed: int, steps: int, folder: Path) -> tuple[float, float]:
    """(validation loss, max violation) of a run."""
    run_dir = folder / f"{arm.name} {seed}"
    command = [
        sys.executable, arm.script, "--config", CONFIG, "--train.run-dir", str(run_dir), "--train.seed", str(seed),
        "--train.num-steps", str(steps), "--optim.decay-steps", str(steps), "--train.eval-every", str(steps),
        "--checkpoint.every", "0", *arm.options,
    ]  # fmt: skip
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{arm.name}, seed {seed}: {done.stderr[-2000:]}")
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    last = rows[-max(1, steps // 10) :]
    violation = statistics.fmean(v for row in last for v in row["moe"]["max_violation"])
    (validation,) = (run_dir / "validation.jsonl").read_text().splitlines()
    return json.loads(validation)["validation_loss"], violation


def measure(seeds: Sequence[int], steps: int, jobs: int, console: Console) -> list[dict[str, object]]:
    """A row of the table for each arm."""
    columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeElapsedColumn())
    with (
        tempfile.TemporaryDirectory() as folder,
        ThreadPoolExecutor(jobs) as pool,
        Progress(*columns, console=console, disable=not console.is_terminal) as progress,
    ):
        task = progress.add_task("runs", total=len(arms()) * len(seeds))
        started = {
            (arm.name, seed): pool.submit(train, arm, seed, steps, Path(folder)) for seed in seeds for arm in arms()
        }
        for future in started.values():
            future.add_done_callback(lambda _: progress.advance(task))
        found = {key: future.result() for key, future in started.items()}
    rows: list[dict[str, object]] = []
    for arm in arms():
        losses, violations = zip(*(found[arm.name, seed] for seed in seeds), strict=True)
        rows.append(
            {"arm": arm.name, "seeds": len(seeds), "steps": steps}
            | {"loss": statistics.fmean(losses), "loss_sd": statistics.stdev(losses) if len(seeds) > 1 else 0.0}
            | {"violation": statistics.fmean(violations), "losses": losses, "violations": violations}
        )
    return rows


def main() -> None:
    """Trains all arms and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="runs at a time")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="also write the table as JSON")
    arguments = parser.parse_args()
    console = Console() if sys.stdout.isatty() else Console(width=120)
    rows = measure(arguments.seeds, arguments.steps, arguments.jobs, console)
    table = Table(title=f"{CONFIG}, {arguments.steps} steps, {len(arguments.seeds)} seeds")
    for column in ("", "validation loss", "+-", "max violation"):
        table.add_column(column, justify="right" if column else "left")
    for row in rows:
        table.add_row(str(row["arm"]), *(f"{row[key]:.3f}" for key in ("loss", "loss_sd", "violation")))
    console.print(table)
    if arguments.json is not None:
        replace_json(arguments.json, rows)


if __name__ == "__main__":
    main()
