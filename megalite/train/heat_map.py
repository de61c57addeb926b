"""Pictures of expert loads over time: a panel per layer, experts upwards, steps to the right."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.cm import ScalarMappable

MAX_BINS = 256
"""Columns of a panel at most; each stands for as many steps as it takes."""

_DOUBLINGS = 2.0
"""The colours end at 1/4 and at 4 times the even share."""
_NO_TOKEN = "#ffd400"
_NO_DATA = "#d8d8d8"


class LoadHistory:
    """Tokens of each expert over the steps of a run, in bins that double their width when the run outgrows them.

    What it holds is a function of the rows that were added, so that reading them again after a resume restores it.
    """

    def __init__(self, layers: Sequence[int], num_experts: int):
        self.layers, self.steps_per_bin = tuple(layers), 1
        self._tokens = np.zeros((MAX_BINS, len(self.layers), num_experts))
        self._num_bins = 0

    def add(self, step: int, tokens: NDArray[np.int64]) -> None:
        """Adds the tokens [layers, num_experts] of `step`, counted from 1."""
        while (step - 1) // self.steps_per_bin >= MAX_BINS:
            self._tokens[: MAX_BINS // 2] = self._tokens[::2] + self._tokens[1::2]
            self._tokens[MAX_BINS // 2 :] = 0
            self.steps_per_bin *= 2
            self._num_bins = -(-self._num_bins // 2)
        place = (step - 1) // self.steps_per_bin
        self._tokens[place] += tokens
        self._num_bins = max(self._num_bins, place + 1)

    def of_layer(self, place: int) -> NDArray[np.float64]:
        """[bins so far, num_experts] of the layer in `place`."""
        return self._tokens[: self._num_bins, place]


@dataclass(frozen=True, kw_only=True, eq=False)
class Panel:
    """One heat map."""

    title: str
    tokens: NDArray[np.float64]
    """[bins, num_experts]; a bin without any token was not recorded."""
    dead: Sequence[int] = ()
    """Experts to point at."""


@dataclass(frozen=True)
class _Sheet:
    """Places in inches: laying out a hundred panels automatically would take a minute."""

    num_panels: int
    columns: int
    num_experts: int

    @property
    def cell(self) -> tuple[float, float]:
        """Width and height of a panel with its title and the gap to the next one."""
        return max(3.3, 6.0 / self.columns), min(max(0.1 * self.num_experts, 1.4), 3.2) + 0.4

    @property
    def size(self) -> tuple[float, float]:
        """Width and height of the sheet."""
        return 0.7 + self.cell[0] * self.columns + 0.9, 0.4 + self.cell[1] * -(-self.num_panels // self.columns) + 0.5

    def box(self, left: float, top: float, width: float, height: float) -> tuple[float, float, float, float]:
        """A rectangle, its top measured from the top of the sheet, as matplotlib wants it."""
        across, down = self.size
        return left / across, 1.0 - (top + height) / down, width / across, height / down

    def panel(self, place: int) -> tuple[float, float, float, float]:
        """Where panel number `place` goes."""
        row, column = divmod(place, self.columns)
        width, height = self.cell
        return self.box(0.7 + column * width, 0.8 + row * height, width - 0.15, height - 0.4)


def draw(panels: Sequence[Panel], *, title: str, steps_per_bin: int, columns: int | None = None) -> bytes:
    """A PNG of all panels, side by side in `columns`, with one scale of colours."""
    # It takes a second to import and most runs need none of it. Without pyplot there is neither display nor state.
    from matplotlib import colormaps
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize
    from matplotlib.figure import Figure

    columns = columns if columns is not None else min(math.ceil(math.sqrt(len(panels))), 6)
    sheet = _Sheet(len(panels), columns, max(panel.tokens.shape[1] for panel in panels))
    figure = Figure(figsize=sheet.size, dpi=110)
    FigureCanvasAgg(figure)
    colours = ScalarMappable(
        Normalize(-_DOUBLINGS, _DOUBLINGS), colormaps["RdBu_r"].with_extremes(under=_NO_TOKEN, bad=_NO_DATA)
    )
    for place, panel in enumerate(panels):
        axis = figure.add_axes(sheet.panel(place))
        _fill(axis, panel, steps_per_bin, colours)
        axis.tick_params(labelsize=7, labelleft=place % columns == 0, labelbottom=place + columns >= len(panels))
    bar_height = min(sheet.cell[1] - 0.4, 2.2)
    bar = figure.colorbar(colours, cax=figure.add_axes(sheet.box(sheet.size[0] - 0.75, 0.8, 0.13, bar_height)))
    bar.set_ticks(range(-2, 3), labels=["1/4", "1/2", "even", "2x", "4x"])
    bar.ax.tick_params(labelsize=7)
    key = "colour: tokens of an expert / even share; yellow: no token; grey: not recorded; triangle: dead at the end"
    steps = "step" if steps_per_bin == 1 else f"step ({steps_per_bin} in a column)"
    for left, top, size, text in (
        (0.1, 0.25, 10, title), (0.1, 0.45, 7, key), (sheet.size[0] / 2, sheet.size[1] - 0.1, 8, steps),
    ):  # fmt: skip
        figure.text(*sheet.box(left, top, 0, 0)[:2], text, fontsize=size)
    figure.text(0.15 / sheet.size[0], 0.5, "expert", fontsize=8, rotation=90, va="center")
    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    return picture.getvalue()


def _fill(axis: Axes, panel: Panel, steps_per_bin: int, colours: ScalarMappable) -> None:
    from matplotlib.ticker import MaxNLocator

    bins, experts = panel.tokens.shape
    last = bins * steps_per_bin + 0.5
    shares = np.maximum(log_share(panel.tokens), -2 * _DOUBLINGS)  # below the scale, for "no token"
    axis.imshow(
        shares.T, cmap=colours.get_cmap(), vmin=-_DOUBLINGS, vmax=_DOUBLINGS, aspect="auto", origin="lower",
        interpolation="nearest", extent=(0.5, last, -0.5, experts - 0.5),
    )  # fmt: skip
    axis.plot([last] * len(panel.dead), panel.dead, "<", color="black", markersize=4, clip_on=False)
    axis.spines[:].set_linewidth(0.5)
    axis.spines[:].set_position(("outward", 2))  # or they hide the outermost of many experts
    axis.set_title(panel.title, fontsize=8, pad=5)
    axis.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axis.yaxis.set_major_locator(MaxNLocator(8, integer=True))


def log_share(tokens: NDArray[np.float64]) -> NDArray[np.float64]:
    """log2 of tokens [bins, experts] over the even share, within the scale; -inf without a token, nan without data."""
    total = tokens.sum(1, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        value = np.log2(tokens * tokens.shape[1] / total)
    return np.where(np.isfinite(value), value.clip(-_DOUBLINGS, _DOUBLINGS), value)
