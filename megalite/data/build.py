"""From the data section of a config to the datasets of a run."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from megalite.data.blended import SURPLUS, BlendedDataset, blend_targets
from megalite.data.cache import build_once, default_directory, key_of
from megalite.data.chained import ChainedDataset
from megalite.data.config import DataConfig, problems
from megalite.data.corpus import DEMO_VOCAB_SIZE, prepare_demo
from megalite.data.gpt_dataset import GPTDataset
from megalite.data.gpt_index import split_ranges
from megalite.data.indexed import FormatError, IndexedDataset, strip_suffix
from megalite.data.packed_dataset import PackedDataset
from megalite.data.preprocess import TEXT_SUFFIXES, TextOptions, preprocess
from megalite.data.rows import DocumentRules, SampleSource
from megalite.data.tokenizer import Tokenizer, load_tokenizer

DEMO_NAME = "embedded demo"
TEXT_RECIPE = 2
_SCAN_LIMIT = 1 << 30  # bytes of token ids that are read through at start-up to check them
_EDGE = 1 << 20
_NEXT_ORDER = 0x9E3779B1  # added to the seed for epochs that are appended: odd, so that no two in reach are alike
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
    """Lines for the log: the size of each dataset, and the tokenizer."""
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


@dataclass(frozen=True, kw_only=True)
class _Source:
    name: str
    """As the config has it: tokenised text lies elsewhere."""
    data: IndexedDataset
    eod: int | None
    checked_vocab: int | None
    """The vocabulary that each row read is checked against; what a side file says may be out of date."""
    record: dict[str, Any]


def build_datasets(
    config: DataConfig,
    *,
    seed: int,
    num_samples: int | None,
    num_validation_samples: int = 0,
    vocab_size: int | None = None,
    orders: Sequence[int] = (),
) -> Datasets:
    """Finds (or makes) the token files of `config` and builds the datasets of a run that needs `num_samples` samples.

    `num_samples` None means every sample once. `orders` are those of a run that goes on: its samples stay where they
    were, and further epochs are appended if there are too few of them. `vocab_size` is the model's. Safe to call on
    every rank at once; text is tokenised once per file system and indices are cached.

    Raises ValueError for a bad config, a vocabulary that
    does not fit, an empty training split or a corpus shorter than one sample with `num_samples` None;
    FileNotFoundError for missing data; FormatError for damaged data.
    """
    found = problems(config)
    if found:
        raise ValueError("\n".join(found))
    cache = Path(config.cache_dir).expanduser() if config.cache_dir else default_directory()
    prefixes, named = _resolve(config, cache, vocab_size)
    data = [IndexedDataset(prefix) for prefix in prefixes]
    named = named or _recorded_tokenizer(data)
    tokenizer = named.tokenizer if named is not None else None
    names = config.paths or (DEMO_NAME,)
    sources = [_checked_source(d, name, tokenizer, vocab_size) for d, name in zip(data, names, strict=True)]
    wanted = config.num_samples if config.num_samples is not None else num_samples
    builder = _Builder(config=config, sources=sources, seed=seed, index_dir=cache / "index")
    if wanted is not None and wanted > max(orders, default=0):
        orders = (*orders, wanted)
    train = builder.build(0, "train", None) if wanted is None else _one_after_another(builder, orders)
    assert train is not None
    if num_samples is not None and len(train) < num_samples:
        raise ValueError(
            f"data.num_samples={config.num_samples} makes {len(train)} samples, the run needs {num_samples};"
            " raise data.num_samples or shorten the run"
        )
    validation = builder.build(1, "validation", num_validation_samples) if num_validation_samples else None
    return Datasets(
        train=train,
        validation=validation,
        tokenizer=tokenizer,
        summary=[*builder.summary, f"tokenizer: {named or 'not recorded with the data'}"],
        orders=tuple(orders),
        fingerprint=key_of({"records": [s.record for s in sources]} | _packing(config), *(d.lengths for d in data)),
    )


def _one_after_another(builder: _Builder, orders: Sequence[int]) -> SampleSource:
    """Samples for the largest of `orders`: those made for the first, then what the next ones ask for beyond.

    What is appended are epochs of their own, in another order.
    """
    parts: list[SampleSource] = []
    for number, wanted in enumerate(orders):
        missing = wanted - sum(map(len, parts))
        if missing > 0:
            seed = (builder.seed + number * _NEXT_ORDER) % 2**32
            part = replace(builder, seed=seed).build(0, "train", missing)
            assert part is not None, "an empty training split is an error"
            parts.append(part)
    return parts[0] if len(parts) == 1 else ChainedDataset(parts)


def _packing(config: DataConfig) -> dict[str, Any]:
    """What the packing settings add to the fingerprint of the data; nothing where they are the plain ones."""
    settings = {name: getattr(config, name) for name in ("pack", "reset_attention", "reset_positions", "boundaries")}
    return settings if any(value != getattr(DataConfig(), name) for name, value in settings.items()) else {}


@dataclass(frozen=True, kw_only=True)
class _Builder:
    config: DataConfig
    sources: list[_Source]
    seed: int
    index_dir: Path
    reports: dict[str, list[str]] = field(default_factory=dict)
    """What the datasets of each part say of their rows."""

    @property
    def summary(self) -> list[str]:
        """One line for each source and, where documents matter inside a row, for each training dataset."""
        sizes = [
            f"{s.name}: {len(s.data)} sequences, {s.data.num_tokens} tokens ({s.data.dtype.name})" for s in self.sources
        ]
        return sizes + (self.reports["train"] if _packing(self.config) else [])

    def build(self, part: int, name: str, num_samples: int | None) -> SampleSource | None:
        """The dataset of one part of the split; an empty part is an error in training and a warning elsewhere."""
        ranges = [split_ranges(self.config.split, len(s.data))[part] or (0, 0) for s in self.sources]
        tokens = [int(s.data.lengths[a:b].sum(dtype="int64")) for s, (a, b) in zip(self.sources, ranges, strict=True)]
        if part and not any(tokens):
            log.warning(
                "data.split=%r leaves no %s documents (of %s); there will be no validation",
                self.config.split, name, ", ".join(str(len(s.data)) for s in self.sources),
            )  # fmt: skip
            return None
        weights = list(self.config.blend) or [float(n) for n in tokens]
        if part:
            weights = [w if n else 0.0 for w, n in zip(weights, tokens, strict=True)]
        if num_samples is None and self.config.blend and len(self.sources) > 1:
            raise ValueError("data.blend needs a number of samples: give data.num_samples or train.num_steps")
        used = [i for i, w in enumerate(weights) if w > 0]
        for i in set(range(len(weights))) - set(used):
            log.warning("%s has no share in %s and is left out", self.sources[i].name, name)
        if not used:
            used, weights = [0], [1.0, *weights[1:]]  # every path is empty: let GPTDataset say so
        if len(used) == 1:
            return self._dataset(used[0], ranges[used[0]], name, num_samples)
        return self._blend(used, weights, ranges, name, num_samples)

    def _blend(
        self, used: list[int], weights: list[float], ranges: list[tuple[int, int]], name: str, num_samples: int | None
    ) -> BlendedDataset:
        if num_samples is None:
            return BlendedDataset([self._dataset(i, ranges[i], name, None) for i in used])
        shares = [weights[i] for i in used]
        requests = blend_targets(shares, num_samples, SURPLUS)
        parts = [self._dataset(i, ranges[i], name, n) for i, n in zip(used, requests, strict=True)]
        size = sum(blend_targets(shares, num_samples))
        return BlendedDataset(parts, shares, size, cache_dir=self.index_dir)

    def _dataset(
        self, i: int, sequences: tuple[int, int], name: str, num_samples: int | None
    ) -> GPTDataset | PackedDataset:
        dataset = self._rows(self.sources[i], sequences, name, num_samples)
        self.reports.setdefault(name, []).append(f"{self.sources[i].name}: {dataset.report}")
        return dataset

    def _rows(
        self, source: _Source, sequences: tuple[int, int], name: str, num_samples: int | None
    ) -> GPTDataset | PackedDataset:
        config = self.config
        rules = DocumentRules(
            boundaries=config.boundaries,
            reset_attention=config.reset_attention,
            reset_positions=config.reset_positions,
            eod=source.eod,
            eod_mask_loss=config.eod_mask_loss,
        )
        settings: dict[str, Any] = {
            "seq_len": config.seq_len, "seed": self.seed, "num_samples": num_samples, "sequences": sequences,
            "split_name": name, "vocab_size": source.checked_vocab, "cache_dir": self.index_dir,
        }  # fmt: skip
        if config.pack == "concat":
            partial = config.keep_partial and name == "validation"
            counts: dict[str, Any] = {"keep_partial": partial, "float32_counts": config.float32_counts and partial}
            return GPTDataset(source.data, **vars(rules), **settings, **counts)
        return PackedDataset(source.data, pack=config.pack, rules=rules, **settings)


def _resolve(config: DataConfig, cache: Path, vocab_size: int | None) -> tuple[list[str], _Named | None]:
    """The prefixes of all paths, and the tokenizer if the config or the way they are made decides it."""
    demo_vocab = min(vocab_size or DEMO_VOCAB_SIZE, DEMO_VOCAB_SIZE)
    if not config.paths:
        demo = prepare_demo(cache, vocab_size=demo_vocab, tokenizer=config.tokenizer)
        return [str(demo.prefix)], _Named(config.tokenizer or DEMO_NAME, load_tokenizer(demo.tokenizer))
    texts = [p for p in config.paths if Path(p).suffix in TEXT_SUFFIXES]
    for path in texts:
        if not Path(path).is_file():
            raise FileNotFoundError(f"data.paths: {path} does not exist")
    name = config.tokenizer
    if texts and not name:
        name = prepare_demo(cache, vocab_size=demo_vocab).tokenizer
    tokenizer = load_tokenizer(name) if name else None
    prefixes = [
        str(_tokenised(Path(p), name, tokenizer.fingerprint, config.json_key, cache))
        if tokenizer is not None and p in texts
        else _existing(p)
        for p in config.paths
    ]
    return prefixes, _Named(config.tokenizer or DEMO_NAME, tokenizer) if tokenizer is not None else None


def _existing(path: str) -> str:
    prefix = strip_suffix(path)
    if not Path(prefix + ".idx").is_file():
        kind = "is not a text file that is understood" if Path(path).exists() else "does not exist"
        raise FileNotFoundError(
            f"data.paths: {path} {kind}, and there is no {prefix}.idx;"
            f" give a {' or '.join(TEXT_SUFFIXES)} file or the PREFIX of a .bin/.idx pair"
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
    except (KeyError, OSError, ValueError):
        return None
    return _Named(record["name"], tokenizer) if tokenizer.fingerprint == record.get("fingerprint") else None


def _checked_source(data: IndexedDataset, name: str, tokenizer: Tokenizer | None, vocab_size: int | None) -> _Source:
    """Compares the vocabularies of the data, the tokenizer and the model; ValueError when ids would not fit."""
    side = data.side_file() or {}
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
    if largest is None and data.bin_path.stat().st_size <= _SCAN_LIMIT:
        largest = data.largest_id()
    if limit is not None and largest is not None and largest >= limit:
        owner = "the tokenizer" if limit == known else "model.vocab_size"
        raise ValueError(f"{data.prefix} has token id {largest}, but {owner} has {limit} entries")
    eod = tokenizer.eod if tokenizer is not None else record.get("eod")
    identity = {"sha256": side.get("sha256"), "dtype": data.dtype.str}
    return _Source(name=name, data=data, eod=eod, checked_vocab=limit, record=identity)


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
