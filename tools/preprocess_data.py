"""Tokenise .jsonl and .txt files to a token file (PREFIX.bin/.idx) for training.

    python tools/preprocess_data.py --inputs a.jsonl b.txt --output data/mine --tokenizer tokenizer.model --workers 8

The exit status is 0 when the files are in place, 1 when the text is bad or the disk is full (nothing is left
behind then), 2 when the command line cannot work.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import tyro
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from megalite.data.indexed import strip_suffix
from megalite.data.preprocess import TEXT_SUFFIXES, TextOptions, Totals, preprocess
from megalite.data.tokenizer import load_tokenizer

PLAIN_SECONDS = 5.0
"""How often a line is printed when the output is not a terminal."""


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Tokenise .jsonl and .txt files to a token file (PREFIX.bin/.idx)."""

    inputs: tuple[str, ...]
    """Text files: .jsonl (one JSON object a line) or .txt (documents separated by form feeds)."""
    output: str
    """PREFIX of the files to write; its directory is created."""
    tokenizer: str
    """Sentencepiece .model, Hugging Face tokenizer.json, or "byte"."""
    json_key: str = "text"
    """Key of the text in .jsonl files."""
    workers: Annotated[int, tyro.conf.arg(metavar="N")] = 1
    """Processes that encode; the result does not depend on it."""
    on_error: Literal["fail", "skip"] = "fail"
    """What a broken line does: end the run, or be reported, counted and left out."""
    keep_blank: bool = False
    """Keep blank texts: an empty one becomes a document without tokens, as Megatron does."""
    append_eod: bool = True
    """End each document with the tokenizer's end-of-document id."""
    overwrite: bool = False
    """Replace existing output files."""


def usage_errors(args: Arguments) -> list[str]:
    """What makes a run pointless, found before any work."""
    found = [f"{p} does not exist" for p in args.inputs if not os.path.exists(p)]
    expected = " or ".join(TEXT_SUFFIXES)
    found += [f"{p}: expected a {expected} file" for p in args.inputs if not p.endswith(TEXT_SUFFIXES)]
    if not args.inputs:
        found.append("no input files")
    if args.workers < 1:
        found.append(f"--workers {args.workers} must be at least 1")
    prefix = strip_suffix(args.output)
    existing = [prefix + end for end in (".bin", ".idx") if os.path.exists(prefix + end)]
    if existing and not args.overwrite:
        found.append(f"{existing[0]} already exists; add --overwrite to replace it")
    try:
        load_tokenizer(args.tokenizer)
    except (OSError, ValueError, ImportError) as error:
        found.append(f"--tokenizer: {error}")
    return found


@contextlib.contextmanager
def progress_display(console: Console, total_bytes: int) -> Iterator[Callable[[Totals], None]]:
    """A bar with rate and remaining time on a terminal, a line every few seconds elsewhere."""
    if not console.is_terminal:
        yield plain_progress(console, total_bytes)
        return
    columns = (
        TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("tokenising", total=total_bytes)
        yield lambda totals: bar.update(
            task, completed=totals.bytes_read, description=f"{totals.documents:,} documents, {totals.tokens:,} tokens"
        )


def plain_progress(console: Console, total_bytes: int) -> Callable[[Totals], None]:
    """Prints megabytes, rate and remaining time at most every PLAIN_SECONDS."""
    start = last = time.monotonic()

    def show(totals: Totals) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last < PLAIN_SECONDS:
            return
        last = now
        rate = totals.bytes_read / (now - start)
        left = (total_bytes - totals.bytes_read) / rate
        console.print(
            f"{totals.bytes_read / 1e6:.1f} of {total_bytes / 1e6:.1f} MB, {rate / 1e6:.2f} MB/s, {left:.0f} s left,"
            f" {totals.documents} documents, {totals.tokens} tokens"
        )

    return show


def run(args: Arguments, console: Console) -> Totals:
    """Tokenises everything; raises what `preprocess` raises."""
    total_bytes = sum(os.path.getsize(p) for p in args.inputs)
    options = TextOptions(
        json_key=args.json_key, on_error=args.on_error, keep_blank=args.keep_blank, append_eod=args.append_eod
    )
    with progress_display(console, total_bytes) as progress:
        return preprocess(
            args.inputs,
            args.output,
            args.tokenizer,
            options=options,
            workers=args.workers,
            overwrite=args.overwrite,
            progress=progress,
            report=lambda problem: console.print(f"skipped {problem}", markup=False),
        )


def explain(error: Exception, args: Arguments) -> str:
    """One line for the user."""
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        text = sum(os.path.getsize(p) for p in args.inputs)
        return f"the disk is full; {text / 1e6:.0f} MB of text usually need about {text * 0.6 / 1e6:.0f} MB of tokens"
    return str(error) or type(error).__name__


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit status."""
    args = tyro.cli(Arguments, args=argv, description=__doc__)
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    found = usage_errors(args)
    for problem in found:
        console.print(f"error: {problem}", markup=False)
    if found:
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # unwinds, so that temporary files go
    start = time.monotonic()
    try:
        totals = run(args, console)
    except KeyboardInterrupt:
        console.print("interrupted; nothing was written")
        return 130
    except Exception as error:
        console.print(f"error: {explain(error, args)}", markup=False)
        return 1
    seconds = time.monotonic() - start
    print(
        f"{strip_suffix(args.output)}: {totals.documents} documents, {totals.tokens} tokens from"
        f" {totals.bytes_read / 1e6:.1f} MB in {seconds:.1f} s; {totals.blank} blank,"
        f" {totals.broken} broken lines left out, {totals.replaced} texts with lone surrogates repaired"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
