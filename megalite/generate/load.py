"""A trained model for inference, on any layout: from a run folder, a checkpoint of any layout, or Hugging Face's."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from megalite.checkpoint import store
from megalite.checkpoint.agree import on_first, together
from megalite.checkpoint.errors import CheckpointError
from megalite.checkpoint.folder import MANIFEST, folder_at
from megalite.checkpoint.hf import CONFIG, HFFolder, read_json
from megalite.checkpoint.manifest import Manifest, Tensors
from megalite.config import Config, load_config
from megalite.config.load import from_dict
from megalite.data.build import build_datasets
from megalite.data.config import DataConfig
from megalite.generate.words import Words, hugging_face_words
from megalite.kernels.cpu import tune_malloc
from megalite.kernels.inference import for_inference, matrix_for
from megalite.models import MODELS
from megalite.models.transformer import StageSpec, Transformer
from megalite.mpu import ParallelConfig, ParallelState
from megalite.nn.config import ModelConfig
from megalite.nn.router import FRACTIONS
from megalite.optim.optimizer import MASTER
from megalite.parallel.shard import buffer_tensors, materialize, name_parameters, shard_of
from megalite.parallel.tensor import ColumnParallelLinear, FusedColumnParallelLinear, RowParallelLinear
from megalite.train.build import kernels_of, plan_of
from megalite.train.config import TrainConfig
from megalite.train.hf import KEPT, import_model, load_weights, read_model
from megalite.train.stages import stage_layers

Precision = Literal["auto", "fp32", "bf16", "fp16", "fp64"]

_PRECISIONS: dict[str, Literal["fp32", "bf16", "fp16", "fp64"]] = {
    "float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "float64": "fp64",
}  # fmt: skip
_SAME_VALUES = {"parameter": (MASTER,)}


class LoadError(ValueError):
    """There is no model to be had there, or not in this layout; the message says what to do."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """A model on disk, before any tensor is read."""

    path: str
    """As it was given."""
    config: Config
    """Sections model and data say what it is."""
    weights: Path | str
    """The folder of the checkpoint, or of Hugging Face's files."""
    home: Path | None = None
    """The run folder, where it is known."""
    hugging_face: bool = False
    """Whether the weights are Hugging Face's."""

    @property
    def context(self) -> int:
        """The longest row that the model was trained on."""
        return self.config.data.seq_len


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """The stage of a model on this rank, ready for inference. step: optimizer steps that it was trained."""

    stage: Transformer
    step: int


def find_source(path: str | Path) -> Source:
    """What `path` is: a run folder, a checkpoint, or a folder of Hugging Face.

    Raises LoadError, or CheckpointError where one is broken.
    """
    run = Path(path)
    if (run / "config.yaml").is_file():
        found = store.latest(run)
        config = load_config(["--config", str(run / "config.yaml")])
        if found is None and config.checkpoint.folder:
            found = store.latest(config.checkpoint.folder)
        if found is None:
            raise LoadError(f"{path} has no checkpoint yet")
        return Source(path=str(path), config=config, weights=found, home=run)
    if folder_at(path).size(CONFIG) is not None and folder_at(path).size(MANIFEST) is None:
        return _hugging_face(path)
    try:
        weights = store.find_checkpoint(path)
    except CheckpointError as error:
        raise CheckpointError(f"{error}, nor a folder of Hugging Face ({CONFIG})") from error
    run = Path(weights).parent.parent if isinstance(weights, Path) else None
    if run is not None and (run / "config.yaml").is_file():
        config = load_config(["--config", str(run / "config.yaml")])
        return Source(path=str(path), config=config, weights=weights, home=run)
    return Source(path=str(path), config=_stored_config(weights), weights=weights)


def _hugging_face(path: str | Path) -> Source:
    """A folder of Hugging Face, which need not be imported first."""
    content = read_json(folder_at(path), CONFIG)
    length = content.get("max_position_embeddings", content.get("n_positions"))
    dtype = content.get("dtype", content.get("torch_dtype"))
    config = Config(
        model=read_model(path),
        data=DataConfig(seq_len=length if type(length) is int else DataConfig().seq_len),
        train=TrainConfig(precision=_PRECISIONS.get(str(dtype), "fp32")),
    )
    return Source(path=str(path), config=config, weights=path, hugging_face=True)


def _stored_config(weights: Path | str) -> Config:
    """The configuration that a checkpoint says it is of."""
    stored = Manifest.read(folder_at(weights)).state.get("config")
    if not isinstance(stored, Mapping):
        raise LoadError(f"{weights} does not say what model it holds: it is not of a training run")
    sections: dict[str, dict[str, Any]] = {"model": {}, "data": {}}
    for name, value in stored.items():
        section, _, field = name.partition(".")
        if section in sections and (section == "model" or field == "seq_len"):
            sections[section][field] = value
    return from_dict(sections)


def find_words(source: Source, name: str | None = None) -> Words:
    """The tokenizer called `name` (see `load_tokenizer`), or that which the model was trained with."""
    if name is not None:
        return Words.named(name)
    if source.hugging_face:
        found = hugging_face_words(source.weights)
    elif source.config.data.tokenizer:
        return Words.named(source.config.data.tokenizer)
    else:
        found = _words_of_run(source)
    if found is None:
        raise LoadError(f"{source.path} does not say which tokenizer its tokens are of; name it with --tokenizer")
    return found


def _words_of_run(source: Source) -> Words | None:
    """Those of a run's data, or of the folder of Hugging Face that it was imported from."""
    if source.home is None:
        return None
    config = source.config
    if not config.data.paths and (source.home / KEPT).is_dir():
        return hugging_face_words(source.home / KEPT)
    tokenizer = build_datasets(
        config.data, seed=config.train.seed, num_samples=None, vocab_size=config.model.vocab_size
    ).tokenizer
    return Words.of(tokenizer) if tokenizer is not None else None


def inference_layout(parallel: ParallelConfig, num_ranks: int) -> ParallelConfig:
    """`parallel` without what only training has; LoadError where `num_ranks` is not what inference of it takes."""
    if parallel.cp > 1:
        raise LoadError(f"cp={parallel.cp}: a context-parallel model generates nothing; cut it over tp, pp and ep")
    if parallel.data_parallel_size(num_ranks) > 1 and parallel.ep * parallel.etp == 1:
        raise LoadError(
            f"{num_ranks} ranks of tp={parallel.tp} and pp={parallel.pp} are {num_ranks // parallel.tp // parallel.pp}"
            f" copies of the model, which would all say the same: start {parallel.tp * parallel.pp}, without dp"
        )
    kept = ParallelConfig(
        tp=parallel.tp, pp=parallel.pp, ep=parallel.ep, etp=parallel.etp, order=parallel.order,
        layers_per_stage=parallel.layers_per_stage, cut_expert_tokens=parallel.cut_expert_tokens,
        expert_dispatch=parallel.expert_dispatch, expert_node_size=parallel.expert_node_size,
    )  # fmt: skip
    return kept


def inference_config(source: Source, parallel: ParallelConfig, precision: Precision, device: torch.device) -> Config:
    """The same model for inference: no expert is ever full, and layers of multi-token prediction are left out."""
    config = source.config
    if config.model.routing == "expert_choice":
        raise LoadError(
            f"{source.path} has model.routing=expert_choice: its experts choose among the tokens of a whole row, so"
            " that a next token cannot be told from those before it"
        )
    if precision == "auto":
        precision = config.train.precision  # pyright: ignore[reportAssignmentType]
        if device.type == "cpu" and precision != "fp64":
            precision = "fp32"
    model = dataclasses.replace(
        config.model, capacity_factor=0.0, pad_to_capacity=False, label_smoothing=0.0, z_loss=0.0, mtp_layers=0
    )
    # torch.compile would compile anew for every number of rows.
    kernels = dataclasses.replace(config.kernels, compile=False, backend="auto", attention="auto", grouped="auto")
    train = dataclasses.replace(config.train, precision=precision)
    return dataclasses.replace(config, model=model, parallel=parallel, kernels=kernels, train=train)


def load_stage(
    source: Source, mpu: ParallelState, device: torch.device, precision: Precision = "auto", *, rows: int = 1
) -> Loaded:
    """This rank's stage with its weights; every rank calls it.

    mpu: of a layout from `inference_layout`. precision: of the weights in memory and of all computation; auto is that
    of the run on a GPU, and float32 on a CPU, from the masters where there are any. rows: that are generated at once.
    """
    config = inference_config(source, mpu.config, precision, device)
    if device.type == "cpu" and config.kernels.malloc_tuning:
        tune_malloc()
    kernels = for_inference(kernels_of(config, device), device)
    with torch.device("meta"):
        stage = MODELS[config.model.name](config.model, mpu, _stage_spec(config.model, mpu), kernels=kernels)
    name_parameters(stage)
    materialize(stage, device, config.train.dtype)
    weights = [(shard_of(parameter), parameter.data) for parameter in stage.parameters()]
    tensors = {"parameter": weights} | buffer_tensors(stage)
    if source.hugging_face:
        together(mpu, f"cannot load {source.path}", lambda: _load_hugging_face(source.weights, tensors))
        return Loaded(stage=frozen(stage, rows), step=0)
    manifest = store.load(
        source.weights, tensors, mpu, optional=("buffer",), instead=_SAME_VALUES, apart=("mtp.*", FRACTIONS)
    )  # fmt: skip
    return Loaded(stage=frozen(stage, rows), step=manifest.step)


def _load_hugging_face(weights: Path | str, tensors: Tensors) -> None:
    with HFFolder(weights) as folder, torch.no_grad():
        load_weights(import_model(folder), tensors)


def frozen(stage: Transformer, rows: int = 1) -> Transformer:
    """The stage itself, for inference from now on: its matrices lie so that products of `rows` rows are fast.

    Those that are packed for several rows are no longer in its parameters.
    """
    head = stage.head if stage.config.tie_embeddings else None  # an embedding is read by rows
    linears = (FusedColumnParallelLinear, ColumnParallelLinear, RowParallelLinear)
    for module in stage.modules():
        if isinstance(module, linears) and module is not head:
            module.freeze(partial(matrix_for, rows=rows))
    return stage.eval().requires_grad_(False)


def read_source(path: str | Path, mpu: ParallelState) -> Source:
    """`find_source` on the first rank, for all: a run may save while they look."""
    return on_first(mpu, f"cannot load {path}", lambda: find_source(path))


def _stage_spec(model: ModelConfig, mpu: ParallelState) -> StageSpec:
    plan = plan_of(mpu.config, mpu.pp.size)
    return StageSpec(mpu.pp.rank, mpu.pp.size, stage_layers(model, mpu.config, plan)[mpu.pp.rank])
