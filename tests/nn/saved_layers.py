"""Layers of tiny models, run forward and backward, with what they keep counted beside what they declare."""

from __future__ import annotations

import gc
from dataclasses import dataclass

import torch
from torch import Tensor

from megalite.batch import MicroBatch
from megalite.kernels.chosen import Kernels
from megalite.kernels.config import AttentionChoice, KernelConfig
from megalite.kernels.saved import Saved
from megalite.models import MODELS
from megalite.models.transformer import Transformer
from megalite.mpu import ParallelState
from megalite.nn.config import ModelConfig
from megalite.nn.router import Router
from megalite.nn.saved import BatchShape, saved_by
from megalite.parallel.random import initialize
from megalite.parallel.shard import materialize
from megalite.testing.memory import LiveMemory

CPU = torch.device("cpu")
SEQ_LEN, SIZE = 16, 3


@dataclass(frozen=True, kw_only=True)
class Case:
    """How the layers are run."""

    model: ModelConfig
    dtype: torch.dtype = torch.float32
    recompute: str = "none"
    stash: bool = False
    sequence_chunk: int = 0
    documents: bool = False
    attention: AttentionChoice = "auto"


def built(mpu: ParallelState, case: Case) -> Transformer:
    """The whole model as one stage."""
    with torch.device("meta"):
        stage = MODELS[case.model.name](
            case.model,
            mpu,
            kernels=Kernels(config=KernelConfig(attention=case.attention)),
            recompute=case.recompute,
            recompute_stash=case.stash,
            sequence_chunk=case.sequence_chunk,
        )
    materialize(stage, CPU, case.dtype)
    initialize(stage, 1)
    return stage


def batch(case: Case) -> MicroBatch:
    """Rows of documents of 5 tokens, if the case has any."""
    tokens = torch.arange(SEQ_LEN * SIZE).view(SEQ_LEN, SIZE) % case.model.vocab_size
    places = torch.arange(SEQ_LEN)[:, None].expand(SEQ_LEN, SIZE).contiguous()
    return MicroBatch(
        tokens=tokens, labels=tokens, loss_mask=torch.ones(SEQ_LEN, SIZE), positions=places,
        samples=torch.arange(SIZE), step=0, documents=places // 5 * 5 if case.documents else None,
    )  # fmt: skip


def shape_of(stage: Transformer, case: Case) -> BatchShape:
    """What the layers are told of the batch."""
    return stage.batch_shape(SEQ_LEN, SIZE, device=CPU, has_documents=case.documents)


def kept_by_layers(mpu: ParallelState, case: Case) -> tuple[int, int]:
    """(bytes that the layers have made and keep after a forward, what they declare without the input)."""
    stage, rows = built(mpu, case), batch(case)
    shape = shape_of(stage, case)
    context, x, live = stage._context(rows), _input(shape), LiveMemory()
    layers = list(stage.layers.values())
    stage.recompute.run(layers, x, context)  # makes what the layers of a batch share: masks, who needs which keys
    _forget(stage)
    with live:
        out = stage.recompute.run(layers, x, context)
    _forget(stage)
    declared = _declared(stage, shape)
    return live.now - out.untyped_storage().nbytes(), declared.total - declared.input


def _input(shape: BatchShape) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(shape.rows // SIZE, SIZE, shape.width, generator=generator)
    return x.to(shape.dtype).requires_grad_()


def _forget(stage: Transformer) -> None:
    """Drops what routers have counted."""
    for module in stage.modules():
        if isinstance(module, Router):
            module.tallies.clear()
    gc.collect()


def _declared(stage: Transformer, shape: BatchShape) -> Saved:
    return stage.recompute.run_saved([saved_by(layer, shape) for layer in stage.layers.values()], shape.stream)


def kept_for_weights(mpu: ParallelState, case: Case) -> tuple[int, int]:
    """(bytes that are left when weight gradients were put off in a backward, what the layers declare)."""
    stage, rows = built(mpu, case), batch(case)
    shape, layers = shape_of(stage, case), list(stage.layers.values())
    for parameter in stage.parameters():
        parameter.grad = torch.zeros_like(parameter)
    context, x, live = stage._context(rows), _input(shape), LiveMemory()
    x.grad = torch.zeros_like(x)
    stage.recompute.run(layers, x, context).backward(torch.ones_like(x))
    stage.queue.deferring = True
    with live:
        stage.recompute.run(layers, x, context).backward(torch.ones_like(x))
    _forget(stage)
    declared = _declared(stage, shape)
    return live.now, declared.work
