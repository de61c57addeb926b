"""Linear layers cut over the tensor-parallel axis (Shoeybi et al., 2019, arXiv:1909.08053).

With sequence parallelism (Korthikanti et al., 2022, arXiv:2205.05198) a column-parallel layer gathers the sequence
before its GEMM and a row-parallel one scatters it after; only the cut input is kept for the backward pass.

A linear adds its weight gradient to `main_grad` (or `grad`, on a bare layer) and never returns it, so that it can be
computed later and in place. Every backward pass through it does so, whatever was asked for: `torch.autograd.grad(loss,
x)` leaves a contribution there too, and `torch.autograd.grad(loss, weight)` finds the weight unused. Where that is
unwanted, freeze the weights (`requires_grad_(False)`) or work on a `copy.deepcopy`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megalite.axis import Axis
from megalite.kernels.inference import Matrix
from megalite.kernels.linear import input_grad, linear
from megalite.parallel.collectives import gather_from, leave_parallel, scatter_to
from megalite.parallel.cross_entropy import vocab_parallel_cross_entropy
from megalite.parallel.random import normal_
from megalite.parallel.shard import Cut, Segments, Shard, ShardedModule, adjacent, even_cut, set_shard
from megalite.parallel.wgrad import WeightGradQueue

__all__ = [
    "ColumnParallelLinear",
    "FusedColumnParallelLinear",
    "OutputPart",
    "RowParallelLinear",
    "share_queue",
    "vocab_parallel_cross_entropy",
]


def _fused(parts: Sequence[Tensor]) -> Tensor:
    """The parts as one matrix: a view where they lie side by side (they do once a layer has made them), else a copy."""
    whole = adjacent(parts)
    return whole if whole is not None else torch.cat(list(parts))


def main_grads(weights: Sequence[nn.Parameter]) -> list[Tensor]:
    """Where each weight gradient accumulates: `main_grad` under data parallelism, `grad` on a bare layer."""
    grads = []
    for weight in weights:
        grad = getattr(weight, "main_grad", None)
        if grad is None:
            if weight.grad is None:
                weight.grad = torch.zeros_like(weight)
            grad = weight.grad
        grads.append(grad)
    return grads


def _accumulate(queue: WeightGradQueue, weights: Sequence[nn.Parameter], dy: Tensor, x: Tensor) -> None:
    """Adds dy^T x to the gradients of the weights whose outputs stand side by side in `dy`, but for frozen ones."""
    learning = all(weight.requires_grad for weight in weights)
    grads = main_grads(weights) if learning else []
    whole = adjacent(grads) if learning else None
    if whole is not None:
        queue.accumulate(whole, dy, x)
        return
    for weight, part in zip(weights, dy.split([w.shape[0] for w in weights], dim=-1), strict=True):
        if weight.requires_grad:
            queue.accumulate(main_grads([weight])[0], part, x)


class _Linear(torch.autograd.Function):
    """y = x W^T + b for weights stacked along their outputs, with this axis' communication hidden behind the GEMMs.

    enter "none": x is used as it is. "copy": x is whole on every rank, so dx is a partial sum and is all-reduced
    while the weight gradient is computed. "gather": x is cut along the sequence; it is gathered (again in backward,
    behind the dx GEMM) and dx is reduce-scattered behind the weight gradient.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        axis: Axis,
        enter: str,
        queue: WeightGradQueue,
        weights: tuple[nn.Parameter, ...],
        num_weights: int,
        *parameters: Tensor,
    ) -> Tensor:
        # `weights` are the objects that carry main_grad; checkpointing hands other objects through saved_tensors.
        ctx.axis, ctx.enter, ctx.queue, ctx.weights = axis, enter, queue, weights
        ctx.save_for_backward(x if any(weight.requires_grad for weight in weights) else None)
        ctx.bias_sizes = [bias.shape[0] for bias in parameters[num_weights:]]
        whole = axis.all_gather(x) if enter == "gather" else x
        bias = _fused(parameters[num_weights:]) if ctx.bias_sizes else None
        return linear(whole, _fused(parameters[:num_weights]), bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (dy,), (x,) = grads, ctx.saved_tensors
        axis, weights, queue = ctx.axis, ctx.weights, ctx.queue
        needs_weight_grad = any(weight.requires_grad for weight in weights)
        gathering = None
        if ctx.enter == "gather" and needs_weight_grad and not queue.deferring:
            gathering = axis.start_all_gather(x)
        dx, arriving = None, None
        if ctx.needs_input_grad[0]:
            dx = input_grad(dy, _fused(weights))
            if ctx.enter == "copy":
                arriving = axis.start_all_reduce(dx)
            elif ctx.enter == "gather":
                whole_dx, arriving = dx, axis.start_reduce_scatter(dx)
                del whole_dx
        if needs_weight_grad:
            whole_x = gathering.wait() if gathering is not None else None
            gather_over = axis if ctx.enter == "gather" else None
            queue.put(_weight_grad_work(queue, weights, dy, x, whole_x, gather_over), weights)
        biases: tuple[Tensor | None, ...] = ()
        if ctx.bias_sizes:
            biases = dy.flatten(0, -2).sum(0).split(ctx.bias_sizes)
        if arriving is not None:
            dx = arriving.wait()
        return dx, None, None, None, None, None, *(None for _ in weights), *biases


def _weight_grad_work(
    queue: WeightGradQueue,
    weights: Sequence[nn.Parameter],
    dy: Tensor,
    x: Tensor,
    whole_x: Tensor | None,
    gather_over: Axis | None,
) -> Callable[[], None]:
    """The weight gradient as a closure; a deferred one keeps only the cut input and gathers it when it runs."""
    version, x = x._version, x.detach()  # a saved tensor holds on to the graph that made it

    def work() -> None:
        assert x._version == version, "a linear's input was changed in place before its weight gradient was computed"
        whole = whole_x
        if whole is None:
            whole = gather_over.all_gather(x) if gather_over is not None else x
        _accumulate(queue, weights, dy, whole)

    return work


def _apply_linear(
    x: Tensor, axis: Axis, enter: str, queue: WeightGradQueue, weights: Sequence[nn.Parameter], biases: Sequence[Tensor]
) -> Tensor:
    enter = enter if axis.size > 1 else "none"
    if not torch.is_grad_enabled():
        whole = axis.all_gather(x) if enter == "gather" else x
        return linear(whole, _fused(weights), _fused(biases) if biases else None)
    return _Linear.apply(x, axis, enter, queue, tuple(weights), len(weights), *weights, *biases)


def apply_linear(x: Tensor, axis: Axis, queue: WeightGradQueue, weights: Sequence[nn.Parameter]) -> Tensor:
    """x W^T for weights stacked along their outputs, without communication over `axis`; gradients go to `queue`."""
    return _apply_linear(x, axis, "none", queue, weights, [])


@dataclass(frozen=True)
class OutputPart:
    """One named block of a column-parallel layer's outputs: `num_units` units of `unit` features, cut by whole units.

    When there are fewer units than ranks, ranks share one (`replicas`: the axis of those who share, consecutive
    ranks); its gradient is then a partial sum over them.
    """

    num_units: int
    unit: int = 1
    replicas: Axis | None = None

    def segments(self, axis: Axis) -> Segments:
        """This rank's run of output features."""
        if self.replicas is not None:
            first = axis.rank // self.replicas.size
            return ((first * self.unit, self.unit),)
        return even_cut(self.num_units, axis, self.unit)


class _Part(ShardedModule):
    """Weight [out_local, in] and bias [out_local] of one output part, as views of the layer's storage."""

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        cut: Cut,
        shape: tuple[int, int],
        replicas: Axis | None,
        init_std: float,
    ):
        super().__init__()
        self.init_std = init_std
        partial = (replicas,) if replicas is not None else ()
        self.weight = set_shard(nn.Parameter(weight), Shard("weight", shape, (cut,), partial))
        self.bias = None
        if bias is not None:
            self.bias = set_shard(nn.Parameter(bias), Shard("bias", shape[:1], (cut,), partial, decay=False))

    def init_parameters(self, seed: int) -> None:
        """Weight N(0, init_std^2) by global name and index, bias zero."""
        normal_(self.weight, seed, self.init_std)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self) -> Tensor:
        """A part is computed by the layer that holds it."""
        raise AssertionError("call the fused layer, not one of its parts")


class FusedColumnParallelLinear(ShardedModule):
    """Several column-parallel linears of one input (q, k, v; gate, up) as one GEMM over adjacent storage.

    Input [s, b, in] (or [s / tp, b, in] under sequence parallelism); output [s, b, sum of the parts' local features],
    parts side by side in the order given; `sizes` splits it. Each part stays a parameter of its own, `<part>.weight`.
    """

    def __init__(
        self,
        in_features: int,
        parts: dict[str, OutputPart],
        *,
        axis: Axis,
        bias: bool = True,
        sequence_parallel: bool = False,
        init_std: float = 0.02,
    ):
        super().__init__()
        self.axis = axis
        self.enter = "gather" if sequence_parallel else "copy"
        self.queue = WeightGradQueue()
        cuts = {name: Cut(axis, 0, part.segments(axis)) for name, part in parts.items()}
        self.sizes = [sum(length for _, length in cut.segments) for cut in cuts.values()]
        weights = torch.empty(sum(self.sizes), in_features).split(self.sizes)
        biases = torch.zeros(sum(self.sizes)).split(self.sizes) if bias else [None] * len(parts)
        for (name, part), weight, one_bias in zip(parts.items(), weights, biases, strict=True):
            shape = (part.num_units * part.unit, in_features)
            self.add_module(name, _Part(weight, one_bias, cuts[name], shape, part.replicas, init_std))
            init_unless_meta(self.part(name))
        self.names = tuple(parts)
        self.lora: nn.Module | None = None
        """What is added to the output, a function of the input (megalite.parallel.lora)."""
        self._frozen: tuple[Matrix, Tensor | None] | None = None

    def freeze(self, matrix: Callable[[Tensor], Matrix] = Matrix) -> None:
        """For inference: looks up the parts side by side now, once. They may not move in memory any more.

        matrix: what computes with the whole, of whose memory the parts become views; empty ones, if it has none.
        """
        parts = [self.part(name) for name in self.names]
        biases = [part.bias for part in parts if part.bias is not None]
        made = matrix(_fused([part.weight for part in parts]).data)
        views = made.weight.split(self.sizes) if made.weight is not None else [None] * len(parts)
        for part, view in zip(parts, views, strict=True):
            part.weight.data = view if view is not None else part.weight.data.new_empty(0)
        self._frozen = made, _fused(biases).data if biases else None

    @property
    def weights(self) -> list[nn.Parameter]:
        """The weights of the parts."""
        return [self.part(name).weight for name in self.names]

    def part(self, name: str) -> _Part:
        """The holder of one part's weight and bias."""
        part = getattr(self, name)
        assert isinstance(part, _Part)
        return part

    def forward(self, x: Tensor) -> Tensor:
        """x [.., in] -> [.., sum(sizes)]."""
        if self._frozen is not None:
            matrix, bias = self._frozen
            y = matrix(self.axis.all_gather(x) if self.enter == "gather" else x, bias)
            return y if self.lora is None else y + self.lora(x)
        parts = [self.part(name) for name in self.names]
        biases = [part.bias for part in parts if part.bias is not None]
        y = _apply_linear(x, self.axis, self.enter, self.queue, [part.weight for part in parts], biases)
        return y if self.lora is None else y + self.lora(x)

    def extra_repr(self) -> str:
        """Local and global sizes."""
        return f"parts={dict(zip(self.names, self.sizes, strict=True))} of {self.axis}"


class _ParallelLinear(ShardedModule):
    """What a column- and a row-parallel linear share: a weight cut over `axis` along one dim, and a bias."""

    def __init__(
        self, in_features: int, out_features: int, cut: Cut, bias: Shard | None, *, skip_bias_add: bool, init_std: float
    ):
        super().__init__()
        self.in_features, self.out_features, self.axis = in_features, out_features, cut.axis
        self.skip_bias_add, self.init_std = skip_bias_add, init_std
        self.queue = WeightGradQueue()
        self._frozen: Matrix | None = None
        shard = Shard("weight", (out_features, in_features), (cut,))
        self.weight = set_shard(nn.Parameter(torch.empty(shard.local_shape)), shard)
        self.bias = None
        if bias is not None:
            self.bias = set_shard(nn.Parameter(torch.zeros(bias.local_shape)), bias)
        init_unless_meta(self)

    def init_parameters(self, seed: int) -> None:
        """Weight N(0, init_std^2) by global name and index, bias zero."""
        normal_(self.weight, seed, self.init_std)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def freeze(self, matrix: Callable[[Tensor], Matrix] = Matrix) -> None:
        """For inference, as `FusedColumnParallelLinear.freeze`; not for a weight that others read."""
        self._frozen = made = matrix(self.weight.data)
        self.weight.data = made.weight if made.weight is not None else self.weight.data.new_empty(0)

    def _product(self, x: Tensor, enter: str, biases: Sequence[Tensor]) -> Tensor:
        """x weight^T, of an x that enters the axis so."""
        if self._frozen is None:
            return _apply_linear(x, self.axis, enter, self.queue, [self.weight], biases)
        return self._frozen(self.axis.all_gather(x) if enter == "gather" else x, biases[0] if biases else None)

    def extra_repr(self) -> str:
        """Global sizes and place."""
        return f"in_features={self.in_features}, out_features={self.out_features} over {self.axis}"


class ColumnParallelLinear(_ParallelLinear):
    """Y = X A^T + b with A cut along its output features: rank r holds rows [r out // n, (r + 1) out // n).

    Input [s, b, in], the same on every rank of `axis` (under sequence parallelism: its rows of the sequence,
    [s / n, b, in]). Output [s, b, out / n], or [s, b, out] with `gather_output`. With `skip_bias_add` forward
    returns (output, bias) for a fused bias op.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        axis: Axis,
        bias: bool = True,
        sequence_parallel: bool = False,
        gather_output: bool = False,
        skip_bias_add: bool = False,
        init_std: float = 0.02,
    ):
        cut = Cut(axis, 0, even_cut(out_features, axis))
        bias_shard = Shard("bias", (out_features,), (cut,), decay=False) if bias else None
        super().__init__(in_features, out_features, cut, bias_shard, skip_bias_add=skip_bias_add, init_std=init_std)
        self.gather_output = gather_output
        self.enter = "gather" if sequence_parallel else "copy"
        self.lora: nn.Module | None = None
        """What is added to the output, a function of the input (megalite.parallel.lora)."""

    @property
    def weights(self) -> list[nn.Parameter]:
        """The weight, as the parts of a fused linear have theirs."""
        return [self.weight]

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor | None]:
        """x [.., in] -> [.., out / n] (see the class)."""
        biases = [self.bias] if self.bias is not None and not self.skip_bias_add else []
        y = self._product(x, self.enter, biases)
        y = y if self.lora is None else y + self.lora(x)
        if self.gather_output:
            y = gather_from(y, self.axis, -1, self.out_features)
        return (y, self.bias) if self.skip_bias_add else y


class RowParallelLinear(_ParallelLinear):
    """Y = X A^T + b with A cut along its input features; the ranks' partial products are summed.

    Input [s, b, in / n], cut like a column-parallel output, by whole units of `unit` features (with
    `input_is_parallel` false: whole, and cut here). Output [s, b, out], or this rank's rows [s / n, b, out] under
    sequence parallelism. The bias is whole on every rank and added after the sum.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        axis: Axis,
        bias: bool = True,
        sequence_parallel: bool = False,
        input_is_parallel: bool = True,
        skip_bias_add: bool = False,
        init_std: float = 0.02,
        unit: int = 1,
    ):
        assert input_is_parallel or not sequence_parallel, "under sequence parallelism the input must be parallel"
        cut = Cut(axis, 1, even_cut(in_features // unit, axis, unit))
        partial = (axis,) if sequence_parallel and axis.size > 1 else ()
        bias_shard = Shard("bias", (out_features,), partial=partial, decay=False) if bias else None
        super().__init__(in_features, out_features, cut, bias_shard, skip_bias_add=skip_bias_add, init_std=init_std)
        self.sequence_parallel, self.input_is_parallel = sequence_parallel, input_is_parallel
        self.lora: nn.Module | None = None
        """What is added to the partial product, a function of the input (megalite.parallel.lora)."""

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor | None]:
        """x [.., in / n] -> [.., out] (see the class)."""
        if not self.input_is_parallel:
            x = scatter_to(x, self.axis, -1)
        y = self._product(x, "none", [])
        y = y if self.lora is None else y + self.lora(x)
        y = leave_parallel(y, self.axis, self.sequence_parallel)
        if self.skip_bias_add:
            return y, self.bias
        return y if self.bias is None else y + self.bias

    def backward_of(self, x: Tensor, dy: Tensor) -> Tensor:
        """The gradient of a parallel input x from dy, that of the output, for a caller with a backward pass of its own.

        The weight gradient goes to the queue; the bias is the caller's.
        """
        if self.sequence_parallel:
            dy = self.axis.all_gather(dy)
        if self.weight.requires_grad:
            self.queue.put(_weight_grad_work(self.queue, [self.weight], dy, x, None, None), [self.weight])
        return input_grad(dy, self.weight)


def init_unless_meta(layer: nn.Module) -> None:
    """A bare layer has its initial values at once; one built on the meta device gets them from `initialize`."""
    if not any(parameter.is_meta for parameter in layer.parameters()):
        layer.init_parameters(0)  # pyright: ignore[reportCallIssue]


def share_queue(module: nn.Module, queue: WeightGradQueue) -> None:
    """Makes every linear of `module` hand its weight gradients to `queue` (one per pipeline stage)."""
    for child in module.modules():
        if isinstance(getattr(child, "queue", None), WeightGradQueue):
            setattr(child, "queue", queue)  # noqa: B010 (not an attribute that nn.Module declares)
