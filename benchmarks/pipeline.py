"""Step time of every pipeline schedule over its simulated makespan, and beside torch.distributed.pipelining.

Ranks are processes on the CPU that talk through gloo. The work of a stage is either sleep (of a calibrated length, so
that ranks do not compete for cores and only the machinery can cost more than the simulation says) or matrix products.
Both libraries run stages of the same work in the same processes and take turns, a step at a time, so that a busy
machine is busy for both; the median step of each counts. Products of more ranks than cores cannot run at once: their
bound is the makespan or, where that is longer, all work divided by the cores.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.pipelining import schedules as torch_schedules

from megalite.batch import MicroBatch
from megalite.files import output_file, replace_json
from megalite.mpu import ParallelConfig, ParallelState
from megalite.parallel.tensor import ColumnParallelLinear, share_queue
from megalite.parallel.wgrad import WeightGradQueue
from megalite.pipeline.executor import Executor
from megalite.pipeline.plan import Plan, PlanError
from megalite.pipeline.schedule import SCHEDULES, make_plan
from megalite.pipeline.simulate import Costs, simulate
from megalite.testing.world import World

CHUNKS = {"interleaved": 2, "looped_bfs": 2, "interleaved_zb": 2}
"""Stages on a rank, for the schedules that take a number."""
PEERS: dict[str, str] = {
    "gpipe": "ScheduleGPipe", "1f1b": "Schedule1F1B", "interleaved": "ScheduleInterleaved1F1B",
    "looped_bfs": "ScheduleLoopedBFS", "zb_h1": "ScheduleInterleavedZeroBubble",
    "interleaved_zb": "ScheduleInterleavedZeroBubble", "zb_v": "ScheduleZBVZeroBubble",
    "dualpipe_v": "ScheduleDualPipeV",
}  # fmt: skip
"""torch's schedule of the same name; its interleaved zero bubble with one stage on a rank is ZB-H1."""
ROWS, NUM_LINEARS = 192, 4
"""Rows of a micro-batch, and products in a rank's share of the model."""
WARM_UP = 1

Work = Literal["sleep", "matmul"]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One line of a table."""

    schedule: str
    work: Work
    ranks: int
    num_microbatches: int
    unit: float
    """Seconds of a rank's share of a forward, of an input gradient and of a weight gradient (sleep)."""
    width: int
    """Features of an activation (matmul)."""
    repeats: int

    @property
    def plan(self) -> Plan:
        """The schedule's plan."""
        return make_plan(self.schedule, self.ranks, self.num_microbatches, CHUNKS.get(self.schedule, 1))


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a case took: seconds, and ratios."""

    schedule: str
    work: str
    simulated: float
    """Makespan of the plan with the measured costs; for products at least all work / cores."""
    step: float
    torch_step: float | None
    """torch's schedule of the same name; None where it has none."""
    over_simulated: float
    over_torch: float | None


class _Pass(torch.autograd.Function):
    """x, after sleeping in the forward and in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, before: float, after: float) -> Tensor:
        ctx.after = after
        _sleep(before)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        _sleep(ctx.after)
        return grads[0], None, None


class _SleepingLinear(torch.autograd.Function):
    """x + weight, whose weight gradient sleeps in the stage's queue."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: nn.Parameter, queue: WeightGradQueue, seconds: float) -> Tensor:
        ctx.weight, ctx.queue, ctx.seconds = weight, queue, seconds
        _sleep(seconds)
        return x + weight

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        _sleep(ctx.seconds)
        ctx.queue.put(lambda: _sleep(ctx.seconds), [ctx.weight])
        return grads[0], None, None, None


def _sleep(seconds: float) -> None:
    if seconds > 0:
        time.sleep(seconds)


def oversleep() -> float:
    """Seconds by which a sleep of this process is too long."""
    late = []
    for _ in range(50):
        begin = time.perf_counter()
        time.sleep(2e-3)
        late.append(time.perf_counter() - begin - 2e-3)
    return statistics.median(late)


class PipelineStage(nn.Module):
    """A stage of megalite."""

    hidden_dtype = torch.float32

    def __init__(self, case: Case, mpu: ParallelState, seconds: float, *, last: bool):
        super().__init__()
        self.queue, self.last, self.width, self.seconds = WeightGradQueue(), last, case.width, seconds
        self.weight = nn.Parameter(torch.zeros(case.width))
        count = _linears(case) if case.work == "matmul" else 0
        self.linears = nn.ModuleList(
            ColumnParallelLinear(case.width, case.width, axis=mpu.tp, bias=False) for _ in range(count)
        )
        share_queue(self, self.queue)

    def hidden_shape(self, batch: MicroBatch) -> tuple[int, ...]:
        """[rows, width]."""
        return (ROWS, self.width)

    def forward(self, x: Tensor | None, batch: MicroBatch) -> Tensor:
        """The last stage returns the sum of its output."""
        x = torch.ones(ROWS, self.width) if x is None else x
        if self.seconds > 0:
            x = _SleepingLinear.apply(x, self.weight, self.queue, self.seconds)
        for linear in self.linears:
            x = linear(x)
        assert isinstance(x, Tensor)
        return x.sum() if self.last else x


class TorchStage(nn.Module):
    """The same stage for torch, whose graph can be cut between the gradients of inputs and of weights."""

    def __init__(self, case: Case, seconds: float):
        super().__init__()
        self.seconds = seconds
        self.weight = nn.Parameter(torch.zeros(case.width))
        count = _linears(case) if case.work == "matmul" else 0
        self.linears = nn.ModuleList(nn.Linear(case.width, case.width, bias=False) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        """Same shape out as in."""
        if self.seconds > 0:
            through, weight = _Pass.apply(x, self.seconds, self.seconds), _Pass.apply(self.weight, 0.0, self.seconds)
            assert isinstance(through, Tensor) and isinstance(weight, Tensor)
            x = through + weight
        for linear in self.linears:
            x = linear(x)
        return x


def _linears(case: Case) -> int:
    """Products in a stage."""
    return NUM_LINEARS * case.ranks // case.plan.num_stages


def _seconds(case: Case, late: float) -> float:
    """What a stage asks to sleep for, so that it sleeps for its share of `case.unit`."""
    return case.unit * case.ranks / case.plan.num_stages - late if case.work == "sleep" else 0.0


def megalite_step(case: Case, mpu: ParallelState, seconds: float) -> Callable[[], object]:
    """One run of the plan."""
    plan = case.plan
    stages = {
        number: PipelineStage(case, mpu, seconds, last=plan.next_stage(number) is None)
        for number in plan.stages_of(mpu.pp.rank)
    }
    executor = Executor(plan, stages, {}, mpu, torch.device("cpu"))
    none = torch.zeros(ROWS, 1, dtype=torch.int64)
    batch = MicroBatch(
        tokens=none,
        labels=none,
        loss_mask=none.float(),
        positions=none,
        samples=torch.zeros(1, dtype=torch.int64),
        step=0,
    )
    return lambda: executor.run([batch] * case.num_microbatches, 1.0)


def torch_step(case: Case, mpu: ParallelState, seconds: float) -> Callable[[], object] | None:
    """One step of torch's schedule of the same name, if there is one for this case."""
    plan = case.plan
    if case.schedule not in PEERS:
        return None
    numbers = plan.stages_of(mpu.pp.rank)
    stages = [
        pipelining.PipelineStage(
            TorchStage(case, seconds), number, plan.num_stages, torch.device("cpu"), group=mpu.pp.group
        )
        for number in numbers
    ]
    make = getattr(torch_schedules, PEERS[case.schedule])
    single = issubclass(make, torch_schedules.PipelineScheduleSingle)
    schedule = make(stages[0] if single else stages, case.num_microbatches, loss_fn=_product, scale_grads=False)
    x = torch.ones(ROWS * case.num_microbatches, case.width)
    arguments = (x,) if 0 in numbers else ()
    last: dict[str, Any] = {"target": x} if plan.num_stages - 1 in numbers else {}
    return lambda: schedule.step(*arguments, **last, return_outputs=False)


def _product(out: Tensor, target: Tensor) -> Tensor:
    """A loss whose gradient is contiguous, as torch's messages must be."""
    return (out * target).sum()


def measure(mpu: ParallelState, case: Case) -> tuple[list[float], list[float]]:
    """Seconds of each step of megalite and of torch, from and to a barrier, in turns."""
    torch.set_num_threads(1)
    seconds = _seconds(case, oversleep())
    steps = [megalite_step(case, mpu, seconds), torch_step(case, mpu, seconds)]
    times: list[list[float]] = [[], []]
    for turn in range(WARM_UP + case.repeats):
        for step, taken in zip(steps, times, strict=True):
            if step is not None:
                mpu.pp.barrier()
                begin = time.perf_counter()
                step()
                mpu.pp.barrier()
                if turn >= WARM_UP:
                    taken.append(time.perf_counter() - begin)
    return times[0], times[1]


def matmul_seconds(width: int) -> float:
    """What one product takes, alone on the machine."""
    torch.set_num_threads(1)
    a, b = torch.ones(ROWS, width), torch.ones(width, width)
    taken = []
    for _ in range(50):
        begin = time.perf_counter()
        torch.mm(a, b)
        taken.append(time.perf_counter() - begin)
    return statistics.median(taken)


def bound(case: Case, cores: int) -> float:
    """Seconds that the case takes at least, by simulation."""
    unit = case.unit if case.work == "sleep" else NUM_LINEARS * matmul_seconds(case.width)
    # Pairs of a forward and a backward run one after the other here: nothing in this work could overlap.
    makespan = float(simulate(case.plan, Costs(forward=unit, input_grad=unit, weight_grad=unit), fb="seq").makespan)
    work = 3 * unit * case.ranks * case.num_microbatches
    return makespan if case.work == "sleep" else max(makespan, work / min(cores, case.ranks))


def run(case: Case, world: World, cores: int) -> Result:
    """Measures one case."""
    simulated = bound(case, cores)
    layout = ParallelConfig(pp=case.ranks, schedule=case.schedule)
    by_rank = world.run(measure, case, layout=layout, timeout=300)
    ours = max(statistics.median(mine) for mine, _ in by_rank)
    theirs = max(statistics.median(peer) for _, peer in by_rank) if by_rank[0][1] else None
    return Result(
        schedule=case.schedule,
        work=case.work,
        simulated=simulated,
        step=ours,
        torch_step=theirs,
        over_simulated=ours / simulated,
        over_torch=ours / theirs if theirs is not None else None,
    )


def table_of(results: list[Result], title: str) -> Table:
    """For people."""
    table = Table(title=title)
    for column in ("schedule", "simulated ms", "megalite ms", "/ simulated", "torch ms", "megalite / torch"):
        table.add_column(column, justify="left" if column == "schedule" else "right")
    for result in results:
        peer = f"{result.torch_step * 1e3:.1f}" if result.torch_step is not None else "-"
        ratio = f"{result.over_torch:.3f}" if result.over_torch is not None else "-"
        table.add_row(
            result.schedule, f"{result.simulated * 1e3:.1f}", f"{result.step * 1e3:.1f}",
            f"{result.over_simulated:.3f}", peer, ratio,
        )  # fmt: skip
    return table


def main() -> None:
    """Measures every schedule that has a plan for the sizes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--num-microbatches", type=int, default=16)
    parser.add_argument("--schedules", nargs="+", default=list(SCHEDULES), metavar="NAME")
    parser.add_argument("--work", nargs="+", choices=("sleep", "matmul"), default=("sleep", "matmul"))
    parser.add_argument("--unit-ms", type=float, default=20.0, help="sleep of a rank's share of F, I and W")
    parser.add_argument("--width", type=int, default=768, help="features of the products")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=output_file, metavar="FILE", help="also write the table as JSON")
    arguments = parser.parse_args()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    console = Console()
    results: list[Result] = []
    with World(max_ranks=arguments.ranks) as world:
        for work in arguments.work:
            titles: Mapping[str, str] = {"sleep": "stages that sleep", "matmul": f"matrix products on {cores} cores"}
            of_work = [_run_one(name, work, arguments, world, cores, console) for name in arguments.schedules]
            results += [result for result in of_work if result is not None]
            sizes = f"{arguments.ranks} ranks, {arguments.num_microbatches} micro-batches"
            console.print(table_of([r for r in of_work if r is not None], f"{sizes}, {titles[work]}"))
    if arguments.json is not None:
        replace_json(arguments.json, [asdict(result) for result in results])


def _run_one(
    name: str, work: Work, arguments: argparse.Namespace, world: World, cores: int, console: Console
) -> Result | None:
    case = Case(
        schedule=name,
        work=work,
        ranks=arguments.ranks,
        num_microbatches=arguments.num_microbatches,
        unit=arguments.unit_ms / 1e3,
        width=arguments.width if work == "matmul" else 8,
        repeats=arguments.repeats,
    )
    try:
        simulate(case.plan)
    except PlanError as error:
        console.print(f"{name} is left out: {error}", highlight=False)
        return None
    if not console.is_terminal:
        print(f"{work} {name}", file=sys.stderr, flush=True)
    return run(case, world, cores)


if __name__ == "__main__":
    main()
