"""What a person sees."""

import io

from rich.console import Console
from rich.text import Text

from megalite.train.metrics import Speed
from megalite.train.progress import ProgressView, clock_time, loss_curve, step_line
from tests.train.test_metrics import make_metrics


def test_step_line_holds_what_matters() -> None:
    line = step_line(make_metrics(loss=2.5, mfu=None), Speed(32_000, 2.0), num_steps=103)
    assert line == "step   3/103 | loss 2.5000 | grad norm 1.500 | lr 1.00e-03 | 16,000 tokens/s | ETA 3:20"
    assert "MFU 50.0%" in step_line(make_metrics(), Speed(1, 1.0), num_steps=9)
    assert "SKIPPED" in step_line(make_metrics(skipped=True), Speed(1, 1.0), num_steps=9)


def test_clock_time() -> None:
    assert [clock_time(s) for s in (0, 59.4, 61, 3600, 90_061)] == ["0:00", "0:59", "1:01", "1:00:00", "25:01:01"]


def test_no_bar_where_there_is_no_terminal() -> None:
    text = io.StringIO()
    view = ProgressView(Console(file=text), num_steps=10)
    view.start(0)
    view.show(make_metrics(), Speed(1, 1.0))
    view.stop()
    assert text.getvalue() == ""


def test_the_bar_shows_the_state_in_a_terminal() -> None:
    text = io.StringIO()
    view = ProgressView(Console(file=text, force_terminal=True, width=80), num_steps=1000)
    view.start(2)
    view.show(make_metrics(step=300, loss=2.5, grad_norm=12.5), Speed(123_456, 1.0))
    view.stop()
    shown = Text.from_ansi(text.getvalue()).plain
    assert "step 300/1000" in shown
    assert "loss 2.5000  grad 12.50  lr 1.0e-03  123,456 tok/s  ETA 11:40" in shown


def test_loss_curve_falls_from_left_to_right() -> None:
    curve = loss_curve([4.0, 3.0, 2.0, 1.0], height=4).splitlines()
    assert curve[0].endswith("┤█") and curve[3].endswith("┤███▁")
    assert curve[0].startswith("   3.625") and curve[3].startswith("   1.375")
    assert curve[-1].split() == ["step", "1", "4"]


def test_loss_curve_averages_steps_into_columns() -> None:
    curve = loss_curve([float(step) for step in range(1000)], width=10, height=8).splitlines()
    assert len(curve[-2]) == 10 + 10
    assert curve[0].startswith(f"{49.5 + 900 * 7.5 / 8:8.3f}")


def test_loss_curve_leaves_out_what_is_not_finite() -> None:
    curve = loss_curve([2.0, None, float("nan"), 1.0], height=2).splitlines()
    assert curve[1].endswith("┤█  ▁")
    assert loss_curve([1.0]) == loss_curve([]) == loss_curve([None, None]) == ""


def test_loss_curve_of_a_constant() -> None:
    assert "▁▁▁" in loss_curve([2.0, 2.0, 2.0])
