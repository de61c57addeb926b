"""Preparation of text beside the bare tokenizer: CPU time, memory, start-up.

    python benchmarks/preprocess.py --megabytes 16 --rounds 3

Both sides see the same text. CPU seconds of the tool are those of a whole run less those of a run on one line, children
included; those of the bare tokenizer are of its own batch call in one thread, text in memory. Rounds alternate between
the two, so that other load meets both. Peak memory is the largest of any process of the tool.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.table import make_table
from megalite.data.corpus import demo_documents
from megalite.data.tokenizer import train_sentencepiece
from megalite.data.tokenizer_backends import train_byte_bpe
from megalite.files import output_file, replace_json

ROOT = Path(__file__).parents[1]
COLUMNS = {
    "tokenizer": "", "workers": ".0f", "bare_mb_per_cpu_s": ".2f", "tool_mb_per_cpu_s": ".2f", "ratio": ".2f",
    "tool_mb_per_s": ".2f", "peak_mb": ".0f", "start_s": ".2f",
}  # fmt: skip
BARE = """
import json, sys, time
from megalite.data.tokenizer import load_tokenizer
name, path = sys.argv[1:]
tokenizer = load_tokenizer(name)
texts = [json.loads(line)["text"] for line in open(path)]
tokenizer.encode_batch(texts[:20])
begin = time.process_time()
for i in range(0, len(texts), 200):
    tokenizer.encode_batch(texts[i : i + 200])
print(time.process_time() - begin)
"""


def source_texts() -> Iterator[str]:
    """Text that every machine with Python has: the demo corpus, then the sources of the standard library."""
    yield from demo_documents()
    for path in sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py")):
        if "site-packages" not in path.parts:
            yield path.read_text(errors="replace")


def write_corpus(folder: Path, megabytes: float) -> tuple[Path, list[str]]:
    """corpus.jsonl of about `megabytes` of text, and its first texts."""
    texts, size = list[str](), 0
    for text in source_texts():
        if size > megabytes * 1e6:
            break
        if text.strip():
            texts.append(text)
            size += len(text)
    path = folder / "corpus.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path, texts[:800]


def make_tokenizers(folder: Path, texts: list[str]) -> dict[str, str]:
    """Name for people -> name for load_tokenizer, of all whose packages are there."""
    train_sentencepiece(texts, folder / "sp.model", 8192)
    found = {"bytes": "byte", "sentencepiece BPE 8k": f"sentencepiece:{folder}/sp.model"}
    if importlib.util.find_spec("tokenizers"):
        train_byte_bpe(texts, folder / "tokenizer.json", 8192)
        found["tokenizers BPE 8k"] = f"huggingface:{folder}/tokenizer.json"
        if importlib.util.find_spec("gigatoken"):
            found["gigatoken BPE 8k"] = f"gigatoken:{folder}/tokenizer.json"
    return found


def bare_seconds(name: str, corpus: Path) -> float:
    """CPU seconds of the tokenizer's own batches over the corpus."""
    command = [sys.executable, "-c", BARE, name, str(corpus)]
    return float(subprocess.run(command, env=_environment(), capture_output=True, text=True, check=True).stdout)


def _environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


def tool_run(name: str, corpus: Path, workers: int, folder: Path) -> dict[str, float]:
    """cpu, wall (seconds) and peak (MB, of the largest process) of one run of the command."""
    command = [
        sys.executable, str(ROOT / "tools" / "preprocess_data.py"), "--input", str(corpus), "--tokenizer", name,
        "--output-prefix", str(folder / "out"), "--workers", str(workers), "--overwrite",
    ]  # fmt: skip
    before, begin, peak = os.times(), time.monotonic(), 0.0
    with subprocess.Popen(command, env=_environment(), stdout=subprocess.DEVNULL) as process:
        while process.poll() is None:
            peak = max([peak, *map(peak_memory, [process.pid, *children(process.pid)])])
            time.sleep(0.02)
    wall, after = time.monotonic() - begin, os.times()
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}")
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    return {"cpu": cpu, "wall": wall, "peak": peak}


def children(process: int) -> list[int]:
    """Its child processes."""
    try:
        return [int(p) for p in Path(f"/proc/{process}/task/{process}/children").read_text().split()]
    except OSError:
        return []


def peak_memory(process: int) -> float:
    """The most memory that a process has had, in MB; 0 for one that is gone."""
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:
        return 0.0
    return next((int(line.split()[1]) / 1e3 for line in lines if line.startswith("VmHWM")), 0.0)


def measure(label: str, name: str, corpus: Path, folder: Path, *, workers: int, rounds: int) -> dict[str, Any]:
    """One row of the table: medians over rounds of (bare, tool, tool on one line)."""
    one_line = folder / "one.jsonl"
    one_line.write_text('{"text": "a line"}\n')
    megabytes = sum(len(json.loads(line)["text"].encode()) for line in corpus.open()) / 1e6
    found: list[dict[str, float]] = []
    for _ in range(rounds):
        bare = bare_seconds(name, corpus)
        start, whole = (tool_run(name, path, workers, folder) for path in (one_line, corpus))
        work = max(whole["cpu"] - start["cpu"], 1e-3)
        found.append(
            {
                "bare_mb_per_cpu_s": megabytes / bare, "tool_mb_per_cpu_s": megabytes / work, "ratio": bare / work,
                "tool_mb_per_s": megabytes / max(whole["wall"] - start["wall"], 1e-3), "peak_mb": whole["peak"],
                "start_s": start["wall"],
            }
        )  # fmt: skip
    medians = {key: statistics.median(row[key] for row in found) for key in found[0]}
    return {"tokenizer": label, "workers": workers} | medians


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=16.0, help="text to prepare")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--json", type=output_file, help="write the rows there, too")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        corpus, texts = write_corpus(folder, args.megabytes)
        rows = [
            measure(label, tokenizer, corpus, folder, workers=workers, rounds=args.rounds)
            for label, tokenizer in make_tokenizers(folder, texts).items()
            for workers in args.workers
        ]
    Console().print(make_table(f"Preparation of {args.megabytes:g} MB of text", rows, COLUMNS))
    if args.json:
        replace_json(args.json, rows)


if __name__ == "__main__":
    main()
