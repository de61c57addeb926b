"""A trained model for inference, on any layout: from a run folder, or from a checkpoint of any layout."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from megalite.checkpoint import store
from megalite.checkpoint.agree import on_first
from megalite.checkpoint.folder import folder_at
from megalite.checkpoint.manifest import Manifest
from megalite.config import Config, load_config
from megalite.config.load import from_dict
from megalite.data.build import build_datasets
from megalite.data.tokenizer import Tokenizer, load_tokenizer
from megalite.kernels.inference import for_inference
from megalite.models import MODELS
from megalite.models.transformer import StageSpec, Transformer
from megalite.mpu import ParallelConfig, ParallelState
from megalite.nn.config import ModelConfig
from megalite.optim.optimizer import MASTER
from megalite.parallel.shard import buffer_tensors, materialize, name_parameters, shard_of
from megalite.parallel.tensor import FusedColumnParallelLinear
from megalite.train.build import kernels_of, plan_of
from megalite.train.stages import stage_layers

Precision = Literal["auto", "fp32", "bf16", "fp16", "fp64"]

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
    """The folder of the checkpoint."""
    home: Path | None = None
    """The run folder, where it is known."""

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
    """What `path` is: a run folder, or a checkpoint; raises LoadError, or CheckpointError where one is broken."""
    run = Path(path)
    if (run / "config.yaml").is_file():
        found = store.latest(run)
        config = load_config(["--config", str(run / "config.yaml")])
        if found is None and config.checkpoint.folder:
            found = store.latest(config.checkpoint.folder)
        if found is None:
            raise LoadError(f"{path} has no checkpoint yet")
        return Source(path=str(path), config=config, weights=found, home=run)
    weights = store.find_checkpoint(path)
    run = Path(weights).parent.parent if isinstance(weights, Path) else None
    if run is not None and (run / "config.yaml").is_file():
        config = load_config(["--config", str(run / "config.yaml")])
        return Source(path=str(path), config=config, weights=weights, home=run)
    return Source(path=str(path), config=_stored_config(weights), weights=weights)


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


def find_tokenizer(source: Source, name: str | None = None) -> Tokenizer:
    """The tokenizer called `name` (see `load_tokenizer`), or that of the data that the model was trained on."""
    if name is not None:
        return load_tokenizer(name)
    config = source.config
    if config.data.tokenizer:
        return load_tokenizer(config.data.tokenizer)
    found = None
    if source.home is not None:
        found = build_datasets(
            config.data, seed=config.train.seed, num_samples=None, vocab_size=config.model.vocab_size
        ).tokenizer
    if found is None:
        raise LoadError(f"{source.path} does not say which tokenizer its tokens are of; name it with --tokenizer")
    return found


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
    """The configuration of the same model for inference: no expert is ever full, and nothing is recomputed."""
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
        config.model, capacity_factor=0.0, pad_to_capacity=False, label_smoothing=0.0, z_loss=0.0
    )
    # torch.compile would compile anew for every number of rows.
    kernels = dataclasses.replace(config.kernels, compile=False, backend="auto", attention="auto", grouped="auto")
    train = dataclasses.replace(config.train, precision=precision)
    return dataclasses.replace(config, model=model, parallel=parallel, kernels=kernels, train=train)


def load_stage(source: Source, mpu: ParallelState, device: torch.device, precision: Precision = "auto") -> Loaded:
    """This rank's stage with its weights; every rank calls it.

    mpu: of a layout from `inference_layout`. precision: of the weights in memory and of all computation; auto is that
    of the run on a GPU, and float32 on a CPU, from the masters where there are any.
    """
    config = inference_config(source, mpu.config, precision, device)
    kernels = for_inference(kernels_of(config, device), device)
    with torch.device("meta"):
        stage = MODELS[config.model.name](config.model, mpu, _stage_spec(config.model, mpu), kernels=kernels)
    name_parameters(stage)
    materialize(stage, device, config.train.dtype)
    weights = [(shard_of(parameter), parameter.data) for parameter in stage.parameters()]
    tensors = {"parameter": weights} | buffer_tensors(stage)
    manifest = store.load(source.weights, tensors, mpu, optional=("buffer",), instead=_SAME_VALUES)
    return Loaded(stage=frozen(stage), step=manifest.step)


def frozen(stage: Transformer) -> Transformer:
    """The stage itself, for inference from now on."""
    for module in stage.modules():
        if isinstance(module, FusedColumnParallelLinear):
            module.freeze()
    return stage.eval().requires_grad_(False)


def read_source(path: str | Path, mpu: ParallelState) -> Source:
    """`find_source` on the first rank, for all: a run may save while they look."""
    return on_first(mpu, f"cannot load {path}", lambda: find_source(path))


def _stage_spec(model: ModelConfig, mpu: ParallelState) -> StageSpec:
    plan = plan_of(mpu.config, mpu.pp.size)
    return StageSpec(mpu.pp.rank, mpu.pp.size, stage_layers(model, mpu.config, plan)[mpu.pp.rank])
