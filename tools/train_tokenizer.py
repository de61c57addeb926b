"""Train a sentencepiece BPE tokenizer on .jsonl and .txt files.

python tools/train_tokenizer.py --inputs a.jsonl --output tokenizer.model --vocab-size 8192
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro

from megalite.data.preprocess import piece_text, read_pieces
from megalite.data.tokenizer import train_sentencepiece


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Train a sentencepiece BPE tokenizer."""

    inputs: tuple[str, ...]
    """Text files: .jsonl or .txt."""
    output: str
    """The .model file to write."""
    vocab_size: int = 8192
    """Ids, the 256 bytes and the end of a document included."""
    json_key: str = "text"
    """Key of the text in .jsonl files."""
    max_megabytes: float = 200.0
    """Text that is read, from the beginning of the inputs; training keeps it in memory."""
    overwrite: bool = False
    """Replace an existing file."""


def texts(args: Arguments) -> Iterator[str]:
    """The texts of the inputs in order, up to the limit."""
    left = int(args.max_megabytes * 1e6)
    for path in args.inputs:
        for piece in read_pieces(path):
            if left <= 0:
                return
            left -= len(piece.data)
            yield piece_text(piece, args.json_key).encode("utf-8", "replace").decode()


def usage_errors(args: Arguments) -> list[str]:
    """What makes a run pointless, found before any work."""
    found = [f"{p} does not exist" for p in args.inputs if not os.path.exists(p)]
    if not args.inputs:
        found.append("no input files")
    if os.path.exists(args.output) and not args.overwrite:
        found.append(f"{args.output} already exists; add --overwrite to replace it")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns 0, 1 (bad text) or 2 (bad command line)."""
    args = tyro.cli(Arguments, args=argv, description=__doc__)
    found = usage_errors(args)
    for problem in found:
        print(f"error: {problem}", file=sys.stderr)
    if found:
        return 2
    output = Path(args.output)
    output.parent.mkdir(parents=True, exist_ok=True)
    scratch = output.with_name(f"{output.name}.tmp{os.getpid()}")
    try:
        tokenizer = train_sentencepiece(texts(args), scratch, args.vocab_size)
        os.replace(scratch, output)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    finally:
        scratch.unlink(missing_ok=True)
    print(f"{output}: {tokenizer.vocab_size} ids, end of document {tokenizer.eod}, fingerprint {tokenizer.fingerprint}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
