"""Looks at token files, checks, cuts and joins them:

    python tools/data.py inspect data/mine          what is in it
    python tools/data.py validate data/mine         reads all of it; the exit status is 1 when something is wrong
    python tools/data.py merge a b --output ab      documents of a, then those of b
    python tools/data.py split data/mine --parts 98,1,1 --output data/cut       data/cut_0, _1, _2
    python tools/data.py sample data/mine --seq-len 256 --count 3               rows as a run sees them
    python tools/data.py stats data/mine            lengths of documents
    python tools/data.py detokenize data/mine --documents 0:3                   the text again
    python tools/data.py plot "0.7 a 0.3 b" --output blend.png                  lengths and blend as a picture

PREFIX stands for PREFIX.bin and PREFIX.idx. `--json FILE` also writes what is shown as JSON.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from megalite.data.blend_spec import parse_blend
from megalite.data.blended import normalise_weights, phased_order
from megalite.data.gpt_dataset import GPTDataset
from megalite.data.indexed import IndexedDataset, IndexedWriter
from megalite.data.pictures import data_png
from megalite.data.report import document_lengths, inspect_file, statistics, validate_file
from megalite.data.tokenizer import Tokenizer, load_tokenizer
from megalite.files import replace_bytes

Result = list[dict[str, Any]]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; 0 when all is well, 1 for bad or missing data, 2 for a command line that cannot work."""
    arguments = _parser().parse_args(argv)
    try:
        result = arguments.command(arguments)
    except (ValueError, OSError, ImportError, IndexError) as error:
        print(f"data.py: {error}", file=sys.stderr)
        return 1
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(result, indent=1) + "\n")
    return int(any(row.get("problem") for row in result))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, command: Callable[[argparse.Namespace], Result], text: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text)
        sub.set_defaults(command=command)
        sub.add_argument("--json", metavar="FILE", help="write the result as JSON")
        return sub

    several = [
        add("inspect", _inspect, "counts, dtype and tokenizer of token files"),
        checking := add("validate", _validate, "read token files and compare them with their index and side file"),
        merging := add("merge", _merge, "join token files of one dtype"),
        add("stats", _stats, "lengths of documents"),
    ]
    for sub in several:
        sub.add_argument("prefixes", nargs="+", metavar="PREFIX")
    checking.add_argument("--vocab-size", type=int, help="ids must be below (default: what the side file records)")
    cutting = add("split", _split, "cut a token file between documents")
    cutting.add_argument("--parts", required=True, help="weights such as 98,1,1, or how many equal parts")
    drawing = add("sample", _sample, "rows of tokens, as a run of this seed would see them")
    drawing.add_argument("--seq-len", type=int, default=128)
    drawing.add_argument("--seed", type=int, default=1234, help="train.seed of the run")
    drawing.add_argument("--num-samples", type=int, help="data.num_samples of the run (default: one epoch)")
    drawing.add_argument("--first", type=int, default=0, metavar="N", help="number of the first row shown")
    drawing.add_argument("--count", type=int, default=1, help="rows to show")
    reading = add("detokenize", _detokenize, "print documents as text, a form feed after each")
    reading.add_argument("--documents", nargs="+", metavar="K or FIRST:END", help="which (default: all)")
    for sub in (cutting, drawing, reading):
        sub.add_argument("prefix", metavar="PREFIX")
    for sub in (drawing, reading):
        sub.add_argument("--tokenizer", help="default: what the side file records")
    plotting = add("plot", _plot, "document lengths and, of a blend, what it draws, as a PNG")
    plotting.add_argument("blend", nargs="+", help="PREFIXES, or a blend as data.blend takes it")
    plotting.add_argument("--num-samples", type=int, default=10_000, help="samples of the blend")
    plotting.add_argument("--samples-per-step", type=int, default=1, help="what @STEP in the blend counts")
    for sub in (merging, cutting, plotting):
        sub.add_argument("--output", required=True, metavar="PREFIX or FILE")
    for sub in (merging, cutting):
        sub.add_argument("--overwrite", action="store_true", help="replace existing files")
    return parser


def _inspect(arguments: argparse.Namespace) -> Result:
    rows = [inspect_file(prefix).as_dict() for prefix in arguments.prefixes]
    _print_columns(rows)
    return rows


def _validate(arguments: argparse.Namespace) -> Result:
    rows: Result = []
    for prefix in arguments.prefixes:
        try:
            checked, problem = validate_file(prefix, arguments.vocab_size), None
        except (ValueError, OSError) as error:
            checked, problem = [], str(error)
        rows.append({"prefix": prefix, "checked": checked, "problem": problem})
        print(f"{prefix}: {'BAD' if problem else 'good'}")
        print("\n".join(f"  {line}" for line in ([problem] if problem else checked)))
    return rows


def _stats(arguments: argparse.Namespace) -> Result:
    rows = [statistics(prefix) for prefix in arguments.prefixes]
    _print_columns(rows)
    return rows


def _print_columns(rows: Result) -> None:
    """A column for each file."""
    table = Table(box=None, pad_edge=False)
    for name in ("", *(row["prefix"] for row in rows)):
        table.add_column(name, overflow="fold")
    for name in list(rows[0])[1:]:
        table.add_row(name.replace("_", " "), *(_shown(row[name]) for row in rows))
    Console(width=max(80, 40 * (1 + len(rows)))).print(table)


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int) else f"{value:.3f}" if isinstance(value, float) else str(value)


def _merge(arguments: argparse.Namespace) -> Result:
    sources = [IndexedDataset(prefix) for prefix in arguments.prefixes]
    records = [(source.side_file() or {}).get("tokenizer") for source in sources]
    prints = {(record or {}).get("fingerprint") for record in records}
    if len(prints - {None}) > 1:
        raise ValueError(f"{', '.join(arguments.prefixes)} were made with different tokenizers: their ids do not mix")
    extra = {"tokenizer": records[0]} if len(prints) == 1 and records[0] else {}
    row = _write(arguments.output, sources[0], [(s, 0, s.num_documents) for s in sources], extra, arguments.overwrite)
    return [row]


def _split(arguments: argparse.Namespace) -> Result:
    source = IndexedDataset(arguments.prefix)
    record = (source.side_file() or {}).get("tokenizer")
    weights = [float(word) for word in arguments.parts.split(",")]
    if len(weights) == 1:
        weights = [1.0] * int(weights[0])
    ends = np.rint(np.cumsum([0.0, *normalise_weights(weights, "--parts")]) * source.num_documents).astype(int).tolist()
    extra = {"tokenizer": record} if record else {}
    return [
        _write(f"{arguments.output}_{k}", source, [(source, first, end)], extra, arguments.overwrite)
        for k, (first, end) in enumerate(itertools.pairwise(ends))
    ]


def _write(
    prefix: str,
    like: IndexedDataset,
    parts: list[tuple[IndexedDataset, int, int]],
    extra: dict[str, Any],
    overwrite: bool,
) -> dict[str, Any]:
    """Writes ranges of documents to PREFIX; returns what it holds."""
    for source, _, _ in parts:
        if source.dtype != like.dtype:
            raise ValueError(f"{source.prefix} holds {source.dtype.name}, {like.prefix} {like.dtype.name}")
    writer = IndexedWriter(prefix, dtype=like.dtype, overwrite=overwrite)
    try:
        for source, first, end in parts:
            writer.add_range(source, first, end)
        writer.finish(**extra)
    finally:
        writer.abort()
    print(f"{prefix}: {writer.num_documents} documents, {writer.num_tokens} tokens")
    return {"prefix": prefix, "documents": writer.num_documents, "tokens": writer.num_tokens}


def _tokenizer(data: IndexedDataset, name: str | None) -> Tokenizer | None:
    name = name or ((data.side_file() or {}).get("tokenizer") or {}).get("name")
    return load_tokenizer(name) if name else None


def _sample(arguments: argparse.Namespace) -> Result:
    data = IndexedDataset(arguments.prefix)
    tokenizer = _tokenizer(data, arguments.tokenizer)
    rows = GPTDataset(data, seq_len=arguments.seq_len, seed=arguments.seed, num_samples=arguments.num_samples)
    result: Result = []
    for number in range(arguments.first, arguments.first + arguments.count):
        tokens = rows[number].tokens.tolist()
        pieces = [list(piece) for piece in rows.pieces(number)]
        text = tokenizer.decode(tokens) if tokenizer is not None else None
        result.append({"sample": number, "pieces": pieces, "tokens": tokens, "text": text})
        where = ", ".join(f"{length} of sequence {sequence} from {begin}" for sequence, begin, length in pieces)
        print(f"sample {number}: {where}\n{text if text is not None else tokens}\n")
    return result


def _detokenize(arguments: argparse.Namespace) -> Result:
    data = IndexedDataset(arguments.prefix)
    tokenizer = _tokenizer(data, arguments.tokenizer)
    if tokenizer is None:
        raise ValueError(f"{data.prefix} does not record its tokenizer; give --tokenizer")
    for first, end in _ranges(arguments.documents or [f"0:{data.num_documents}"], data.num_documents):
        for document in range(first, end):
            low, high = data.document_index[document : document + 2].tolist()
            ids = data.read(data.position(low), data.position(high) - data.position(low)).tolist()
            sys.stdout.write(tokenizer.decode(ids) + "\n\f\n")
    return []


def _ranges(words: Sequence[str], count: int) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for word in words:
        first, colon, end = word.partition(":")
        try:
            low = int(first or 0)
            high = int(end or count) if colon else low + 1
        except ValueError:
            raise ValueError(f"--documents {word} is no number and no FIRST:END") from None
        if not 0 <= low <= high <= count:
            raise ValueError(f"--documents {word} is not within 0:{count}")
        found.append((low, high))
    return found


def _plot(arguments: argparse.Namespace) -> Result:
    words = arguments.blend
    blended = len(words) == 1 and (" " in words[0] or words[0].endswith((".yaml", ".yml", ".json")))
    spec = parse_blend(words[0] if blended else (), () if blended else words, name="the blend")
    files = [IndexedDataset(path) for path in spec.paths]
    phases = [(phase.step * arguments.samples_per_step, phase.weights) for phase in spec.phases]
    phases = phases or [(0, tuple(float(data.num_tokens) for data in files))]
    normal = [(first, normalise_weights(weights)) for first, weights in phases]
    order = phased_order(normal, arguments.num_samples)[0] if len(files) > 1 else None
    names = [Path(data.prefix).name for data in files]
    lengths = {f"{data.prefix}": document_lengths(data) for data in files}
    replace_bytes(Path(arguments.output), data_png(lengths, order, names))
    counts = np.bincount(order, minlength=len(files)).tolist() if order is not None else []
    print(f"{arguments.output} written")
    return [{"output": arguments.output, "prefixes": list(spec.paths), "counts": counts}]


if __name__ == "__main__":
    sys.exit(main())
