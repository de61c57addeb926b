"""Rows and speeds."""

import json
import math

import pytest
import torch

from megalite.train.metrics import DETERMINISTIC_FIELDS, TIMING_FIELDS, Meter, StepMetrics, peak_memory_mb


class FakeClock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def make_metrics(**changes: object) -> StepMetrics:
    values: dict[str, object] = dict(
        step=3, loss=0.1 + 0.2, grad_norm=1.5, learning_rate=1e-3, tokens=96, samples=6, loss_tokens=30,
        sample_fingerprint=7, skipped=False, tokens_per_second=10.0, step_seconds=3.2, tflops_per_second=0.1,
        mfu=0.5, peak_memory_mb=12.0,
    )  # fmt: skip
    return StepMetrics(**{**values, **changes})  # pyright: ignore[reportArgumentType]


def test_speed_divides_the_tokens_of_a_step_by_the_time_of_that_step() -> None:
    clock = FakeClock()
    meter = Meter(clock=clock)
    meter.start()
    for _ in range(5):
        clock.now += 1.0
        assert meter.step(1000).tokens_per_second == 1000.0
    assert meter.average is not None and meter.average.tokens_per_second == 1000.0
    assert meter.recent is not None and meter.recent.tokens_per_second == 1000.0


def test_the_first_step_is_outside_of_recent_and_average() -> None:
    clock = FakeClock()
    meter = Meter(clock=clock)
    clock.now += 50.0  # building the model
    meter.start()
    clock.now += 9.0  # compiling
    assert meter.step(1000).seconds == 9.0
    assert meter.average is None and meter.recent is None
    clock.now += 2.0
    meter.step(1000)
    assert meter.average is not None and meter.average.seconds == 2.0 and meter.average.tokens == 1000


def test_evaluation_and_saving_belong_to_no_step() -> None:
    clock = FakeClock()
    meter = Meter(clock=clock)
    meter.start()
    clock.now += 1.0
    meter.step(1000)
    with meter.paused():
        clock.now += 30.0
    clock.now += 1.0
    assert meter.step(1000).seconds == 1.0
    with pytest.raises(RuntimeError), meter.paused():
        clock.now += 5.0
        raise RuntimeError("the evaluation failed")
    clock.now += 1.0
    assert meter.step(1000).seconds == 1.0


def test_recent_forgets_what_is_older_than_the_window() -> None:
    clock = FakeClock()
    meter = Meter(clock=clock, window=3)
    meter.start()
    for seconds in (1.0, 8.0, 8.0, 2.0, 2.0, 2.0):
        clock.now += seconds
        meter.step(1000)
    assert meter.recent is not None and meter.recent.seconds == 2.0
    assert meter.average is not None and meter.average.seconds == 22.0


def test_rows_keep_every_bit_of_a_float() -> None:
    row = json.loads(json.dumps(make_metrics().row()))
    assert row["loss"] == 0.1 + 0.2 and row["step"] == 3


def test_rows_hold_the_two_kinds_of_fields_and_nothing_else() -> None:
    assert set(make_metrics().row()) == {*DETERMINISTIC_FIELDS, *TIMING_FIELDS}
    assert "mfu" not in make_metrics(mfu=None).row()


def test_numbers_that_json_cannot_hold_become_null() -> None:
    row = make_metrics(loss=math.nan, grad_norm=math.inf, skipped=True).row()
    assert row["loss"] is None and row["grad_norm"] is None and row["skipped"] is True
    json.dumps(row, allow_nan=False)


def test_peak_memory_is_in_mib_and_sees_an_allocation() -> None:
    before = peak_memory_mb(torch.device("cpu"))
    held = torch.ones(2**26)  # 256 MiB
    after = peak_memory_mb(torch.device("cpu"))
    assert held[-1] == 1 and 10 < before < after + 1 < 1e6
    assert after >= 256


def test_the_loss_scale_is_in_the_row_where_there_is_one() -> None:
    assert "loss_scale" not in make_metrics().row()
    assert make_metrics(loss_scale=65536.0).row()["loss_scale"] == 65536.0
