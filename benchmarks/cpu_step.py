"""Step time of a Llama of 32 M parameters on the CPU, against its GEMM floor and Hugging Face in plain PyTorch.

Each case lives in processes of its own (peak memory is theirs alone) and they take turns, a step at a time, so that
a busy machine is busy for all of them; the best step of each counts, so that the first may warm up, and so does the
best round of the floor. The peers are transformers' LlamaForCausalLM, as it is and under torch.compile, with
torch.optim.AdamW, in the precision itself (so bf16 without float32 master weights), with no clipping, and torch's and
malloc's own settings. On a CPU without 16-bit products their bf16 step takes minutes: --peers leaves them out, and
--num-layers makes all models smaller. megalite runs its whole `train_step`, gradient norm and clipping included, with
the settings that its runs make for their process by default: malloc keeps freed memory, and float32 products may use
oneDNN. Cases with several ranks share the same cores and run `--num-microbatches` micro-batches a step; their floor is
that many floors of one process on all the threads.
"""

from __future__ import annotations

import argparse
import os
import resource
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from floor import GemmFloor
from llama import LEARNING_RATE, LLAMA_32M, huggingface_llama, megalite_training
from rich.console import Console
from rich.table import Table
from table import make_table
from team import Team
from torch import distributed as dist

from megalite.files import output_file, replace_json
from megalite.layout import parse_layout
from megalite.nn.config import ModelConfig
from megalite.train.step import train_step

SEQ_LEN, MICRO_BATCH = 512, 4
PLAIN, COMPILED = "huggingface", "hf compiled"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One line of the table."""

    name: str
    """megalite, huggingface, hf compiled or floor."""
    precision: str
    """A train.precision."""
    threads: int
    """Per rank."""
    model: ModelConfig
    layout: str = "single"
    num_microbatches: int = 1

    def __str__(self) -> str:
        return f"{self.name} {self.layout} {self.precision}"

    @property
    def ranks(self) -> int:
        """Processes."""
        return parse_layout(self.layout).num_ranks


class Step:
    """A process's part of a case."""

    def __init__(self, case: Case):
        self._ranks = case.ranks
        made = {"floor": _floor, "megalite": _megalite, PLAIN: _huggingface, COMPILED: _huggingface}[case.name]
        self._seconds = made(case)

    def step(self) -> float:
        """Seconds of a step."""
        if self._ranks > 1:
            dist.barrier()
        return self._seconds()

    def peak_mb(self) -> float:
        """The most memory that this process has had."""
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _floor(case: Case) -> Callable[[], float]:
    return GemmFloor(case.model, seq_len=SEQ_LEN, batch=MICRO_BATCH, dtype=DTYPES[case.precision]).measure


def _megalite(case: Case) -> Callable[[], float]:
    """What `Trainer` calls, in a process tuned as a run's is."""
    training = megalite_training(
        case.model,
        case.layout,
        precision=case.precision,
        seq_len=SEQ_LEN,
        micro_batch_size=MICRO_BATCH,
        global_batch_size=MICRO_BATCH * case.num_microbatches,
    )
    return lambda: _time(lambda: train_step(training, 0))


def _huggingface(case: Case) -> Callable[[], float]:
    """The plain PyTorch loop of the same model."""
    model = huggingface_llama(case.model, SEQ_LEN).to(DTYPES[case.precision])
    if case.name == COMPILED:
        model.compile()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    tokens = torch.randint(0, case.model.vocab_size, (MICRO_BATCH, SEQ_LEN))

    def step() -> float:
        optimizer.zero_grad()
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        return loss.item()

    return lambda: _time(step)


def _time(run: Callable[[], object]) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def race(cases: Sequence[Case], rounds: int, console: Console) -> list[dict[str, object]]:
    """Rows of the table for cases of one precision, the first of which is the floor."""
    with ExitStack() as stack:
        teams = [
            stack.enter_context(Team(str(case), Step, case, ranks=case.ranks, threads=case.threads)) for case in cases
        ]
        seconds: list[list[float]] = [[] for _ in cases]
        with console.status("") as status:
            for number in range(rounds):
                status.update(f"{cases[0].precision}: round {number + 1} of {rounds}")
                for team, taken in zip(teams, seconds, strict=True):
                    taken.append(max(team.ask("step")))
        peaks = [max(team.ask("peak_mb")) for team in teams]
    return _rows(cases, [min(taken) for taken in seconds], peaks)


def _rows(cases: Sequence[Case], best: Sequence[float], peaks: Sequence[float]) -> list[dict[str, object]]:
    floor, *seconds = [taken / case.num_microbatches for case, taken in zip(cases, best, strict=True)]
    peers = {case.name: taken for case, taken in zip(cases[1:], seconds, strict=True) if case.name != "megalite"}
    return [
        {
            "name": case.name,
            "dtype": case.precision,
            "ranks": case.ranks,
            "layout": case.layout,
            "threads": case.threads,
            "step_over_floor": taken / floor,
            "ratio_to_hf": peers[PLAIN] / taken if PLAIN in peers else None,
            "ratio_to_hf_compiled": peers[COMPILED] / taken if COMPILED in peers else None,
            "peak_mb": peak,
            "tokens_per_second": SEQ_LEN * MICRO_BATCH / taken,
            "floor_seconds": floor,
        }
        for case, taken, peak in zip(cases[1:], seconds, peaks[1:], strict=True)
    ]


def _cases(arguments: argparse.Namespace, precision: str) -> list[Case]:
    model = arguments.model
    common = {"precision": precision, "model": model}
    names = ("floor", *arguments.peers, "megalite")
    cases = [Case(name=name, threads=arguments.threads, **common) for name in names]
    for layout in arguments.layouts:
        threads = max(1, arguments.threads // parse_layout(layout).num_ranks)
        cases.append(
            Case(name="megalite", threads=threads, layout=layout, num_microbatches=arguments.num_microbatches, **common)
        )
    return cases


def _table(rows: Sequence[dict[str, object]]) -> Table:
    columns = {
        "name": "", "dtype": "", "layout": "", "ranks": "d", "threads": "d", "step_over_floor": ".2f",
        "ratio_to_hf": ".2f", "ratio_to_hf_compiled": ".2f", "tokens_per_second": ",.0f", "peak_mb": ",.0f",
    }  # fmt: skip
    heads = {
        "step_over_floor": "step / floor", "ratio_to_hf": "over HF", "ratio_to_hf_compiled": "over compiled",
        "tokens_per_second": "tokens/s", "peak_mb": "peak MB",
    }  # fmt: skip
    return make_table(f"One training step, {SEQ_LEN * MICRO_BATCH} tokens a micro-batch", rows, columns, heads)


def main() -> None:
    """Measures and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtypes", nargs="+", choices=tuple(DTYPES), default=tuple(DTYPES))
    parser.add_argument(
        "--peers", nargs="*", choices=(PLAIN, COMPILED), default=(PLAIN, COMPILED), help="(default both)"
    )
    parser.add_argument("--layouts", nargs="*", default=("dp2", "tp2", "pp2"), help="of more than one rank")
    parser.add_argument("--num-microbatches", type=int, default=8, help="a step of several ranks (default 8)")
    parser.add_argument("--rounds", type=int, default=4, help="steps of each case (default 4)")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of each case, all ranks")
    parser.add_argument(
        "--num-layers", type=int, default=LLAMA_32M.num_layers, help="for a quick look at a small model"
    )
    parser.add_argument("--json", type=output_file, metavar="FILE", help="also write the table as JSON")
    arguments = parser.parse_args()
    arguments.model = ModelConfig(**{**vars(LLAMA_32M), "num_layers": arguments.num_layers})
    console = Console() if sys.stdout.isatty() else Console(width=120)
    rows = [
        row for precision in arguments.dtypes for row in race(_cases(arguments, precision), arguments.rounds, console)
    ]
    console.print(_table(rows))
    if arguments.json is not None:
        replace_json(arguments.json, rows)


if __name__ == "__main__":
    main()
