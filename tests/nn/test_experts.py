"""Experts on one rank against their formulas; their shards, initial values, deferred gradients and memory."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

from megalite.kernels.chosen import Kernels
from megalite.kernels.config import GroupedChoice, KernelConfig
from megalite.mpu import ParallelConfig, ParallelState
from megalite.nn.config import ModelConfig
from megalite.nn.experts import ClampedSwigluExperts, Experts, GeluExperts
from megalite.parallel.random import initialize
from megalite.parallel.shard import shard_of
from megalite.parallel.wgrad import WeightGradQueue
from megalite.testing.world import World
from tests.parallel.routed import assert_equal, defined, gathered, problem, run_routed, window

SINGLE = ParallelState.single()
CONFIG = ModelConfig(num_layers=3, hidden_size=6, num_experts=4, expert_ffn_hidden_size=10, init_std=0.3)
FORMS = [Experts, GeluExperts, ClampedSwigluExperts]


@pytest.mark.parametrize("cls", FORMS)
@pytest.mark.parametrize("kind", ["top2", "one", "none"])
def test_forms(cls: type[Experts], kind: str) -> None:
    given = problem(kind)
    assert_equal(gathered([run_routed(SINGLE, cls, given)], given, cls), defined(given, cls))


def test_clamped_swiglu_is_clamped() -> None:
    """gate 100 counts as 7, up 9 as 7, up -9 as -7; gate has no lower bound."""
    experts = ClampedSwigluExperts(CONFIG, SINGLE)
    x = torch.tensor([[100.0, -20.0, 100.0, 9.0, 9.0, -9.0]], dtype=torch.float64).requires_grad_()
    seven = 7 / (1 + torch.exp(torch.tensor(-7 * 1.702, dtype=torch.float64)))
    minus = -20 / (1 + torch.exp(torch.tensor(20 * 1.702, dtype=torch.float64)))
    y = experts.activation(x)
    torch.testing.assert_close(y, torch.stack([8 * seven, 8 * minus, -6 * seven])[None], rtol=1e-12, atol=1e-12)
    (dx,) = torch.autograd.grad(y.sum(), x)
    assert dx[0, [0, 2, 3, 4, 5]].eq(0).all() and dx[0, 1] != 0


def _pieces(mpu: ParallelState, cls: type[Experts]) -> list[tuple[str, tuple[int, ...], tuple[int, ...], Tensor, bool]]:
    experts = cls(CONFIG, mpu)
    initialize(experts, seed=5)
    return [
        (name, offset, sizes, view.clone(), shard_of(parameter).is_owner(mpu))
        for name, parameter in experts.named_parameters()
        for offset, sizes, view in shard_of(parameter).pieces(parameter.detach())
    ]


@pytest.mark.parametrize("cls", FORMS)
def test_shards_tile_the_same_initial_values(world: World, cls: type[Experts]) -> None:
    """Every rank draws its part of one global model, and each element has one owner on ep x etp."""
    whole = cls(CONFIG, SINGLE)
    initialize(whole, seed=5)
    owned = {name: torch.zeros(parameter.shape) for name, parameter in whole.named_parameters()}
    for rank in world.run(_pieces, cls, layout=ParallelConfig(tp=2, etp=2, ep=2), ranks=4):
        for name, offset, sizes, values, owner in rank:
            expected = whole.get_parameter(name).detach()
            assert torch.equal(values, expected[window(offset, sizes)]), name
            owned[name][window(offset, sizes)] += owner
    for name, times in owned.items():
        assert times.eq(1).all(), name


def test_scale_of_initial_values() -> None:
    experts = Experts(ModelConfig(num_layers=8, hidden_size=64, num_experts=4, expert_ffn_hidden_size=96), SINGLE)
    torch.testing.assert_close(experts.fc1.std().item(), 0.02, rtol=0.03, atol=0)
    torch.testing.assert_close(experts.fc2.std().item(), 0.02 / 4, rtol=0.03, atol=0)
    assert not any(torch.equal(experts.fc1[0], experts.fc1[e]) for e in range(1, 4))


def _inputs(counts: list[int], dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    n = sum(counts)
    return torch.randn(n, 6, dtype=dtype, requires_grad=True), torch.rand(n, dtype=dtype).requires_grad_()


class _Relu(Experts):
    """A form as a user writes it: the activation alone."""

    def activation(self, x: Tensor) -> Tensor:
        gate, up = x.chunk(2, -1)
        return gate.relu() * up


def test_a_form_is_its_activation() -> None:
    """What a subclass says is used, forward and backward, and not the kernel of the form that it derives from."""
    experts, counts = _Relu(CONFIG, SINGLE).double(), [2, 0, 3, 1]
    x, probs = _inputs(counts)
    x_again, probs_again = (value.detach().clone().requires_grad_() for value in (x, probs))
    y = experts(x, probs, counts)
    rows = zip(x_again.split(counts), probs_again.split(counts), experts.fc1, experts.fc2, strict=True)
    expected = torch.cat([(experts.activation(t @ w1.t()) * p[:, None]) @ w2.t() for t, p, w1, w2 in rows])
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
    dy = torch.randn_like(y)
    found = torch.autograd.grad(y, (x, probs), dy)
    wanted = torch.autograd.grad(expected, (x_again, probs_again), dy)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def test_main_grads_are_added_to_and_wait_for_the_queue() -> None:
    counts, experts = [3, 0, 2, 1], Experts(CONFIG, SINGLE).double()
    tokens, probs = _inputs(counts)
    experts(tokens, probs, counts).sum().backward()
    plain = {name: parameter.grad for name, parameter in experts.named_parameters()}
    assert plain["fc1"] is not None and plain["fc1"][1].eq(0).all()
    for parameter in experts.parameters():
        parameter.grad, parameter.main_grad = None, torch.ones_like(parameter)  # pyright: ignore
    experts.queue = WeightGradQueue(deferring=True, microbatch=4)
    told: list[object] = []
    experts.queue.on_done = told.extend
    experts(tokens, probs, counts).sum().backward()
    assert experts.fc1.main_grad.eq(1).all()  # pyright: ignore
    experts.queue.drain(4)
    assert told == [experts.fc2, experts.fc1]
    for name, parameter in experts.named_parameters():
        assert parameter.grad is None
        torch.testing.assert_close(parameter.main_grad, 1 + plain[name])  # pyright: ignore


def test_copies_know_what_they_are_and_defer_for_themselves() -> None:
    experts = GeluExperts(CONFIG, SINGLE)
    copied = copy.deepcopy(experts)
    assert copied.queue is not experts.queue and copied.fc1 is not experts.fc1
    for name, parameter in copied.named_parameters():
        assert shard_of(parameter) == shard_of(experts.get_parameter(name)), name


def test_frozen_weights_get_no_gradient() -> None:
    counts, experts = [3, 0, 2, 1], Experts(CONFIG, SINGLE).double()
    experts.fc1.requires_grad_(False)
    tokens, probs = _inputs(counts)
    experts(tokens, probs, counts).sum().backward()
    assert experts.fc1.grad is None and experts.fc2.grad is not None and tokens.grad is not None


@pytest.mark.parametrize("cls", FORMS)
def test_keep_tokens_probs_and_the_first_output_only(cls: type[Experts]) -> None:
    counts, experts = [3, 0, 2, 1], cls(CONFIG, SINGLE).double()
    tokens, probs = _inputs(counts)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        experts(tokens, probs, counts)
    width = len(cls.parts) * 10
    assert [tuple(t.shape) for t in saved] == [(6, 6), (6,), (6, width)]


def test_tokens_changed_in_place_are_noticed() -> None:
    counts, experts = [3, 0, 2, 1], Experts(CONFIG, SINGLE).double()
    experts.queue = WeightGradQueue(deferring=True)
    tokens, probs = _inputs(counts)
    experts(tokens, probs, counts).sum().backward()
    tokens.data.mul_(1)
    with torch.no_grad():
        tokens.mul_(2)
    with pytest.raises(AssertionError, match="changed in place"):
        experts.queue.drain(0)


@pytest.mark.parametrize("cls", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_grouped_mm_agrees_with_the_loop(cls: type[Experts], dtype: torch.dtype) -> None:
    counts, found = [3, 0, 2, 1], []
    choices: tuple[GroupedChoice, ...] = ("loop", "grouped_mm")
    for choice in choices:
        config = KernelConfig(backend="torch", grouped=choice)
        kernels = Kernels.resolve(config, device=torch.device("cpu"), dtype=dtype, width=CONFIG.hidden_size)
        assert kernels.chosen["grouped_linear"] == choice
        experts = cls(CONFIG, SINGLE, kernels).to(dtype)
        tokens, probs = _inputs(counts, dtype)
        y = experts(tokens, probs, counts)
        y.backward(torch.ones_like(y))
        found.append([y.detach(), tokens.grad, probs.grad, *(p.grad for p in experts.parameters())])
    bound = 1e-5 if dtype == torch.float32 else 2e-2
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(other, one, rtol=bound, atol=bound)
