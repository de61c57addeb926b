"""Tokenise text to token files (PREFIX_KEY_document.bin/.idx) for training.

    python tools/preprocess_data.py --input a.jsonl.gz dir --output-prefix data/mine --tokenizer mine.model --workers 8

A run that was interrupted, killed, or found the disk full goes on where it stopped when its command is repeated. The
exit status is 0 when the files are in place, 1 when the text is bad or the disk is full, 2 when the command line
cannot work.
"""

from __future__ import annotations

import contextlib
import errno
import math
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import tyro
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from megalite.data.encoder import Encoder, TextOptions, Totals
from megalite.data.fim import FimOptions
from megalite.data.indexed import strip_suffix
from megalite.data.preprocess import Progress as Done
from megalite.data.preprocess import ResumeError, existing_outputs, preprocess, was_publishing
from megalite.data.text_sources import STDIN, find_sources
from megalite.data.tokenizer import find_chat_template, load_tokenizer
from megalite.files import url_problem

PLAIN_SECONDS = 5.0
"""How often a line is printed when the output is not a terminal."""
SHOWN_LINES = 20
"""Skipped lines that are shown; all are in PREFIX.rejected.jsonl."""


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Tokenise text to token files (PREFIX_KEY_document.bin/.idx)."""

    input: Annotated[tuple[str, ...], tyro.conf.arg(aliases=["--inputs"])]
    """.jsonl (one object a line), .txt (documents between form feeds), .parquet; .gz and .zst of the first two; folders
    of them; - is jsonl from standard input."""
    output_prefix: Annotated[str, tyro.conf.arg(aliases=["--output"])]
    """What the names of the files to write begin with; the folder is created."""
    tokenizer: str
    """byte, or a file: sentencepiece .model, Hugging Face tokenizer.json (or its folder), .tiktoken. A kind may stand
    before it: sentencepiece:FILE, huggingface:FILE, tiktoken:FILE (or the name of an encoding), gigatoken:FILE."""
    json_keys: tuple[str, ...] = ("text",)
    """Keys (of .jsonl) or columns (of .parquet) with text: each gives files of its own."""
    workers: Annotated[int, tyro.conf.arg(metavar="N")] = 1
    """Processes that encode; the result does not depend on it."""
    on_error: Literal["skip", "fail"] = "skip"
    """What a broken line does: be counted, shown, written to PREFIX.rejected.jsonl and left out, or end the run."""
    keep_empty: Annotated[bool, tyro.conf.arg(aliases=["--keep-blank"])] = False
    """Keep blank texts: an empty one becomes a document without tokens, as Megatron does."""
    append_eod: bool = True
    """End each document with the tokenizer's end-of-document id."""
    max_document_mb: float = 8.0
    """Longer documents are cut at whitespace into several; the last has the end-of-document id."""
    fim_rate: float = 0.0
    """Share of documents that are rearranged for fill-in-the-middle."""
    fim_spm_rate: float = 0.5
    """Of these, the share with the suffix first."""
    fim_seed: int = 0
    """Which documents, and where they are cut, follows from this and their text."""
    chat_template: str = ""
    """The keys hold conversations (lists of messages): a Jinja file, "chatml", or "tokenizer" for the one beside
    the tokenizer. PREFIX_KEY_document_loss_mask marks what the assistant says."""
    overwrite: bool = False
    """Replace existing output files."""

    @property
    def prefixes(self) -> dict[str, str]:
        """PREFIX_KEY_document of each key."""
        return {key: f"{strip_suffix(self.output_prefix)}_{key}_document" for key in self.json_keys}

    def options(self) -> TextOptions:
        """Raises ValueError or OSError for a chat template that cannot be found."""
        return TextOptions(
            json_keys=self.json_keys,
            on_error=self.on_error,
            keep_blank=self.keep_empty,
            append_eod=self.append_eod,
            max_document_mb=self.max_document_mb,
            fim=FimOptions(rate=self.fim_rate, spm_rate=self.fim_spm_rate, seed=self.fim_seed),
            chat_template=find_chat_template(self.chat_template, self.tokenizer) if self.chat_template else "",
        )


def usage_errors(args: Arguments) -> list[str]:
    """What makes a run pointless, found before any work."""
    found = [] if args.input else ["no input"]
    if problem := url_problem(args.output_prefix):
        found.append(f"--output-prefix {problem}")
    for given in args.input:
        try:
            find_sources([given])
        except (OSError, ValueError, ImportError) as error:
            found.append(str(error))
    if args.workers < 1:
        found.append(f"--workers {args.workers} must be at least 1")
    if not (math.isfinite(args.max_document_mb) and args.max_document_mb > 0):
        found.append(f"--max-document-mb {args.max_document_mb} must be finite and more than 0")
    if len(set(args.json_keys)) < len(args.json_keys) or not args.json_keys:
        found.append(f"--json-keys {' '.join(args.json_keys)} must name each key once")
    if args.fim_rate and args.chat_template:
        found.append("--fim-rate does not go with --chat-template")
    prefixes = list(args.prefixes.values())
    if (existing := existing_outputs(prefixes)) and not args.overwrite and not was_publishing(prefixes[0]):
        found.append(f"{existing[0]} already exists; add --overwrite to replace it")
    found += [f"--{p.replace('_', '-')}" for p in FimOptions(rate=args.fim_rate, spm_rate=args.fim_spm_rate).problems()]
    try:
        Encoder(load_tokenizer(args.tokenizer), args.options())
    except (OSError, ValueError, ImportError) as error:
        found.append(f"--tokenizer: {error}")
    return found


@contextlib.contextmanager
def progress_display(console: Console) -> Iterator[Callable[[Done], None]]:
    """A bar with rates and remaining time on a terminal, a line every few seconds elsewhere."""
    rates = Rates()
    if not console.is_terminal:
        yield plain_progress(console, rates)
        return
    columns = (BarColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("tokenising", total=None)

        def show(done: Done) -> None:
            text = rates.describe(done)
            bar.update(task, total=done.total_bytes or None, completed=done.disk_bytes, description=text)

        yield show


class Rates:
    """Speed since the start of this process, whatever an earlier one did."""

    def __init__(self) -> None:
        self._start = time.monotonic()

    def describe(self, done: Done) -> str:
        """Megabytes, documents, tokens, their rates, and the time that is left."""
        seconds = max(time.monotonic() - self._start, 1e-9)
        now = done.totals.bytes_read, done.totals.tokens
        text, tokens = ((a - b) / seconds for a, b in zip(now, done.at_start, strict=True))
        # The rest has as much text to a byte on disk as what has been read.
        remaining = (done.total_bytes / max(done.disk_bytes, 1) - 1) * done.totals.bytes_read
        left = f", {remaining / text:.0f} s left" if text > 0 and done.total_bytes else ""
        whole = f" of {done.total_bytes / 1e6:.1f} MB" if done.total_bytes else " MB"
        return (
            f"{done.disk_bytes / 1e6:.1f}{whole} read, {done.totals.documents:,} documents,"
            f" {done.totals.tokens:,} tokens, {text / 1e6:.2f} MB/s, {tokens:,.0f} tokens/s{left}"
        )


def plain_progress(console: Console, rates: Rates) -> Callable[[Done], None]:
    """Prints a line at most every PLAIN_SECONDS."""
    last = time.monotonic()

    def show(done: Done) -> None:
        nonlocal last
        line = rates.describe(done)
        if time.monotonic() - last >= PLAIN_SECONDS:
            last = time.monotonic()
            console.print(line, markup=False)

    return show


def reporter(console: Console) -> Callable[[str], None]:
    """Prints what is reported, up to SHOWN_LINES lines."""
    count = 0

    def report(line: str) -> None:
        nonlocal count
        count += 1
        if count <= SHOWN_LINES:
            console.print(line, markup=False)
        elif count == SHOWN_LINES + 1:
            console.print("further skipped lines are not shown", markup=False)

    return report


def run(args: Arguments, console: Console) -> Totals:
    """Tokenises everything; raises what `preprocess` raises."""
    with progress_display(console) as progress:
        return preprocess(
            args.input,
            args.prefixes,
            args.tokenizer,
            options=args.options(),
            workers=args.workers,
            overwrite=args.overwrite,
            progress=progress,
            report=reporter(console),
        )


def explain(error: Exception, args: Arguments) -> str:
    """One line for the user."""
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        text = sum(s.size for s in find_sources([i for i in args.input if i != STDIN]))
        return (
            f"the disk is full; {text / 1e6:.0f} MB of text usually need about {text * 0.6 / 1e6:.0f} MB of tokens."
            " Make room and repeat the command: it goes on after what is safe"
        )
    return str(error) or type(error).__name__


def summary(args: Arguments, totals: Totals, seconds: float) -> str:
    """What was done, for people."""
    found = {
        "broken lines left out": totals.broken, "blank texts": totals.blank, "documents cut": totals.cut,
        "texts with lone surrogates repaired": totals.replaced, "documents rearranged": totals.rearranged,
        "tokens to learn": totals.learnt,
    }  # fmt: skip
    notes = "".join(f"; {count} {name}" for name, count in found.items() if count)
    aside = f" (see {next(iter(args.prefixes.values()))}.rejected.jsonl)" if totals.broken else ""
    return (
        f"{', '.join(args.prefixes.values())}: {totals.documents} documents, {totals.tokens} tokens from"
        f" {totals.bytes_read / 1e6:.1f} MB of text, {seconds:.1f} s{notes}{aside}"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit status."""
    args = tyro.cli(Arguments, args=argv, description=__doc__)
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    found = usage_errors(args)
    for problem in found:
        console.print(f"error: {problem}", markup=False)
    if found:
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # unwinds, so that workers go
    start = time.monotonic()
    try:
        totals = run(args, console)
    except KeyboardInterrupt:
        console.print("interrupted; repeat the command to go on")
        return 130
    except Exception as error:
        console.print(f"error: {explain(error, args)}", markup=False)
        return 2 if isinstance(error, ResumeError | FileExistsError) else 1
    print(summary(args, totals, time.monotonic() - start))
    return 0


if __name__ == "__main__":
    sys.exit(main())
