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
merge and split take the mask of a conversation file (PREFIX_loss_mask) along.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from megalite.data.blend_spec import parse_blend
from megalite.data.blended import normalise_weights, phased_order
from megalite.data.config import DataConfig
from megalite.data.gpt_dataset import GPTDataset
from megalite.data.gpt_index import split_ranges
from megalite.data.indexed import FormatError, IndexedDataset, IndexedWriter, strip_suffix
from megalite.data.loss_mask import MASK_SUFFIX, loss_mask_of
from megalite.data.pictures import data_png
from megalite.data.remote_blocks import BlockCache
from megalite.data.report import document_lengths, inspect_file, statistics, validate_file
from megalite.data.tokenizer import Tokenizer, load_tokenizer
from megalite.files import output_file, replace_bytes, replace_json, url_problem

Result = list[dict[str, Any]]
Range = tuple[IndexedDataset, int, int]
"""Documents of a file: the first, and the one after the last."""
_MOST_PARTS = 10_000


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; 0 when all is well, 1 for bad or missing data, 2 for a command line that cannot work."""
    arguments = _parser().parse_args(argv)
    try:
        result = arguments.command(arguments)
        if arguments.json:
            replace_json(arguments.json, result)
    except (ValueError, OSError, ImportError, IndexError) as error:
        print(f"data.py: {error}", file=sys.stderr)
        return 1
    return int(any(row.get("problem") for row in result))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, command: Callable[[argparse.Namespace], Result], text: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text)
        sub.set_defaults(command=command)
        sub.add_argument("--json", type=output_file, metavar="FILE", help="write the result as JSON")
        sub.add_argument("--cache-dir", metavar="DIR", help="data.cache_dir of a run: where parts of remote files stay")
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
    cutting.add_argument(
        "--parts", type=_weights, required=True, help="weights such as 98,1,1, or how many equal parts"
    )
    drawing = add("sample", _sample, "rows of tokens, as a run of this seed would see them")
    defaults = DataConfig()
    drawing.add_argument("--seq-len", type=_positive, default=defaults.seq_len, help="data.seq_len of the run")
    drawing.add_argument(
        "--split", type=_split_weights, default=defaults.split, help="data.split of the run: rows are of its first part"
    )
    drawing.add_argument("--seed", type=int, default=1234, help="train.seed of the run")
    drawing.add_argument(
        "--num-samples", type=_positive, help="data.num_samples of the run, or all it needs (default: one epoch)"
    )
    drawing.add_argument("--first", type=int, default=0, metavar="N", help="number of the first row shown")
    drawing.add_argument("--count", type=_positive, default=1, help="rows to show")
    reading = add("detokenize", _detokenize, "print documents as text, a form feed after each")
    reading.add_argument("--documents", nargs="+", metavar="K or FIRST:END", help="which (default: all)")
    for sub in (cutting, drawing, reading):
        sub.add_argument("prefix", metavar="PREFIX")
    for sub in (drawing, reading):
        sub.add_argument("--tokenizer", help="default: what the side file records")
    plotting = add("plot", _plot, "document lengths and, of a blend, what it draws, as a PNG")
    plotting.add_argument("blend", nargs="+", help="PREFIXES, or a blend as data.blend takes it")
    plotting.add_argument("--num-samples", type=_positive, default=10_000, help="samples of the blend")
    plotting.add_argument("--samples-per-step", type=_positive, default=1, help="what @STEP in the blend counts")
    plotting.add_argument("--output", type=output_file, required=True, metavar="FILE")
    for sub in (merging, cutting):
        sub.add_argument("--output", type=_output_prefix, required=True, metavar="PREFIX")
        sub.add_argument("--overwrite", action="store_true", help="replace existing files")
    return parser


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} must be a whole number, at least 1")
    return int(text)


def _weights(text: str) -> list[float]:
    """Weights that sum to 1: of parts, or of as many equal ones as a single number says."""
    try:
        words = text.split(",") if "," in text else ["1"] * min(int(text), _MOST_PARTS + 1)
        weights = [float(word) for word in words]
        if len(weights) <= _MOST_PARTS and sum(weights) < math.inf:
            return normalise_weights(weights)
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(
        f"{text} must be weights such as 98,1,1 (none negative, not all zero) or how many equal parts, at most"
        f" {_MOST_PARTS}"
    )


def _split_weights(text: str) -> str:
    try:
        split_ranges(text, 1)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def _output_prefix(text: str) -> str:
    if problem := url_problem(text):
        raise argparse.ArgumentTypeError(problem)
    return strip_suffix(text)


def _cache(arguments: argparse.Namespace) -> BlockCache | None:
    """What --cache-dir names, bounded as that of a run; None: the user's."""
    if arguments.cache_dir is None:
        return None
    limit = round(DataConfig().remote_cache_gb * 1e9)
    return BlockCache(Path(arguments.cache_dir).expanduser() / "remote", limit)


def _inspect(arguments: argparse.Namespace) -> Result:
    rows = [inspect_file(prefix, _cache(arguments)).as_dict() for prefix in arguments.prefixes]
    _print_columns(rows)
    return rows


def _validate(arguments: argparse.Namespace) -> Result:
    rows: Result = []
    for prefix in arguments.prefixes:
        try:
            checked, problem = validate_file(prefix, arguments.vocab_size, _cache(arguments)), None
        except (ValueError, OSError) as error:
            checked, problem = [], str(error)
        rows.append({"prefix": prefix, "checked": checked, "problem": problem})
        print(f"{prefix}: {'BAD' if problem else 'good'}")
        print("\n".join(f"  {line}" for line in ([problem] if problem else checked)))
    return rows


def _stats(arguments: argparse.Namespace) -> Result:
    rows = [statistics(prefix, _cache(arguments)) for prefix in arguments.prefixes]
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
    _check_free([arguments.output], arguments.overwrite)
    sources = [IndexedDataset(prefix, cache=_cache(arguments)) for prefix in arguments.prefixes]
    records = [(source.side_file() or {}).get("tokenizer") for source in sources]
    prints = {(record or {}).get("fingerprint") for record in records}
    if len(prints - {None}) > 1:
        raise ValueError(f"{', '.join(arguments.prefixes)} were made with different tokenizers: their ids do not mix")
    for source in sources:
        if source.dtype != sources[0].dtype:
            raise ValueError(
                f"{source.prefix} holds {source.dtype.name}, {sources[0].prefix} {sources[0].dtype.name}: files of one"
                " dtype can be joined"
            )
    extra = {"tokenizer": records[0]} if len(prints) == 1 and records[0] else {}
    parts = [(source, 0, source.num_documents) for source in sources]
    return [_write(arguments.output, parts, _masks(sources), extra, arguments.overwrite)]


def _split(arguments: argparse.Namespace) -> Result:
    names = [f"{arguments.output}_{k}" for k in range(len(arguments.parts))]
    _check_free(names, arguments.overwrite)
    source = IndexedDataset(arguments.prefix, cache=_cache(arguments))
    masks = _masks([source])
    record = (source.side_file() or {}).get("tokenizer")
    ends = np.rint(np.cumsum([0.0, *arguments.parts]) * source.num_documents).astype(int).tolist()
    extra = {"tokenizer": record} if record else {}
    return [
        _write(name, [(source, first, end)], masks, extra, arguments.overwrite)
        for name, (first, end) in zip(names, itertools.pairwise(ends), strict=True)
    ]


def _check_free(prefixes: Sequence[str], overwrite: bool) -> None:
    """FileExistsError when outputs are there; a mask that lay beside a new file would be taken for its own."""
    names = [prefix + mask + end for prefix in prefixes for mask in ("", MASK_SUFFIX) for end in (".bin", ".idx")]
    existing = [name for name in names if os.path.exists(name)]
    if existing and not overwrite:
        raise FileExistsError(f"{existing[0]} already exists; choose another --output or add --overwrite")


def _masks(sources: Sequence[IndexedDataset]) -> list[IndexedDataset]:
    """The mask of each file; nothing when none has one."""
    found = [loss_mask_of(source) for source in sources]
    masks = [mask for mask in found if mask is not None]
    if masks and len(masks) < len(found):
        without = sources[found.index(None)].prefix
        raise ValueError(
            f"{masks[0].prefix} says what is to be learnt, but {without} has no mask: both need one, or none"
        )
    for mask, source in zip(masks, sources, strict=False):
        if not np.array_equal(mask.document_index, source.document_index):
            raise FormatError(f"{mask.prefix} is not the mask of {source.prefix}: its documents have other sequences")
    return masks


def _write(
    prefix: str, parts: Sequence[Range], masks: Sequence[IndexedDataset], extra: dict[str, Any], overwrite: bool
) -> dict[str, Any]:
    """Writes ranges of documents, and of the `masks` of their files if they have some; returns what PREFIX holds."""
    with contextlib.ExitStack() as stack:
        writer = stack.enter_context(_filled(prefix, parts, overwrite))
        beside: IndexedWriter | None = None
        if masks:
            ranges = [(mask, first, end) for mask, (_, first, end) in zip(masks, parts, strict=True)]
            beside = stack.enter_context(_filled(prefix + MASK_SUFFIX, ranges, overwrite))
        # A full disk has been found by now. Until all is in place the pair is missing, never beside another's mask.
        for end in (".idx", f"{MASK_SUFFIX}.idx", f"{MASK_SUFFIX}.bin", f"{MASK_SUFFIX}.json"):
            Path(prefix + end).unlink(missing_ok=True)
        if beside is not None:
            beside.finish()
            extra = extra | {"loss_mask": os.path.basename(prefix) + MASK_SUFFIX}
        writer.finish(**extra)
    aside = ", and their mask" if masks else ""
    print(f"{prefix}: {writer.num_documents} documents, {writer.num_tokens} tokens{aside}")
    return {"prefix": prefix, "documents": writer.num_documents, "tokens": writer.num_tokens, "mask": bool(masks)}


@contextlib.contextmanager
def _filled(prefix: str, parts: Sequence[Range], overwrite: bool) -> Iterator[IndexedWriter]:
    """Ranges of documents on disk under a temporary name, which goes with the block unless it is finished."""
    writer = IndexedWriter(prefix, dtype=parts[0][0].dtype, overwrite=overwrite)
    try:
        for part in parts:
            writer.add_range(*part)
        writer.sync()
        yield writer
    finally:
        writer.abort()


def _tokenizer(data: IndexedDataset, name: str | None) -> Tokenizer | None:
    name = name or ((data.side_file() or {}).get("tokenizer") or {}).get("name")
    return load_tokenizer(name) if name else None


def _sample(arguments: argparse.Namespace) -> Result:
    data = IndexedDataset(arguments.prefix, cache=_cache(arguments))
    tokenizer = _tokenizer(data, arguments.tokenizer)
    settings: dict[str, Any] = {name: getattr(arguments, name) for name in ("seq_len", "seed", "num_samples")}
    first, last = split_ranges(arguments.split, len(data))[0] or (0, 0)
    if first == last:
        raise ValueError(
            f"--split {arguments.split} leaves none of the {len(data)} sequences of {data.prefix} to train on"
        )
    rows = GPTDataset(data, sequences=(first, last), **settings)
    print(
        f"data.split={arguments.split}: sequences {first} to {last - 1} of {len(data)}; data.seq_len={rows.seq_len},"
        f" train.seed={arguments.seed}, data.num_samples={arguments.num_samples or 'one epoch'}: {len(rows)} samples\n"
    )
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
    data = IndexedDataset(arguments.prefix, cache=_cache(arguments))
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
    files = [IndexedDataset(path, cache=_cache(arguments)) for path in spec.paths]
    phases = [(phase.step * arguments.samples_per_step, phase.weights) for phase in spec.phases]
    phases = phases or [(0, tuple(float(data.num_tokens) for data in files))]
    normal = [(first, normalise_weights(weights)) for first, weights in phases]
    order = phased_order(normal, arguments.num_samples)[0] if len(files) > 1 else None
    names = [Path(data.prefix).name for data in files]
    lengths = {f"{data.prefix}": document_lengths(data) for data in files}
    replace_bytes(arguments.output, data_png(lengths, order, names))
    counts = np.bincount(order, minlength=len(files)).tolist() if order is not None else []
    print(f"{arguments.output} written")
    return [{"output": str(arguments.output), "prefixes": list(spec.paths), "counts": counts}]


if __name__ == "__main__":
    sys.exit(main())
