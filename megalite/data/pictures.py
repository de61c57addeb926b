"""Pictures of token files: how long documents are, and which dataset a blend draws from."""

from __future__ import annotations

import io
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

_BINS = 60
_COLOURS = ("#4269d0", "#efb118", "#ff725c", "#6cc5b0", "#3ca951", "#ff8ab7", "#a463f2", "#97bbf5", "#9c6b4e")


def data_png(lengths: Mapping[str, NDArray[np.int64]], order: NDArray[Any] | None, names: Sequence[str]) -> bytes:
    """A PNG: a histogram of document lengths for each file and, with `order`, its share of samples over the run.

    lengths: of all documents of each file. order: the dataset of each sample, numbered as `names` are.
    """
    from matplotlib.figure import Figure  # slow to import, and only pictures need it

    figure = Figure(figsize=(9, 3.4 * (1 + (order is not None))), layout="constrained")
    axes = figure.subplots(1 + (order is not None), 1, squeeze=False)[:, 0]
    longest = max((int(n.max(initial=1)) for n in lengths.values()), default=1)
    edges = np.unique(np.geomspace(1, longest + 1, _BINS).astype(np.int64))
    for k, (name, values) in enumerate(lengths.items()):
        counts, _ = np.histogram(values, bins=edges)
        share = counts / max(len(values), 1)
        axes[0].stairs(share, edges, color=_COLOURS[k % len(_COLOURS)], label=f"{name} ({len(values):,} documents)")
    axes[0].set(xscale="log", xlabel="tokens in a document", ylabel="share of documents", title="Document lengths")
    axes[0].legend(fontsize="small", frameon=False)
    if order is not None:
        _draw_shares(axes[1], order, names)
    target = io.BytesIO()
    figure.savefig(target, format="png", dpi=120)
    return target.getvalue()


def _draw_shares(axes: Any, order: NDArray[Any], names: Sequence[str]) -> None:
    """Shares of samples, in a hundred parts of the run."""
    edges = np.linspace(0, len(order), min(100, len(order)) + 1).astype(np.int64)
    counts = np.stack([np.bincount(order[a:b], minlength=len(names)) for a, b in itertools.pairwise(edges)])
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    places = (edges[:-1] + edges[1:]) / 2
    colours = [_COLOURS[k % len(_COLOURS)] for k in range(len(names))]
    axes.stackplot(places, shares.T, labels=names, colors=colours)
    axes.set(xlim=(0, max(len(order), 1)), ylim=(0, 1), xlabel="sample", ylabel="share", title="What the blend draws")
    axes.legend(loc="upper right", fontsize="small", framealpha=0.8)
