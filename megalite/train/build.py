"""From sections of a configuration to a `Training`: stages, buckets, optimizer, data and executor of this rank."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial

import torch

from megalite.data.build import Datasets, build_datasets
from megalite.data.gpt_dataset import SampleSource
from megalite.data.sampler import GlobalBatches
from megalite.kernels.chosen import Kernels
from megalite.models import MODELS
from megalite.models.transformer import StageSpec, Transformer
from megalite.mpu import ParallelConfig, ParallelState
from megalite.nn.lora import NAMES, add_adapters
from megalite.nn.router import Router
from megalite.optim.optimizer import Optimizer
from megalite.optim.scaler import LossScaler
from megalite.parallel.data import DataParallel, Fresh, Unit
from megalite.parallel.random import initialize, initialize_held
from megalite.parallel.shard import freeze, mark_copies, materialize, materialize_buffers, name_parameters
from megalite.parallel.tensor import share_queue
from megalite.pipeline.executor import Executor
from megalite.pipeline.plan import Plan
from megalite.pipeline.schedule import make_plan
from megalite.train.config import TrainConfig
from megalite.train.sections import Sections
from megalite.train.stages import stage_layers
from megalite.train.step import Training


def plan_of(parallel: ParallelConfig, num_microbatches: int) -> Plan:
    """The plan that `parallel.schedule` means; raises PlanError with the reason when there is none that runs."""
    return make_plan(parallel.schedule, parallel.pp, num_microbatches, parallel.vpp, group_size=parallel.group_size)


def kernels_of(config: Sections, device: torch.device) -> Kernels:
    """The backend of each operation on `device`."""
    return Kernels.resolve(config.kernels, device=device, dtype=config.train.dtype, width=config.model.hidden_size)


def build_stages(
    config: Sections, mpu: ParallelState, plan: Plan, layers: Sequence[range], device: torch.device
) -> dict[int, Transformer]:
    """This rank's stages, by their numbers in `plan`; `layers` are those of each stage of the model.

    Their buffers are there; parameters are on the meta device until `DataParallel` adopts them as `fresh_units` says.
    Stages of the plan's second chain are copies: the rank that holds the original counts and saves their parameters.
    Tied weights are one parameter where both ends of the model lie on one rank.
    """
    stages: dict[int, Transformer] = {}
    for number in plan.stages_of(mpu.pp.rank):
        index = plan.model_stage(number)
        stage = stages[number] = describe_stage(config, mpu, StageSpec(index, plan.num_stages, layers[index]), device)
        name_parameters(stage)
        _freeze(stage, config)
        materialize_buffers(stage, device, config.train.dtype)
        initialize_held([stage], (), config.train.seed)
        if number != index:
            mark_copies(stage)
    first = next((stage for stage in stages.values() if stage.stage.is_first), None)
    last = next((stage for stage in stages.values() if stage.stage.is_last), None)
    if config.model.shares_embedding and first is not None and last is not None and first is not last:
        last.tie_to(first)
    return stages


def fresh_units(train: TrainConfig, device: torch.device) -> Fresh:
    """Parameters in the precision of the run, with the initial values of its seed."""

    def fill(unit: Unit) -> None:
        initialize_held(unit.modules, unit.parameters, train.seed)

    return Fresh(device, train.dtype, fill)


def build_stage(config: Sections, mpu: ParallelState, spec: StageSpec, device: torch.device) -> Transformer:
    """A stage with all its parameters, whole."""
    stage = describe_stage(config, mpu, spec, device)
    materialize(stage, device, config.train.dtype)
    initialize(stage, config.train.seed)
    return stage


def describe_model(config: Sections) -> Transformer:
    """The whole model of one rank on the meta device, its parameters named and frozen as in a run."""
    spec, nowhere = StageSpec(0, 1, range(config.model.num_layers)), torch.device("meta")
    model = describe_stage(config, ParallelState.single(), spec, nowhere)
    name_parameters(model)
    _freeze(model, config)
    return model


def _freeze(model: Transformer, config: Sections) -> None:
    """What `train.freeze` names, and beside adapters everything else, does not learn."""
    freeze(model, config.train.freeze)
    if config.lora.rank:
        freeze(model, [NAMES], but=True)


def describe_stage(config: Sections, mpu: ParallelState, spec: StageSpec, device: torch.device) -> Transformer:
    """A stage on the meta device, with the kernels of `device`."""
    kernels = kernels_of(config, device)
    with torch.device("meta"):
        stage = MODELS[config.model.name](
            config.model,
            mpu,
            spec,
            kernels=kernels,
            recompute=config.train.recompute,
            sequence_chunk=config.train.sequence_chunk,
            recompute_stash=config.train.recompute_stash,
            recompute_cut_input=config.train.recompute_cut_input,
            seed=config.train.seed,
        )
        if config.lora.rank:
            add_adapters(stage, config.lora, kernels)
            share_queue(stage, stage.queue)
    return stage


def build_training(
    config: Sections,
    mpu: ParallelState,
    device: torch.device,
    *,
    datasets: Datasets | None = None,
    wrap_data: Callable[[SampleSource], SampleSource] | None = None,
    orders: Sequence[int] = (),
) -> Training:
    """This rank's part of the run.

    `datasets` stand in for those that the data section describes. `orders` are those that a run which is resumed has
    begun (Origin.orders). `wrap_data` may change the training samples (proofs
    use ragged loss masks).
    """
    datasets = datasets if datasets is not None else _datasets(config, orders)
    batches = dataclasses.replace(
        _batches(config, mpu, wrap_data(datasets.train) if wrap_data is not None else datasets.train),
        ramp=config.train.batch_ramp,
    )
    plan = plan_of(config.parallel, batches.num_microbatches)
    layers = stage_layers(config.model, config.parallel, plan)
    stages = build_stages(config, mpu, plan, layers, device)
    data_parallels = {
        i: DataParallel(
            stage.units(),
            mpu,
            queue=stage.queue,
            reduce_dtype=_reduce_dtype(config.train),
            copied=plan.num_chains > 1,
            fresh=fresh_units(config.train, device),
        )
        for i, stage in stages.items()
    }
    return Training(
        mpu=mpu,
        device=device,
        layers=layers,
        stages=stages,
        data_parallels=data_parallels,
        executor=Executor(plan, stages, data_parallels, mpu, device, replan=partial(plan_of, config.parallel)),
        optimizer=Optimizer(
            config.optim,
            list(data_parallels.values()),
            mpu,
            scaler=LossScaler.fresh(config.optim) if config.train.precision == "fp16" else None,
            seed=config.train.seed,
            kernels=kernels_of(config, device),
        ),
        batches=batches,
        validation=_batches(config, mpu, datasets.validation) if datasets.validation is not None else None,
        each_validation={name: _batches(config, mpu, data) for name, data in datasets.each_validation.items()},
        datasets=datasets,
        num_steps=config.train.num_steps,
        model=config.model,
        routers=[module for stage in stages.values() for module in stage.modules() if isinstance(module, Router)],
    )


def _datasets(config: Sections, orders: Sequence[int]) -> Datasets:
    """Training samples for the whole run, and what its evaluations need; every rank opens them."""
    train = config.train
    evaluates = train.eval_only or train.eval_every > 0
    return build_datasets(
        config.data,
        seed=train.seed,
        num_samples=train.batch_sizes.before(train.num_steps),
        num_validation_samples=train.eval_steps * train.global_batch_size if evaluates else 0,
        vocab_size=config.model.vocab_size,
        orders=orders,
        samples_before=train.batch_sizes.before,
    )


def _reduce_dtype(train: TrainConfig) -> torch.dtype | None:
    return torch.bfloat16 if train.reduce_dtype == "bf16" else None


def _batches(config: Sections, mpu: ParallelState, dataset: SampleSource) -> GlobalBatches:
    return GlobalBatches(
        dataset=dataset,
        global_batch_size=config.train.global_batch_size,
        micro_batch_size=config.train.micro_batch_size,
        dp_rank=mpu.dp.rank,
        dp_size=mpu.dp.size,
    )
