"""A small model in stages, whose linears defer their weight gradients as the library's do."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megalite.batch import MicroBatch
from megalite.parallel.wgrad import WeightGradQueue

HIDDEN, VOCAB, LAYERS = 6, 11, 8


def microbatch(number: int, step: int = 0) -> MicroBatch:
    """Micro-batches of different lengths and masks, every one with its own labels."""
    length, rows = 3 + number % 3, 2
    generator = torch.Generator().manual_seed(100 * step + number)
    tokens = torch.randint(VOCAB, (length, rows), generator=generator)
    mask = (torch.rand(length, rows, generator=generator) < 0.7).float()
    return MicroBatch(
        tokens=tokens,
        labels=tokens * 0 + 3 * number + step,
        loss_mask=mask,
        positions=torch.arange(length)[:, None].expand(length, rows),
        samples=torch.arange(rows) + number * rows,
        step=step,
    )


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: nn.Parameter, queue: WeightGradQueue) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.queue = weight, queue
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        (grad,), weight = grads, ctx.weight

        def add_weight_grad() -> None:
            update = grad.flatten(0, 1).T @ x.flatten(0, 1)
            weight.grad = update if weight.grad is None else weight.grad + update

        if weight.requires_grad:
            ctx.queue.put(add_weight_grad, [weight])
        return grad @ weight, None, None


class _Layer(nn.Module):
    """x + gain * tanh(W x), with W used a second time: x + gain * tanh(W tanh(W x))."""

    def __init__(self, number: int, queue: WeightGradQueue | None):
        super().__init__()
        generator = torch.Generator().manual_seed(number)
        self.weight = nn.Parameter(torch.randn(HIDDEN, HIDDEN, generator=generator, dtype=torch.float64))
        self.gain = nn.Parameter(torch.randn(HIDDEN, generator=generator, dtype=torch.float64))
        self.queue = queue

    def _linear(self, x: Tensor) -> Tensor:
        if self.queue is None:
            return nn.functional.linear(x, self.weight)
        return _Linear.apply(x, self.weight, self.queue)  # pyright: ignore[reportReturnType]

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gain * torch.tanh(self._linear(torch.tanh(self._linear(x))))


class ToyStage(nn.Module):
    """The given layers; with `first` the embedding, with `last` the loss. `plain` uses autograd alone."""

    hidden_dtype = torch.float64

    def __init__(self, layers: range, *, first: bool, last: bool, plain: bool = False, recompute: bool = False):
        super().__init__()
        self.queue = WeightGradQueue()
        self.recompute = recompute
        generator = torch.Generator().manual_seed(1000)
        embedding = torch.randn(VOCAB, HIDDEN, generator=generator, dtype=torch.float64)
        self.embedding = nn.Parameter(embedding) if first else None
        self.layers = nn.ModuleDict({str(i): _Layer(i, None if plain else self.queue) for i in layers})
        head = torch.randn(HIDDEN, generator=generator, dtype=torch.float64)
        self.head = nn.Parameter(head) if last else None
        self.outputs: list[Tensor] = []

    def hidden_shape(self, batch: MicroBatch) -> tuple[int, ...]:
        return (batch.seq_len, batch.size, HIDDEN)

    def forward(self, x: Tensor | None, batch: MicroBatch) -> Tensor:
        if self.embedding is not None:
            assert x is None
            x = self.embedding[batch.tokens]
        assert x is not None
        assert x.shape == self.hidden_shape(batch)
        for layer in self.layers.values():
            out = checkpoint(layer, x, use_reentrant=False) if self.recompute else layer(x)
            assert isinstance(out, Tensor)
            x = out
        if self.head is not None:
            x = ((x @ self.head - batch.labels) ** 2 * batch.loss_mask).sum()
        self.outputs.append(x)
        return x


@dataclass
class RecordingReducer:
    """Notes when it is driven."""

    events: list[str] = field(default_factory=list)

    def leave(self) -> None: ...

    def arm(self, microbatch: int) -> None:
        self.events.append("arm")

    def complete(self) -> None:
        self.events.append("complete")

    def finish(self) -> None:
        self.events.append("finish")


def gradients(stages: list[ToyStage]) -> dict[str, Tensor]:
    """All gradients by a name that does not depend on the split."""
    return {n: p.grad.clone() for stage in stages for n, p in stage.named_parameters() if p.grad is not None}


def reference(
    num_microbatches: int, steps: int, scale: float, frozen: frozenset[str] = frozenset()
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """(loss sums of each step, accumulated gradients) of the whole model by plain autograd."""
    model = ToyStage(range(LAYERS), first=True, last=True, plain=True)
    freeze(model, frozen)
    losses = []
    for step in range(steps):
        total = torch.zeros((), dtype=torch.float64)
        for k in range(num_microbatches):
            loss = model(None, microbatch(k, step))
            (loss * scale).backward()
            total += loss.detach()
        losses.append(total)
    return losses, gradients([model])


def micro_losses(num_microbatches: int, step: int) -> list[Tensor]:
    """The loss of each micro-batch by the whole model."""
    model = ToyStage(range(LAYERS), first=True, last=True, plain=True)
    return [model(None, microbatch(k, step)).detach() for k in range(num_microbatches)]


def freeze(stage: nn.Module, names: frozenset[str]) -> None:
    """Freezes parameters by name."""
    for name, parameter in stage.named_parameters():
        parameter.requires_grad_(name not in names)
