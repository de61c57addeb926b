"""Train a tokenizer on text: sentencepiece BPE or unigram (.model), or Hugging Face byte-level BPE (tokenizer.json).

python tools/train_tokenizer.py --input a.jsonl folder --output tokenizer.model --vocab-size 8192
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from megalite.data.encoder import repaired
from megalite.data.text_blocks import Broken, Position, blocks, cut_text, records
from megalite.data.text_sources import TextError, find_sources
from megalite.data.tokenizer import Tokenizer, train_sentencepiece
from megalite.data.tokenizer_backends import train_byte_bpe
from megalite.files import url_problem

_MAX_TEXT = 8_000_000


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Train a tokenizer."""

    input: Annotated[tuple[str, ...], tyro.conf.arg(aliases=["--inputs"])]
    """.jsonl, .txt, .parquet, .gz and .zst of the first two, folders of them, or - (jsonl from standard input)."""
    output: str
    """The file to write: .model, or .json with --kind hf-bpe."""
    vocab_size: int = 8192
    """Ids, the 256 bytes, special tokens and the end of a document included."""
    kind: Literal["bpe", "unigram", "hf-bpe"] = "bpe"
    """bpe and unigram are sentencepiece's, with bytes for what has no piece; hf-bpe is byte-level."""
    special_tokens: tuple[str, ...] = ()
    """Further special tokens, such as <|fim_prefix|> <|fim_suffix|> <|fim_middle|>."""
    json_key: str = "text"
    """Key of the text in .jsonl files, or column of .parquet."""
    max_megabytes: float = 200.0
    """Text that is read, from the beginning of the inputs; training keeps it in memory."""
    overwrite: bool = False
    """Replace an existing file."""


def texts(args: Arguments) -> Iterator[str]:
    """The texts of the inputs in order, up to the limit; TextError for a broken line."""
    left = int(args.max_megabytes * 1e6)
    for source in find_sources(args.input):
        for block in blocks(source, Position(), [args.json_key], _MAX_TEXT):
            if left <= 0:
                return
            left -= block.size
            for record in records(block, [args.json_key]):
                if isinstance(record, Broken):
                    raise TextError(record.reason)
                yield from (piece for piece, _ in cut_text([repaired(record.values[0])], _MAX_TEXT))


def train(args: Arguments, path: Path) -> Tokenizer:
    """Trains and writes `path`; raises what the trainers raise."""
    if args.kind == "hf-bpe":
        return train_byte_bpe(texts(args), path, args.vocab_size, special_tokens=args.special_tokens)
    special = args.special_tokens
    return train_sentencepiece(texts(args), path, args.vocab_size, model_type=args.kind, special_tokens=special)


def usage_errors(args: Arguments) -> list[str]:
    """What makes a run pointless, found before any work."""
    found = [] if args.input else ["no input"]
    for given in args.input:
        try:
            find_sources([given])
        except (OSError, ValueError, ImportError) as error:
            found.append(str(error))
    if os.path.exists(args.output) and not args.overwrite:
        found.append(f"{args.output} already exists; add --overwrite to replace it")
    if problem := _place_problem(args.output):
        found.append(f"--output {problem}")
    if (args.kind == "hf-bpe") != args.output.endswith(".json"):
        found.append(f"--output {args.output}: --kind hf-bpe writes .json files, the others .model")
    if not 0 < args.max_megabytes < math.inf:
        found.append(f"--max-megabytes {args.max_megabytes} must be a positive number")
    return found


def _place_problem(output: str) -> str:
    """Why `output` cannot be written, as far as can be known before; nothing when it can."""
    if problem := url_problem(output):
        return problem
    folder = next(parent for parent in Path(output).absolute().parents if parent.exists())
    if not folder.is_dir():
        return f"{output}: {folder} is a file, not a folder; choose another place"
    if not os.access(folder, os.W_OK):
        return f"{output}: folder {folder} may not be written to; choose another place"
    return f"{output} is a folder: name a file in it" if Path(output).is_dir() else ""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns 0, 1 (bad text) or 2 (bad command line)."""
    args = tyro.cli(Arguments, args=argv, description=__doc__)
    found = usage_errors(args)
    for problem in found:
        print(f"error: {problem}", file=sys.stderr)
    if found:
        return 2
    output = Path(args.output)
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        tokenizer = train(args, output)
    except (OSError, ValueError, ImportError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{output}: {tokenizer.vocab_size} ids, end of document {tokenizer.eod}, fingerprint {tokenizer.fingerprint}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
