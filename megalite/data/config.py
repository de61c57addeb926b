"""The data section of a run's configuration."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args, get_type_hints

from megalite.data.blend_spec import BlendWords, is_file, parse_blend
from megalite.data.gpt_index import split_ranges


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """What a run reads, and how it becomes samples."""

    paths: tuple[str, ...] = ()
    """Token files (PREFIX of .bin/.idx, a path or a URL of fsspec such as s3://bucket/PREFIX) or text files (.jsonl,
    .txt); none: the embedded demo corpus."""
    blend: BlendWords = ()
    """Shares of samples: a weight for each of data.paths (by default their tokens), or instead of data.paths
    "WEIGHT PATH WEIGHT PATH ...", with @STEP before weights that hold from that step on, or a YAML or JSON file."""
    validation: BlendWords = ()
    """Data to validate on, as "WEIGHT PATH ..." or a file; by default the validation part of data.split. All of it is
    used, and all of data.paths then is training data."""
    validate_each: bool = False
    """Evaluate on the validation data of each dataset alone, too."""
    tokenizer: str = ""
    """Sentencepiece .model, Hugging Face tokenizer.json, or "byte"; by default the one recorded with the data (token
    files) or the demo tokenizer (text)."""
    json_key: str = "text"
    """Key of the text in .jsonl files."""
    seq_len: int = 128
    """Tokens in a sample."""
    split: str = "98,2,0"
    """Weights of training, validation and test documents, in file order."""
    num_samples: int | None = None
    """Samples that the training order is built for; by default as many as the run needs. Fix it to make runs of
    different lengths prefixes of each other."""
    eod_mask_loss: bool = False
    """Leave out the loss of the first token after the end of a document."""
    boundaries: Literal["index", "eod"] = "index"
    """Where documents end inside a sample: where the index says, or after each end-of-document id (Megatron-LM's rule).
    It matters to reset_attention, reset_positions and eod_mask_loss."""
    keep_partial: bool = False
    """Keep the last sample of the validation data when text ends inside it, padded (concat only)."""
    float32_counts: bool = False
    """Count kept partial samples in float32, as Megatron-LM does: one or two too few or too many above 2**24 tokens."""
    cache_dir: str = ""
    """Where tokenised text, index files and blocks of remote data are kept; by default ~/.cache/megalite."""
    remote_cache_gb: float = 64.0
    """Disk that blocks of remote data may take, in GB, for all processes of a machine; those that were not used for
    longest go first. 0: without end."""
    prefetch: int = 2
    """Steps whose batches are loaded in the background while a step computes; 0 loads each when it is due."""
    pack: Literal["concat", "best_fit", "none"] = "concat"
    """How documents fill a sample: concat lays them end to end and cuts every seq_len tokens; best_fit packs whole
    documents into rows (longer ones are cut), the rest is padding; none is one document a row, cut and padded."""
    reset_attention: bool = False
    """Keep attention (and short convolutions) inside a document."""
    reset_positions: bool = False
    """Restart positions at each document of a sample."""


def problems(config: DataConfig) -> list[str]:
    """Everything in `config` that cannot work, without touching any file."""
    found: list[str] = []
    if config.seq_len < 1:
        found.append(f"data.seq_len={config.seq_len} must be at least 1")
    if config.num_samples is not None and config.num_samples < 1:
        found.append(f"data.num_samples={config.num_samples} must be at least 1")
    if config.prefetch < 0:
        found.append(f"data.prefetch={config.prefetch} must be at least 0")
    if config.remote_cache_gb < 0:
        found.append(f"data.remote_cache_gb={config.remote_cache_gb} must be at least 0")
    elif not math.isfinite(config.remote_cache_gb):
        found.append(f"data.remote_cache_gb={config.remote_cache_gb} must be finite; 0 is without end")
    found += _blend_problems(config)
    try:
        split_ranges(config.split, 1)
    except ValueError as error:
        found.append(str(error))
    hints = get_type_hints(DataConfig)
    if config.pack not in (packs := get_args(hints["pack"])):
        found.append(f"data.pack={config.pack!r} is not a way to pack; it can be {', '.join(packs)}")
    if config.boundaries not in (rules := get_args(hints["boundaries"])):
        found.append(f"data.boundaries={config.boundaries!r} is not a rule; it can be {', '.join(rules)}")
    if config.keep_partial and config.pack != "concat":
        found.append(f"data.keep_partial=true is of pack concat; pack {config.pack} cuts nothing off")
    if config.float32_counts and not config.keep_partial:
        found.append("data.float32_counts=true changes nothing without data.keep_partial=true")
    return found


def _blend_problems(config: DataConfig) -> list[str]:
    """What is wrong with the blends; files are read later."""
    found: list[str] = []
    try:
        if not is_file(config.blend):
            parse_blend(config.blend, config.paths)
        if config.validation and not is_file(config.validation):
            spec = parse_blend(config.validation, (), name="data.validation")
            if len(spec.phases) > 1:
                found.append("data.validation cannot change at a step: losses before and after could not be compared")
    except ValueError as error:
        found.append(str(error))
    return found
