"""What a person watching the run sees: a live bar in a terminal, a line every few steps, the loss curve at the end."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.table import Column

from megalite.train.metrics import Speed, StepMetrics

_EIGHTHS = " ▁▂▃▄▅▆▇█"


class ProgressView:
    """A rich bar at the foot of `console` when that is a terminal; elsewhere nothing but the logged lines."""

    def __init__(self, console: Console, *, num_steps: int):
        self._console, self._num_steps = console, num_steps
        self._bar: Progress | None = None
        self._task = TaskID(0)

    def start(self, step: int) -> None:
        """Shows the bar, at `step` steps done."""
        if not self._console.is_terminal:
            return
        self._bar = Progress(
            TextColumn("[bold]step {task.completed}/{task.total}", table_column=Column(no_wrap=True, min_width=8)),
            BarColumn(bar_width=8),
            TextColumn("{task.fields[state]}", table_column=Column(no_wrap=True)),
            console=self._console,
            transient=True,
            refresh_per_second=4,
        )
        self._task = self._bar.add_task("steps", total=self._num_steps, completed=step, state="")
        self._bar.start()

    def show(self, metrics: StepMetrics, speed: Speed) -> None:
        """A step is done, at `speed` a step."""
        if self._bar is not None:
            state = _short_state(metrics, speed, num_steps=self._num_steps)
            self._bar.update(self._task, completed=metrics.step, state=state)

    def stop(self) -> None:
        """Takes the bar away."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def step_line(metrics: StepMetrics, speed: Speed, *, num_steps: int) -> str:
    """The plain line of a step: step, loss, gradient norm, learning rate, speed, worst expert load, time left."""
    width = len(str(num_steps))
    parts = [
        f"step {metrics.step:>{width}}/{num_steps}",
        f"loss {metrics.loss:.4f}",
        f"grad norm {metrics.grad_norm:.3f}",
        f"lr {metrics.learning_rate:.2e}",
        f"{speed.tokens_per_second:,.0f} tokens/s",
    ]
    if metrics.moe is not None:
        parts.append(f"max violation {max(metrics.moe.max_violation):.2f}")
    if metrics.mfu is not None:
        parts.append(f"MFU {metrics.mfu:.1%}")
    parts.append("SKIPPED" if metrics.skipped else f"ETA {clock_time((num_steps - metrics.step) * speed.seconds)}")
    return " | ".join(parts)


def _short_state(metrics: StepMetrics, speed: Speed, *, num_steps: int) -> str:
    """What stands beside the bar in 80 columns."""
    remaining = clock_time((num_steps - metrics.step) * speed.seconds)
    return (
        f"loss {metrics.loss:.4f}  grad {metrics.grad_norm:.2f}  lr {metrics.learning_rate:.1e}"
        f"  {speed.tokens_per_second:,.0f} tok/s  ETA {remaining}"
    )


def clock_time(seconds: float) -> str:
    """`seconds` as m:ss or h:mm:ss."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def loss_curve(losses: Sequence[float | None], *, width: int = 64, height: int = 8, first_step: int = 1) -> str:
    """A small bar plot of `losses` over steps; each column is the mean of its steps. Empty below two finite losses.

    None and non-finite entries (skipped steps) are left out of the means.
    """
    columns = _column_means(losses, min(width, len(losses)))
    known = [value for value in columns if value is not None]
    if len(known) < 2:
        return ""
    low, high = min(known), max(known)
    span = (high - low) or 1.0
    # The lowest column keeps one eighth, so that it differs from a column without a value.
    levels = [None if v is None else 1 + round((v - low) / span * (8 * height - 1)) for v in columns]
    lines = []
    for row in range(height - 1, -1, -1):
        label = f"{low + span * (row + 0.5) / height:8.3f} "
        lines.append(label + "┤" + "".join(_cell(level, row) for level in levels).rstrip())
    last_step = first_step + len(losses) - 1
    ruler = f"step {first_step}".ljust(len(columns) - len(str(last_step)) - 1) + f" {last_step}"
    return "\n".join([*lines, " " * 9 + "└" + "─" * len(columns), " " * 10 + ruler])


def _column_means(losses: Sequence[float | None], num_columns: int) -> list[float | None]:
    means: list[float | None] = []
    for column in range(num_columns):
        begin, end = column * len(losses) // num_columns, (column + 1) * len(losses) // num_columns
        part = [loss for loss in losses[begin:end] if loss is not None and math.isfinite(loss)]
        means.append(sum(part) / len(part) if part else None)
    return means


def _cell(level: int | None, row: int) -> str:
    return _EIGHTHS[0 if level is None else min(max(level - 8 * row, 0), 8)]
