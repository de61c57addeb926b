"""A model that goes on from a folder of Hugging Face: its architecture is that of config.json."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from megalite.checkpoint.errors import CheckpointError
from megalite.models.hf.canonical import contradictions
from megalite.nn.config import ModelConfig
from megalite.train.hf import has_config, read_model

_OPTION = "model.from_hf"
_MERGED = ("name", "num_layers", "hidden_size", "num_heads", "vocab_size", "head_dim", "rope_theta")
"""Fields that a merged config has: it needs the folder for the weights alone."""


def folder_of(argv: Sequence[str], model: Mapping[str, Any]) -> str | None:
    """The folder that the command line, or else the files, name."""
    found = model.get("from_hf")
    for word, following in zip(argv, [*argv[1:], ""], strict=False):
        option, equals, value = word.partition("=")
        if option.startswith("--") and option.removeprefix("--").replace("-", "_") == _OPTION:
            found = value if equals else following
    return found


def found_model(folder: str, given: Mapping[str, Any]) -> ModelConfig | None:
    """The model in `folder`; None where it is gone and `given` has all that is needed. ValueError if it is none."""
    if not has_config(folder) and all(name in given for name in _MERGED):
        return None
    try:
        return dataclasses.replace(read_model(folder), from_hf=folder)
    except (CheckpointError, OSError) as error:
        raise ValueError(f"--model.from-hf {folder}: {error}") from error


def problems(found: ModelConfig, model: ModelConfig) -> list[str]:
    """What a run sets and cannot, going on from `found`."""
    return [
        f"model.{name}={getattr(model, name)}: {found.from_hf} has {getattr(found, name)}; leave it out"
        for name in contradictions(found, model)
    ]
