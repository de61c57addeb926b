"""From a folder of Hugging Face to a run folder, and back; what tools/checkpoint.py calls."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
import yaml

from megalite.checkpoint.errors import CheckpointError
from megalite.checkpoint.folder import Folder, folder_at
from megalite.checkpoint.hf import CONFIG, HFFolder, write_folder
from megalite.checkpoint.manifest import Manifest
from megalite.checkpoint.rewrite import LARGEST, cut_evenly, write_checkpoint
from megalite.checkpoint.store import LATEST, checkpoints_folder
from megalite.checkpoint.stored import StoredCheckpoint
from megalite.config import Config, load_config
from megalite.config.check import check
from megalite.config.load import from_dict
from megalite.config.values import dump_yaml
from megalite.data.build import build_datasets
from megalite.data.config import DataConfig
from megalite.data.tokenizer import SentencePieceTokenizer, Tokenizer, load_tokenizer
from megalite.data.tokenizer_export import tokenizer_files
from megalite.train.hf import TENSORS, export_model, import_model, keep, kept_by, kept_like, run_of
from megalite.train.hf_adapters import ADAPTER_CONFIG, ADAPTER_WEIGHTS, export_adapters
from megalite.train.resume import identity

GENERATION = "generation_config.json"
_PRECISIONS = {torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
Progress = Callable[[str, int], AbstractContextManager[Callable[[int], None]]]
"""(what is done, bytes) -> a context whose value is told the bytes that are done."""


def import_folder(
    address: str | Path,
    run_dir: str | Path,
    *,
    progress: Progress,
    dtype: torch.dtype | None = None,
    files: int = 1,
    largest: int = LARGEST,
    ignore: Iterable[str] = (),
) -> Path | str:
    """Writes the model of a folder as step 0 of <run_dir>, with a config.yaml to start from and what an export needs.

    Returns the checkpoint. Memory: the largest tensor of ours and the largest of theirs. Raises CheckpointError.
    """
    if checkpoints_folder(run_dir).size(LATEST) is not None:
        raise CheckpointError(f"{run_dir} has checkpoints already; choose another folder")
    with HFFolder(address) as source:
        found = import_model(source, dtype=dtype, ignore=ignore)
        precision = _PRECISIONS[next(t.dtype for t in found.tensors if t.key.startswith("parameter/"))]
        seq_len = min(found.max_positions or DataConfig().seq_len, DataConfig().seq_len)
        content = {
            "model": _set_fields(found.model), "data": {"seq_len": seq_len}, "train": {"precision": precision},
        }  # fmt: skip
        config = from_dict(content)
        check(config, 1)  # what the model cannot be is said before anything is written
        settings = {name: value for name, value in identity(config).items() if name.startswith("model.")}
        state = {"updates": 0, "hugging_face": str(address), "config": settings}
        run = folder_at(run_dir)
        keep(run, found.files)
        run.replace_text("config.yaml", dump_yaml(content))
        size = sum(tensor.nbytes for tensor in found.tensors)
        with progress("writing", size) as report:
            return write_checkpoint(
                run_dir, 0, found.tensors, cut_evenly(found.tensors, files, largest), state=state,
                layout={"files": files}, progress=report,
            )  # fmt: skip


def _set_fields(model: Any) -> dict[str, Any]:
    """The fields that are not the defaults."""
    plain = type(model)()
    values = {field.name: getattr(model, field.name) for field in dataclasses.fields(model)}
    return {name: value for name, value in values.items() if name == "name" or value != getattr(plain, name)}


def export_folder(
    address: str | Path,
    out: str | Path,
    *,
    progress: Progress,
    dtype: torch.dtype | None = None,
    max_shard: int = 5 << 30,
    like: str | Path | None = None,
    tokenizer: str | None = None,
    told: Callable[[str], None] = lambda note: None,
) -> Path:
    """Writes a checkpoint, or the latest of a run, as the new folder `out`, which transformers can load.

    like: a folder of Hugging Face whose config.json, tokenizer and generation config are kept, by default the one that
    the run began from. tokenizer: a name for `load_tokenizer`, by default that of the run's data. `told` hears what is
    left out. Memory: the largest tensor of ours and the largest of theirs. Raises CheckpointError.
    """
    with StoredCheckpoint(address) as source:
        run = run_of(source.address)
        kept = kept_like(like) if like is not None else kept_by(run)
        found = export_model(source, dtype=dtype, kept=kept)
        files = {name: content for name, content in (kept.files if kept is not None else {}).items() if name != TENSORS}
        config, words = found.config, None
        if kept is None or tokenizer is not None:
            words = load_tokenizer(tokenizer) if tokenizer is not None else run_tokenizer(run, told)
            files |= _tokenizer_files(words, told)
        if kept is None:
            config |= _tokens(words) | _row_length(config, source.manifest)
            files[GENERATION] = _json(_generation(config))
        files[CONFIG] = _json(config)
        with progress("writing", sum(tensor.nbytes for tensor in found.tensors)) as report:
            return write_folder(out, found.tensors, files, max_shard=max_shard, progress=report)


def export_adapter_folder(
    address: str | Path,
    out: str | Path,
    *,
    base: str | None = None,
    progress: Progress,
    dtype: torch.dtype | None = None,
    like: str | Path | None = None,
) -> Path:
    """Writes the low-rank adapters of a checkpoint, or the latest of a run, as the new folder `out`, for peft.

    base: the folder, or the name, of the model that they belong to; by default what the run began from. like: a folder
    of Hugging Face of its family, where the run began from none. Raises CheckpointError.
    """
    with StoredCheckpoint(address) as source:
        kept = kept_like(like) if like is not None else kept_by(run_of(source.address))
        found = export_adapters(source, base=base or _began_from(run_of(source.address)), dtype=dtype, kept=kept)
        files = {ADAPTER_CONFIG: _json(found.config)}
        with progress("writing", sum(tensor.nbytes for tensor in found.tensors)) as report:
            return write_folder(
                out, found.tensors, files, max_shard=sys.maxsize, weights=ADAPTER_WEIGHTS, progress=report
            )


def _began_from(run: Folder) -> str:
    """The model that a run began from, as its config names it; empty where it names none."""
    if run.size("config.yaml") is None:
        return ""
    content = yaml.safe_load(run.read_text("config.yaml")) or {}
    return str(content.get("model", {}).get("from_hf") or content.get("checkpoint", {}).get("load") or "")


def run_tokenizer(run: Folder, told: Callable[[str], None]) -> Tokenizer | None:
    """The tokenizer of a run's data; None, and why, where it cannot be found."""
    path = run.address / "config.yaml" if isinstance(run.address, Path) else None
    if path is None or not path.is_file():
        told(f"{run} has no config.yaml, so its tokenizer is not known: give --tokenizer")
        return None
    try:
        config: Config = load_config(["--config", str(path)])
        if config.data.tokenizer:
            return load_tokenizer(config.data.tokenizer)
        vocab_size = config.model.vocab_size
        found = build_datasets(config.data, seed=0, num_samples=None, vocab_size=vocab_size).tokenizer
    except (OSError, ValueError) as error:
        told(f"the tokenizer of {path} cannot be read ({error}): give --tokenizer")
        return None
    if found is None:
        told(f"the data of {path} do not say which tokenizer made them: give --tokenizer")
    return found


def _tokenizer_files(words: Tokenizer | None, told: Callable[[str], None]) -> dict[str, bytes]:
    if words is None:
        return {}
    found = {"tokenizer.model": words.serialized()} if isinstance(words, SentencePieceTokenizer) else {}
    try:
        return found | tokenizer_files(words)
    except ValueError as error:
        told(str(error))
        return found


def _tokens(words: Tokenizer | None) -> dict[str, Any]:
    """Documents end with their token, and begin after that of another one."""
    end = words.eod if words is not None else None
    return {"bos_token_id": end, "eos_token_id": end, "pad_token_id": None}


def _generation(config: Mapping[str, Any]) -> dict[str, Any]:
    return {name: config.get(name) for name in ("bos_token_id", "eos_token_id") if config.get(name) is not None}


def _row_length(config: Mapping[str, Any], manifest: Manifest) -> dict[str, Any]:
    """Of a model that was trained here from the beginning: the rows that it has seen."""
    seq_len = manifest.state.get("config", {}).get("data.seq_len")
    if "n_positions" in config or "max_position_embeddings" in config or type(seq_len) is not int:
        return {}
    return {"max_position_embeddings": seq_len}


def _json(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content, indent=2) + "\n").encode()
