"""Step time of a Llama of 32 M parameters on the CPU, against its GEMM floor and Hugging Face in plain PyTorch.

Each case lives in processes of its own (peak memory is theirs alone) and they take turns, a step at a time, so that
a busy machine is busy for all of them; the best step of each counts, so that the first may warm up. The peer is
transformers' LlamaForCausalLM with torch.optim.AdamW, in the precision itself (so bf16 without float32 master weights),
with no clipping. megalite runs its whole `train_step`, gradient norm and clipping included, with the settings that its
runs make for their process by default: malloc keeps freed memory, and float32 products may use oneDNN. The peer has
torch's and malloc's own. Cases with several ranks share the same cores and run `--num-microbatches` micro-batches a
step; their floor is that many floors of one process on all the threads.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from floor import GemmFloor
from rich.console import Console
from rich.table import Table
from torch import distributed as dist

from megalite.config import Config
from megalite.data.build import Datasets
from megalite.data.config import DataConfig
from megalite.data.gpt_dataset import Sample
from megalite.layout import parse_layout
from megalite.mpu import ParallelState
from megalite.nn.config import ModelConfig
from megalite.optim.config import OptimConfig
from megalite.train.build import build_training
from megalite.train.config import TrainConfig
from megalite.train.run import choose_kernels
from megalite.train.step import train_step

SEQ_LEN, MICRO_BATCH = 512, 4
MODEL = ModelConfig(num_layers=8, hidden_size=512, num_heads=8, num_kv_heads=4, ffn_hidden_size=1408, vocab_size=8192)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One line of the table."""

    name: str
    """megalite, huggingface or floor."""
    precision: str
    """A train.precision."""
    threads: int
    """Per rank."""
    model: ModelConfig
    layout: str = "single"
    num_microbatches: int = 1

    @property
    def ranks(self) -> int:
        """Processes."""
        return parse_layout(self.layout).num_ranks


def megalite_step(case: Case) -> Callable[[], object]:
    """One whole training step of megalite on this rank: what `Trainer` calls, in a process tuned as a run's is."""
    layout = parse_layout(case.layout)
    config = layout.apply(
        Config(
            model=case.model,
            data=DataConfig(seq_len=SEQ_LEN),
            optim=OptimConfig(lr=1e-4, schedule="constant"),
            train=TrainConfig(
                precision=case.precision,  # pyright: ignore[reportArgumentType]
                micro_batch_size=MICRO_BATCH,
                global_batch_size=MICRO_BATCH * case.num_microbatches,
            ),
        )
    )
    device, mpu = torch.device("cpu"), ParallelState.build(config.parallel)
    choose_kernels(config, device)
    samples = RandomTokens(case.model.vocab_size)
    datasets = Datasets(train=samples, validation=None, tokenizer=None, summary=[], fingerprint="")
    training = build_training(config, mpu, device, datasets=datasets)
    return lambda: train_step(training, 0)


def huggingface_step(case: Case) -> Callable[[], object]:
    """The plain PyTorch loop of the same model."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=case.model.vocab_size,
            hidden_size=case.model.hidden_size,
            intermediate_size=case.model.ffn_size,
            num_hidden_layers=case.model.num_layers,
            num_attention_heads=case.model.num_heads,
            num_key_value_heads=case.model.kv_heads,
            max_position_embeddings=SEQ_LEN,
            tie_word_embeddings=False,
            use_cache=False,
        )
    )
    model.to(DTYPES[case.precision])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    tokens = torch.randint(0, case.model.vocab_size, (MICRO_BATCH, SEQ_LEN))

    def step() -> float:
        optimizer.zero_grad()
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


class RandomTokens:
    """Uniform random rows."""

    def __init__(self, vocab_size: int):
        self.vocab_size = vocab_size

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, i: int, /) -> Sample:
        row = np.random.default_rng(i).integers(0, self.vocab_size, SEQ_LEN + 1)
        return Sample(row[:-1], row[1:], np.ones(SEQ_LEN, np.float32), np.arange(SEQ_LEN))


def work(case: Case, rank: int, port: int, pipe: Connection) -> None:
    """The body of a case's process: a step at each request, its peak memory when told to stop."""
    try:
        torch.set_num_threads(case.threads)
        if case.ranks > 1:
            address = f"tcp://127.0.0.1:{port}"
            dist.init_process_group("gloo", init_method=address, rank=rank, world_size=case.ranks)
        step = _timed(case)
        pipe.send(0.0)
        while pipe.recv():
            pipe.send(step())
        pipe.send(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
        if case.ranks > 1:
            dist.barrier()
            dist.destroy_process_group()
    except Exception:
        pipe.send(traceback.format_exc())


def _timed(case: Case) -> Callable[[], float]:
    """A call that runs a step and returns its seconds."""
    if case.name == "floor":
        floor = GemmFloor(case.model, seq_len=SEQ_LEN, batch=MICRO_BATCH, dtype=DTYPES[case.precision])

        def measure() -> float:
            floor.measure()
            return floor.seconds

        return measure
    step = megalite_step(case) if case.name == "megalite" else huggingface_step(case)

    def timed() -> float:
        if case.ranks > 1:
            dist.barrier()
        begin = time.perf_counter()
        step()
        return time.perf_counter() - begin

    return timed


@dataclass
class Team:
    """The running processes of a case, and what they measured."""

    case: Case
    seconds: list[float] = field(default_factory=list)
    peak_mb: float = 0.0

    def __enter__(self) -> Team:
        context = multiprocessing.get_context("spawn")
        port, self._pipes, self._processes = _free_port(), [], []
        # Read by OpenMP when a child loads it. Idle threads must leave the cores to the other cases: never ACTIVE,
        # which spins for ever; without a policy they spin for about a millisecond.
        os.environ["OMP_NUM_THREADS"] = str(self.case.threads)
        os.environ.pop("OMP_WAIT_POLICY", None)
        if self.case.ranks > 1:
            os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
        for rank in range(self.case.ranks):
            ours, theirs = context.Pipe()
            process = context.Process(target=work, args=(self.case, rank, port, theirs), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        self._collect()
        return self

    def step(self) -> float:
        """Seconds of a step, of the slowest rank."""
        for pipe in self._pipes:
            pipe.send(True)
        return max(self._collect())

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            for pipe in self._pipes:
                pipe.send(False)
            self.peak_mb = max(self._collect())
        for process in self._processes:
            if kind is not None:
                process.terminate()
            process.join()

    def _collect(self) -> list[float]:
        answers = []
        for pipe in self._pipes:
            try:
                answer = pipe.recv()
            except EOFError:
                answer = "its process ended"
            if isinstance(answer, str):
                raise RuntimeError(f"{self.case.name} {self.case.layout} {self.case.precision}: {answer}")
            answers.append(answer)
        return answers


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def race(cases: Sequence[Case], rounds: int, console: Console) -> list[dict[str, object]]:
    """Rows of the table for cases of one precision, the first of which is the floor."""
    teams = [Team(case) for case in cases]
    with ExitStack() as stack:
        for team in teams:
            stack.enter_context(team)
        with console.status(f"{cases[0].precision}: round 1 of {rounds}") as status:
            for number in range(rounds):
                status.update(f"{cases[0].precision}: round {number + 1} of {rounds}")
                for team in teams:
                    team.seconds.append(team.step())
    return _rows(teams)


def _rows(teams: Sequence[Team]) -> list[dict[str, object]]:
    floor, *others = teams
    best = {id(team): min(team.seconds) / team.case.num_microbatches for team in teams}
    (peer,) = (team for team in others if team.case.name == "huggingface")
    return [
        {
            "name": team.case.name,
            "dtype": team.case.precision,
            "ranks": team.case.ranks,
            "layout": team.case.layout,
            "threads": team.case.threads,
            "step_over_floor": best[id(team)] / best[id(floor)],
            "ratio_to_hf": best[id(peer)] / best[id(team)],
            "peak_mb": team.peak_mb,
            "tokens_per_second": SEQ_LEN * MICRO_BATCH / best[id(team)],
            "floor_seconds": best[id(floor)],
        }
        for team in others
    ]


def _cases(arguments: argparse.Namespace, precision: str) -> list[Case]:
    model = arguments.model
    common = {"precision": precision, "model": model}
    cases = [Case(name=name, threads=arguments.threads, **common) for name in ("floor", "huggingface", "megalite")]
    for layout in arguments.layouts:
        threads = max(1, arguments.threads // parse_layout(layout).num_ranks)
        cases.append(
            Case(name="megalite", threads=threads, layout=layout, num_microbatches=arguments.num_microbatches, **common)
        )
    return cases


def _table(rows: Sequence[dict[str, object]]) -> Table:
    table = Table(title=f"One training step, {SEQ_LEN * MICRO_BATCH} tokens a micro-batch")
    columns = {
        "name": "", "dtype": "", "layout": "", "ranks": "d", "threads": "d", "step_over_floor": ".2f",
        "ratio_to_hf": ".2f", "tokens_per_second": ",.0f", "peak_mb": ",.0f",
    }  # fmt: skip
    heads = {"step_over_floor": "step / floor", "ratio_to_hf": "tokens/s over HF", "peak_mb": "peak MB"}
    for column, form in columns.items():
        table.add_column(heads.get(column, column.replace("_", " ")), justify="right" if form else "left")
    for row in rows:
        table.add_row(*(format(row[column], form) for column, form in columns.items()))
    return table


def main() -> None:
    """Measures and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtypes", nargs="+", choices=tuple(DTYPES), default=tuple(DTYPES))
    parser.add_argument("--layouts", nargs="*", default=("dp2", "tp2", "pp2"), help="of more than one rank")
    parser.add_argument("--num-microbatches", type=int, default=8, help="a step of several ranks (default 8)")
    parser.add_argument("--rounds", type=int, default=3, help="steps of each case (default 3)")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of each case, all ranks")
    parser.add_argument("--num-layers", type=int, default=MODEL.num_layers, help="for a quick look at a small model")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the table as JSON")
    arguments = parser.parse_args()
    arguments.model = ModelConfig(**{**vars(MODEL), "num_layers": arguments.num_layers})
    console = Console() if sys.stdout.isatty() else Console(width=120)
    rows = [
        row for precision in arguments.dtypes for row in race(_cases(arguments, precision), arguments.rounds, console)
    ]
    console.print(_table(rows))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
