"""A pre-training run from its configuration: the place of this rank, the model on it, the loop."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import NoReturn

import torch
from rich.console import Console
from rich.table import Table

from megalite.checkpoint.errors import CheckpointError
from megalite.data.indexed import FormatError
from megalite.data.sampler import LoaderError
from megalite.kernels.backends import Traits
from megalite.kernels.chosen import fallback_note
from megalite.kernels.cpu import set_fp32_gemm, tune_malloc
from megalite.kernels.products import describe_products
from megalite.mpu import ParallelState
from megalite.nn.attention import ParallelAttention
from megalite.optim.optimizer import NonFiniteGradient
from megalite.parallel.context import row_multiple
from megalite.parallel.shard import shard_of
from megalite.pipeline.measured import TRACE
from megalite.train.build import build_training, kernels_of
from megalite.train.callbacks import Callback, default_callbacks
from megalite.train.checkpoints import ResumeError, RunCheckpoints
from megalite.train.distributed import Launch, start
from megalite.train.pipeline_trace import PipelineTrace
from megalite.train.resume import find_origin
from megalite.train.router_record import RouterRecorder
from megalite.train.router_view import RouterView
from megalite.train.run_folder import RunFolder, RunFolderError
from megalite.train.sections import RunSections, Sections
from megalite.train.step import Training
from megalite.train.trainer import NonFiniteError, Outcome, RunError, Trainer

logger = logging.getLogger("megalite")

_MENDABLE = (
    RunError, RunFolderError, ResumeError, CheckpointError, FormatError, LoaderError, NonFiniteGradient, NonFiniteError,
)  # fmt: skip
"""Errors during a run that the user can do something about."""


def world_size() -> int:
    """Ranks of the job that this process belongs to, as torchrun tells it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def fail(message: str) -> NoReturn:
    """Ends a process whose configuration cannot run; of all ranks, which find the same, rank 0 says why."""
    if os.environ.get("RANK", "0") == "0":
        print(message, file=sys.stderr, flush=True)
    sys.exit(2)


def pretrain(config: RunSections, write_config: Callable[[Path], None]) -> Outcome:
    """Trains `config` on the ranks of this job; `write_config` writes the merged config to the path it is given."""
    with start(config.train.device) as launch:
        mpu = ParallelState.build(config.parallel)
        console = Console(quiet=not mpu.world.is_first)
        with _told_plainly(ValueError, OSError, ImportError, CheckpointError):
            folder = RunFolder.open(
                config.train.run_dir or "runs/default",
                mpu,
                resume=config.train.resume,
                checkpoints=config.checkpoint.folder,
                read_only=config.train.eval_only,
                console=console,
                write_config=write_config,
            )
            choices = choose_kernels(config, launch.device)
            check_kernels(choices, mpu)
            origin = find_origin(config, mpu, folder.path)
            training = build_training(config, mpu, launch.device, orders=origin.orders)
            check_agreement(config, training)
            choices["attention"] = attention_kinds(config, training) or "none"
        _report(config, training, launch, choices, console)
        callbacks = default_callbacks(config.train, folder, mpu, watchdog=launch.watchdog, console=console)
        if config.train.trace_pipeline:
            layers = {number: len(stage.stage.layers) for number, stage in training.stages.items()}
            trace = PipelineTrace(training.executor, layers, mpu, folder.path / TRACE)
            callbacks = [*callbacks, trace]
        if config.model.num_experts:
            callbacks = [*callbacks, *_router_callbacks(config, training, folder)]
        with _told_plainly(*_MENDABLE), closing(folder), closing(training.loader):
            checkpoints = RunCheckpoints(config, training, folder.path, origin)
            return Trainer(config, training, callbacks, folder=folder, checkpoints=checkpoints).run()


def _router_callbacks(config: Sections, training: Training, folder: RunFolder) -> list[Callback]:
    """What a mixture of experts shows of its routers."""
    train, callbacks = config.train, list[Callback]()
    if folder.is_writer:
        callbacks.append(RouterView(folder, every=train.router_every, dead_expert_steps=train.dead_expert_steps))
    if train.record_router:
        recorder = RouterRecorder(
            folder.router_logits, train.record_router, training.routers, config.model, training.mpu,
            sizes=train.batch_sizes, seq_len=config.data.seq_len, dtype=train.dtype,
        )  # fmt: skip
        callbacks.append(recorder)
    return callbacks


def check_agreement(config: RunSections, training: Training) -> None:
    """Raises ValueError unless all ranks have the same configuration and data: else each would train its own way."""
    sections = {name: repr(getattr(config, name)) for name in ("model", "parallel", "optim", "train", "checkpoint")}
    mine = sections | {"kernels": repr(config.kernels), "data": training.datasets.fingerprint}
    mine["stages"] = repr(training.layers)  # of measured times: a file may differ from node to node
    everyone = training.mpu.world.gather_objects(mine)
    differing = [
        f"{name} on rank {rank}"
        for rank, other in enumerate(everyone)
        for name in mine
        if other[name] != everyone[0][name]
    ]
    if differing:
        raise ValueError(
            f"the ranks do not agree with rank 0: other {', '.join(differing[:8])};"
            " start every rank with the same options and the same files"
        )


@contextmanager
def _told_plainly(*errors: type[Exception]) -> Iterator[None]:
    """Ends the run with the message alone, where an error says what the user can mend."""
    try:
        yield
    except errors as error:
        raise SystemExit(f"{type(error).__name__}: {error}") from error


def choose_kernels(config: Sections, device: torch.device) -> dict[str, str]:
    """Sets this process up for its device; returns what was chosen, by operation, for the log."""
    section, model, dtype = config.kernels, config.model, config.train.dtype
    kernels = kernels_of(config, device)
    choices = {op: backend for op, backend in kernels.chosen.items() if model.num_experts or not _is_of_experts(op)}
    traits = Traits(
        device=device, dtype=dtype, dropout=model.attention_dropout, softcap=model.attention_softcap,
        seq_len=config.data.seq_len,
    )  # fmt: skip
    choices["attention"] = kernels.attention_backend(traits)
    if device.type == "cpu":
        if config.train.precision != "fp64":
            choices["float32 products"] = set_fp32_gemm(section.fp32_gemm)
        if (how := describe_products(dtype)) is not None:
            choices[f"{config.train.precision} products"] = how
        choices["malloc"] = "tuned" if section.malloc_tuning and tune_malloc() else "as it is"
    return choices


def attention_kinds(config: Sections, training: Training) -> str:
    """What the layers attend with, on every rank: `block`, or each kind with the layers that are of it."""
    data, parallel = config.data, config.parallel
    padded = data.seq_len % row_multiple(parallel.cp, parallel.tp, parallel.sequence_parallel) > 0
    mine = {
        module.layer: module.describe(
            training.device, config.train.dtype, data.seq_len, documents=data.reset_attention or padded
        )
        for stage in training.stages.values()
        for module in stage.modules()
        if isinstance(module, ParallelAttention)
    }
    by_layer = {layer: kind for part in training.mpu.pp.gather_objects(mine) for layer, kind in part.items()}
    layers = {kind: [layer for layer in sorted(by_layer) if by_layer[layer] == kind] for kind in by_layer.values()}
    if len(layers) < 2:
        return ", ".join(layers)
    return ", ".join(f"{kind} (layers {', '.join(map(str, numbers))})" for kind, numbers in layers.items())


def _is_of_experts(op: str) -> bool:
    return op.startswith(("grouped_", "weighted_"))


def check_kernels(choices: Mapping[str, str], mpu: ParallelState) -> None:
    """Raises ValueError unless all ranks have chosen as rank 0 has: each kernel rounds in its way."""
    everyone = mpu.world.gather_objects(dict(choices))
    differing = [
        f"{op} is {chosen!r} on rank {rank} and {everyone[0][op]!r} on rank 0"
        for rank, other in enumerate(everyone)
        for op, chosen in other.items()
        if chosen != everyone[0][op]
    ]
    if differing:
        raise ValueError(
            f"the ranks do not choose the same kernels: {'; '.join(differing[:4])}; give every node the same packages"
            " and compilers, or name the backends (kernels.backend, kernels.attention, kernels.grouped)"
        )


def count_parameters(training: Training) -> tuple[int, int]:
    """(Dense parameters, those of all experts) of the global model, on every rank."""
    mpu = training.mpu
    owned = {"dense": 0, "expert": 0}
    for data_parallel in training.data_parallels.values():
        for parameter in data_parallel.parameters:
            shard = shard_of(parameter)
            owned[shard.group] += parameter.numel() if shard.is_owner(mpu) else 0
    dense = mpu.tp.all_reduce(torch.tensor([owned["dense"]], device=mpu.world.device))
    experts = mpu.etp_ep.all_reduce(torch.tensor([owned["expert"]], device=mpu.world.device))
    counts = mpu.pp.all_reduce(torch.cat((dense, experts)))
    return int(counts[0]), int(counts[1])


def _by_choice(choices: Mapping[str, str]) -> str:
    """The table in a line: what computes which operations."""
    groups: dict[str, list[str]] = {}
    for op, choice in choices.items():
        groups.setdefault(choice, []).append(op)
    return "; ".join(f"{choice}: {', '.join(ops)}" for choice, ops in groups.items())


def _report(config: Sections, training: Training, launch: Launch, choices: dict[str, str], console: Console) -> None:
    """What rank 0 says before the first step: the model, the data, the layout and the kernels."""
    mpu = training.mpu
    dense, experts = count_parameters(training)
    size = f"{dense + experts:,} parameters"
    if config.model.num_experts:
        size += f" ({dense + experts * config.model.top_k // config.model.num_experts:,} active)"
    ranks, threads = mpu.world.size, torch.get_num_threads()
    logger.info(
        "%s: %s, %d layers, %s, %d rank%s with %d thread%s each",
        config.model.name, size, config.model.num_layers, config.train.precision,
        ranks, "s"[: ranks > 1], threads, "s"[: threads > 1],
    )  # fmt: skip
    for line in training.datasets.summary:
        logger.info("%s", line)
    logger.info("kernels: %s", _by_choice(choices))
    note = fallback_note(config.kernels, device=launch.device, dtype=config.train.dtype, width=config.model.hidden_size)
    if note is not None:
        logger.info("%s", note)
    if "compiled" in choices.values():
        logger.info("compiled kernels are made in the first steps and kept on disk; kernels.compile=false avoids it")
    rows = mpu.describe(launch.ranks_per_node)
    if rows:
        table = Table("axis", "size", "ranks with rank 0", "in a node")
        for name, size, ranks, inside in rows:
            table.add_row(name, str(size), ranks, inside)
        console.print(table)
