"""A picture of bytes: stacked bars of kinds of memory, one for each rank or variant."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence

COLOURS = {
    "parameters": "#2f5d8a", "gradients": "#4f8fc0", "master": "#8fbcdb", "optimizer": "#c6dcec",
    "batch": "#999999", "activations": "#d9822b", "loss": "#edb26a", "deferred": "#b5651d", "messages": "#f4d3a8",
    "unit gradients": "#4c8c4a", "unit parameters": "#7fb77e", "reduction": "#b9d9b8", "recompute": "#8c6bb1",
    "logits": "#c7b3dd",
}  # fmt: skip
"""State in blues, what micro-batches leave in oranges, what comes and goes within an action in greens and violets."""

_GIB = 2**30
_VISIBLE = 0.002
"""Kinds below this part of the highest bar everywhere are left out."""


def memory_png(title: str, bars: Sequence[tuple[str, Mapping[str, int]]], capacity: int | None = None) -> bytes:
    """The bars (name, bytes by kind) as a PNG; `capacity`: bytes of a device, drawn as a line."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    highest = max(sum(kinds.values()) for _, kinds in bars)
    figure = Figure(figsize=(max(6.0, 1.6 + 0.9 * len(bars) + 2.2), 4.4), layout="constrained")
    axes = figure.add_subplot()
    unit, name = (_GIB, "GiB") if highest >= _GIB else (2**20, "MiB")
    below = [0.0] * len(bars)
    for kind, colour in COLOURS.items():
        heights = [kinds.get(kind, 0) / unit for _, kinds in bars]
        if max(heights) * unit >= _VISIBLE * highest:
            axes.bar(range(len(bars)), heights, bottom=below, color=colour, label=kind, width=0.7)
            below = [low + height for low, height in zip(below, heights, strict=True)]
    for place, top in enumerate(below):
        axes.annotate(f"{top:.1f}", (place, top), ha="center", va="bottom", fontsize=9)
    if capacity is not None:
        axes.axhline(capacity / unit, color="#c0392b", linestyle="--", linewidth=1.2, label="device")
    axes.set_xticks(range(len(bars)), [label for label, _ in bars])
    axes.set_ylabel(f"{name} on a rank")
    axes.set_title(title, fontsize=11)
    axes.margins(y=0.12)
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="outside right center", frameon=False, fontsize=9)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    buffer = io.BytesIO()
    FigureCanvasAgg(figure).print_png(buffer)
    return buffer.getvalue()
