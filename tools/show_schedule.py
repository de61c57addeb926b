"""Shows a pipeline schedule before anything runs: `show_schedule.py --schedule zb_v --pp 4 --num-microbatches 8`.

Simulates the plan and draws who does what when, with makespan, bubbles and activations alive. `--compare` puts all
schedules side by side and says which is fastest within a memory. `--measured RUN_DIR` draws what a run with
`train.trace_pipeline` took above what the simulation makes of the same durations.

Time has the unit of --costs: F, I and W of one microbatch on a rank's whole share of the model, and the latency of a
message. Peaks count activations of one stage for one microbatch, until their input gradient (I) or weight gradient (W).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import yaml
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from megalite.files import output_file, replace_json, replace_text
from megalite.pipeline.draw import Timeline, gantt, measured, measured_costs, simulated, svg
from megalite.pipeline.lower import lower
from megalite.pipeline.measured import TRACE
from megalite.pipeline.plan import Plan, PlanError
from megalite.pipeline.schedule import SCHEDULES, make_plan, write_csv
from megalite.pipeline.simulate import FB, Costs, Simulation, simulate

LOOPED = ("interleaved", "looped_bfs", "interleaved_zb")
"""Schedules with a free number of chunks."""


def main() -> None:
    """Draws one schedule, or compares all."""
    arguments = _parser().parse_args()
    console = Console()
    try:
        if arguments.measured is not None:
            _show_measured(arguments, console)
        elif arguments.compare:
            _compare(arguments, console)
        else:
            _show(arguments, console)
    except (PlanError, OSError) as error:
        sys.exit(f"show_schedule.py: {error}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--schedule", metavar="NAME", help=f"{', '.join(SCHEDULES)} or csv:FILE")
    parser.add_argument("--pp", type=int, help="pipeline ranks")
    parser.add_argument("--vpp", type=int, help="stages on each rank (2 is implied by the V schedules)")
    parser.add_argument("--num-microbatches", type=int, help="microbatches of a step")
    parser.add_argument("--group-size", type=int, help="interleaved: microbatches that pass a chunk together")
    parser.add_argument("--costs", type=_costs, default=Costs(), metavar="F,I,W,LATENCY", help="default 1,1,1,0")
    parser.add_argument(
        "--fb", choices=("atomic", "seq"), default="atomic", help="price a pair of F and B as one slot, or one by one"
    )
    parser.add_argument("--compare", action="store_true", help="all schedules in one table")
    parser.add_argument(
        "--memory", type=_memory, help="with --compare: microbatches whose activations fit a rank (default: as 1f1b)"
    )
    parser.add_argument("--measured", type=Path, metavar="RUN_DIR", help="draw the trace of a run")
    parser.add_argument("--svg", type=output_file, metavar="FILE", help="write the picture")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write the figures")
    parser.add_argument("--csv", type=output_file, metavar="FILE", help="write the plan, which csv:FILE reads")
    return parser


def _costs(text: str) -> Costs:
    try:
        forward, input_grad, weight_grad, latency = map(Fraction, text.split(","))
    except (ValueError, ZeroDivisionError):
        raise argparse.ArgumentTypeError(f"{text!r} must be four numbers, such as 1,1,0.8,0.1") from None
    if not all(cost == 0 or 1e-100 <= cost <= 1e100 for cost in (forward, input_grad, weight_grad, latency)):
        raise argparse.ArgumentTypeError(f"{text!r}: costs must be 0 or from 1e-100 to 1e100")
    if not any((forward, input_grad, weight_grad)):
        raise argparse.ArgumentTypeError(f"{text!r}: F, I and W must not all be 0")
    return Costs(forward=forward, input_grad=input_grad, weight_grad=weight_grad, latency=latency)


def _memory(text: str) -> Fraction:
    try:
        memory = Fraction(text)
    except (ValueError, ZeroDivisionError):
        raise argparse.ArgumentTypeError(f"{text!r} must be a number of microbatches, such as 8 or 4.5") from None
    if not 0 < memory <= 1e100:
        raise argparse.ArgumentTypeError(f"{text!r} must be positive")
    return memory


def _required(arguments: argparse.Namespace, *names: str) -> None:
    missing = [f"--{name.replace('_', '-')}" for name in names if getattr(arguments, name) is None]
    if missing:
        raise PlanError(f"{', '.join(missing)} must be given")


def _num_chunks(schedule: str, vpp: int | None) -> int:
    return vpp if vpp is not None else 2 if schedule in LOOPED else 1


# ---- one schedule


def _show(arguments: argparse.Namespace, console: Console) -> None:
    _required(arguments, "schedule", "pp", "num_microbatches")
    plan = make_plan(
        arguments.schedule,
        arguments.pp,
        arguments.num_microbatches,
        _num_chunks(arguments.schedule, arguments.vpp),
        costs=arguments.costs,
        group_size=arguments.group_size,
    )
    lower(plan)  # proves that it can run
    timed = simulate(plan, arguments.costs, arguments.fb)
    console.print(gantt(simulated(timed), console.width), soft_wrap=True)
    console.print(_rank_table(timed))
    _write(arguments, [simulated(timed)], _figures(timed, arguments.costs, arguments.fb), plan)


def _write(
    arguments: argparse.Namespace, timelines: Sequence[Timeline], figures: dict[str, Any], plan: Plan, unit: str = ""
) -> None:
    if arguments.svg is not None:
        replace_text(arguments.svg, svg(timelines, unit))
    if arguments.json is not None:
        replace_json(arguments.json, figures)
    if arguments.csv is not None:
        write_csv(plan, arguments.csv)


def _figures(timed: Simulation, costs: Costs, fb: FB) -> dict[str, Any]:
    plan = timed.plan
    given = [float(cost) for cost in (costs.forward, costs.input_grad, costs.weight_grad, costs.latency)]
    sizes = {
        "schedule": plan.name,
        "p": plan.num_ranks,
        "v": plan.num_stages // plan.num_ranks,
        "m": plan.num_microbatches,
        "costs": given if costs.stages is None else [[float(cost) for cost in stage] for stage in costs.stages],
        "fb": fb,
    }
    return sizes | timed.summary()


def _rank_table(timed: Simulation) -> Table:
    figures: dict[str, Any] = timed.summary()
    table = Table(title=f"Activations of 1/{timed.plan.num_stages} of the model for one microbatch")
    for column in ("rank", "stages", "busy", "idle", "peak until I", "peak until W"):
        table.add_column(column, justify="right")
    for rank in range(timed.plan.num_ranks):
        stages = " ".join(map(str, timed.plan.stages_of(rank)))
        times = (f"{figures[name][rank]:.4g}" for name in ("busy", "idle"))
        table.add_row(str(rank), stages, *times, str(figures["peak_until_I"][rank]), str(figures["peak_until_W"][rank]))
    return table


# ---- all schedules


@dataclass(frozen=True, kw_only=True)
class _Row:
    """A schedule in the comparison."""

    timed: Simulation
    figures: dict[str, Any]

    @property
    def name(self) -> str:
        """The schedule, and its chunks where they are free."""
        plan = self.timed.plan
        return f"{plan.name} v{plan.num_stages // plan.num_ranks}" if plan.name in LOOPED else plan.name

    @property
    def memory(self) -> Fraction:
        """Activations of the fullest rank until their W, in microbatches of a rank's whole share."""
        plan = self.timed.plan
        return Fraction(max(self.figures["peak_until_W"]) * plan.num_ranks, plan.num_stages)


def _compare(arguments: argparse.Namespace, console: Console) -> None:
    _required(arguments, "pp", "num_microbatches")
    rows, refused = [], {}
    for schedule in SCHEDULES:
        num_chunks = _num_chunks(schedule, arguments.vpp if schedule in LOOPED else None)
        group_size = arguments.group_size if schedule == "interleaved" else None
        sizes = arguments.pp, arguments.num_microbatches, num_chunks
        try:
            plan = make_plan(schedule, *sizes, costs=arguments.costs, group_size=group_size)
        except PlanError as error:
            refused[schedule] = str(error)
            continue
        timed = simulate(plan, arguments.costs, arguments.fb)
        rows.append(_Row(timed=timed, figures=_figures(timed, arguments.costs, arguments.fb)))
    rows.sort(key=lambda row: (row.figures["makespan"], row.memory))
    memory = arguments.memory if arguments.memory is not None else min(arguments.pp, arguments.num_microbatches)
    best = next((row for row in rows if row.memory <= memory), None)
    console.print(_comparison(arguments, rows, best, memory))
    for reason in refused.values():
        console.print(f"not possible: {reason}", style="dim", highlight=False, soft_wrap=True)
    console.print(_verdict(rows, best, memory), highlight=False, soft_wrap=True)
    if arguments.json is not None:
        replace_json(arguments.json, [row.figures for row in rows])


def _comparison(
    arguments: argparse.Namespace, rows: Sequence[_Row], best: _Row | None, memory: Fraction | int
) -> Table:
    title = f"{arguments.pp} ranks, {arguments.num_microbatches} microbatches, FB pairs {arguments.fb}"
    caption = "memory: microbatches of a rank's whole share of the model, until their W"
    table = Table(title=title, caption=caption, box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in ("schedule", "makespan", "bubble\nglobal", "bubble\nspan", "memory", "peak\nto I", "peak\nto W", ""):
        table.add_column(column, justify="left" if column in ("schedule", "") else "right", no_wrap=True)
    for row in rows:
        bubbles = (f"{row.figures[name]:.2%}" for name in ("bubble_global", "bubble_span"))
        peaks = (str(max(row.figures[name])) for name in ("peak_until_I", "peak_until_W"))
        notes = ["2x weights"] if row.timed.plan.num_chains > 1 else []
        notes += ["best fit"] if row is best else []
        style = "bold green" if row is best else None if row.memory <= memory else "dim"
        table.add_row(
            row.name, f"{row.figures['makespan']:.5g}", *bubbles, f"{float(row.memory):.4g}", *peaks, ", ".join(notes),
            style=style,
        )  # fmt: skip
    return table


def _verdict(rows: Sequence[_Row], best: _Row | None, memory: Fraction | int) -> str:
    if not rows:
        return "No schedule has a plan of this size."
    if best is None:
        least = min(rows, key=lambda row: row.memory)
        return f"No schedule fits {float(memory):g} microbatches; {least.name} needs least, {float(least.memory):g}."
    return (
        f"Best fit for {float(memory):g} microbatches of activations on a rank: {best.name}, makespan "
        f"{best.figures['makespan']:g}, {float(best.memory):g} microbatches."
    )


# ---- a run


def _show_measured(arguments: argparse.Namespace, console: Console) -> None:
    trace = arguments.measured / TRACE
    if not trace.is_file():
        raise PlanError(f"{trace} does not exist: was the run made with train.trace_pipeline?")
    try:
        plan = _plan_of_run(arguments, trace)
        real = measured(plan, trace)
    except PlanError:
        raise
    except (yaml.YAMLError, ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise PlanError(f"{trace}, or config.yaml beside it, is damaged: {error!r}") from error
    costs = measured_costs(real)
    timed = simulate(plan, costs, "seq")
    timelines = [real, simulated(timed, " s")]
    for timeline in timelines:
        console.print(gantt(timeline, console.width), soft_wrap=True)
    ratio = real.end / float(timed.makespan)
    console.print(f"measured / simulated: {ratio:.3f}", highlight=False)
    figures = _figures(timed, costs, "seq") | {"measured": real.end, "measured_over_simulated": ratio}
    _write(arguments, timelines, figures, plan, unit=" s")


def _plan_of_run(arguments: argparse.Namespace, trace: Path) -> Plan:
    """The plan that the run's own config names, as far as the command line does not."""
    config = yaml.safe_load((arguments.measured / "config.yaml").read_text()).get("parallel", {})
    rows = [json.loads(line)["action"] for line in trace.read_text().splitlines()]
    num_microbatches = 1 + max((int(action.split(".")[1]) for action in rows), default=0)
    schedule = arguments.schedule or config.get("schedule", "1f1b")
    group_size = arguments.group_size
    if group_size is None and arguments.schedule is None:
        group_size = config.get("group_size")
    return make_plan(
        schedule,
        arguments.pp or config.get("pp", 1),
        arguments.num_microbatches or num_microbatches,
        arguments.vpp or config.get("vpp", 1),
        group_size=group_size,
    )


if __name__ == "__main__":
    main()
