"""Learning-rate schedules against their closed forms."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from megalite.optim.config import OptimConfig
from megalite.optim.lr import lr_at

PEAK, LOW, WARMUP, LENGTH = 2e-3, 2e-4, 22, 220


def _config(schedule: str, **fields: object) -> OptimConfig:
    values = {"lr": PEAK, "min_lr": LOW, "warmup_steps": WARMUP, "schedule": schedule, **fields}
    return OptimConfig(**values)  # pyright: ignore[reportArgumentType]


def _after_warmup(n: int) -> float:
    return (n - WARMUP) / (LENGTH - WARMUP)


def _in_final(n: int, final: int = 50) -> float:
    return max(n - (LENGTH - final), 0) / final


def _between(height: float) -> float:
    return LOW + (PEAK - LOW) * height


SHAPES: dict[str, tuple[dict[str, object], Callable[[int], float]]] = {
    "constant": ({"schedule": "constant"}, lambda n: PEAK),
    "linear": ({"schedule": "linear"}, lambda n: _between(1 - _after_warmup(n))),
    "cosine": ({"schedule": "cosine"}, lambda n: _between((1 + math.cos(math.pi * _after_warmup(n))) / 2)),
    "inverse_sqrt": ({"schedule": "inverse_sqrt"}, lambda n: max(PEAK * math.sqrt(WARMUP / n), LOW)),
    "wsd linear": ({"schedule": "wsd", "wsd_decay_steps": 50}, lambda n: _between(1 - _in_final(n))),
    "wsd tenth": ({"schedule": "wsd"}, lambda n: _between(1 - _in_final(n, 22))),
    "wsd cosine": (
        {"schedule": "wsd", "wsd_decay_steps": 50, "wsd_decay": "cosine"},
        lambda n: _between((1 + math.cos(math.pi * _in_final(n))) / 2),
    ),
    "wsd exponential": (
        {"schedule": "wsd", "wsd_decay_steps": 50, "wsd_decay": "exponential"},
        lambda n: _between(2 * 0.5 ** _in_final(n) - 1),
    ),
    "wsd minus_sqrt": (
        {"schedule": "wsd", "wsd_decay_steps": 50, "wsd_decay": "minus_sqrt"},
        lambda n: _between(1 - math.sqrt(_in_final(n))),
    ),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_every_step_of_every_schedule(shape: str) -> None:
    fields, after = SHAPES[shape]
    config = _config(**fields)  # pyright: ignore[reportArgumentType]
    for n in range(1, LENGTH + 1):
        expected = PEAK * n / WARMUP if n <= WARMUP else after(n)
        assert lr_at(config, n, LENGTH) == pytest.approx(expected, rel=1e-12, abs=1e-18), n


@pytest.mark.parametrize("shape", [name for name in SHAPES if name not in ("constant", "inverse_sqrt")])
def test_decay_ends_exactly_at_the_minimum_and_stays(shape: str) -> None:
    config = _config(**SHAPES[shape][0])  # pyright: ignore[reportArgumentType]
    assert [lr_at(config, n, LENGTH) for n in (LENGTH, LENGTH + 1, 10 * LENGTH)] == [LOW] * 3


def test_warmup_is_part_of_the_decay_length_once() -> None:
    config = _config("cosine", min_lr=0.0)
    assert lr_at(config, 198, LENGTH) / PEAK == pytest.approx(0.0302, abs=5e-5)
    assert lr_at(config, 220, LENGTH) == 0.0


def test_first_step_moves_and_the_peak_is_reached_at_the_end_of_the_warmup() -> None:
    config = _config("linear")
    assert lr_at(config, 1, LENGTH) == PEAK / WARMUP and lr_at(config, WARMUP, LENGTH) == PEAK
    assert lr_at(_config("linear", warmup_steps=0, min_lr=0.0), 1, 10) == pytest.approx(0.9 * PEAK)


def test_a_longer_run_shares_its_beginning_when_decay_steps_is_set() -> None:
    config = _config("cosine", decay_steps=100)
    assert [lr_at(config, n, 50) for n in range(1, 51)] == [lr_at(config, n, 400) for n in range(1, 51)]


def test_samples_and_steps_give_one_curve() -> None:
    batch = 32
    in_steps = _config("wsd", wsd_decay_steps=50)
    in_samples = _config(
        "wsd", schedule_unit="samples", warmup_steps=WARMUP * batch, wsd_decay_steps=50 * batch
    )  # fmt: skip
    for n in range(1, LENGTH + 1):
        assert lr_at(in_samples, n * batch, LENGTH * batch) == pytest.approx(lr_at(in_steps, n, LENGTH), rel=1e-12)


def test_a_run_shorter_than_its_warmup_is_all_warmup() -> None:
    assert lr_at(_config("cosine", warmup_steps=30), 3, 3) == PEAK * 3 / 30


def test_inverse_sqrt_without_warmup_begins_at_the_peak() -> None:
    config = _config("inverse_sqrt", warmup_steps=0, min_lr=0.0)
    assert [lr_at(config, n, 9) / PEAK for n in (1, 4)] == [1.0, 0.5]
    assert lr_at(_config("inverse_sqrt", min_lr=PEAK), 100, 9) == PEAK


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"lr": -1.0}, "optim.lr=-1.0 must be at least 0"),
        ({"lr": math.nan}, "optim.lr=nan must be"),
        ({"min_lr": 1.0}, "optim.min_lr=1.0 is above optim.lr"),
        ({"beta2": 1.0}, "optim.beta2=1.0 must be in"),
        ({"decay_steps": 0}, "optim.decay_steps=0 must be at least 1"),
        ({"decay_steps": 10, "warmup_steps": 11}, "warmup_steps=11 is longer than optim.decay_steps=10"),
        (
            {"schedule": "wsd", "decay_steps": 10, "wsd_decay_steps": 9, "warmup_steps": 3},
            "wsd_decay_steps can be up to 7",
        ),
        ({"clip_grad": -0.5}, "optim.clip_grad=-0.5"),
    ],
)
def test_bad_values_are_named(fields: dict[str, object], message: str) -> None:
    (problem,) = OptimConfig(**fields).problems()  # pyright: ignore[reportArgumentType]
    assert message in problem


def test_all_problems_are_reported_at_once() -> None:
    assert OptimConfig().problems() == []
    assert len(OptimConfig(lr=-1.0, min_lr=-2.0, eps=-1.0, momentum=2.0).problems()) == 4
