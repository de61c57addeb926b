"""The batch ramp, against the rule of the literature applied step by step."""

from __future__ import annotations

import pytest

from megalite.data.batch_sizes import BatchSizes, Ramp


def by_rule(final: int, ramp: Ramp, num_steps: int) -> list[tuple[int, int]]:
    """(samples before, size) of each step: Megatron-LM's calculator, one update a step."""
    start, increment, samples = ramp
    found, consumed = [], 0
    for _ in range(num_steps):
        size = final
        if consumed < samples and final > start:
            size = start + consumed * ((final - start) // increment) // samples * increment
        found.append((consumed, size))
        consumed += size
    return found


@pytest.mark.parametrize(
    ("final", "ramp"),
    [
        (32, (8, 8, 100)),
        (32, (4, 4, 1000)),
        (30, (10, 10, 37)),
        (64, (2, 1, 99)),  # steps that pass several sizes at once
        (16, (4, 12, 1)),
        (16, (16, 4, 50)),
        (7, (3, 2, 10)),
    ],
)
def test_sizes_and_first_samples_are_those_of_the_rule(final: int, ramp: Ramp) -> None:
    sizes = BatchSizes(final=final, ramp=ramp)
    assert sizes.problems() == []
    expected = by_rule(final, ramp, 500)
    assert [(sizes.before(step), sizes.of(step)) for step in range(500)] == expected
    assert expected[-1][1] == final
    assert sizes.all == tuple(sorted({size for _, size in expected}))


def test_a_known_ramp() -> None:
    """Three increments over 96 samples: 32 samples of each size at least, and a step is never cut."""
    sizes = BatchSizes(final=16, ramp=(4, 4, 96))
    assert [sizes.of(step) for step in range(16)] == [4] * 8 + [8] * 4 + [12] * 3 + [16]
    assert [sizes.before(step) for step in (0, 8, 12, 15, 16, 17)] == [0, 32, 64, 100, 116, 132]


def test_without_a_ramp_all_batches_are_equal() -> None:
    sizes = BatchSizes(final=6)
    assert (sizes.of(0), sizes.of(9), sizes.before(9), sizes.all) == (6, 6, 54, (6,))


@pytest.mark.parametrize(
    ("ramp", "message"),
    [
        ((0, 4, 10), "at least 1"),
        ((4, 4, 0), "at least 1"),
        ((20, 4, 10), "starts above global_batch_size=16"),
        ((4, 5, 10), "steps of 5 do not lead from 4 to global_batch_size=16; they do to 14 and 19"),
    ],
)
def test_a_ramp_that_cannot_be(ramp: Ramp, message: str) -> None:
    (problem,) = BatchSizes(final=16, ramp=ramp).problems()
    assert message in problem
