"""The trainings that benchmarks/zero.py compares: megalite's and those of other libraries, behind one interface.

All compute in bf16, keep float32 weights and Adam moments, clip the gradient norm and update with a fused AdamW. What
differs is what a library offers:

    megalite                 bf16 parameters, float32 gradients, reduced in float32; float32 master weights
    DDP                      float32 parameters, cast to bf16 by autocast; float32 gradients, in the buckets
    ZeroRedundancyOptimizer  as DDP, with the moments divided and updated parameters broadcast
    FSDP2                    float32 shards, gathered in bf16; gradients reduced in float32 (`reduce_dtype`)
    DeepSpeed                its bf16 mode, float32 gradient accumulation where the stage has it
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Protocol

import torch
from llama import LEARNING_RATE, RandomTokens, huggingface_llama, megalite_training
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

from megalite.nn.config import ModelConfig
from megalite.train.step import train_step

CLIP = 1.0
NUM_ROWS = 64
"""Different rows of the data, so that the loss falls."""


@dataclass(frozen=True, kw_only=True)
class Size:
    """What every contender trains, on each rank."""

    model: ModelConfig
    seq_len: int
    micro_batch_size: int
    num_microbatches: int
    ranks: int
    tune_malloc: bool

    @property
    def global_batch_size(self) -> int:
        """Rows of a step."""
        return self.micro_batch_size * self.num_microbatches * self.ranks


class Contender(Protocol):
    """A training on this rank."""

    num_params: int
    """Of the whole model."""

    def step(self) -> float:
        """One whole step; the loss of this rank, or of all."""
        ...

    def state(self) -> Sequence[Tensor]:
        """Parameters, gradients, master weights and optimizer state as they are after a step."""
        ...


class Megalite:
    """megalite's train_step."""

    def __init__(self, size: Size, stage: int):
        self.training = megalite_training(
            size.model,
            f"dp{size.ranks}+zero{stage}",
            precision="bf16",
            seq_len=size.seq_len,
            micro_batch_size=size.micro_batch_size,
            global_batch_size=size.global_batch_size,
            tune_malloc=size.tune_malloc,
            num_rows=NUM_ROWS,
        )
        self.num_params = sum(p.numel() for part in self.training.data_parallels.values() for p in part.parameters)
        self._step = 0

    def step(self) -> float:
        """One step; the loss of all ranks."""
        self._step += 1
        return train_step(self.training, self._step - 1).loss

    def state(self) -> list[Tensor]:
        """Buckets, slices and what the optimizer keeps."""
        buckets = [bucket for part in self.training.data_parallels.values() for bucket in part.buckets]
        flat = [t for b in buckets for t in (b.param, b.grad, b.param_shard, b.grad_shard)]
        return flat + [view for kind in self.training.optimizer.state_tensors().values() for _, view in kind]

    def bytes_sent(self) -> int:
        """What the axes have counted."""
        return sum(axis.stats.bytes_sent for axis in self.training.mpu.axes().values())


class _Rows:
    """This rank's micro-batches of a step: [rows, tokens] each."""

    def __init__(self, size: Size):
        self.size, self.next = size, dist.get_rank() * size.micro_batch_size * size.num_microbatches
        self.samples = RandomTokens(size.model.vocab_size, size.seq_len, NUM_ROWS)

    def take(self) -> Iterator[Tensor]:
        for _ in range(self.size.num_microbatches):
            rows = [self.samples[self.next + i].tokens for i in range(self.size.micro_batch_size)]
            self.next += self.size.micro_batch_size
            yield torch.stack([torch.as_tensor(row) for row in rows])
        self.next += self.size.micro_batch_size * self.size.num_microbatches * (self.size.ranks - 1)


class Plain:
    """A loop in plain PyTorch; subclasses say how parameters and gradients are kept."""

    model: Any
    optimizer: Any

    def __init__(self, size: Size):
        self.rows = _Rows(size)
        self.num_params = sum(p.numel() for p in self.model.parameters())

    def step(self) -> float:
        """One step; the loss of this rank."""
        self.optimizer.zero_grad()
        total, number = 0.0, self.rows.size.num_microbatches
        for i, tokens in enumerate(self.rows.take()):
            with self.around(is_last=i == number - 1):
                loss = self.loss(tokens) / number
                loss.backward()
            total += loss.item()
        nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        self.optimizer.step()
        return total

    def loss(self, tokens: Tensor) -> Tensor:
        """The mean over the tokens."""
        return self.model(input_ids=tokens, labels=tokens).loss

    def around(self, *, is_last: bool) -> contextlib.AbstractContextManager[object]:
        """What a micro-batch runs in."""
        return contextlib.nullcontext()

    def state(self) -> list[Tensor]:
        """Parameters, gradients and moments."""
        parameters = list(self.model.parameters())
        grads = [p.grad for p in parameters if p.grad is not None]
        return [*parameters, *grads, *_tensors(self._optimizer_state())]

    def _optimizer_state(self) -> Any:
        return self.optimizer.state


class Ddp(Plain):
    """torch's DistributedDataParallel under autocast; gradients live in its buckets."""

    def __init__(self, size: Size):
        self.model = DistributedDataParallel(huggingface_llama(size.model, size.seq_len), gradient_as_bucket_view=True)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE, fused=True)
        super().__init__(size)

    def loss(self, tokens: Tensor) -> Tensor:
        """In bf16, with float32 parameters."""
        with torch.autocast("cpu", torch.bfloat16):
            return super().loss(tokens)

    def around(self, *, is_last: bool) -> contextlib.AbstractContextManager[object]:
        """Gradients are reduced once a step."""
        return contextlib.nullcontext() if is_last else self.model.no_sync()


class ZeroRedundancy(Ddp):
    """DDP with torch's ZeroRedundancyOptimizer."""

    def __init__(self, size: Size):
        from torch.distributed.optim import ZeroRedundancyOptimizer

        super().__init__(size)
        self.optimizer = ZeroRedundancyOptimizer(
            self.model.parameters(),
            torch.optim.AdamW,
            parameters_as_bucket_view=True,
            lr=LEARNING_RATE,
            fused=True,
        )

    def _optimizer_state(self) -> Any:
        return self.optimizer.optim.state


class Fsdp2(Plain):
    """torch's fully_shard on the embedding, each layer and the head; whole parameters go after forward in stage 3."""

    def __init__(self, size: Size, stage: int):
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        self.model = huggingface_llama(size.model, size.seq_len)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        inner = self.model.model
        for unit in (inner.embed_tokens, *inner.layers, [inner.norm, self.model.lm_head], self.model):
            fully_shard(unit, mp_policy=policy, reshard_after_forward=stage == 3)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE, fused=True)
        super().__init__(size)


class DeepSpeed:
    """DeepSpeed's engine on its CPU accelerator."""

    def __init__(self, size: Size, stage: int):
        os.environ.setdefault("LOCAL_RANK", str(dist.get_rank()))
        import deepspeed  # pyright: ignore[reportMissingImports]

        deepspeed.init_distributed(dist_backend="gloo")
        model = huggingface_llama(size.model, size.seq_len)
        self.num_params = sum(p.numel() for p in model.parameters())
        model.to(torch.bfloat16)
        optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
        self.engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=_deepspeed_config(size, stage))
        self.rows = _Rows(size)

    def step(self) -> float:
        """One step; the loss of this rank."""
        total = 0.0
        for tokens in self.rows.take():
            loss = self.engine(input_ids=tokens, labels=tokens).loss
            self.engine.backward(loss)
            self.engine.step()
            total += loss.item()
        return total / self.rows.size.num_microbatches

    def state(self) -> list[Tensor]:
        """Whatever flat tensors the engine's optimizer and the model keep."""
        parameters = list(self.engine.module.parameters())
        grads = [p.grad for p in parameters if p.grad is not None]
        return [*parameters, *grads, *_tensors(vars(self.engine.optimizer)), *_tensors(self.engine.optimizer.state)]


def _deepspeed_config(size: Size, stage: int) -> dict[str, Any]:
    return {
        "train_batch_size": size.global_batch_size,
        "train_micro_batch_size_per_gpu": size.micro_batch_size,
        "gradient_accumulation_steps": size.num_microbatches,
        "gradient_clipping": CLIP,
        "bf16": {"enabled": True},
        "data_types": {"grad_accum_dtype": "fp32"},
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }


def _tensors(value: Any) -> Iterator[Tensor]:
    """All tensors in nested dicts and lists."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from _tensors(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _tensors(part)


def load_libraries(name: str) -> None:
    """Imports what only this contender needs."""
    if name == "DeepSpeed":
        os.environ["DS_ACCELERATOR"] = "cpu"  # read once, when deepspeed is imported
        import_module("deepspeed")


def contenders(stage: int) -> dict[str, str]:
    """Name -> why it cannot take part, empty if it can, of those that have the stage."""
    absent = "" if find_spec("deepspeed") else "not installed"
    torch_peer = {0: "DDP", 1: "ZeroRedundancyOptimizer", 2: "FSDP2", 3: "FSDP2"}[stage]
    return {"megalite": "", torch_peer: "", "DeepSpeed": absent}


def make_contender(name: str, size: Size, stage: int) -> Contender:
    """The contender called `name`, on this rank."""
    if name == "megalite":
        return Megalite(size, stage)
    if name == "DDP":
        return Ddp(size)
    if name == "ZeroRedundancyOptimizer":
        return ZeroRedundancy(size)
    return Fsdp2(size, stage) if name == "FSDP2" else DeepSpeed(size, stage)
