"""Samples text from the latest checkpoint of a run.

    python tools/generate.py --run-dir runs/demo --prompt 'Return a new' 'The list' --num-tokens 120

Runs on one process, and reads checkpoints that one process wrote. The exit status is 0, or 1 with a line that says
what was wrong.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro
from rich.console import Console
from rich.rule import Rule
from rich.text import Text
from torch import Tensor

from megalite.batch import MicroBatch
from megalite.checkpoint import store
from megalite.checkpoint.errors import CheckpointError
from megalite.config import Config, load_config
from megalite.data.build import build_datasets
from megalite.data.tokenizer import Tokenizer, load_tokenizer
from megalite.models.transformer import StageSpec, Transformer
from megalite.mpu import ParallelConfig, ParallelState
from megalite.parallel.shard import buffer_tensors, shard_of
from megalite.train.build import build_stage


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Sample text from the latest checkpoint of a run."""

    run_dir: str
    """The run folder."""
    prompt: tuple[str, ...] = ("The",)
    """Texts to continue."""
    num_tokens: int = 100
    """Tokens to add to each prompt; fewer if the document ends before."""
    temperature: float = 0.8
    """Divides the logits: lower is safer, 0 always takes the likeliest token."""
    top_k: int = 50
    """Sample among this many likeliest tokens only; 0 is all."""
    seed: int = 0
    """Seed of the sampling; the same seed gives the same text."""
    checkpoint: str | None = None
    """Checkpoint folder, if not the latest of the run."""
    device: str = "cpu"
    """Where to run: cpu or cuda."""


class GenerateError(ValueError):
    """The run cannot be sampled as asked; the message says what to do."""


def usage_errors(args: Arguments) -> list[str]:
    """What is wrong with the arguments, found before any work."""
    found = [
        f"--{name.replace('_', '-')}={getattr(args, name)} must be at least {least}"
        for name, least in (("num_tokens", 1), ("temperature", 0.0), ("top_k", 0))
        if getattr(args, name) < least
    ]
    if not (Path(args.run_dir) / "config.yaml").is_file():
        found.append(f"--run-dir={args.run_dir} is not a run folder: it has no config.yaml")
    return found


def load_run(run_dir: Path, checkpoint: Path | None, device: torch.device) -> tuple[Transformer, Config, int]:
    """The model of a run as one stage with its trained weights, the run's config, and the steps it was trained."""
    config = load_config(["--config", str(run_dir / "config.yaml")])
    config = dataclasses.replace(config, parallel=ParallelConfig())
    folder = checkpoint or store.latest(run_dir)
    if folder is None:
        raise GenerateError(f"{run_dir} has no checkpoint yet")
    mpu = ParallelState.single()
    model = build_stage(config, mpu, StageSpec(0, 1, range(config.model.num_layers)), device)
    weights = [(shard_of(parameter), parameter.data) for parameter in model.parameters()]
    manifest = store.load(folder, {"parameter": weights} | buffer_tensors(model), mpu)
    return model.eval(), config, manifest.step


def find_tokenizer(config: Config) -> Tokenizer:
    """The tokenizer of a run's data."""
    if config.data.tokenizer:
        return load_tokenizer(config.data.tokenizer)
    datasets = build_datasets(config.data, seed=config.train.seed, num_samples=None, vocab_size=config.model.vocab_size)
    if datasets.tokenizer is None:
        raise GenerateError(
            "the data of this run do not say which tokenizer made them; set data.tokenizer in config.yaml"
        )
    return datasets.tokenizer


def pick(logits: Tensor, *, temperature: float, top_k: int, generator: torch.Generator) -> int:
    """The next token from `logits` [vocab]."""
    if temperature == 0.0:
        return int(logits.argmax())
    scaled = logits.detach().to("cpu", torch.float64) / temperature
    if 0 < top_k < scaled.numel():
        kept = scaled.topk(top_k)
        return int(kept.indices[torch.multinomial(kept.values.softmax(0), 1, generator=generator)])
    return int(torch.multinomial(scaled.softmax(0), 1, generator=generator))


@torch.no_grad()
def continue_tokens(
    model: Transformer, prompt: Sequence[int], args: Arguments, *, window: int, eod: int, device: torch.device
) -> list[int]:
    """Up to `args.num_tokens` tokens after `prompt`, until `eod`. The model sees the last `window` tokens."""
    generator = torch.Generator().manual_seed(args.seed)
    tokens = list(prompt)
    for _ in range(args.num_tokens):
        logits = model.logits(_one_row(tokens[-window:], device))
        token = pick(logits[-1, 0], temperature=args.temperature, top_k=args.top_k, generator=generator)
        if token == eod:
            break
        tokens.append(token)
    return tokens[len(prompt) :]


def _one_row(tokens: Sequence[int], device: torch.device) -> MicroBatch:
    """A micro-batch of one row without labels."""
    column = torch.tensor(tokens, device=device)[:, None]
    return MicroBatch(
        tokens=column,
        labels=torch.zeros_like(column),
        loss_mask=torch.zeros(column.shape, device=device),
        positions=torch.arange(len(tokens), device=device)[:, None],
        samples=torch.zeros(1, dtype=torch.int64, device=device),
        step=0,
    )


def run(args: Arguments, console: Console) -> None:
    """Loads the model and prints each prompt with its continuation."""
    device = torch.device(args.device)
    model, config, step = load_run(Path(args.run_dir), Path(args.checkpoint) if args.checkpoint else None, device)
    tokenizer = find_tokenizer(config)
    console.print(f"{args.run_dir} after step {step}, temperature {args.temperature}, top-k {args.top_k}", style="dim")
    for prompt in args.prompt:
        # An empty prompt begins a document, as the end of another one does.
        ids = tokenizer.encode(prompt) or [tokenizer.eod]
        new = continue_tokens(model, ids, args, window=config.data.seq_len, eod=tokenizer.eod, device=device)
        whole = tokenizer.decode([*ids, *new])
        console.print(Rule(style="dim"))
        console.print(Text(prompt, style="bold"), Text(whole.removeprefix(prompt)), sep="")
    console.print(Rule(style="dim"))


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit status."""
    args = tyro.cli(Arguments, args=argv, description=__doc__)
    problems = usage_errors(args)
    try:
        if not problems:
            run(args, Console(highlight=False, soft_wrap=True))
    except (GenerateError, CheckpointError, OSError, ValueError) as error:
        problems = [str(error)]
    for problem in problems:
        print(f"generate.py: {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
