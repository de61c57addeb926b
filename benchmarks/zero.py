"""ZeRO 0 to 3 on two CPU ranks, beside torch DDP, ZeroRedundancyOptimizer, FSDP2 and DeepSpeed.

A step of a Llama in bf16, with clipping and AdamW: its time, the memory it takes and the bytes it sends. Peers train
transformers' LlamaForCausalLM of the same sizes on the same rows; `zero_contenders.py` says what each keeps in which
precision. FSDP2 is taken for stage 2 with whole parameters kept from forward to backward, for stage 3 without.
The contenders of a stage live in processes of their own and take turns, a step at a time, so that a busy machine is
busy for all of them. All processes have the settings that megalite's runs make (malloc keeps freed memory), or with
`--plain-malloc` none has.

step_ms: the median, of the slower rank. peak_mb: the most memory of a rank beyond what its process had with all
libraries loaded. state_bytes_per_param: memory behind parameters, gradients, master weights and optimizer state after
a step, over the parameters of the whole model. bytes_sent: of the rank that sends most, in one step; megalite's axes
count their own, the calls of the others are counted by the same formulas. loss: of the last step.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import resource
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bytes_sent import BytesSent, storage_bytes
from llama import LLAMA_32M
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from table import make_table
from team import Team
from torch import distributed as dist
from zero_contenders import Megalite, Size, contenders, load_libraries, make_contender

from megalite.files import output_file, replace_json
from megalite.kernels.cpu import set_fp32_gemm, tune_malloc
from megalite.nn.config import ModelConfig

RANKS = 2
STAGES = (0, 1, 2, 3)
FULL = Size(model=LLAMA_32M, seq_len=512, micro_batch_size=2, num_microbatches=2, ranks=RANKS, tune_malloc=True)
SMALL = replace(
    FULL,
    model=ModelConfig(num_layers=2, hidden_size=64, num_heads=4, num_kv_heads=2, ffn_hidden_size=176, vocab_size=512),
    seq_len=64,
)
LIBRARIES = (
    "torch.distributed.fsdp", "torch.distributed.optim", "transformers.models.llama.modeling_llama",
    "megalite.train.build", "megalite.layout", "megalite.train.run", "torch._inductor.compile_fx", "setuptools",
)  # fmt: skip
"""Loaded once, in the server that processes are forked from; the last two are what torch.compile loads at first."""


class Member:
    """A process's part of a contender."""

    def __init__(self, name: str, size: Size, stage: int):
        load_libraries(name)
        if size.tune_malloc:
            tune_malloc()
        set_fp32_gemm("auto")
        self._before = _resident_bytes()
        self.contender = make_contender(name, size, stage)
        self.ranks = size.ranks

    def step(self) -> tuple[float, float]:
        """Seconds and loss of a step."""
        dist.barrier()
        begin = time.perf_counter()
        loss = self.contender.step()
        return time.perf_counter() - begin, loss

    def bytes_sent(self) -> int:
        """Of one step, which is run for it."""
        if isinstance(self.contender, Megalite):
            self.contender.training.mpu.reset_stats()
            self.contender.step()
            return self.contender.bytes_sent()
        with BytesSent(dist.get_rank(), self.ranks) as sent:
            self.contender.step()
        return sent.total

    def state_bytes(self) -> float:
        """Of a parameter of the model, after a step."""
        return storage_bytes(self.contender.state()) / self.contender.num_params

    def peak_bytes(self) -> int:
        """The most memory so far, beyond the libraries."""
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - self._before


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@dataclass(kw_only=True)
class Entry:
    """A contender of a stage and what it measured."""

    name: str
    team: Team
    bytes_sent: int = 0
    seconds: list[float] = field(default_factory=list)
    loss: float = 0.0

    def step(self) -> None:
        """A timed step."""
        answers = self.team.ask("step")
        self.seconds.append(max(seconds for seconds, _ in answers))
        self.loss = statistics.fmean(loss for _, loss in answers)

    def row(self, stage: int) -> dict[str, Any]:
        """The figures."""
        return {
            "name": self.name,
            "stage": stage,
            "step_ms": 1e3 * statistics.median(self.seconds),
            "peak_mb": max(self.team.ask("peak_bytes")) / 2**20,
            "state_bytes_per_param": max(self.team.ask("state_bytes")),
            "bytes_sent": self.bytes_sent,
            "loss": self.loss,
        }


class Race:
    """The contenders of all stages, one stage after another."""

    def __init__(self, size: Size, rounds: int, stages: Sequence[int], progress: Progress):
        self.size, self.rounds, self.progress = size, rounds, progress
        self.missing: dict[str, str] = {}
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(list(LIBRARIES))
        present = [name for stage in stages for name, absent in contenders(stage).items() if not absent]
        self._task = progress.add_task("", total=len(present) * (1 + rounds))

    def run(self, stage: int) -> list[dict[str, Any]]:
        """Rows of a stage."""
        with ExitStack() as stack:
            entries = []
            for name, absent in contenders(stage).items():
                if absent:
                    self.missing[name] = absent
                elif (entry := self._start(name, stage, stack)) is not None:
                    entries.append(entry)
            for number in range(self.rounds):
                for entry in entries:
                    self._say(f"stage {stage}, round {number + 1} of {self.rounds}: {entry.name}")
                    entry.step()
                    self.progress.advance(self._task)
            return [entry.row(stage) for entry in entries]

    def _start(self, name: str, stage: int, stack: ExitStack) -> Entry | None:
        """A contender that has warmed up; what keeps a peer from running is a line under the table."""
        self._say(f"stage {stage}: starting {name}")
        threads = max(1, len(os.sched_getaffinity(0)) // self.size.ranks)
        title, ranks = f"{name}, stage {stage}", self.size.ranks
        try:
            team = Team(title, Member, name, self.size, stage, ranks=ranks, threads=threads, context=self._context)
            stack.enter_context(team)
            team.ask("step")
            entry = Entry(name=name, team=team, bytes_sent=max(team.ask("bytes_sent")))
        except RuntimeError as error:
            if name == "megalite":
                raise
            self.missing[title] = str(error).strip().splitlines()[-1]
            self.progress.advance(self._task, 1 + self.rounds)
            return None
        self.progress.advance(self._task)
        return entry

    def _say(self, text: str) -> None:
        self.progress.update(self._task, description=text)


def with_ratios(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows with their time and memory over the best peer's of the stage."""
    found = []
    for row in rows:
        peers = [other for other in rows if other["stage"] == row["stage"] and other["name"] != "megalite"]
        ratios = {
            f"{key}_over_best": row[key] / min(peer[key] for peer in peers) if peers else None
            for key in ("step_ms", "peak_mb")
        }
        found.append(row | ratios)
    return found


def _table(rows: Sequence[dict[str, Any]], size: Size) -> Table:
    columns = {
        "stage": "d", "name": "", "step_ms": ",.0f", "step_ms_over_best": ".2f", "peak_mb": ",.0f",
        "peak_mb_over_best": ".2f", "state_bytes_per_param": ".2f", "bytes_sent": ",.0f", "loss": ".3f",
    }  # fmt: skip
    heads = {
        "step_ms": "step ms", "step_ms_over_best": "/ best peer", "peak_mb": "peak MB",
        "peak_mb_over_best": "/ best peer", "state_bytes_per_param": "state B/param",
    }  # fmt: skip
    tokens = size.global_batch_size * size.seq_len
    return make_table(f"One step of {tokens} tokens on {size.ranks} ranks", rows, columns, heads)


def main() -> None:
    """Measures and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9, help="timed steps of each contender (default 9)")
    parser.add_argument("--num-microbatches", type=int, default=FULL.num_microbatches, help="of a rank (default 2)")
    parser.add_argument("--stages", type=int, nargs="+", choices=STAGES, default=STAGES)
    parser.add_argument("--small", action="store_true", help="a tiny model, to try the script")
    parser.add_argument("--plain-malloc", action="store_true", help="leave malloc as it is, for all contenders")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="also write the rows as JSON")
    arguments = parser.parse_args()
    size = replace(
        SMALL if arguments.small else FULL,
        num_microbatches=arguments.num_microbatches,
        tune_malloc=not arguments.plain_malloc,
    )
    console = Console() if sys.stdout.isatty() else Console(width=120)
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("ETA"),
        TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as progress:
        race = Race(size, arguments.rounds, arguments.stages, progress)
        rows = [row for stage in arguments.stages for row in race.run(stage)]
    console.print(_table(with_ratios(rows), size))
    for name, reason in race.missing.items():
        console.print(f"{name}: {reason}", highlight=False, markup=False)
    if arguments.json is not None:
        replace_json(arguments.json, rows)


if __name__ == "__main__":
    main()
