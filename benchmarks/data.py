"""What reading data costs: the index of 1e5, 1e6 and 1e7 documents, the first batch, samples a second, memory.

    PYTHONPATH=. python benchmarks/data.py --json data.json

prints a table for each part. Documents have lognormal lengths of about 300 tokens, as a web corpus has. Each
measurement runs in a process of its own, so that its peak memory is its own. Seconds are CPU seconds.

The index is two shuffles of numpy, which Megatron-LM makes too, and the places where samples begin; Megatron-LM finds
these in a loop of C++. The same loop, written in C and compiled by `cc`, runs beside ours in the same process; the
ratio is that of the whole index to one that is made with this loop. Of the loader is measured what a step waits for
its batch while the model keeps a core busy, as it does in the demo.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import multiprocessing
import resource
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from benchmarks.table import make_table
from megalite.data.gpt_dataset import GPTDataset
from megalite.data.gpt_index import IndexPlan, build_index, plan_index, sample_starts
from megalite.data.indexed import IndexedDataset, IndexedWriter
from megalite.data.loader import Prefetcher
from megalite.data.sampler import GlobalBatches

SEQ_LEN = 2048
EPOCHS = (1, 3.5)
LOOP = """
#include <stdint.h>
/* Where sample k begins: walks through the documents, seq_len tokens at a time. */
void sample_starts(const int32_t *lengths, int64_t samples, int32_t seq_len, int32_t *out) {
    int64_t place = 0;
    int32_t offset = 0;
    out[0] = out[1] = 0;
    for (int64_t k = 1; k <= samples; k++) {
        int64_t left = (int64_t)seq_len + 1;
        while (left) {
            int64_t here = (int64_t)lengths[place] - offset;
            if (here >= left) {
                offset += (int32_t)(left - 1);
                left = 0;
            } else {
                left -= here;
                place++;
                offset = 0;
            }
        }
        out[2 * k] = (int32_t)place;
        out[2 * k + 1] = offset;
    }
}
"""
DEMO_STEP_SECONDS = 1.0
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
    plan = plan_index(tokens, seq_len=SEQ_LEN, num_samples=wanted)
    base, whole, ours, theirs = peak_mb(), list[float](), list[float](), list[float]()
    index = build_index(plan, lengths, 0, seq_len=SEQ_LEN, seed=1)
    peak, in_order = peak_mb(), lengths[index["documents"]]
    for _ in range(3):
        whole.append(cpu_seconds(lambda: build_index(plan, lengths, 0, seq_len=SEQ_LEN, seed=1)))
        ours.append(cpu_seconds(lambda: sample_starts(plan, in_order, SEQ_LEN)))
        theirs.append(_loop_seconds(plan, in_order, index["samples"]))
    return {
        "documents": count, "epochs": epochs, "cpu_seconds": min(whole), "sample_starts": min(ours),
        "loop_in_c": min(theirs), "ratio": min(whole) / (min(whole) - min(ours) + min(theirs)),
        "cache_mb": sum(values.nbytes for values in index.values()) / 1e6, "peak_mb": peak - base,
    }  # fmt: skip


def _loop_seconds(plan: IndexPlan, lengths: NDArray[np.int32], expected: NDArray[Any]) -> float:
    """CPU seconds of the loop in C, whose result must be ours; nan where there is no compiler."""
    compiler = shutil.which("cc")
    if compiler is None:
        return float("nan")
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "loop.c"
        source.write_text(LOOP)
        library = str(source.with_suffix(".so"))
        subprocess.run([compiler, "-O3", "-shared", "-fPIC", "-o", library, str(source)], check=True)
        loop = ctypes.CDLL(library).sample_starts
        found = np.empty_like(expected)

        def run() -> None:
            loop(
                ctypes.c_void_p(lengths.ctypes.data), ctypes.c_int64(plan.num_samples), ctypes.c_int32(SEQ_LEN),
                ctypes.c_void_p(found.ctypes.data),
            )  # fmt: skip

        seconds = cpu_seconds(run)
    assert np.array_equal(found, expected)
    return seconds


def loader_rows(_: list[int]) -> list[Row]:
    """How long steps wait for their batch when it is loaded by the step, and ahead of it, beside a busy core."""
    return [alone(_loader_row, depth) for depth in (0, 2)]


def _loader_row(depth: int) -> Row:
    with tempfile.TemporaryDirectory() as folder:
        prefix = _write_tokens(Path(folder), lognormal_lengths(20_000))
        data = GPTDataset(IndexedDataset(prefix), seq_len=128, seed=1)
        batches = GlobalBatches(dataset=data, global_batch_size=64, micro_batch_size=2)
        loader, waits, busy = Prefetcher(depth), list[float](), np.ones((512, 512), dtype=np.float32)
        for step in range(12):
            begin = time.perf_counter()
            loader.load(batches, step)
            waits.append(time.perf_counter() - begin)
            while time.perf_counter() - begin < waits[-1] + DEMO_STEP_SECONDS / 4:
                np.matmul(busy, busy)
        loader.close()
    wait = statistics.median(waits[2:])
    return {"prefetch": depth, "wait_ms": 1e3 * wait, "percent_of_a_second": 100 * wait}


def reading_rows(counts: list[int]) -> list[Row]:
    """Opening, the first batch and samples a second of files with at most a million documents."""
    return [alone(_reading_row, min(count, 1_000_000), seq_len) for count in counts[:1] for seq_len in (2048, 8192)]


def _reading_row(count: int, seq_len: int) -> Row:
    with tempfile.TemporaryDirectory() as folder:
        _write_tokens(Path(folder), lognormal_lengths(count))
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


def _write_tokens(folder: Path, lengths: NDArray[np.int32]) -> Path:
    """The prefix of token files with documents of these lengths."""
    with IndexedWriter(folder / "x", dtype="uint16") as writer:
        tokens = np.arange(int(lengths.sum()), dtype=np.uint32) % 50_000
        writer.add_documents(tokens, lengths, np.ones(len(lengths), dtype=np.int64))
    return folder / "x"


PARTS: dict[str, Callable[[list[int]], list[Row]]] = {
    "index": index_rows, "reading": reading_rows, "loader": loader_rows,
}  # fmt: skip
"""What can be measured, by name: a function from numbers of documents to rows."""


def cpu_seconds(run: Callable[[], object]) -> float:
    """What a call takes."""
    begin = time.process_time()
    run()
    return time.process_time() - begin


def lognormal_lengths(count: int) -> NDArray[np.int32]:
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
