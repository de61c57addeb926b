"""From the data section of a config to the datasets of a run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from megalite.data.blend_spec import BlendSpec, parse_blend
from megalite.data.blended import BlendPhase
from megalite.data.cache import build_once, default_directory, key_of
from megalite.data.config import DataConfig, problems
from megalite.data.corpus import DEMO_VOCAB_SIZE, prepare_demo
from megalite.data.indexed import FormatError, IndexedDataset, strip_suffix
from megalite.data.loss_mask import loss_mask_of
from megalite.data.mixing import DatasetBuilder, Source
from megalite.data.preprocess import TextOptions, preprocess
from megalite.data.remote_blocks import BlockCache
from megalite.data.rows import SampleSource
from megalite.data.text_sources import TEXT_SUFFIXES, is_text_path
from megalite.data.tokenizer import Tokenizer, load_tokenizer
from megalite.remote import is_remote

DEMO_NAME = "embedded demo"
TEXT_RECIPE = 2
_SCAN_LIMIT = 1 << 30  # bytes of token ids that are read through at start-up to check them
_EDGE = 1 << 20
log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Datasets:
    """What a run trains and validates on."""

    train: SampleSource
    """At least the samples asked for."""
    validation: SampleSource | None
    """None when no validation was asked for, or when its split is empty (which is logged)."""
    tokenizer: Tokenizer | None
    """None when token files come without a usable record of their tokenizer."""
    summary: list[str]
    """Lines for the log: the size of each dataset, what is drawn from it, and the tokenizer."""
    each_validation: dict[str, SampleSource] = field(default_factory=dict)
    """Validation samples of each dataset alone, by its name, if data.validate_each asks for them."""
    orders: tuple[int, ...] = ()
    """For how many training samples orders were asked for, one after another: to go on with the same data, ask again
    for these, then for more."""
    fingerprint: str
    """A hash of the sequence lengths and, where recorded, of the tokens: must be equal on all ranks."""


@dataclass(frozen=True)
class _Named:
    """A tokenizer and what people call it."""

    name: str
    tokenizer: Tokenizer

    def __str__(self) -> str:
        return f"{self.name}, {self.tokenizer.vocab_size} ids"


def build_datasets(
    config: DataConfig,
    *,
    seed: int,
    num_samples: int | None,
    num_validation_samples: int = 0,
    vocab_size: int | None = None,
    orders: Sequence[int] = (),
    samples_before: Callable[[int], int] | None = None,
) -> Datasets:
    """Finds (or makes) the token files of `config` and builds the datasets of a run that needs `num_samples` samples.

    `num_samples` None means every sample once. `orders` are those of a run that goes on: its samples stay where they
    were, and further epochs are appended if there are too few of them. `vocab_size` is the model's. `samples_before`
    says how many samples a number of steps consumes, for a blend that changes at a step. Safe to call on every
    rank at once; text is tokenised once per file system and indices are cached.

    Raises ValueError for a bad config, a vocabulary that
    does not fit, an empty training split or a corpus shorter than one sample with `num_samples` None;
    FileNotFoundError for missing data; FormatError for damaged data.
    """
    found = problems(config)
    if found:
        raise ValueError("\n".join(found))
    blend = parse_blend(config.blend, config.paths)
    config = replace(config, paths=blend.paths)
    cache = Path(config.cache_dir).expanduser() if config.cache_dir else default_directory()
    prefixes, named = _resolve(config, cache, vocab_size)
    data = [IndexedDataset(prefix, cache=_block_cache(config, cache)) for prefix in prefixes]
    named = named or _recorded_tokenizer(data)
    tokenizer = named.tokenizer if named is not None else None
    names = config.paths or (DEMO_NAME,)
    sources = [_checked_source(d, name, tokenizer, vocab_size) for d, name in zip(data, names, strict=True)]
    wanted = config.num_samples if config.num_samples is not None else num_samples
    if wanted is not None and wanted > max(orders, default=0):
        orders = (*orders, wanted)
    builder = DatasetBuilder(
        config=config,
        sources=sources,
        seed=seed,
        index_dir=cache / "index",
        phases=_in_samples(blend, samples_before),
        split="1" if config.validation else "",
    )
    train = builder.train(orders)
    if num_samples is not None and len(train) < num_samples:
        raise ValueError(
            f"data.num_samples={config.num_samples} makes {len(train)} samples, the run needs {num_samples};"
            " raise data.num_samples or shorten the run"
        )
    validating = _validation_builder(config, builder, tokenizer, vocab_size, cache)
    count = num_validation_samples
    rows = builder.reports["train"] if _packing(config) else []
    return Datasets(
        train=train,
        validation=validating.validation(count) if count else None,
        each_validation=validating.each_validation(count) if count and config.validate_each else {},
        tokenizer=tokenizer,
        summary=[
            *map(str, sources),
            *rows,
            *builder.reports.get("train shares", []),
            f"tokenizer: {named or 'not recorded with the data'}",
        ],
        orders=tuple(orders),
        fingerprint=key_of({"records": [s.record for s in sources]} | _packing(config), *(d.lengths for d in data)),
    )


def _in_samples(blend: BlendSpec, samples_before: Callable[[int], int] | None) -> list[BlendPhase]:
    """The phases of a blend by the samples at which they begin."""
    if samples_before is None:
        if len(blend.phases) > 1:
            raise ValueError("data.blend changes at a step, and nothing says which samples its steps consume")
        return [(0, phase.weights) for phase in blend.phases]
    return [(samples_before(phase.step), phase.weights) for phase in blend.phases]


def _validation_builder(
    config: DataConfig, training: DatasetBuilder, tokenizer: Tokenizer | None, vocab_size: int | None, cache: Path
) -> DatasetBuilder:
    """What builds validation data: the one for training, or one of data.validation, of which everything is used."""
    if not config.validation:
        return training
    blend = parse_blend(config.validation, (), name="data.validation")
    prefixes, _ = _resolve(replace(config, paths=blend.paths), cache, vocab_size, "data.validation")
    data = [IndexedDataset(prefix, cache=_block_cache(config, cache)) for prefix in prefixes]
    sources = [_checked_source(d, name, tokenizer, vocab_size) for d, name in zip(data, blend.paths, strict=True)]
    return replace(training, sources=sources, phases=_in_samples(blend, None), split="0,1", reports={})


def _block_cache(config: DataConfig, cache: Path) -> BlockCache:
    """Where the blocks of remote files are kept."""
    return BlockCache(cache / "remote", round(config.remote_cache_gb * 1e9) or None)


def _packing(config: DataConfig) -> dict[str, Any]:
    """What the packing settings add to the fingerprint of the data; nothing where they are the plain ones."""
    settings = {name: getattr(config, name) for name in ("pack", "reset_attention", "reset_positions", "boundaries")}
    return settings if any(value != getattr(DataConfig(), name) for name, value in settings.items()) else {}


def _resolve(
    config: DataConfig, cache: Path, vocab_size: int | None, option: str = "data.paths"
) -> tuple[list[str], _Named | None]:
    """The prefixes of all paths, and the tokenizer if the config or the way they are made decides it."""
    demo_vocab = min(vocab_size or DEMO_VOCAB_SIZE, DEMO_VOCAB_SIZE)
    if not config.paths:
        demo = prepare_demo(cache, vocab_size=demo_vocab, tokenizer=config.tokenizer)
        return [str(demo.prefix)], _Named(config.tokenizer or DEMO_NAME, load_tokenizer(demo.tokenizer))
    texts = [p for p in config.paths if is_text_path(p)]
    for path in texts:
        if is_remote(path):
            raise ValueError(
                f"{option}: {path} is text far away, which is not read; make token files with"
                " tools/preprocess_data.py and give their PREFIX, which may be a URL"
            )
        if not Path(path).is_file():
            raise FileNotFoundError(f"{option}: {path} does not exist")
    name = config.tokenizer
    if texts and not name:
        name = prepare_demo(cache, vocab_size=demo_vocab).tokenizer
    tokenizer = load_tokenizer(name) if name else None
    prefixes = [
        str(_tokenised(Path(p), name, tokenizer.fingerprint, config.json_key, cache))
        if tokenizer is not None and p in texts
        else _existing(p, option)
        for p in config.paths
    ]
    return prefixes, _Named(config.tokenizer or DEMO_NAME, tokenizer) if tokenizer is not None else None


def _existing(path: str, option: str) -> str:
    prefix = strip_suffix(path)
    if not is_remote(path) and not Path(prefix + ".idx").is_file():
        kind = "is not a text file that is understood" if Path(path).exists() else "does not exist"
        raise FileNotFoundError(
            f"{option}: {path} {kind}, and there is no {prefix}.idx;"
            f" give a {', '.join(TEXT_SUFFIXES)} file or the PREFIX of a .bin/.idx pair"
        )
    return prefix


def _tokenised(path: Path, name: str, fingerprint: str, json_key: str, cache: Path) -> Path:
    """The prefix of a text file's tokens in the cache; they are made on first use."""
    stat = path.stat()
    with open(path, "rb") as file:
        head = file.read(_EDGE)
        file.seek(max(0, stat.st_size - _EDGE))
        tail = file.read(_EDGE)
    settings = {
        "recipe": TEXT_RECIPE, "size": stat.st_size, "modified": stat.st_mtime_ns, "suffix": path.suffix,
        "tokenizer": fingerprint, "json_key": json_key, "edges": [key_of({"edge": repr(e)}) for e in (head, tail)],
    }  # fmt: skip

    def build(scratch: Path) -> None:
        log.info("tokenising %s (%.1f MB)", path, stat.st_size / 1e6)
        preprocess([path], scratch / "tokens", name, options=TextOptions(json_keys=(json_key,)))

    return build_once(cache / f"text-{key_of(settings)}", build) / "tokens"


def _recorded_tokenizer(data: list[IndexedDataset]) -> _Named | None:
    """The tokenizer that the side file of the first data names, if it is still there and still the same."""
    record = (data[0].side_file() or {}).get("tokenizer") or {}
    try:
        tokenizer = load_tokenizer(record["name"])
    except (KeyError, OSError, ValueError, ImportError):
        return None
    return _Named(record["name"], tokenizer) if tokenizer.fingerprint == record.get("fingerprint") else None


def _checked_source(data: IndexedDataset, name: str, tokenizer: Tokenizer | None, vocab_size: int | None) -> Source:
    """Compares the vocabularies of the data, the tokenizer and the model; ValueError when ids would not fit."""
    side = data.side_file() or {}
    if not side:
        log.warning(
            "%s has no side file (Megatron's have none): that its tokenizer is ours is not checked", data.prefix
        )
    record = side.get("tokenizer") or {}
    if data.dtype.kind == "f":
        raise FormatError(f"{data.prefix} holds {data.dtype.name}, which are not token ids")
    if tokenizer is not None and record.get("fingerprint") not in (None, tokenizer.fingerprint):
        raise ValueError(
            f"{data.prefix} was made with another tokenizer ({record.get('name')}, {record.get('vocab_size')} ids)"
            f" than data.tokenizer ({tokenizer.vocab_size} ids)"
        )
    known = tokenizer.vocab_size if tokenizer is not None else record.get("vocab_size")
    if vocab_size is not None and known is not None and known != vocab_size:
        _compare_vocabularies(data.prefix, known, vocab_size)
    limit = min((n for n in (known, vocab_size) if n is not None), default=None)
    largest = side.get("largest_id")
    if largest is None and data.num_bytes <= _SCAN_LIMIT and not is_remote(data.prefix):
        largest = data.largest_id()
    if limit is not None and largest is not None and largest >= limit:
        owner = "the tokenizer" if limit == known else "model.vocab_size"
        raise ValueError(f"{data.prefix} has token id {largest}, but {owner} has {limit} entries")
    eod = tokenizer.eod if tokenizer is not None else record.get("eod")
    identity = {"sha256": side.get("sha256"), "dtype": data.dtype.str}
    if (mask := loss_mask_of(data)) is not None:
        identity["loss_mask"] = (mask.side_file() or {}).get("sha256") or key_of({}, mask.tokens)
    return Source(name=name, data=data, eod=eod, checked_vocab=limit, record=identity)


def _compare_vocabularies(prefix: str, known: int, vocab_size: int) -> None:
    if known > vocab_size:
        raise ValueError(
            f"model.vocab_size={vocab_size} is smaller than the {known} ids of the tokenizer of {prefix};"
            f" set model.vocab_size={known}"
        )
    log.warning(
        "model.vocab_size=%d, but the tokenizer of %s has %d ids: the other entries are never used",
        vocab_size, prefix, known,
    )  # fmt: skip
