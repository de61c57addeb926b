"""Shows who computes which part of the attention matrix under context parallelism, before anything runs.

`show_context.py --cp 4 --cp-mode ring,ulysses --seq-len 8192 --documents 5000,3000 --window 512`

Draws each mode from the plan that its ranks would follow: the colour of a cell is the rank whose queries are there, the
number is the step of its plan in which it computes the cell (0 with its own keys; under ring, t with those of rank
+ t). Beside it: the attention work of every rank, the imbalance, and the bytes that each rank sends in one layer,
forward and backward, for one row.
"""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Literal

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import Tensor

from megalite.batch import MicroBatch
from megalite.files import output_file, replace_bytes, replace_json
from megalite.grid import CONTEXT_MODES, ParallelConfig, RankGrid
from megalite.parallel.context import pad_rows, row_multiple, row_places
from megalite.parallel.context_picture import COLOURS, ContextPicture, Heads, bytes_text, context_picture, legend
from megalite.parallel.context_plan import Sight
from megalite.parallel.head_exchange import head_exchange_problems

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def main() -> None:
    """Draws the modes that were asked for."""
    arguments = _parser().parse_args()
    try:
        pictures = list(_pictures(arguments))
    except ValueError as error:
        sys.exit(f"show_context.py: {error}")
    console = Console()
    for picture in pictures:
        console.print(_drawing(picture), soft_wrap=True)
        console.print(_table(picture))
    for form in ("svg", "png"):
        if (path := getattr(arguments, form)) is not None:
            replace_bytes(path, draw(pictures, form))
    if arguments.json is not None:
        replace_json(arguments.json, [_figures(picture) for picture in pictures])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--cp", type=_positive, default=4, help="context-parallel ranks (default 4)")
    parser.add_argument(
        "--cp-mode", default=",".join(CONTEXT_MODES), help=f"a list of {', '.join(CONTEXT_MODES)}; default: all"
    )
    parser.add_argument("--cp-ulysses", type=_positive, default=2, help="ranks of a block of ulysses_ring (default 2)")
    parser.add_argument("--seq-len", type=_positive, help="tokens of the row (default: the documents, or 8192)")
    parser.add_argument("--documents", type=_lengths, help="lengths of packed documents; what is left is one more")
    parser.add_argument("--window", type=_count, default=0, help="tokens that a token sees at most (0: no limit)")
    parser.add_argument("--num-heads", type=_positive, default=8)
    parser.add_argument("--num-kv-heads", type=_positive, default=8)
    parser.add_argument("--head-dim", type=_positive, default=128)
    parser.add_argument("--bytes", type=_positive, default=2, help="of an element of activations (default 2)")
    parser.add_argument("--cells", type=_positive, default=32, help="cells of a side of the picture (default 32)")
    parser.add_argument("--svg", type=output_file, metavar="FILE", help="write the picture")
    parser.add_argument("--png", type=output_file, metavar="FILE", help="write the picture")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write the figures")
    return parser


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text} must be a whole number of at least 0")
    return int(text)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} must be a whole number of at least 1")
    return int(text)


def _lengths(text: str) -> list[int]:
    try:
        return [_positive(part) for part in text.split(",")]
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{text}: the length {error}") from None


def _pictures(arguments: argparse.Namespace) -> Iterator[ContextPicture]:
    heads = Heads(
        num_heads=arguments.num_heads,
        kv_heads=arguments.num_kv_heads,
        head_size=arguments.head_dim,
        bytes_per_element=arguments.bytes,
    )
    if heads.num_heads % heads.kv_heads:
        raise ValueError(f"--num-heads={heads.num_heads} is not divisible by --num-kv-heads={heads.kv_heads}")
    sight = _sight(arguments)
    for mode in arguments.cp_mode.split(","):
        parallel = ParallelConfig(cp=arguments.cp, cp_mode=mode, cp_ulysses=arguments.cp_ulysses)
        problems = RankGrid.problems(arguments.cp, parallel)
        problems = problems or head_exchange_problems(heads.num_heads, parallel.head_exchange_size(mode))
        if problems:
            raise ValueError("\n".join(problems))
        yield context_picture(sight, parallel, heads, cells=arguments.cells)


def _sight(arguments: argparse.Namespace) -> Sight:
    """What each token of the row sees, once it is padded and cut as in training."""
    lengths: list[int] = arguments.documents or []
    seq_len = arguments.seq_len or sum(lengths) or 8192
    if sum(lengths) > seq_len:
        raise ValueError(f"documents of {sum(lengths)} tokens do not fit into --seq-len={seq_len}")
    if seq_len > sum(lengths):
        lengths = [*lengths, seq_len - sum(lengths)]
    ends = torch.tensor([0, *lengths]).cumsum(0)
    starts = torch.repeat_interleave(ends[:-1], torch.tensor(lengths))[:, None]
    rows = pad_rows(_batch(seq_len, starts if len(lengths) > 1 else None), row_multiple(arguments.cp, 1, False))
    return Sight.causal(row_places(rows, arguments.cp, arguments.window), rows.documents, arguments.window)


def _batch(seq_len: int, documents: Tensor | None) -> MicroBatch:
    zeros = torch.zeros(seq_len, 1, dtype=torch.int64)
    return MicroBatch(
        tokens=zeros, labels=zeros, loss_mask=zeros.float(), positions=zeros, samples=zeros[0], step=0,
        documents=documents,
    )  # fmt: skip


_PANEL, _TOP, _LINE = 3.0, 0.55, 0.17  # inches


def draw(pictures: Sequence[ContextPicture], form: Literal["svg", "png"]) -> bytes:
    """The pictures side by side: colours are ranks, numbers the steps of their plans."""
    # Without pyplot there is neither display nor state, and most calls of this tool need no matplotlib at all.
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    entries = max(len(legend(picture)) for picture in pictures)
    width, height = len(pictures) * (_PANEL + 0.3) + 0.3, _TOP + _PANEL + (entries + 2) * _LINE + 0.15
    written = io.BytesIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "megalite"}):  # the same bytes each time
        figure = Figure(figsize=(width, height), dpi=120)
        FigureCanvasAgg(figure)
        for number, picture in enumerate(pictures):
            left = (0.3 + number * (_PANEL + 0.3)) / width
            axes = figure.add_axes((left, 1 - (_TOP + _PANEL) / height, _PANEL / width, _PANEL / height))
            _fill(axes, picture)
        figure.savefig(written, format=form, metadata={"Date": None} if form == "svg" else {})
    return written.getvalue()


def _fill(axes: Axes, picture: ContextPicture) -> None:
    """One panel: the attention matrix, its title above it, who is who below it."""
    from matplotlib.colors import to_rgba

    cells = len(picture.rank)
    colours = torch.full((cells, cells, 4), 0.95)
    for i, j in (picture.rank >= 0).nonzero().tolist():
        rank, share = int(picture.rank[i, j]), float(picture.share[i, j])
        colours[i, j] = torch.tensor(to_rgba(COLOURS[rank % len(COLOURS)], 0.35 + 0.65 * min(share, 1.0)))
        size = min(110 / cells, 8)
        axes.text(j, i, str(int(picture.step[i, j])), size=size, color="white", ha="center", va="center")
    axes.imshow(colours.numpy(), interpolation="nearest")
    for border in range(1, cells):
        axes.axhline(border - 0.5, color="white", linewidth=0.6)
        axes.axvline(border - 0.5, color="white", linewidth=0.6)
    axes.spines[:].set_visible(False)
    axes.set(xticks=[], yticks=[])
    inch = 1 / _PANEL
    axes.text(0, 1 + 0.24 * inch, picture.title, size=10, weight="bold", transform=axes.transAxes)
    axes.text(0, 1 + 0.07 * inch, "queries down, keys to the right", size=8, transform=axes.transAxes)
    said = [(None, f"imbalance of the work {picture.imbalance:.1%}", "sends"), *legend(picture)]
    for number, (colour, who, sends) in enumerate(said):
        y = -(0.2 + number * _LINE) * inch
        if colour is not None:
            axes.text(0, y, "\u25a0", size=11, color=colour, va="center", transform=axes.transAxes)
        axes.text(0.06 if colour else 0, y, who, size=8, va="center", transform=axes.transAxes)
        axes.text(1, y, sends, size=8, va="center", ha="right", transform=axes.transAxes)


def _drawing(picture: ContextPicture) -> Text:
    """Two columns a cell: the step in the colour of the rank."""
    text = Text(f"{picture.title}\n", style="bold")
    for ranks, steps in zip(picture.rank.tolist(), picture.step.tolist(), strict=True):
        for rank, step in zip(ranks, steps, strict=True):
            if rank < 0:
                text.append(" .", style="dim not bold")
            else:
                text.append(f"{step:2d}", style=f"not bold white on {COLOURS[rank % len(COLOURS)]}")
        text.append("\n")
    return text


def _table(picture: ContextPicture) -> Table:
    caption = f"imbalance of the work {picture.imbalance:.2%}"
    table = Table(box=SIMPLE_HEAD, caption=caption, padding=(0, 1, 0, 0))
    for column in ("", "rank", "(query, key) pairs x heads", "sends forward", "sends backward"):
        table.add_column(column, justify="left" if not column else "right")
    for rank, work in enumerate(picture.work.tolist()):
        colour = COLOURS[rank // picture.ranks_together % len(COLOURS)]
        sent = (bytes_text(part[rank]) for part in (picture.forward_bytes, picture.backward_bytes))
        table.add_row(Text("  ", style=f"on {colour}"), str(rank), f"{work:,}", *sent)
    return table


def _figures(picture: ContextPicture) -> dict[str, object]:
    return {
        "title": picture.title,
        "imbalance": picture.imbalance,
        "work": picture.work.tolist(),
        "forward_bytes": picture.forward_bytes.tolist(),
        "backward_bytes": picture.backward_bytes.tolist(),
        "rank": picture.rank.tolist(),
        "step": picture.step.tolist(),
    }


if __name__ == "__main__":
    main()
