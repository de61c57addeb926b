"""The choice of experts, and the way of rows to them and back, against torch, in guarded memory."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from megalite.kernels import routing as reference
from megalite.kernels.routing import Bags
from megalite.kernels.triton.routing import choose_experts, permute, unpermute
from megalite.testing.triton_interpreter import count_traffic
from tests.kernels.interpreter.checks import DTYPES, canaries, guarded


def scores(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """With many ties."""
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(shape[-1]), dtype=torch.float64)
    return guarded(x.mul(4).round().div(4).to(dtype), gap=2)


@pytest.mark.parametrize(("experts", "k"), [(8, 2), (60, 4), (64, 64), (5, 1), (160, 6), (1, 1)])
def test_choice(experts: int, k: int) -> None:
    x, bias = scores(3, 3, experts), scores(experts)
    with canaries():
        plain, biased = choose_experts(x, k), choose_experts(x, k, bias)
    assert plain.dtype == torch.bool and plain.shape == x.shape
    assert torch.equal(plain, reference.choose_experts(x, k))
    assert torch.equal(biased, reference.choose_experts(x, k, bias))


@pytest.mark.parametrize(
    ("experts", "k", "num_groups", "top_groups", "of_group"),
    [(32, 4, 4, 2, 0), (60, 6, 3, 2, 0), (24, 2, 6, 1, 0), (60, 6, 3, 2, 1), (32, 5, 8, 3, 2)],
)
def test_choice_within_groups(experts: int, k: int, num_groups: int, top_groups: int, of_group: int) -> None:
    x, bias = scores(7, experts), scores(experts)
    ours, theirs = (
        choose(x, k, bias, num_groups=num_groups, top_groups=top_groups, group_top_k=of_group)
        for choose in (choose_experts, reference.choose_experts)
    )
    assert torch.equal(ours, theirs)


def test_scores_that_are_no_numbers() -> None:
    """Each token gets its k experts whatever its scores; padding of the tile is never one of them."""
    x = torch.full((3, 5), -math.inf, dtype=torch.float64)
    x[1, 3], x[2, 4] = math.nan, math.inf
    chosen = choose_experts(x, 2)
    assert chosen.nonzero().tolist() == [[0, 0], [0, 1], [1, 0], [1, 3], [2, 0], [2, 4]]
    assert choose_experts(x[:0], 2).shape == (0, 5)


ROUTES = {
    "some twice, some never, some nowhere": (torch.tensor([4, 0, 6, 4, 2, 6, 4, 0, 1]), 6),
    "each once": (torch.tensor([2, 0, 1]), 3),
    "all of one": (torch.tensor([0] * 9), 1),
    "nothing arrives": (torch.tensor([], dtype=torch.int64), 4),
    "nobody": (torch.tensor([0, 0]), 0),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("token", "size"), ROUTES.values(), ids=ROUTES.keys())
def test_routes(token: Tensor, size: int, dtype: torch.dtype) -> None:
    generator, width, bags = torch.Generator().manual_seed(0), 530, Bags.of(token, size)
    rows, there = (
        guarded(torch.randn(n, width, generator=generator).to(dtype), gap=3).requires_grad_()
        for n in (size, len(token))
    )  # fmt: skip
    with canaries():
        out, home = permute(rows, token), unpermute(there, *bags)
        (back,) = torch.autograd.grad(out, rows, there)
        (forth,) = torch.autograd.grad(home, there, rows)
    assert torch.equal(out, reference.permute(rows, token)) and torch.equal(forth, out)
    exact = reference.unpermute(there.double(), *bags)
    torch.testing.assert_close(home.double(), exact, rtol=torch.finfo(dtype).eps / 2, atol=1e-6)
    assert torch.equal(back, home)


def test_the_sum_over_experts_is_rounded_once() -> None:
    token, rows = torch.arange(8).repeat(4), torch.randn(32, 40, generator=torch.Generator().manual_seed(0)).bfloat16()
    exact = rows.double().view(4, 8, 40).sum(0)
    assert torch.equal(unpermute(rows, *Bags.of(token, 8)), exact.float().bfloat16())


def test_ops_are_as_they_are_declared() -> None:
    token, ops = torch.tensor([1, 0, 2, 1]), torch.ops.megalite
    torch.library.opcheck(ops.permute.default, (torch.randn(2, 16, requires_grad=True), token))
    torch.library.opcheck(ops.unpermute.default, (torch.randn(4, 16, requires_grad=True), *Bags.of(token, 2)))


def test_gradients_are_derivatives() -> None:
    token = torch.tensor([1, 0, 2, 1])
    rows, there = (torch.randn(n, 6, dtype=torch.float64).requires_grad_() for n in (2, 4))
    torch.autograd.gradcheck(lambda x: permute(x, token), rows, fast_mode=True)
    torch.autograd.gradcheck(lambda x: unpermute(x, *Bags.of(token, 2)), there, fast_mode=True)


def test_traffic_is_the_minimum() -> None:
    """Rows are read and written once, with their numbers for each block of columns."""
    token, rows = torch.arange(32).repeat(2), torch.randn(32, 2048).bfloat16()
    bags = Bags.of(token, 32)
    with count_traffic() as out:
        there = permute(rows, token)
    with count_traffic() as home:
        unpermute(there, *bags)
    assert out.total <= 1.1 * (2 * 64 * 2048 * 2) and out.of(rows) == 64 * 2048 * 2
    assert home.total <= 1.1 * (64 + 32) * 2048 * 2
