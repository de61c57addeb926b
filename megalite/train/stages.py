"""Which layers each pipeline stage of a model holds, by what `parallel.partition` weighs."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch
import yaml
from torch import nn

from megalite.models import MODELS
from megalite.mpu import ParallelConfig, ParallelState
from megalite.nn.config import ModelConfig
from megalite.pipeline.measured import TRACE, part_costs
from megalite.pipeline.partition import PartCosts, partition
from megalite.pipeline.plan import Plan
from megalite.train.flops import end_matmul_parameters, layer_matmul_parameters

MEASURED = "measured:"
"""How a partition by a run's trace is spelled: measured:RUN_DIR."""


def trace_of(by: str) -> Path:
    """The file that a measured partition reads."""
    return Path(by.removeprefix(MEASURED)) / TRACE


def stage_layers(model: ModelConfig, parallel: ParallelConfig, plan: Plan) -> list[range]:
    """The global layers of every stage of the model; raises ValueError with what is wrong.

    A pure function of the configuration, the plan and, where it is measured, of two files: equal on every rank that
    reads the same.
    """
    if parallel.layers_per_stage is not None and parallel.partition != "cost":
        raise ValueError(
            f"parallel.layers_per_stage={list(parallel.layers_per_stage)} and parallel.partition={parallel.partition}"
            " both say which stage holds which layers; leave one out"
        )
    costs = _costs(model, parallel.partition, plan)
    return partition(
        model.num_layers,
        plan.num_stages,
        layer_cost=costs.layers,
        embedding_cost=costs.embedding,
        head_cost=costs.head,
        layers_per_stage=parallel.layers_per_stage,
    )


def _costs(model: ModelConfig, by: str, plan: Plan) -> PartCosts:
    if by == "cost":
        return matmul_costs(model)
    if by == "parameters":
        return parameter_counts(model, ends_meet=_ends_meet(plan))
    if by.startswith(MEASURED) and by != MEASURED:
        trace = trace_of(by)
        if not trace.is_file():
            raise ValueError(f"parallel.partition={by}: {trace} does not exist; train.trace_pipeline=true writes it")
        _check_same_model(trace.parent, model)
        return part_costs(trace, matmul_costs(model))
    raise ValueError(f"parallel.partition={by!r} is not known; it can be cost, parameters or measured:RUN_DIR")


def matmul_costs(model: ModelConfig) -> PartCosts:
    """Multiplications of a token in each part (of experts, those that it uses), up to a factor."""
    return PartCosts(
        layers=tuple(float(layer_matmul_parameters(model, layer)) for layer in range(model.num_layers)),
        embedding=float(model.hidden_size),  # a look-up: next to nothing
        head=float(end_matmul_parameters(model)),
    )


def parameter_counts(model: ModelConfig, *, ends_meet: bool = False) -> PartCosts:
    """Parameters of each part, counted on a model without memory.

    The last stage's copy of the embedding counts unless both ends of the model are on one rank (ends_meet).
    """
    with torch.device("meta"):
        whole = MODELS[model.name](model, ParallelState.single())

    def held(*modules: nn.Module | None) -> set[nn.Parameter]:
        return {p for module in modules if module is not None for p in module.parameters()}

    def count(parameters: set[nn.Parameter]) -> float:
        return float(sum(p.numel() for p in parameters))

    first, last = held(whole.embedding, whole.positions), held(whole.final_norm, whole.head, whole.mtp)

    return PartCosts(
        layers=tuple(count(held(layer)) for layer in whole.layers.values()),
        embedding=count(first),
        head=count(last - first if ends_meet else last),
    )


def _ends_meet(plan: Plan) -> bool:
    """Whether the ranks with the last stage of the model also have the first."""
    first, last = ({plan.placement[copy] for copy in plan.copies_of(end)} for end in (0, plan.num_stages - 1))
    return first == last


def _check_same_model(folder: Path, model: ModelConfig) -> None:
    """Raises ValueError when the run in `folder` trained a model of other sizes."""
    path = folder / "config.yaml"
    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"parallel.partition={MEASURED}{folder}: {path} cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    section = config.get("model") if isinstance(config, dict) else None
    if not isinstance(section, dict):
        raise ValueError(f"{path} is damaged: it has no model")
    differing = [
        f"{field.name}={section.get(field.name, field.default)} there, {value} here"
        for field in dataclasses.fields(model)
        if not isinstance(value := getattr(model, field.name), float)  # rates and the like change no time
        and section.get(field.name, field.default) != value
    ]
    if differing:
        raise ValueError(
            f"parallel.partition={MEASURED}{folder} is the run of another model: {', '.join(differing)};"
            " trace a run of this one"
        )
