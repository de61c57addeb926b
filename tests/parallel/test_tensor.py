"""Tensor- and sequence-parallel layers against one rank: outputs, every gradient, shards that tile the whole."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from megalite.mpu import ParallelConfig, ParallelState
from megalite.parallel.collectives import gather_from, sequence_part
from megalite.parallel.cross_entropy import linear_cross_entropy
from megalite.parallel.embedding import VocabParallelEmbedding
from megalite.parallel.random import initialize
from megalite.parallel.shard import shard_of
from megalite.parallel.tensor import (
    ColumnParallelLinear,
    FusedColumnParallelLinear,
    OutputPart,
    RowParallelLinear,
    vocab_parallel_cross_entropy,
)
from megalite.parallel.wgrad import WeightGradQueue
from megalite.testing.world import World

TP2, TP4 = ParallelConfig(tp=2), ParallelConfig(tp=4)
SP2, SP4 = ParallelConfig(tp=2, sequence_parallel=True), ParallelConfig(tp=4, sequence_parallel=True)


def _values(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


class ColumnThenRow(nn.Module):
    """The pair that every block is made of; widths that tp does not divide."""

    def __init__(self, mpu: ParallelState, width: int = 13):
        super().__init__()
        self.mpu = mpu
        sp = mpu.config.sequence_parallel
        self.column = ColumnParallelLinear(6, width, axis=mpu.tp, sequence_parallel=sp)
        self.row = RowParallelLinear(width, 5, axis=mpu.tp, sequence_parallel=sp)

    def forward(self, x: Tensor) -> Tensor:
        """[s, b, 6] -> [s, b, 5]."""
        return self.row(torch.tanh(self.column(x)))


def _run_pair(mpu: ParallelState, deferring: bool = False) -> dict[str, Tensor]:
    """Global outputs and gradients, gathered from the ranks."""
    module = ColumnThenRow(mpu).double()
    initialize(module, seed=3)
    with torch.no_grad():
        module.column.bias.copy_(_cut(_values(13, seed=5), module.column.bias))  # pyright: ignore
    sp, tp = mpu.config.sequence_parallel, mpu.tp
    queue = WeightGradQueue(deferring=deferring)
    module.column.queue = module.row.queue = queue
    x = sequence_part(_values(8, 2, 6), tp, sp).clone().requires_grad_()
    y = module(x)
    y.backward(sequence_part(_values(8, 2, 5, seed=1), tp, sp))
    if deferring:
        assert module.column.weight.grad is None, "the weight gradient must wait"
        queue.drain(0)
    assert x.grad is not None
    found = {"y": tp.all_gather(y.detach()) if sp else y.detach(), "dx": tp.all_gather(x.grad) if sp else x.grad}
    return found | _global_grads(module, mpu)


def _cut(whole: Tensor, parameter: Tensor) -> Tensor:
    part = torch.empty_like(parameter)
    for offset, sizes, view in shard_of(parameter).pieces(part):
        view.copy_(whole[tuple(slice(o, o + n) for o, n in zip(offset, sizes, strict=True))])
    return part


def _global_grads(module: nn.Module, mpu: ParallelState) -> dict[str, Tensor]:
    """Every gradient as the global tensor: partial sums summed, owned pieces put in place."""
    found = {}
    for name, parameter in module.named_parameters():
        shard, grad = shard_of(parameter), parameter.grad
        assert grad is not None, name
        for axis in shard.partial:
            axis.all_reduce(grad)
        whole = torch.zeros(shard.shape, dtype=grad.dtype)
        if shard.is_owner(mpu):
            for offset, sizes, view in shard.pieces(grad):
                whole[tuple(slice(o, o + n) for o, n in zip(offset, sizes, strict=True))] += view
        found[name] = mpu.tp.all_reduce(whole)
    return found


def _assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("layout", [TP2, SP2, TP4, SP4], ids=["tp2", "tp2+sp", "tp4", "tp4+sp"])
@pytest.mark.parametrize("deferring", [False, True])
def test_column_then_row(world: World, layout: ParallelConfig, deferring: bool) -> None:
    expected = _run_pair(ParallelState.single())
    for found in world.run(_run_pair, deferring, layout=layout, ranks=layout.tp):
        _assert_equal(found, expected)


def _gathered(mpu: ParallelState) -> dict[str, Tensor]:
    layer = ColumnParallelLinear(6, 7, axis=mpu.tp, gather_output=True).double()
    initialize(layer, seed=1)
    x = _values(3, 2, 6).requires_grad_()
    y = layer(x)
    y.backward(_values(3, 2, 7, seed=1))
    assert x.grad is not None
    return {"y": y.detach(), "dx": x.grad} | _global_grads(layer, mpu)


def test_gather_output_of_uneven_parts(world: World) -> None:
    expected = _gathered(ParallelState.single())
    for found in world.run(_gathered, layout=TP4, ranks=4):
        _assert_equal(found, expected)


def _shared_heads(mpu: ParallelState, kv_heads: int) -> dict[str, Tensor]:
    """k and v of fewer heads than ranks: every rank uses its own query heads against the head it shares."""
    replicas = mpu.blocks(mpu.tp, mpu.tp.size // kv_heads) if mpu.tp.size > kv_heads else None
    kv = OutputPart(kv_heads, 3, replicas)
    layer = FusedColumnParallelLinear(5, {"q": OutputPart(4, 3), "k": kv, "v": kv}, axis=mpu.tp).double()
    initialize(layer, seed=2)
    x = _values(4, 2, 5).requires_grad_()
    q, k, v = (part.unflatten(-1, (-1, 3)) for part in layer(x).split(layer.sizes, -1))
    group = q.shape[2] // k.shape[2]
    out = q * k.repeat_interleave(group, 2) + v.repeat_interleave(group, 2).square()
    whole = gather_from(out.flatten(2), mpu.tp, -1)
    whole.backward(_values(4, 2, 12, seed=1))
    assert x.grad is not None
    return {"y": whole.detach(), "dx": x.grad} | _global_grads(layer, mpu)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_fewer_kv_heads_than_ranks(world: World, kv_heads: int) -> None:
    expected = _shared_heads(ParallelState.single(), kv_heads)
    for found in world.run(_shared_heads, kv_heads, layout=TP4, ranks=4):
        _assert_equal(found, expected)


def _embed(mpu: ParallelState) -> dict[str, Tensor]:
    sp = mpu.config.sequence_parallel
    layer = VocabParallelEmbedding(11, 6, axis=mpu.tp, sequence_parallel=sp).double()
    initialize(layer, seed=4)
    ids = torch.randint(11, (8, 3), generator=torch.Generator().manual_seed(0))
    y = layer(ids)
    y.backward(sequence_part(_values(8, 3, 6), mpu.tp, sp))
    return {"y": mpu.tp.all_gather(y.detach()) if sp else y.detach()} | _global_grads(layer, mpu)


@pytest.mark.parametrize("layout", [TP2, SP2, TP4], ids=["tp2", "tp2+sp", "tp4"])
def test_embedding_with_a_vocabulary_that_tp_does_not_divide(world: World, layout: ParallelConfig) -> None:
    expected = _embed(ParallelState.single())
    for found in world.run(_embed, layout=layout, ranks=layout.tp):
        _assert_equal(found, expected)


def _dense_loss(logits: Tensor, labels: Tensor, smoothing: float, z: float) -> Tensor:
    """The definition, on whole logits."""
    log_z = logits.logsumexp(-1)
    log_p = logits - log_z[..., None]
    vocab = logits.shape[-1]
    target = torch.full_like(logits, smoothing / (vocab - 1)).scatter(-1, labels[..., None], 1.0 - smoothing)
    return -(target * log_p).sum(-1) + z * log_z.square()


def _vocab_loss(
    mpu: ParallelState, logits: Tensor, labels: Tensor, smoothing: float, z: float
) -> tuple[Tensor, Tensor]:
    vocab = logits.shape[-1]
    start, end = (r * vocab // mpu.tp.size for r in (mpu.tp.rank, mpu.tp.rank + 1))
    local = logits[..., start:end].clone().requires_grad_()
    loss = vocab_parallel_cross_entropy(
        local, labels, axis=mpu.tp, vocab_size=vocab, label_smoothing=smoothing, z_loss=z
    )
    (loss * torch.arange(1, loss.numel() + 1).view(loss.shape)).sum().backward()
    assert local.grad is not None
    return loss.detach(), gather_from(local.grad, mpu.tp, -1, vocab)


@pytest.mark.parametrize(("smoothing", "z"), [(0.0, 0.0), (0.1, 0.0), (0.1, 0.01)])
@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("scale", [1.0, 1000.0])
def test_cross_entropy_is_the_dense_one(world: World, smoothing: float, z: float, tp: int, scale: float) -> None:
    logits = _values(3, 2, 11) * scale
    labels = torch.randint(11, (3, 2), generator=torch.Generator().manual_seed(0))
    dense = logits.clone().requires_grad_()
    expected = _dense_loss(dense, labels, smoothing, z)
    (expected * torch.arange(1, 7).view(3, 2)).sum().backward()
    for loss, grad in world.run(_vocab_loss, logits, labels, smoothing, z, layout=ParallelConfig(tp=tp), ranks=tp):
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(grad, dense.grad, rtol=1e-11, atol=1e-11)


def test_target_on_another_rank_still_moves_this_ranks_logits(world: World) -> None:
    logits, labels = torch.arange(4.0, dtype=torch.float64).view(1, 1, 4), torch.tensor([[3]])
    for _, grad in world.run(_vocab_loss, logits, labels, 0.0, 0.0, layout=TP2, ranks=2):
        expected = torch.tensor([0.0321, 0.0871, 0.2369, -0.3561], dtype=torch.float64)
        torch.testing.assert_close(grad.flatten(), expected, rtol=0, atol=5e-5)


@pytest.mark.parametrize("tp", [2, 4])
def test_label_smoothing_is_over_the_global_vocabulary(world: World, tp: int) -> None:
    logits, labels = torch.arange(8, dtype=torch.float64).view(1, 1, 8) / 2, torch.tensor([[2]])
    for loss, _ in world.run(_vocab_loss, logits, labels, 0.1, 0.0, layout=ParallelConfig(tp=tp), ranks=tp):
        assert abs(loss.item() - 3.3286) < 5e-5


def _gathered_logits_refused(mpu: ParallelState) -> str:
    logits = torch.zeros(1, 1, 8, dtype=torch.float64)
    try:
        vocab_parallel_cross_entropy(logits, torch.tensor([[2]]), axis=mpu.tp, vocab_size=8)
    except ValueError as error:
        return str(error)
    return "accepted"


def test_gathered_logits_are_refused(world: World) -> None:
    for message in world.run(_gathered_logits_refused, layout=TP2, ranks=2):
        assert "holds 4 of vocab_size=8" in message


def _head_loss(mpu: ParallelState, dtype: torch.dtype, deferring: bool, main: bool) -> dict[str, Tensor]:
    """linear_cross_entropy of a head whose vocabulary tp does not divide, weighted rows, small chunks."""
    head = ColumnParallelLinear(6, 11, axis=mpu.tp, bias=False).to(dtype)
    initialize(head, seed=1)
    if main:
        head.weight.main_grad = torch.ones_like(head.weight)  # pyright: ignore
    hidden = _values(9, 2, 6).to(dtype).requires_grad_()
    labels = torch.randint(11, (9, 2), generator=torch.Generator().manual_seed(0))
    mask = (torch.arange(18).view(9, 2) % 4).float()
    queue = WeightGradQueue(deferring=deferring)
    loss = linear_cross_entropy(
        hidden, head.weight, labels, mask, axis=mpu.tp, vocab_size=11, queue=queue, label_smoothing=0.1, z_loss=1e-3
    )
    (loss * 0.5).backward()
    queue.drain(0)
    assert hidden.grad is not None
    if main:
        assert head.weight.grad is None
        head.weight.grad = head.weight.main_grad - 1  # pyright: ignore
    return {"loss": loss.detach(), "dx": mpu.tp.all_reduce(hidden.grad)} | _global_grads(head, mpu)


@pytest.mark.parametrize("deferring", [False, True])
@pytest.mark.parametrize("main", [False, True])
def test_chunked_head_loss(world: World, monkeypatch: pytest.MonkeyPatch, deferring: bool, main: bool) -> None:
    head = ColumnParallelLinear(6, 11, axis=ParallelState.single().tp, bias=False).double()
    initialize(head, seed=1)
    hidden = _values(9, 2, 6).requires_grad_()
    labels = torch.randint(11, (9, 2), generator=torch.Generator().manual_seed(0))
    mask = (torch.arange(18).view(9, 2) % 4).double()  # tokens of no weight, of one, and of more
    loss = (_dense_loss(hidden @ head.weight.T, labels, 0.1, 1e-3) * mask).sum()
    grads = torch.autograd.grad(loss * 0.5, [hidden, head.weight])
    expected = {"loss": loss.detach(), "dx": grads[0], "weight": grads[1]}
    monkeypatch.setattr("megalite.parallel.cross_entropy._CHUNK_ELEMENTS", 4 * 11)
    _assert_equal(_head_loss(ParallelState.single(), torch.float64, deferring, main), expected)
    for found in world.run(_head_loss, torch.float64, deferring, main, layout=TP4, ranks=4):
        _assert_equal(found, expected)


def _replicated_values(mpu: ParallelState) -> dict[str, Tensor]:
    module = ColumnThenRow(mpu)
    torch.manual_seed(mpu.rank)  # a rank's own stream must not matter
    initialize(module, seed=3)
    return {n: p.detach().clone() for n, p in module.named_parameters() if not shard_of(p).cuts}


def test_replicated_parameters_are_equal_on_all_ranks(world: World) -> None:
    first, *others = world.run(_replicated_values, layout=SP4, ranks=4)
    assert "row.bias" in first
    for other in others:
        _assert_equal(other, first)


def test_masked_rows_may_hold_anything() -> None:
    weight = nn.Parameter(torch.ones(4, 2, dtype=torch.float64))
    hidden = torch.tensor([[[1.0, 2.0]], [[float("inf"), 0.0]]], dtype=torch.float64).requires_grad_()
    mask = torch.tensor([[1.0], [0.0]])
    loss = linear_cross_entropy(
        hidden, weight, torch.zeros(2, 1, dtype=torch.int64), mask,
        axis=ParallelState.single().tp, vocab_size=4, queue=WeightGradQueue(),
    )  # fmt: skip
    assert abs(loss.item() - 1.3862943611198906) < 1e-12


def test_a_loss_is_gone_through_once_and_evaluation_makes_no_gradients() -> None:
    weight = nn.Parameter(torch.ones(4, 2, dtype=torch.float64))
    hidden, labels = torch.ones(3, 1, 2, dtype=torch.float64), torch.zeros(3, 1, dtype=torch.int64)

    def loss() -> Tensor:
        tp = ParallelState.single().tp
        return linear_cross_entropy(
            hidden, weight, labels, torch.ones(3, 1), axis=tp, vocab_size=4, queue=WeightGradQueue()
        )

    value = loss()
    value.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="spent"):
        value.backward()
    with torch.no_grad(), FlopCounterMode(display=False) as counted:
        assert torch.equal(loss(), value)
    assert counted.get_total_flops() == 2 * 3 * 2 * 4, "one product: the logits"


def test_every_backward_pass_adds_to_the_gradients_unless_the_weights_are_frozen() -> None:
    layer = ColumnParallelLinear(3, 4, axis=ParallelState.single().tp)
    x = torch.ones(2, 1, 3, requires_grad=True)

    def loss() -> Tensor:
        y = layer(x)
        assert isinstance(y, Tensor)
        return y.sum()

    loss().backward()
    assert layer.weight.grad is not None
    once = layer.weight.grad.clone()
    torch.autograd.grad(loss(), x)
    assert torch.equal(layer.weight.grad, 2 * once)
    with pytest.raises(RuntimeError, match="not have been used in the graph"):
        torch.autograd.grad(loss(), layer.weight)
    layer.weight.requires_grad_(False)
    layer.weight.grad = None
    (dx,) = torch.autograd.grad(loss(), x)
    assert layer.weight.grad is None and torch.equal(dx[0, 0], layer.weight.sum(0))


class _Holding(torch.autograd.Function):
    """The identity, with a tensor on its node."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, held: Tensor) -> Tensor:
        ctx.held = held
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


def test_work_that_is_put_off_lets_go_of_the_graph() -> None:
    queue = WeightGradQueue(deferring=True)
    linear = RowParallelLinear(6, 4, axis=ParallelState.single().tp, bias=False)
    linear.queue = queue
    held = _values(3)
    alive = weakref.ref(held)
    y = linear(_Holding.apply(_values(5, 6).float().requires_grad_(), held))
    del held
    y.sum().backward()
    assert alive() is not None
    del y
    assert alive() is None and queue.num_waiting == 1
    queue.drain(0)
    assert linear.weight.grad is not None and linear.weight.grad.any()
