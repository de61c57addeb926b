"""Proves that a run can be resumed: trains steps that it has recorded once more, from one of its checkpoints.

    python tools/replay.py runs/demo
    torchrun --nproc-per-node 4 tools/replay.py runs/demo --from 100 --steps 20
    python tools/replay.py runs/demo --layout single

In the layout of the run every bit of loss, gradient norm, learning rate and data must be as metrics.jsonl has it; in
another one, up to the order of sums. The first step that is not is named with its cause: data, weights, loss, gradient
or update. Reads the run folder and writes nothing. The exit status is 0, 1 when a step differs, 2 when the run cannot
be replayed so.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from pathlib import Path
from typing import NoReturn

from rich.console import Console
from rich.table import Table

from megalite.checkpoint.errors import CheckpointError
from megalite.config import Config, ConfigError, check, load_config
from megalite.data.indexed import FormatError
from megalite.files import output_file, replace_json
from megalite.layout import parse_layout
from megalite.mpu import ParallelState
from megalite.optim.optimizer import NonFiniteGradient
from megalite.train.distributed import start
from megalite.train.replay import Replay, replay
from megalite.train.resume import ResumeError
from megalite.train.run import check_kernels, choose_kernels, world_size

_PLAIN_WIDTH = 120
"""Columns of the table in a file or a pipe."""
_REFUSED = 2


def main() -> None:
    """Replays and prints the table."""
    arguments = _parser().parse_args()
    try:
        config, changed = _config(arguments)
    except (ConfigError, ValueError) as error:
        _refuse(error)
    with start(config.train.device) as launch:
        mpu = ParallelState.build(config.parallel)
        try:
            check_kernels(choose_kernels(config, launch.device), mpu)
            outcome = replay(
                config, mpu, launch.device, arguments.run, start=arguments.start, num_steps=arguments.steps,
                may_be_exact=not changed, tolerance=arguments.tolerance,
            )  # fmt: skip
        except (CheckpointError, ResumeError, FormatError, NonFiniteGradient, OSError, ValueError) as error:
            _refuse(error)
        if mpu.world.is_first:
            _show(outcome, arguments)
    sys.exit(0 if outcome.divergence is None else 1)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, metavar="RUN", help="the run folder")
    parser.add_argument(
        "--from", dest="start", type=int, metavar="STEP",
        help="the checkpoint to begin at, 0 for the beginning of the run (default: the newest that steps follow)",
    )  # fmt: skip
    parser.add_argument("--steps", type=int, default=10, help="steps at most (default 10)")
    parser.add_argument("--layout", help="another layout, such as tp2+dp2 or single (default: that of the run)")
    parser.add_argument("--tolerance", type=float, help="largest relative difference in another layout")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="also write the outcome as JSON")
    return parser


def _config(arguments: argparse.Namespace) -> tuple[Config, bool]:
    """The run's configuration in the layout asked for, and whether that changes more than which rank holds what."""
    if arguments.steps < 1 or (arguments.start is not None and arguments.start < 0):
        raise ValueError("--steps must be at least 1, and --from at least 0")
    path = arguments.run / "config.yaml"
    if not path.is_file():
        raise ValueError(f"{arguments.run} is not a run folder: it has no config.yaml")
    config = load_config(["--config", str(path)])
    config = dataclasses.replace(
        config,
        train=dataclasses.replace(
            config.train, run_dir=str(arguments.run), resume="none", eval_every=0, eval_only=False
        ),
        checkpoint=dataclasses.replace(config.checkpoint, allow=("*",)),  # what differs is to be seen in the steps
    )
    layout = parse_layout(arguments.layout) if arguments.layout is not None else None
    applied = layout.apply(config) if layout is not None else config
    ranks = layout.num_ranks if layout is not None else world_size()
    if ranks != world_size():
        raise ValueError(
            f"--layout {layout} takes {ranks} ranks, and this job has {world_size()}:"
            f" torchrun --nproc-per-node {ranks} tools/replay.py {arguments.run} --layout {layout}"
        )
    try:
        check(applied, ranks)
    except ConfigError as error:
        hint = (
            "" if layout is not None else "; start as many ranks as the run had, or give --layout (single is one rank)"
        )
        raise ValueError(f"{error}{hint}") from error
    same = (applied.parallel, applied.train.micro_batch_size) == (config.parallel, config.train.micro_batch_size)
    return applied, not same


def _refuse(error: Exception) -> NoReturn:
    if os.environ.get("RANK", "0") == "0":
        print(f"replay.py: {error}", file=sys.stderr, flush=True)
    sys.exit(_REFUSED)


def _show(outcome: Replay, arguments: argparse.Namespace) -> None:
    """The table and the verdict, for people; the same as JSON."""
    console = Console() if sys.stdout.isatty() else Console(width=_PLAIN_WIDTH)
    limit = "the same bits" if outcome.exact else f"up to {outcome.tolerance:.0e}, as the layout is another"
    table = Table(title=f"{arguments.run} from step {outcome.start}: relative differences ({limit})")
    for column in ("step", "loss", "grad norm", "learning rate"):
        table.add_column(column, justify="right")
    for step in outcome.steps:
        values = (step.loss, step.grad_norm, step.learning_rate)
        table.add_row(str(step.step), *(f"{value:.1e}" if value else "same" for value in values))
    console.print(table)
    for note in outcome.notes:
        console.print(f"note: {note}", highlight=False)
    if outcome.divergence is not None:
        console.print(f"differs first in {outcome.divergence}", style="red", highlight=False)
    else:
        last, how = outcome.start + len(outcome.steps), "bit for bit" if outcome.exact else "within the tolerance"
        console.print(f"steps {outcome.start + 1} to {last} are as recorded, {how}", style="green", highlight=False)
    if arguments.json is not None:
        content = dataclasses.asdict(outcome) | {"pass": outcome.divergence is None}
        replace_json(arguments.json, content)


if __name__ == "__main__":
    main()
