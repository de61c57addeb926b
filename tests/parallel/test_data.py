"""Gradient buckets on one rank: layout of the buffers, what accumulates in them, and what is refused."""

from __future__ import annotations

import pytest
import torch

from megalite.mpu import ParallelState
from megalite.parallel.data import ALIGNMENT, DataParallel, Unit, main_grad
from megalite.parallel.shard import adjacent, shard_of
from megalite.parallel.wgrad import WeightGradQueue
from tests.parallel.net import Net, accumulate, assert_close, autograd_sums, token_ids
from tests.parallel.parameters import adopt, whole


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
        found = accumulate(net, data_parallel, token_ids(), num_microbatches, deferred=deferred)
        assert_close(found, autograd_sums(token_ids()))
    assert all(p.grad is None for p in net.parameters())


def test_frozen_parameters_keep_their_values_and_have_no_gradient() -> None:
    mpu = ParallelState.single()
    net = Net(mpu)
    for parameter in (net.qkv.part("k").weight, net.words.weight):
        parameter.requires_grad_(False)
    before = {n: p.detach().clone() for n, p in net.named_parameters()}
    data_parallel = DataParallel(net.units(), mpu, queue=net.queue)
    found = accumulate(net, data_parallel, token_ids(), 2)
    expected = {n: g for n, g in autograd_sums(token_ids()).items() if n in found}
    assert set(before) - set(found) == {"qkv.k.weight", "words.weight"}
    assert_close(found, expected)
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
    net(token_ids()).backward()
    with pytest.raises(AssertionError, match="not yet computed"):
        data_parallel.finish()


def test_a_parameter_belongs_to_one_unit() -> None:
    weight = whole("w", torch.ones(2, 2))
    with pytest.raises(AssertionError, match="w is in two units"):
        DataParallel([Unit("a", [weight]), Unit("b", [weight])], ParallelState.single(), queue=WeightGradQueue())
