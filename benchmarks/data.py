"""What reading data costs: the index of 1e5, 1e6 and 1e7 documents, the first batch, samples a second, memory.

    PYTHONPATH=. python benchmarks/data.py --json data.json

prints a table for each part. Documents have lognormal lengths of about 300 tokens, as a web corpus has. Each
measurement runs in a process of its own, so that its peak memory is its own. Seconds are CPU seconds.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from benchmarks.table import make_table
from megalite.data.gpt_dataset import GPTDataset
from megalite.data.gpt_index import build_index, plan_index
from megalite.data.indexed import IndexedDataset, IndexedWriter
from megalite.data.sampler import GlobalBatches

SEQ_LEN = 2048
EPOCHS = (1, 3.5)
MEGATRON = {100_000: (0.016, 0.016), 1_000_000: (0.05, 0.26), 10_000_000: (0.81, 3.95)}
"""CPU seconds of megatron-core 0.19's C++ index, one epoch and 3.5, on a comparable machine."""
Row = dict[str, Any]


def main() -> None:
    """Measures, prints and writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, nargs="+", default=[100_000, 1_000_000, 10_000_000])
    parser.add_argument("--only", choices=tuple(PARTS), nargs="+", default=list(PARTS), help="parts to measure")
    parser.add_argument("--json", metavar="FILE", help="write the figures as JSON")
    arguments = parser.parse_args()
    console, result = Console(width=140), {}
    for name in arguments.only:
        result[name] = rows = PARTS[name](arguments.documents)
        columns = {key: "" if isinstance(value, str) else ",.6g" for key, value in rows[0].items()}
        console.print(make_table(name, rows, columns))
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(result, indent=1) + "\n")


def index_rows(counts: list[int]) -> list[Row]:
    """The index of each number of documents, for one epoch and for several."""
    return [alone(_index_row, count, epochs) for count in counts for epochs in EPOCHS]


def _index_row(count: int, epochs: float) -> Row:
    lengths = lognormal_lengths(count)
    tokens = int(lengths.sum(dtype=np.int64))
    wanted = None if epochs == 1 else int(epochs * tokens) // SEQ_LEN
    base, begin = peak_mb(), time.process_time()
    plan = plan_index(tokens, seq_len=SEQ_LEN, num_samples=wanted)
    index = build_index(plan, lengths, 0, seq_len=SEQ_LEN, seed=1)
    seconds = time.process_time() - begin
    theirs = MEGATRON.get(count)
    return {
        "documents": count, "epochs": epochs, "cpu_seconds": seconds,
        "megatron": theirs[epochs > 1] if theirs else float("nan"),
        "cache_mb": sum(values.nbytes for values in index.values()) / 1e6, "peak_mb": peak_mb(), "before_mb": base,
    }  # fmt: skip


def reading_rows(counts: list[int]) -> list[Row]:
    """Opening, the first batch and samples a second of files with at most a million documents."""
    return [alone(_reading_row, min(count, 1_000_000), seq_len) for count in counts[:1] for seq_len in (2048, 8192)]


def _reading_row(count: int, seq_len: int) -> Row:
    with tempfile.TemporaryDirectory() as folder:
        lengths = lognormal_lengths(count)
        with IndexedWriter(Path(folder) / "x", dtype="uint16") as writer:
            tokens = np.arange(int(lengths.sum()), dtype=np.uint32) % 50_000
            writer.add_documents(tokens, lengths, np.ones(count, dtype=np.int64))
        begin = time.process_time()
        data = GPTDataset(IndexedDataset(Path(folder) / "x"), seq_len=seq_len, seed=1, cache_dir=Path(folder))
        GlobalBatches(dataset=data, global_batch_size=8, micro_batch_size=8).load(0)
        first = time.process_time() - begin
        begin = time.process_time()
        again = GPTDataset(IndexedDataset(Path(folder) / "x"), seq_len=seq_len, seed=1, cache_dir=Path(folder))
        GlobalBatches(dataset=again, global_batch_size=8, micro_batch_size=8).load(0)
        cached = time.process_time() - begin
        count_read = min(len(data), 4000)
        begin = time.process_time()
        for i in range(count_read):
            data[i]
        rate = count_read / (time.process_time() - begin)
    return {
        "documents": count, "seq_len": seq_len, "first_batch_seconds": first, "with_cache_seconds": cached,
        "samples_per_second": rate, "million_tokens_per_second": rate * seq_len / 1e6, "peak_mb": peak_mb(),
    }  # fmt: skip


PARTS: dict[str, Callable[[list[int]], list[Row]]] = {"index": index_rows, "reading": reading_rows}
"""What can be measured, by name: a function from numbers of documents to rows."""


def lognormal_lengths(count: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    """Lengths of `count` documents with a mean of about 300."""
    return np.maximum(np.random.RandomState(0).lognormal(5.2, 1.0, count), 1).astype(np.int32)


def peak_mb() -> float:
    """The most memory that this process has held, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


def alone(function: Callable[..., Row], *arguments: Any) -> Row:
    """`function(*arguments)` in a process of its own."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, arguments)


if __name__ == "__main__":
    main()
