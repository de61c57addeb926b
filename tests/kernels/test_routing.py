"""The choice of experts and the way of rows to them, in plain torch, against definitions in Python."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from megalite.kernels.routing import Bags, choose_experts, permute, unpermute


def best(values: Sequence[float], k: int) -> list[int]:
    """Places of the k largest, of equal ones the first."""
    return sorted(sorted(range(len(values)), key=lambda i: (-values[i], i))[:k])


def with_ties(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(shape[-1]), dtype=torch.float64).mul(3).round()


@pytest.mark.parametrize(("experts", "k"), [(8, 2), (60, 4), (5, 5), (1, 1)])
def test_the_best_are_chosen_and_of_equal_ones_the_first(experts: int, k: int) -> None:
    scores, bias = with_ties(4, 3, experts), with_ties(experts)
    for chosen, values in ((choose_experts(scores, k), scores), (choose_experts(scores, k, bias), scores + bias)):
        assert chosen.shape == scores.shape and chosen.dtype == torch.bool
        for row, found in zip(values.flatten(0, 1).tolist(), chosen.flatten(0, 1), strict=True):
            assert found.nonzero()[:, 0].tolist() == best(row, k)


@pytest.mark.parametrize(
    ("experts", "k", "num_groups", "top_groups", "of_group"),
    [(32, 4, 4, 2, 0), (24, 2, 6, 1, 0), (12, 6, 3, 2, 0), (12, 6, 3, 2, 1), (12, 3, 4, 2, 2)],
)
def test_only_experts_of_the_best_groups(experts: int, k: int, num_groups: int, top_groups: int, of_group: int) -> None:
    scores, size = with_ties(7, experts), experts // num_groups
    chosen = choose_experts(scores, k, num_groups=num_groups, top_groups=top_groups, group_top_k=of_group)
    for row, found in zip(scores.tolist(), chosen, strict=True):
        groups = [row[start : start + size] for start in range(0, experts, size)]
        sums = [sum(sorted(group)[-(of_group or k // top_groups) :]) for group in groups]
        kept = best(sums, top_groups)
        limited = [score if i // size in kept else -math.inf for i, score in enumerate(row)]
        assert found.nonzero()[:, 0].tolist() == best(limited, k)


@pytest.mark.parametrize(("token", "size"), [([3, 0, 4, 3, 1, 4], 4), ([2, 0, 1], 3), ([], 4), ([0, 0], 0)], ids=str)
def test_rows_go_and_come_home(token: list[int], size: int) -> None:
    """Each to its place, zeros where there is no token; home, their sum for each token."""
    rows, there = with_ties(size, 5), with_ties(len(token), 5)
    places = torch.tensor(token, dtype=torch.int64)
    out, home = permute(rows, places), unpermute(there, *Bags.of(places, size))
    assert out.tolist() == [rows[t].tolist() if t < size else [0.0] * 5 for t in token]
    assert home.tolist() == [
        [sum(there[i, column].item() for i, t in enumerate(token) if t == row) for column in range(5)]
        for row in range(size)
    ]
    if size not in token:
        assert torch.equal(permute(rows, places, zeros=False), out)
