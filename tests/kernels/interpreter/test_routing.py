"""The choice of experts against sorting, and the way of rows to experts and back against indexing."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from megalite.kernels.triton.routing import Bags, choose_experts, permute, unpermute, unpermute_backward
from tests.kernels.interpreter.checks import DTYPES, assert_no_worse, canaries, guarded


def top_k(scores: Tensor, k: int) -> Tensor:
    order = scores.sort(dim=-1, descending=True, stable=True).indices[..., :k]
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, order, True)


def limited(scores: Tensor, k: int, num_groups: int, top_groups: int) -> Tensor:
    grouped = scores.unflatten(-1, (num_groups, -1))
    best = grouped.sort(dim=-1, descending=True, stable=True).values[..., : k // top_groups]
    groups = top_k(best.sum(-1), top_groups)
    return top_k(grouped.masked_fill(~groups[..., None], -math.inf).flatten(-2), k)


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
    assert torch.equal(plain, top_k(x, k)) and torch.equal(biased, top_k(x + bias, k))


@pytest.mark.parametrize(("experts", "k", "num_groups", "top_groups"), [(32, 4, 4, 2), (60, 6, 3, 2), (24, 2, 6, 1)])
def test_choice_within_groups(experts: int, k: int, num_groups: int, top_groups: int) -> None:
    x, bias = scores(7, experts), scores(experts)
    mine = choose_experts(x, k, bias, num_groups=num_groups, top_groups=top_groups)
    assert torch.equal(mine, limited(x + bias, k, num_groups, top_groups))


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
        torch.randn(n, width, generator=generator).to(dtype) for n in (size, len(token))
    )  # fmt: skip
    probs = torch.rand(len(token), generator=generator)
    leaves = [guarded(x, gap=3).requires_grad_() for x in (rows, there)] + [probs.clone().requires_grad_()]
    index = torch.zeros(size + 1, len(token), dtype=torch.float64)
    index[token, torch.arange(len(token))] = 1.0
    index = index[:size]
    with canaries():
        out = permute(leaves[0], token, *bags)
        home, weighted = (unpermute(leaves[1], p, token, *bags) for p in (None, leaves[2]))
        back = torch.autograd.grad(out, leaves[0], there)[0]
        forth = torch.autograd.grad(home, leaves[1], rows)[0]
        drows, dprobs = torch.autograd.grad(weighted, leaves[1:], rows)
    # Copies are exact, and sums are rounded once.
    assert torch.equal(out.double(), index.t() @ rows.double()) and torch.equal(forth, out)
    exact = index @ there.double()
    torch.testing.assert_close(home.double(), exact, rtol=torch.finfo(dtype).eps / 2, atol=1e-6)
    assert torch.equal(back, home)
    exact = index @ (there.double() * probs.double()[:, None])
    torch.testing.assert_close(weighted.double(), exact, rtol=torch.finfo(dtype).eps / 2, atol=1e-6)
    grad = index.t() @ rows.double()
    torch.testing.assert_close(drows.double(), grad * probs[:, None], rtol=torch.finfo(dtype).eps / 2 + 1e-6, atol=0.0)
    assert dprobs.dtype == torch.float32
    torch.testing.assert_close(dprobs.double(), (grad * there.double()).sum(-1), rtol=1e-5, atol=1e-4)


def test_the_sum_over_experts_is_no_worse_than_torch() -> None:
    token, size = torch.arange(8).repeat(4), 8
    rows = torch.randn(32, 40, generator=torch.Generator().manual_seed(0)).bfloat16()
    exact = rows.double().view(4, 8, 40).sum(0)
    eager = torch.zeros(8, 40, dtype=torch.bfloat16).index_add_(0, token, rows)
    assert_no_worse(unpermute(rows, None, token, *Bags.of(token, size)), eager, exact, factor=1.0)


def test_ops_are_as_they_are_declared() -> None:
    token = torch.tensor([1, 0, 2, 1])
    bags = Bags.of(token, 2)
    rows, there, probs = torch.randn(2, 16), torch.randn(4, 16), torch.rand(4)
    leaves = [x.requires_grad_() for x in (rows, there, probs)]
    torch.library.opcheck(permute, (leaves[0], token, *bags))
    torch.library.opcheck(unpermute, (leaves[1], leaves[2], token, *bags))
    detached = [x.detach() for x in leaves]
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(unpermute_backward, (detached[0], *detached[1:], token), test_utils=tests)


def test_gradients_are_derivatives() -> None:
    token = torch.tensor([1, 0, 2, 1])
    there, probs = (torch.randn(*shape, dtype=torch.float64).requires_grad_() for shape in ((4, 6), (4,)))
    torch.autograd.gradcheck(lambda *x: unpermute(*x, token, *Bags.of(token, 2)), (there, probs), fast_mode=True)
