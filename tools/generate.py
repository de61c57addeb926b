"""Continues texts with a trained model, printing them as they grow.

    python tools/generate.py runs/demo --prompt 'Return a new' 'The list' --max-new-tokens 120
    python tools/generate.py runs/demo/checkpoints/step_00000100 --prompt-file prompts.txt --json
    torchrun --nproc-per-node 4 tools/generate.py runs/x --layout tp2+pp2 --prompt 'The'

SRC is a run folder, whose latest checkpoint is meant, or a checkpoint; of any layout. The exit status is 0, or 1 with a
line that says what was wrong.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import tyro

from megalite.checkpoint.agree import on_first
from megalite.checkpoint.errors import CheckpointError
from megalite.generate.generator import Generator
from megalite.generate.load import Precision, Source, find_tokenizer, inference_layout, load_stage, read_source
from megalite.generate.row import Stop
from megalite.generate.sampling import Sampling
from megalite.layout import parse_layout
from megalite.models import MODELS
from megalite.mpu import ParallelConfig, ParallelState
from megalite.train.distributed import start
from megalite.train.run import world_size


@dataclass(frozen=True, kw_only=True)
class Arguments(Sampling):
    """Continue texts with a trained model."""

    src: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="SRC")]
    """Run folder or checkpoint."""
    prompt: tuple[str, ...] = ()
    """Texts to continue; - is standard input. Without any, and without --prompt-file: "The"."""
    prompt_file: str | None = None
    """A file of prompts: one a line, or of a .jsonl file the field `prompt` of each object; - is standard input."""
    max_new_tokens: Annotated[int, tyro.conf.arg(aliases=["--num-tokens"])] = 100
    """Tokens to add to each prompt; fewer if its document ends before."""
    num_samples: int = 1
    """Continuations of each prompt, with other samples."""
    stop: tuple[str, ...] = ()
    """Texts at which a continuation ends; they are left out."""
    ignore_eod: bool = False
    """Go on where a document ends."""
    batch_size: int = 16
    """Rows that are generated side by side."""
    context: int | None = None
    """Most tokens that the model sees; by default the row length that it was trained on. A longer text loses its oldest
    tokens, a quarter of them at a time."""
    json: bool = False
    """Print one JSON object a continuation, in the order of the prompts, when its batch is done."""
    layout: str | None = None
    """How the model is cut over the ranks of torchrun: tp2+pp2, ep2, ...; by default tp over all."""
    dtype: Precision = "auto"
    """Precision of the weights: auto is the run's on a GPU, fp32 on a CPU."""
    tokenizer: str | None = None
    """Tokenizer, if not that of the run: `byte`, a sentencepiece model, or a tokenizer.json."""
    device: str = "auto"
    """Where to run: cpu, cuda, or auto."""


class GenerateError(ValueError):
    """What was asked for cannot be done; the message says why."""


def usage_errors(args: Arguments) -> list[str]:
    """What is wrong with the arguments, found before any work."""
    found = args.problems()
    for name in ("max_new_tokens", "num_samples", "batch_size", "context"):
        value = getattr(args, name)
        if value is not None and value < 1:
            found.append(f"--{name.replace('_', '-')}={value} must be at least 1")
    if not Path(args.src).exists() and "://" not in args.src:
        found.append(f"{args.src} does not exist; it should be a run folder or a checkpoint")
    if args.device not in ("auto", "cpu", "cuda"):
        found.append(f"--device={args.device} must be cpu, cuda or auto")
    return found


def read_prompts(args: Arguments) -> list[str]:
    """The texts to continue, each as often as it is to be sampled."""
    texts = [sys.stdin.read() if text == "-" else text for text in args.prompt]
    if args.prompt_file is not None:
        texts += _lines(args.prompt_file)
    texts = texts or (["The"] if args.prompt_file is None else [])
    if not texts:
        raise GenerateError(f"--prompt-file={args.prompt_file} has no prompt")
    return [text for text in texts for _ in range(args.num_samples)]


def _lines(path: str) -> list[str]:
    text = sys.stdin.read() if path == "-" else Path(path).read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if line.strip()]
    if not path.endswith(".jsonl"):
        return lines
    try:
        return [str(json.loads(line)["prompt"]) for line in lines]
    except (ValueError, KeyError, TypeError) as error:
        raise GenerateError(f"--prompt-file={path}: every line should be an object with a field prompt") from error


def layout_of(args: Arguments, num_ranks: int) -> ParallelConfig:
    """The layout that is asked for; ValueError where it is none, or not for so many ranks."""
    if args.layout is None:
        return inference_layout(ParallelConfig(tp=num_ranks), num_ranks)
    layout = parse_layout(args.layout)
    if layout.num_ranks != num_ranks:
        raise GenerateError(
            f"--layout {args.layout} has {layout.num_ranks} ranks, and there are {num_ranks}:"
            f" torchrun --nproc-per-node {layout.num_ranks} tools/generate.py ..."
        )
    if layout.dp > 1 and layout.parallel.ep * layout.parallel.etp == 1:
        raise GenerateError(f"--layout {args.layout}: data-parallel ranks would all say the same; leave out dp")
    return inference_layout(layout.parallel, num_ranks)


class Printer:
    """Shows rows one after another: the first that has not ended as it grows, and of others what they have by then."""

    def __init__(self, prompts: Sequence[str]):
        self._prompts, self._current, self._begun = prompts, 0, False
        self._waiting: dict[int, str] = {}
        self._ended: set[int] = set()

    def __call__(self, number: int, piece: str, last: bool) -> None:
        """Takes a piece of a row."""
        self._waiting[number] = self._waiting.get(number, "") + piece
        if last:
            self._ended.add(number)
        while self._current in self._waiting:
            self._show(self._current)
            if self._current not in self._ended:
                return
            del self._waiting[self._current]
            print("\n", flush=True)
            self._current, self._begun = self._current + 1, False

    def _show(self, number: int) -> None:
        if not self._begun:
            prompt = self._prompts[number]
            print(f"\033[1m{prompt}\033[0m" if sys.stdout.isatty() else prompt, end="")
            self._begun = True
        print(self._waiting[number], end="", flush=True)
        self._waiting[number] = ""


def run(args: Arguments, mpu: ParallelState, device: torch.device) -> None:
    """Loads the model on this rank and prints, on the first, every prompt with its continuation."""
    speaks = mpu.world.is_first
    source = read_source(args.src, mpu)
    tokenizer = find_tokenizer(source, args.tokenizer)
    prompts = read_prompts_together(args, mpu)
    loaded = load_stage(source, mpu, device, args.dtype)
    generator = Generator(loaded.stage, mpu, device, context=context_of(args, source))
    if speaks:
        print(f"{source.path} after step {loaded.step}, {loaded.stage.hidden_dtype} on {device.type}", file=sys.stderr)
    printer = Printer(prompts) if speaks and not args.json else None
    stop = Stop(
        max_new_tokens=args.max_new_tokens,
        tokens=() if args.ignore_eod else (tokenizer.eod,),
        strings=args.stop,
    )
    for begin in range(0, len(prompts), args.batch_size):
        texts = prompts[begin : begin + args.batch_size]
        # An empty prompt begins a document, as the end of another one does.
        ids = [tokenizer.encode(text) or [tokenizer.eod] for text in texts]
        numbers = range(begin, begin + len(texts))
        found = generator.generate(ids, args, stop, numbers=numbers, tokenizer=tokenizer, on_text=printer)
        for text, completion in zip(texts, found, strict=True):
            if speaks and args.json:
                print(json.dumps({"prompt": text} | dataclasses.asdict(completion)), flush=True)
    speed = generator.speed
    if speaks:
        print(
            f"{speed.prompt_tokens} prompt tokens in {speed.prefill_seconds:.2f} s,"
            f" {speed.new_tokens} new ones at {speed.tokens_per_second:,.1f} tokens/s",
            file=sys.stderr,
        )


def read_prompts_together(args: Arguments, mpu: ParallelState) -> list[str]:
    """The texts to continue on every rank: standard input and files are read by the first alone."""
    return on_first(mpu, "no prompts", lambda: read_prompts(args))


def context_of(args: Arguments, source: Source) -> int:
    """The most tokens that the model sees; GenerateError beyond what its learned positions cover."""
    model = source.config.model
    most = model.max_positions if MODELS[model.name].learned_positions else None
    if args.context is not None and most is not None and args.context > most:
        raise GenerateError(f"--context={args.context}: {args.src} has learned positions for {most} tokens")
    return args.context or (source.context if most is None else min(source.context, most))


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit status."""
    args = tyro.cli(Arguments, args=argv, description=__doc__)
    try:
        if problems := usage_errors(args):
            raise SystemExit("\n".join(problems))
        layout = layout_of(args, world_size())
        with start(args.device) as launch, _told_plainly():
            run(args, ParallelState.build(layout), launch.device)
    except (SystemExit, ValueError) as error:
        for line in str(error).splitlines():
            print(f"generate.py: {line}", file=sys.stderr)
        return 1
    return 0


@contextmanager
def _told_plainly() -> Iterator[None]:
    """Ends the job with the message alone, where an error says what the user can mend."""
    try:
        yield
    except (CheckpointError, ValueError, OSError, ImportError) as error:
        raise SystemExit(str(error)) from error


if __name__ == "__main__":
    sys.exit(main())
