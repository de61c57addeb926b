"""Models of Hugging Face as megalite's, and back: families say what means what, folders hold the tensors."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megalite.checkpoint.errors import CheckpointError
from megalite.checkpoint.folder import Folder, folder_at
from megalite.checkpoint.hf import CONFIG, HFFolder, LastRead, Part, assemble, read_bytes, read_json
from megalite.checkpoint.manifest import Tensors
from megalite.checkpoint.rewrite import NewTensor
from megalite.checkpoint.stored import StoredCheckpoint, dtype_of
from megalite.models import FAMILIES
from megalite.models.hf.family import Family, family_of, find_family
from megalite.models.hf.fields import Refused
from megalite.models.hf.weights import by_ours, by_theirs
from megalite.nn.config import ModelConfig
from megalite.nn.lora import NAMES

KEPT = "hugging_face"
"""Of a run that began from a folder of Hugging Face, the small files of that."""
NEW = (NAMES, "mtp.*")
"""Patterns of names of what a folder has not, and that begins anew: adapters, layers of multi-token prediction."""
TENSORS = "tensors.json"
"""Among them, ours: the dtype of each tensor that the folder had, so that an export has the same."""


@dataclass(frozen=True, kw_only=True)
class Imported:
    """A model that was found, to be written or loaded."""

    model: ModelConfig
    tensors: list[NewTensor]
    """Its parameters and buffers."""
    files: dict[str, bytes]
    """What is kept, for an export."""
    max_positions: int | None
    """Tokens of a row that the model was made for."""


def read_model(address: str | Path, ignore: Iterable[str] = ()) -> ModelConfig:
    """The model that the config.json in a folder describes; CheckpointError with every reason why there is none."""
    with HFFolder(address) as source:
        return _read(source, ignore)[1]


def import_model(source: HFFolder, *, dtype: torch.dtype | None = None, ignore: Iterable[str] = ()) -> Imported:
    """The model in a folder that stays open while its tensors are made.

    dtype: of the parameters; as they are stored by default. ignore: keys of config.json to leave out. Raises
    CheckpointError with everything that is missing, left over or of another shape.
    """
    family, model = _read(source, ignore)
    links = family.links(model, frozenset(source.names))
    _check(source, family, links.shapes)
    kinds, read = family.shapes(model), LastRead(source.read)
    tensors: list[NewTensor] = []
    for name, of_name in by_ours(links):
        kind, shape = kinds[name]
        parts = [Part(link.theirs, link.of_ours, link.of_theirs) for link in of_name]
        found = _common_dtype(source, parts)
        found = torch.promote_types(found, torch.float32) if kind == "buffer" else dtype or found
        make = partial(assemble, shape, found, parts, read)
        if name == "embedding.weight" and len(parts) > 1:
            make = partial(_tied, source, parts, shape, found)
        tensors.append(NewTensor(key=f"{kind}/{name}", shape=shape, dtype=found, make=make))
    stored = {name: str(source.find(name).dtype).removeprefix("torch.") for name in source.names}
    files = source.small_files() | {TENSORS: json.dumps(stored).encode()}
    positions = source.config.get("max_position_embeddings", source.config.get("n_positions"))
    return Imported(model=model, tensors=tensors, files=files, max_positions=positions)


def load_weights(found: Imported, tensors: Tensors) -> None:
    """Puts what this rank holds of a model into its tensors (parameter, master and buffer), in place; any layout.

    Buffers that the folder has not, and what is NEW, stay as they are. Memory: a whole tensor at a time.
    """
    whole = {tensor.key: tensor for tensor in found.tensors}
    for kind, theirs in (("parameter", "parameter"), ("master", "parameter"), ("buffer", "buffer")):
        for shard, local in tensors.get(kind, ()):
            key = f"{theirs}/{shard.tied_to or shard.name}"
            if key not in whole and (kind == "buffer" or any(fnmatchcase(shard.name, name) for name in NEW)):
                continue
            made = whole[key].make()
            if made.shape != shard.shape:
                raise CheckpointError(f"{key} is {list(made.shape)} there and {list(shard.shape)} here")
            for offset, sizes, view in shard.pieces(local):
                view.copy_(made[tuple(slice(at, at + size) for at, size in zip(offset, sizes, strict=True))])


def has_config(address: str | Path) -> bool:
    """Whether there is a folder of Hugging Face."""
    return folder_at(address).size(CONFIG) is not None


def keep(run: Folder, files: Mapping[str, bytes]) -> None:
    """Writes what an export of the run will need into its folder."""
    for name, content in files.items():
        if isinstance(run.address, Path):
            (run.address / KEPT).mkdir(parents=True, exist_ok=True)
        with run.writer(f"{KEPT}/{name}") as file:
            file.write(content)


def keep_from(run: Folder, checkpoint: Path | str) -> None:
    """The same for a run that begins from a checkpoint whose run has such files."""
    if (kept := kept_by(run_of(checkpoint))) is not None:
        keep(run, {**kept.files, TENSORS: json.dumps(kept.tensors).encode()})


def _read(source: HFFolder, ignore: Iterable[str]) -> tuple[Family, ModelConfig]:
    try:
        family = find_family(FAMILIES, source.config)
        return family, family.read(source.config, ignore)
    except Refused as error:
        lines = "\n".join(f"  - {problem}" for problem in error.problems)
        raise CheckpointError(f"{source}/{CONFIG} asks for what no model here has:\n{lines}") from error


def _check(source: HFFolder, family: Family, shapes: Mapping[str, tuple[int, ...]]) -> None:
    problems = [f"{name} {list(shape)} is missing" for name, shape in shapes.items() if name not in source.names]
    for name in source.names:
        if name not in shapes:
            problems += [] if family.is_unused(name) else [f"{name} is there, but the model has no place for it"]
            continue
        found = source.find(name)
        if found.shape != shapes[name]:
            problems.append(f"{name} is {list(found.shape)}, not {list(shapes[name])} as its config says")
        elif not found.dtype.is_floating_point:
            problems.append(f"{name} is {found.dtype}: weights are floating-point numbers")
    if problems:
        shown = problems[:12] + ([f"and {len(problems) - 12} more"] if len(problems) > 12 else [])
        raise CheckpointError(f"{source} is not what its {CONFIG} says:\n" + "\n".join(f"  - {p}" for p in shown))


def _common_dtype(source: HFFolder, parts: Sequence[Part]) -> torch.dtype:
    found = source.find(parts[0].source).dtype
    for name in {part.source for part in parts}:
        found = torch.promote_types(found, source.find(name).dtype)
    return found


def _tied(source: HFFolder, parts: Sequence[Part], shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """The tied weight of a file that has it twice."""
    first, second = (part.source for part in parts)
    one, other = source.read(first), source.read(second)
    if not torch.equal(one, other):
        raise CheckpointError(
            f"{source}: tie_word_embeddings is true, but {first} and {second} differ; set it to false in {CONFIG} for"
            " a model with two weights"
        )
    return one.to(dtype)


# ---- back


@dataclass(frozen=True, kw_only=True)
class Kept:
    """The small files that a run has of the folder it began from, and the dtypes of the tensors there."""

    files: Mapping[str, bytes]
    tensors: Mapping[str, str]

    @property
    def config(self) -> dict[str, Any]:
        """config.json."""
        return json.loads(self.files[CONFIG])


def kept_by(run: Folder) -> Kept | None:
    """Those in a run folder; None where it has none."""
    folder = run.child(KEPT)
    if folder.size(CONFIG) is None:
        return None
    tensors = read_json(folder, TENSORS) if folder.size(TENSORS) is not None else {}
    files = {name: read_bytes(folder, name) for name in folder.names() if name != TENSORS and folder.size(name)}
    return Kept(files=files, tensors=tensors)


def kept_like(address: str | Path) -> Kept:
    """Those in a folder of Hugging Face."""
    with HFFolder(address) as source:
        return Kept(files=source.small_files(), tensors={name: "" for name in source.names})


def run_of(checkpoint: Path | str) -> Folder:
    """The run folder of a checkpoint in <run>/checkpoints/<step>."""
    return folder_at(str(checkpoint).rstrip("/").rsplit("/", 2)[0])


@dataclass(frozen=True, kw_only=True)
class Exported:
    """What is to be written."""

    model: ModelConfig
    config: dict[str, Any]
    tensors: list[NewTensor]


def export_model(source: StoredCheckpoint, *, dtype: torch.dtype | None = None, kept: Kept | None = None) -> Exported:
    """A checkpoint as a folder of Hugging Face would have it, while `source` is open.

    dtype: of all tensors; by default float32 masters, or parameters where there are none. kept: what to keep to.
    Raises CheckpointError when the model is of no family, has adapters beside its weights, or tensors are missing.
    """
    if any(fnmatchcase(key, NAMES) for key in source.tensors):
        raise CheckpointError(
            f"{source} has low-rank adapters beside its weights: write them alone with --adapters, or put them into the"
            " weights with tools/checkpoint.py merge-lora first"
        )
    model = stored_model(source)
    theirs = kept.config if kept is not None else {}
    with refusals_of(source):
        family = family_of(FAMILIES, model, theirs.get("model_type"))
        is_same = theirs.get("model_type") == family.model_type
        config = family.merge(model, theirs) if is_same else family.write(model)
    known = kept.tensors if kept is not None and is_same else {}
    links = family.links(model, frozenset(known) if known else None)
    keys = {name: _exact(source, kind, name) for name, (kind, _) in family.shapes(model).items()}
    read = LastRead(lambda name: source.read(keys[name]))
    tensors: list[NewTensor] = []
    for name, of_name in by_theirs(links):
        parts = [Part(link.ours, link.of_theirs, link.of_ours) for link in of_name]
        found = dtype or dtype_of(source.tensors[keys[parts[0].source]])
        if dtype is None and keys[parts[0].source].startswith("buffer/") and known.get(name):
            found = getattr(torch, known[name])
        make = partial(assemble, links.shapes[name], found, parts, read)
        tensors.append(NewTensor(key=name, shape=links.shapes[name], dtype=found, make=make))
    return Exported(model=model, config=_with_dtype(config, tensors, known), tensors=tensors)


@contextmanager
def refusals_of(source: StoredCheckpoint) -> Iterator[None]:
    """What no family can say is a CheckpointError with every reason."""
    try:
        yield
    except Refused as error:
        lines = "\n".join(f"  - {problem}" for problem in error.problems)
        raise CheckpointError(f"no family of Hugging Face is like the model of {source}:\n{lines}") from error


def stored_model(source: StoredCheckpoint) -> ModelConfig:
    """The model that a checkpoint says it is of."""
    settings = source.manifest.state.get("config")
    if not isinstance(settings, dict):
        raise CheckpointError(f"{source} does not say what its model is")
    found = {name.removeprefix("model."): value for name, value in settings.items() if name.startswith("model.")}
    unknown = sorted(set(found) - {field.name for field in dataclasses.fields(ModelConfig)})
    if unknown:
        raise CheckpointError(f"{source} has settings of a model that are not known here: {', '.join(unknown)}")
    return ModelConfig(**found)


def _exact(source: StoredCheckpoint, kind: str, name: str) -> str:
    """The key of a tensor: its float32 master where there is one."""
    keys = ("master", "parameter") if kind == "parameter" else (kind,)
    found = next((f"{key}/{name}" for key in keys if f"{key}/{name}" in source.tensors), None)
    if found is None:
        raise CheckpointError(f"{source} has no {kind}/{name}, which its model has")
    return found


def _with_dtype(config: dict[str, Any], tensors: Sequence[NewTensor], known: Mapping[str, str]) -> dict[str, Any]:
    """`config` with the dtype that the weights now have, where that is another than they had."""
    largest = max(tensors, key=lambda tensor: tensor.nbytes)
    name = str(largest.dtype).removeprefix("torch.")
    if known.get(largest.key) == name:
        return config
    keys = [key for key in ("dtype", "torch_dtype") if key in config] or ["dtype"]
    return config | dict.fromkeys(keys, name)
