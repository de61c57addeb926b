"""Continues texts with a trained model, printing them as they grow.

    python tools/generate.py runs/demo --prompt 'Return a new' 'The list' --max-new-tokens 120
    python tools/generate.py runs/demo/checkpoints/step_00000100 --prompt-file prompts.txt --json
    torchrun --nproc-per-node 4 tools/generate.py runs/x --layout tp2+pp2 --prompt 'The'

SRC is a run folder, whose latest checkpoint is meant, or a checkpoint, of any layout; or a folder of Hugging Face. The
exit status is 0, or 1 with a line that says what was wrong.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import tyro

from megalite.checkpoint.agree import on_first
from megalite.generate.command import ModelArguments, asked_layout, context_of, run_command, too_small
from megalite.generate.generator import Generator
from megalite.generate.load import find_words, inference_layout, load_stage, read_source
from megalite.generate.row import Stop
from megalite.generate.sampling import Sampling
from megalite.mpu import ParallelConfig, ParallelState


@dataclass(frozen=True, kw_only=True)
class Arguments(Sampling, ModelArguments):
    """Continue texts with a trained model."""

    prompt: tuple[str, ...] = ()
    """Texts to continue; - is standard input. Without any, and without --prompt-file: "The"."""
    prompt_file: str | None = None
    """A file of prompts: one a line, or of a .jsonl file the field `prompt` of each object; - is standard input."""
    max_new_tokens: Annotated[int, tyro.conf.arg(aliases=["--num-tokens"])] = 100
    """Tokens to add to each prompt; fewer if its document ends before. Beyond the context, a text loses its oldest
    tokens, a quarter of the context at a time."""
    num_samples: int = 1
    """Continuations of each prompt, with other samples."""
    stop: tuple[str, ...] = ()
    """Texts at which a continuation ends; they are left out."""
    ignore_eod: bool = False
    """Go on where a document ends."""
    batch_size: int = 16
    """Rows that are generated side by side."""
    json: bool = False
    """Print one JSON object a continuation, in the order of the prompts, when its batch is done."""


def usage_errors(args: Arguments) -> list[str]:
    """What is wrong with the arguments, found before any work."""
    counts = too_small(args, "max_new_tokens", "num_samples", "batch_size")
    return [*args.problems(), *counts, *args.model_problems()]


def layout_of(args: Arguments, num_ranks: int) -> ParallelConfig:
    """The layout that is asked for; ValueError where it is none, or generates nothing."""
    return inference_layout(asked_layout(args.layout, num_ranks, "tools/generate.py"), num_ranks)


def read_prompts(args: Arguments) -> list[str]:
    """The texts to continue, each as often as it is to be sampled."""
    texts = [sys.stdin.read() if text == "-" else text for text in args.prompt]
    if args.prompt_file is not None:
        texts += _lines(args.prompt_file)
    texts = texts or (["The"] if args.prompt_file is None else [])
    if not texts:
        raise ValueError(f"--prompt-file={args.prompt_file} has no prompt")
    return [text for text in texts for _ in range(args.num_samples)]


def _lines(path: str) -> list[str]:
    text = sys.stdin.read() if path == "-" else Path(path).read_text(encoding="utf-8")
    lines = [line for line in text.split("\n") if line.strip()]
    if not path.endswith(".jsonl"):
        return lines
    try:
        return [str(json.loads(line)["prompt"]) for line in lines]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"--prompt-file={path}: every line should be an object with a field prompt") from error


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
    words = find_words(source, args.tokenizer)
    # Standard input and files are read by the first rank alone.
    prompts = on_first(mpu, "no prompts", lambda: read_prompts(args))
    loaded = load_stage(source, mpu, device, args.dtype, rows=min(args.batch_size, len(prompts)))
    generator = Generator(loaded.stage, mpu, device, context=context_of(args, source))
    if speaks:
        print(f"{source.path} after step {loaded.step}, {loaded.stage.hidden_dtype} on {device.type}", file=sys.stderr)
    printer = Printer(prompts) if speaks and not args.json else None
    stop = Stop(
        max_new_tokens=args.max_new_tokens,
        tokens=() if args.ignore_eod else words.ends,
        strings=args.stop,
    )
    for begin in range(0, len(prompts), args.batch_size):
        texts = prompts[begin : begin + args.batch_size]
        ids = [words.prompt(text) for text in texts]
        numbers = range(begin, begin + len(texts))
        found = generator.generate(ids, args, stop, numbers=numbers, tokenizer=words.tokenizer, on_text=printer)
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


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit status."""
    args = tyro.cli(Arguments, args=argv, description=__doc__)
    return run_command(
        "generate.py",
        args,
        usage_errors(args),
        lambda num_ranks: layout_of(args, num_ranks),
        lambda mpu, device: run(args, mpu, device),
    )


if __name__ == "__main__":
    sys.exit(main())
