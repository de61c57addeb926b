"""How well a trained model predicts texts: loss, perplexity, and bits per byte.

    python tools/evaluate.py runs/demo --text book.txt --stride 32
    python tools/evaluate.py runs/demo --data data/valid --json found.json
    torchrun --nproc-per-node 4 tools/evaluate.py runs/x --layout tp2+pp2 --text texts.jsonl

SRC is a run folder, whose latest checkpoint is meant, a checkpoint, or a folder of Hugging Face. A text file is one
document, a line of a .jsonl file is one, and so is each of a token file. Every token counts once, the first one of a
document after an end of document. The exit status is 0, or 1 with a line that says what was wrong.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import tyro
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from megalite.files import replace_json
from megalite.generate.command import ModelArguments, asked_layout, context_of, run_command, too_small
from megalite.generate.load import LoadError, Source, find_words, load_stage, read_source
from megalite.generate.perplexity import (
    Document,
    Perplexity,
    evaluate,
    evaluation_layout,
    indexed_documents,
    text_documents,
)
from megalite.generate.words import Words
from megalite.mpu import ParallelState


@dataclass(frozen=True, kw_only=True)
class Arguments(ModelArguments):
    """Evaluate a trained model on texts."""

    text: tuple[str, ...] = ()
    """Text files; of a .jsonl file the field --text-key of each object."""
    text_key: str = "text"
    """The field of .jsonl files that holds the text."""
    data: tuple[str, ...] = ()
    """Token files, by their prefix (.bin and .idx)."""
    num_documents: int | None = None
    """Only the first so many documents of each file."""
    stride: int | None = None
    """Tokens by which a window of a long document moves on; by default the context, so that windows do not overlap. A
    smaller one gives tokens more context and takes longer."""
    batch_size: int = 8
    """Windows of a micro-batch."""
    json: Path | None = None
    """A file for the result as JSON."""


def usage_errors(args: Arguments) -> list[str]:
    """What is wrong with the arguments, found before any work."""
    found = [*args.model_problems(), *too_small(args, "stride", "batch_size", "num_documents")]
    if not args.text and not args.data:
        found.append("there is nothing to evaluate: name files with --text or --data")
    found += [f"--text {path}: there is no such file" for path in args.text if not Path(path).is_file()]
    if args.json is not None and (args.json.is_dir() or not args.json.parent.is_dir()):
        found.append(f"--json={args.json} should be a file in a folder that is there")
    return found


def read_documents(args: Arguments, words: Words | None) -> list[Document]:
    """All documents of all files; ValueError or OSError that names the file."""
    found: list[Document] = []
    for path in args.text:
        if words is None:
            raise LoadError(f"--text {path}: a text needs a tokenizer; name it with --tokenizer")
        found += text_documents(path, words, args.text_key)[: args.num_documents]
    for prefix in args.data:
        found += indexed_documents(prefix, words, args.num_documents)
    if not any(document.num_scored for document in found):
        raise ValueError(f"{', '.join((*args.text, *args.data))}: there is no token to predict")
    return found


def run(args: Arguments, mpu: ParallelState, device: torch.device) -> None:
    """Evaluates on this rank's part of the model; the first rank prints."""
    source = read_source(args.src, mpu)
    documents = read_documents(args, _words(source, args))
    context = context_of(args, source)
    stride = min(args.stride or context, context)
    loaded = load_stage(source, mpu, device, args.dtype)
    console = Console(stderr=True, quiet=not mpu.world.is_first, highlight=False)
    began = time.perf_counter()
    with _progress(console, sum(document.num_scored for document in documents)) as report:
        found = evaluate(
            documents, loaded.stage, mpu, device, context=context, stride=stride, batch_size=args.batch_size,
            report=report,
        )  # fmt: skip
    seconds = time.perf_counter() - began
    if not mpu.world.is_first:
        return
    result = {"source": source.path, "step": loaded.step, "context": context, "stride": stride} | _result(found)
    result |= {"seconds": seconds, "tokens_per_second": found.tokens / seconds}
    print_result(result)
    if args.json is not None:
        replace_json(args.json, result)


def _words(source: Source, args: Arguments) -> Words | None:
    """Those of the model; None where only token files are read and they are not known."""
    try:
        return find_words(source, args.tokenizer)
    except LoadError:
        if args.text:
            raise
        return None


def _result(found: Perplexity) -> dict[str, Any]:
    perplexity = found.perplexity
    return {
        "documents": found.documents, "tokens": found.tokens, "bytes": found.bytes, "loss": found.loss,
        "perplexity": perplexity if math.isfinite(perplexity) else None, "bits_per_byte": found.bits_per_byte,
    }  # fmt: skip


def print_result(result: dict[str, Any]) -> None:
    """The result as a table on standard output."""
    table = Table(title=f"{result['source']} after step {result['step']}", show_header=False)
    for name in ("documents", "tokens", "bytes", "context", "stride"):
        if result[name] is not None:
            table.add_row(name, f"{result[name]:,}")
    for name in ("loss", "perplexity", "bits_per_byte"):
        if result[name] is not None:
            table.add_row(name.replace("_", " "), f"{result[name]:.6g}")
    table.add_row("tokens/s", f"{result['tokens_per_second']:,.0f}")
    Console(highlight=False).print(table)


@contextmanager
def _progress(console: Console, total: int) -> Iterator[Callable[[int], None]]:
    """A bar with rate and remaining time in a terminal; without one, a line every ten seconds."""
    columns = (
        TextColumn("{task.completed:,}/{task.total:,} tokens"), BarColumn(),
        TextColumn("{task.fields[rate]:,.0f} tokens/s"), TimeRemainingColumn(),
    )  # fmt: skip
    done, began = 0, time.perf_counter()
    told = began
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("evaluation", total=total, rate=0.0)

        def report(count: int) -> None:
            nonlocal done, told
            done, now = done + count, time.perf_counter()
            rate = done / max(now - began, 1e-9)
            bar.update(task, completed=done, rate=rate)
            if not console.is_terminal and now - told > 10.0:
                told = now
                console.print(f"{done:,} of {total:,} tokens, {rate:,.0f} tokens/s, {(total - done) / rate:.0f} s left")

        yield report


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit status."""
    args = tyro.cli(Arguments, args=argv, description=__doc__)
    return run_command(
        "evaluate.py",
        args,
        usage_errors(args),
        lambda num_ranks: evaluation_layout(asked_layout(args.layout, num_ranks, "tools/evaluate.py")),
        lambda mpu, device: run(args, mpu, device),
    )


if __name__ == "__main__":
    sys.exit(main())
