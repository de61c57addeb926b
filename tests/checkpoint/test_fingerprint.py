"""Fingerprints: equal however a tensor is cut, different after any change."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from megalite.checkpoint import fingerprint
from megalite.checkpoint.manifest import Held
from megalite.mpu import ParallelState
from megalite.parallel.shard import Shard

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.bool)
SHAPES = ((), (1,), (7,), (5, 9), (3, 4, 5), (2, 3, 2, 7), (300, 700))


def by_definition(tensor: Tensor) -> int:
    """One element after the other, in Python's integers."""
    width = min(tensor.element_size(), 4)
    dtype = {1: torch.int8, 2: torch.int16, 4: torch.int32}[width]
    words = tensor.contiguous().reshape(-1).view(dtype).tolist()
    return sum(word * (2 * index + 1) for index, word in enumerate(words)) % fingerprint.MODULUS


def whole(tensor: Tensor) -> int:
    found = fingerprint.of_tensors({"kind": [(Shard("x", tuple(tensor.shape)), tensor)]}, ParallelState.single())
    return found["kind/x"]


def make(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64) * 100
    return values > 0 if dtype == torch.bool else values.to(dtype)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_it_is_the_sum_that_is_stated(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor = make(shape, dtype)
    assert whole(tensor) == by_definition(tensor)


@pytest.mark.parametrize("dtype", DTYPES[:4], ids=str)
def test_any_rectangles_add_up(dtype: torch.dtype) -> None:
    tensor, draw = make((6, 5, 11), dtype), random.Random(1)
    for _ in range(20):
        cuts = [sorted({0, size, draw.randrange(1, size)}) for size in tensor.shape]
        total = 0
        for a0, b0 in zip(cuts[0], cuts[0][1:], strict=False):
            for a1, b1 in zip(cuts[1], cuts[1][1:], strict=False):
                for a2, b2 in zip(cuts[2], cuts[2][1:], strict=False):
                    view = tensor[a0:b0, a1:b1, a2:b2]  # strided
                    shard = Shard("x", tuple(tensor.shape))
                    piece = Held("kind/x", shard, (a0, a1, a2), tuple(view.shape), view)
                    total += fingerprint._of_piece(piece)
        assert total % fingerprint.MODULUS == whole(tensor)


@pytest.mark.parametrize("dtype", DTYPES[:4], ids=str)
def test_a_bit_that_changed_and_rows_that_changed_places_show(dtype: torch.dtype) -> None:
    tensor = make((40, 30), dtype)
    before = whole(tensor)
    width = {2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    for bit in range(tensor.element_size() * 8 - 1):
        other = tensor.clone()
        other.view(width)[7, 3] ^= 1 << bit
        assert whole(other) != before
    swapped = tensor.clone()
    swapped[[2, 3]] = tensor[[3, 2]]
    assert whole(swapped) != before
    assert whole(tensor.t().contiguous()) != before


def test_parts_without_elements_count_nothing() -> None:
    empty = Held("kind/x", Shard("x", (3, 4)), (3, 0), (0, 4), torch.zeros(0, 4))
    assert fingerprint._of_piece(empty) == 0
