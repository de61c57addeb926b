"""Gradient buckets: layout of the buffers, when reductions start, and sums equal to one rank's gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megalite.mpu import ParallelConfig, ParallelState
from megalite.parallel.data import ALIGNMENT, DataParallel, Unit, main_grad
from megalite.parallel.random import initialize
from megalite.parallel.shard import adjacent, materialize, name_parameters, shard_of
from megalite.parallel.tensor import (
    ColumnParallelLinear,
    FusedColumnParallelLinear,
    OutputPart,
    RowParallelLinear,
    VocabParallelEmbedding,
    share_queue,
)
from megalite.parallel.wgrad import WeightGradQueue
from megalite.testing.world import World
from tests.parallel.parameters import adopt, cut_rows, set_grads, whole

ROWS, WIDTH, VOCAB = 8, 6, 11


class Net(nn.Module):
    """All kinds of contribution: fused linears, a weight used twice, an embedding used as head too, a norm weight."""

    def __init__(self, mpu: ParallelState, dtype: torch.dtype = torch.float64):
        super().__init__()
        self.queue = WeightGradQueue()
        with torch.device("meta"):
            self.words = VocabParallelEmbedding(VOCAB, WIDTH, axis=mpu.tp)
            parts = {"q": OutputPart(4), "k": OutputPart(4), "v": OutputPart(4)}
            self.qkv = FusedColumnParallelLinear(WIDTH, parts, axis=mpu.tp)
            self.out = RowParallelLinear(4, WIDTH, axis=mpu.tp)
            self.twice = ColumnParallelLinear(WIDTH, WIDTH, axis=mpu.tp, gather_output=True)
            self.scale = nn.Parameter(torch.ones(WIDTH))
            self.unused = nn.Parameter(torch.ones(3))
        name_parameters(self)
        materialize(self, torch.device("cpu"), dtype)
        initialize(self, seed=1)
        nn.init.ones_(self.scale)
        share_queue(self, self.queue)

    def units(self) -> list[Unit]:
        """Embedding; attention; the rest, with the parameter that nothing uses."""
        rest = [*self.twice.parameters(), self.scale, self.unused]
        return [
            Unit("words", list(self.words.parameters())),
            Unit("attention", [*self.qkv.parameters(), *self.out.parameters()]),
            Unit("rest", rest),
        ]

    def attend(self, ids: Tensor) -> Tensor:
        """[rows] -> [rows, WIDTH], cut over tp in the middle."""
        x = self.words(ids)
        q, k, v = self.qkv(x).split(self.qkv.sizes, dim=-1)
        return x + self.out(q * k + v)

    def forward(self, ids: Tensor) -> Tensor:
        """[rows] -> a scalar."""
        x = self.attend(ids)
        x = self.twice(torch.tanh(self.twice(x))) * self.scale
        return (x.tanh() @ self.words.weight.t()).square().sum()


def _ids(rows: int = ROWS) -> Tensor:
    return torch.arange(rows) * 7 % VOCAB


def _grads(net: nn.Module) -> dict[str, Tensor]:
    return {n: main_grad(p).clone() for n, p in net.named_parameters() if p.requires_grad}


def _step(
    net: Net, data_parallel: DataParallel, ids: Tensor, num_microbatches: int, *, deferred: bool = False
) -> dict[str, Tensor]:
    """Backward over micro-batches of `ids`, with the weight gradients split off when `deferred`."""
    data_parallel.zero_grad()
    parts = ids.chunk(num_microbatches)
    net.queue.deferring = deferred
    for i, part in enumerate(parts):
        net.queue.microbatch = i
        if i == len(parts) - 1 and not deferred:
            data_parallel.arm()
        net(part).backward()
    if deferred:
        for i in range(len(parts)):
            if i == len(parts) - 1:
                data_parallel.arm()
            net.queue.drain(i)
    net.queue.deferring = False
    data_parallel.finish()
    return _grads(net)


def _autograd_sums(ids: Tensor) -> dict[str, Tensor]:
    """What plain accumulation in .grad gives, without any bucket."""
    net = Net(ParallelState.single())
    for row in ids:
        net(row.view(1)).backward()
    return {n: p.grad if p.grad is not None else torch.zeros_like(p) for n, p in net.named_parameters()}


def _assert_close(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-12) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        difference = (found[name] - value).abs().max()
        assert difference <= tolerance * value.abs().max(), f"{name}: {difference}"


def test_adoption_keeps_values_and_lays_out_aligned_segments() -> None:
    mpu = ParallelState.single()
    net = Net(mpu, torch.bfloat16)
    before = {n: p.detach().clone() for n, p in net.named_parameters()}
    data_parallel = DataParallel(net.units(), mpu, queue=net.queue)
    for name, parameter in net.named_parameters():
        assert torch.equal(parameter, before[name])
        assert main_grad(parameter).dtype == torch.float32 and main_grad(parameter).shape == parameter.shape
    assert [(s.unit, s.decay) for s in data_parallel.segments] == [
        ("words", True), ("attention", True), ("attention", False), ("rest", True), ("rest", False),
    ]  # fmt: skip
    for segment in data_parallel.segments:
        assert segment.param.numel() % ALIGNMENT == 0 and segment.param.data_ptr() % 64 == 0
        assert segment.param.dtype == torch.bfloat16 and segment.main_grad.dtype == torch.float32
        covered = torch.zeros_like(segment.main_grad)
        for span in segment.spans:
            assert span.of(segment.param).data_ptr() == span.parameter.data_ptr()
            assert span.of(segment.main_grad).data_ptr() == main_grad(span.parameter).data_ptr()
            assert shard_of(span.parameter).decay == segment.decay
            covered[span.start : span.end] += 1
        assert covered.max() == 1 and segment.param[covered == 0].count_nonzero() == 0


def test_weights_of_one_gemm_stay_adjacent_in_data_and_gradients() -> None:
    net = Net(ParallelState.single())
    for _ in range(2):  # a second adoption moves them again
        DataParallel(net.units(), ParallelState.single(), queue=net.queue)
        parts = [net.qkv.part(name) for name in ("q", "k", "v")]
        for tensors in ([p.weight for p in parts], [p.bias for p in parts]):
            assert adjacent([t.data for t in tensors if t is not None]) is not None
            assert adjacent([main_grad(t) for t in tensors if t is not None]) is not None


def test_mixed_dtypes_get_buffers_of_their_own() -> None:
    narrow, wide = whole("a", torch.ones(3, 3, dtype=torch.bfloat16)), whole("b", torch.ones(2, 2, dtype=torch.float64))
    data_parallel = adopt(ParallelState.single(), narrow, wide)
    assert [(s.param.dtype, s.main_grad.dtype) for s in data_parallel.segments] == [
        (torch.bfloat16, torch.float32), (torch.float64, torch.float64),
    ]  # fmt: skip


@pytest.mark.parametrize("num_microbatches", [1, 4])
@pytest.mark.parametrize("deferred", [False, True])
def test_one_rank_accumulates_what_autograd_sums(num_microbatches: int, deferred: bool) -> None:
    mpu = ParallelState.single()
    net = Net(mpu)
    data_parallel = DataParallel(net.units(), mpu, queue=net.queue)
    for _ in range(2):  # zero_grad forgets the step before
        found = _step(net, data_parallel, _ids(), num_microbatches, deferred=deferred)
        _assert_close(found, _autograd_sums(_ids()))
    assert all(p.grad is None for p in net.parameters())


def test_frozen_parameters_keep_their_values_and_have_no_gradient() -> None:
    mpu = ParallelState.single()
    net = Net(mpu)
    for parameter in (net.qkv.part("k").weight, net.words.weight):
        parameter.requires_grad_(False)
    before = {n: p.detach().clone() for n, p in net.named_parameters()}
    data_parallel = DataParallel(net.units(), mpu, queue=net.queue)
    found = _step(net, data_parallel, _ids(), 2)
    expected = {n: g for n, g in _autograd_sums(_ids()).items() if n in found}
    assert set(before) - set(found) == {"qkv.k.weight", "words.weight"}
    _assert_close(found, expected)
    assert all(torch.equal(p, before[n]) for n, p in net.named_parameters())
    in_segments = {span.parameter for segment in data_parallel.segments for span in segment.spans}
    assert net.words.weight not in in_segments and net.words.weight in data_parallel.parameters
    frozen = net.qkv.part("k").weight
    assert frozen.untyped_storage().nbytes() == frozen.nbytes  # its old neighbours' memory is free


def test_bf16_gradients_accumulate_in_float32() -> None:
    weight = whole("w", torch.ones(2, 2, dtype=torch.bfloat16))
    data_parallel = adopt(ParallelState.single(), weight)
    data_parallel.zero_grad()
    for _ in range(1024):
        (weight.sum() / 1024).backward()
    data_parallel.finish()
    assert torch.equal(main_grad(weight), torch.ones(2, 2))  # a bf16 sum stops at 0.25


def test_contributions_after_the_reduction_are_refused() -> None:
    weight = whole("w", torch.ones(2, 2))
    data_parallel = adopt(ParallelState.single(), weight)
    data_parallel.finish()
    with pytest.raises(RuntimeError, match="gradient of w arrived after its bucket was reduced"):
        weight.sum().backward()
    with pytest.raises(AssertionError, match="twice"):
        data_parallel.finish()


def test_two_passes_after_arm_are_refused() -> None:
    first, second = whole("first", torch.ones(2, 2)), whole("second", torch.ones(2, 2))
    data_parallel = adopt(ParallelState.single(), first, second)
    data_parallel.arm()
    (first.sum() + second.sum()).backward()
    with pytest.raises(RuntimeError, match="arm\\(\\) only before the step's last pass"):
        first.sum().backward()


def test_finish_refuses_weight_gradients_left_in_the_queue() -> None:
    net = Net(ParallelState.single())
    data_parallel = DataParallel(net.units(), ParallelState.single(), queue=net.queue)
    net.queue.deferring = True
    net(_ids()).backward()
    with pytest.raises(AssertionError, match="not yet computed"):
        data_parallel.finish()


def test_a_parameter_belongs_to_one_unit() -> None:
    weight = whole("w", torch.ones(2, 2))
    with pytest.raises(AssertionError, match="w is in two units"):
        DataParallel([Unit("a", [weight]), Unit("b", [weight])], ParallelState.single(), queue=WeightGradQueue())


def _parity(mpu: ParallelState, num_microbatches: int, deferred: bool, reduce_dtype: torch.dtype | None) -> Any:
    net = Net(mpu)
    data_parallel = DataParallel(net.units(), mpu, queue=net.queue, reduce_dtype=reduce_dtype)
    mpu.reset_stats()
    mine = _ids().chunk(mpu.dp.size)[mpu.dp.rank]
    grads = _step(net, data_parallel, mine, num_microbatches, deferred=deferred)
    buffers = sum(s.main_grad.nbytes for s in data_parallel.segments)
    return grads, mpu.dp_cp.stats.calls, mpu.dp_cp.stats.bytes_sent, buffers


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("dp", [2, 4])
def test_data_parallel_sums_equal_one_rank(world: World, dp: int, deferred: bool) -> None:
    results = world.run(_parity, 2, deferred, None, ranks=dp)
    for grads, calls, sent, buffers in results:
        _assert_close(grads, _autograd_sums(_ids()))
        assert calls == 3 and sent == 2 * (dp - 1) * buffers // dp  # one all-reduce for each unit
    for grads, *_ in results[1:]:
        assert all(torch.equal(g, results[0][0][n]) for n, g in grads.items())


def test_deferred_weight_gradients_are_in_the_reduction_bit_for_bit(world: World) -> None:
    plain, deferred = (world.run(_parity, 2, flag, None, ranks=2) for flag in (False, True))
    for (a, *_), (b, *_) in zip(plain, deferred, strict=True):
        assert all(torch.equal(b[name], value) for name, value in a.items())


def test_reduce_dtype_is_what_travels(world: World) -> None:
    for grads, _, sent, buffers in world.run(_parity, 1, False, torch.float32, ranks=2):
        assert sent == buffers // 2
        _assert_close(grads, _autograd_sums(_ids()), tolerance=1e-5)
        exact = _autograd_sums(_ids())
        assert any(not torch.equal(grads[n], exact[n]) for n in exact)


def _start_times(mpu: ParallelState) -> list[int]:
    """All-reduces started after: arm, the last I, arm again, each W; a step that ends in W. Then one that ends in B."""
    net = Net(mpu)
    net.unused.requires_grad_(False)
    data_parallel = DataParallel(net.units(), mpu, queue=net.queue)
    started = []
    mpu.reset_stats()
    net.queue.deferring = True
    net(_ids()).backward()
    started.append(mpu.dp_cp.stats.calls)  # hooks have fired, with None where a linear has deferred its work
    data_parallel.arm()
    started.append(mpu.dp_cp.stats.calls)
    net.queue.drain(0)
    started.append(mpu.dp_cp.stats.calls)
    data_parallel.finish()
    net.queue.deferring = False
    data_parallel.zero_grad()
    net(_ids()).backward()
    started.append(mpu.dp_cp.stats.calls)
    data_parallel.arm()
    net(_ids()).backward()
    started.append(mpu.dp_cp.stats.calls)
    data_parallel.finish()
    started.append(mpu.dp_cp.stats.calls)
    return started


def test_reductions_start_with_the_last_contribution(world: World) -> None:
    for started in world.run(_start_times, ranks=2):
        assert started == [0, 0, 3, 3, 6, 6]


def _other_order(mpu: ParallelState) -> list[Tensor]:
    """Units whose last contributions come in another order on each rank; one rank does not use the last unit."""
    sizes = {"a": 3, "b": 70, "c": 200}
    parameters = {name: whole(name, torch.ones(size, dtype=torch.float64)) for name, size in sizes.items()}
    units = [Unit(name, [p]) for name, p in parameters.items()]
    data_parallel = DataParallel(units, mpu, queue=WeightGradQueue())
    x = torch.ones((), dtype=torch.float64)
    for name in ("a", "b", "c") if mpu.rank else ("b", "a"):
        x = x + parameters[name].sum() * x.detach()
    data_parallel.arm()
    x.backward()
    data_parallel.finish()
    return [main_grad(p).clone() for p in parameters.values()]


def test_ranks_may_finish_units_in_different_orders(world: World) -> None:
    # A parameter's gradient is the running sum before its use: rank 0 adds b (70) first, rank 1 adds a (3).
    factors = {"a": 71.0 + 1.0, "b": 1.0 + 4.0, "c": 0.0 + 284.0}
    for a, b, c in world.run(_other_order, ranks=2):
        for found, name in ((a, "a"), (b, "b"), (c, "c")):
            assert torch.equal(found, torch.full_like(found, factors[name])), name


def _partial(mpu: ParallelState) -> list[Tensor]:
    """A norm weight under sequence parallelism, a KV weight shared by pairs of ranks, a bias of neither kind."""
    pair = mpu.blocks(mpu.tp, 2)
    norm = whole("norm", torch.zeros(3, dtype=torch.float64), partial=(mpu.tp,))
    shared = whole("kv", torch.zeros(2, 2, dtype=torch.float64), partial=(pair,))
    bias = whole("bias", torch.zeros(5, dtype=torch.float64))
    data_parallel = adopt(mpu, norm, shared, bias)
    data_parallel.zero_grad()
    share = 10.0**mpu.rank
    set_grads({norm: share, shared: share, bias: share})
    data_parallel.finish()
    return [main_grad(p).flatten()[0].clone() for p in (norm, shared, bias)]


def test_partial_sums_are_completed_over_their_axis_and_over_data_parallel_ranks(world: World) -> None:
    results = world.run(_partial, layout=ParallelConfig(tp=4), ranks=8)
    for rank, (norm, shared, bias) in enumerate(results):
        tp = rank % 4
        assert norm == 11111111.0
        assert shared == (11.0 if tp < 2 else 1100.0) * 10001.0
        assert bias == 10.0**tp * 10001.0


def _tied(mpu: ParallelState) -> tuple[Tensor, Tensor]:
    table = torch.zeros(5, 2, dtype=torch.float64)
    tied_to = None if mpu.pp.is_first else "words"
    copy = cut_rows("words" if mpu.pp.is_first else "head", table, mpu, tied_to=tied_to)
    other = whole("norm", torch.zeros(3, dtype=torch.float64))
    units = [Unit("tied", [copy], tied=True), Unit("other", [other])]
    data_parallel = DataParallel(units, mpu, queue=WeightGradQueue())
    data_parallel.zero_grad()
    set_grads({copy: 10.0**mpu.rank / 3, other: 10.0**mpu.rank})
    data_parallel.finish()
    return main_grad(copy).clone(), main_grad(other).clone()


@pytest.mark.parametrize(("layout", "ranks"), [(ParallelConfig(pp=2), 4), (ParallelConfig(tp=2, pp=2), 8)])
def test_tied_copies_get_the_sum_over_stages_and_data_parallel_ranks(
    world: World, layout: ParallelConfig, ranks: int
) -> None:
    results = world.run(_tied, layout=layout, ranks=ranks)
    for rank in range(ranks):
        t = rank % layout.tp
        same_tp = [r for r in range(ranks) if r % layout.tp == t]
        stage = [r for r in same_tp if r // (ranks // 2) == rank // (ranks // 2)]
        torch.testing.assert_close(results[rank][0].max(), torch.tensor(sum(10.0**r / 3 for r in same_tp)).double())
        assert torch.equal(results[rank][0], results[same_tp[0]][0])  # the copies agree bit for bit
        assert results[rank][1][0] == sum(10.0**r for r in stage)


def _shared(mpu: ParallelState) -> Tensor:
    """An embedding that the last stage on this rank uses as well, its contribution the last to come."""
    table = whole("words", torch.zeros(5, 2, dtype=torch.float64))
    first, last = WeightGradQueue(), WeightGradQueue()
    other = whole("norm", torch.zeros(3, dtype=torch.float64))
    owner = DataParallel([Unit("shared", [table], shared=True), Unit("other", [other])], mpu, queue=first)
    user = DataParallel([Unit("head", [whole("head", torch.zeros(2, dtype=torch.float64))])], mpu, queue=last)
    last.deferring = True

    def late() -> None:
        main_grad(table).add_(10.0**mpu.rank)

    last.put(late, [table])
    owner.arm()
    (table.sum() * 3 + other.sum()).backward()
    owner.complete()
    user.arm()
    (table.sum() * 4).backward()
    last.drain(0)
    user.complete()
    owner.finish()
    user.finish()
    return main_grad(table).clone()


def test_a_unit_shared_with_another_stage_waits_for_both(world: World) -> None:
    for grad in world.run(_shared, ranks=2):
        assert torch.equal(grad, torch.full((5, 2), 2 * 7.0 + 11.0, dtype=torch.float64))


def _mirrored(mpu: ParallelState, copied: bool) -> list[Tensor]:
    """Each rank holds two stages, those of its mirror rank in the other order."""
    stages = sorted((mpu.pp.rank, mpu.pp.size - 1 - mpu.pp.rank))
    parameters = [whole(f"stage {stage}", torch.zeros(3, dtype=torch.float64)) for stage in stages]
    data_parallels = [adopt(mpu, parameter, copied=copied) for parameter in parameters]
    for stage, parameter in zip(stages, parameters, strict=True):
        set_grads({parameter: (stage + 1) * 10.0**mpu.rank})
    for data_parallel in data_parallels:
        data_parallel.finish()
    return [main_grad(parameter)[0].clone() for parameter in parameters]


def test_copies_of_a_bidirectional_pipeline_get_the_sum_of_both(world: World) -> None:
    layout = ParallelConfig(pp=4, schedule="dualpipe")
    for rank, grads in enumerate(world.run(_mirrored, True, layout=layout)):
        both = 10.0**rank + 10.0 ** (3 - rank)
        assert grads == [(stage + 1) * both for stage in sorted((rank, 3 - rank))]
    layout = ParallelConfig(pp=4, schedule="csv:a plan without copies")
    for rank, grads in enumerate(world.run(_mirrored, False, layout=layout)):
        assert grads == [(stage + 1) * 10.0**rank for stage in sorted((rank, 3 - rank))]


def _tensor_parallel(mpu: ParallelState, deferred: bool) -> dict[str, Tensor]:
    """Gradients of the cut model as global tensors; the ranks of a tensor-parallel group each fill in their part."""
    net = Net(mpu)
    data_parallel = DataParallel(net.units(), mpu, queue=net.queue)
    mine = _ids().chunk(mpu.dp.size)[mpu.dp.rank]
    data_parallel.zero_grad()
    net.queue.deferring = deferred
    if not deferred:
        data_parallel.arm()
    (net.attend(mine) * net.scale).tanh().square().sum().backward()
    if deferred:
        data_parallel.arm()
        net.queue.drain(0)
    data_parallel.finish()
    grads = {}
    for name, parameter in net.named_parameters():
        shard = shard_of(parameter)
        full = torch.zeros(shard.shape, dtype=torch.float64)
        if shard.is_owner(mpu):
            for offset, sizes, view in shard.pieces(main_grad(parameter)):
                full[tuple(slice(o, o + n) for o, n in zip(offset, sizes, strict=True))] = view
        grads[name] = mpu.tp.all_reduce(full)
    return grads


@pytest.mark.parametrize("deferred", [False, True])
def test_tensor_and_data_parallel_together_equal_one_rank(world: World, deferred: bool) -> None:
    expected = _tensor_parallel(ParallelState.single(), False)
    for grads in world.run(_tensor_parallel, deferred, layout=ParallelConfig(tp=2), ranks=4):
        _assert_close(grads, expected)
