"""The few rows before each place that a local operation sees, fetched from the ranks that hold them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megalite.axis import Axis
from megalite.parallel.context import RowCut


@dataclass(frozen=True, kw_only=True)
class Halo:
    """What the last `depth` places before each one are, for rows cut over `axis` in any way and documents inside them.

    near, for each distance bool [s_local - distance, b]: whether the row `distance` before in memory is the one that
    many places before, in the same document. far, for each distance (rows that see, rows fetched), int64 [n]: the
    others that exist. Rows are numbered as in [s_local x b, ..]. Each is fetched once, whoever sees it here.
    """

    axis: Axis
    near: Sequence[Tensor]
    far: Sequence[tuple[Tensor, Tensor]]
    sent: Tensor
    """int64 [n]: the rows of this rank that others (and itself) fetch, by receiver."""
    send_rows: Sequence[int]
    receive_rows: Sequence[int]

    def fetch(self, inputs: Callable[[Tensor], Tensor]) -> Callable[[], Tensor]:
        """Begins to fetch inputs of rows, `inputs` here [n] -> [n, h]; the result waits for them, [n, h]."""
        return self.axis.start_all_to_all(inputs(self.sent), self.send_rows, self.receive_rows).wait

    def send_home(self, grads: Tensor) -> Callable[[], Sequence[tuple[Tensor, Tensor]]]:
        """Begins to return gradients of fetched rows; the result waits: [(this rank's rows, what to add to theirs)]."""
        pending = self.axis.start_all_to_all(grads, self.receive_rows, self.send_rows)
        sizes = list(self.send_rows)
        # No receiver has a row twice, so that the sum over them has one order.
        return lambda: list(zip(self.sent.split(sizes), pending.wait().split(sizes), strict=True))


def find_halo(cut: RowCut, depth: int) -> Halo | None:
    """The halo of rows cut as `cut` says.

    None where each row sees just the `depth` above it: rows in one piece, of one document. Every rank works out the
    sends and receives of all from the places alone.
    """
    if cut.axis.size == 1 and cut.documents is None:
        return None
    places, documents = cut.places, cut.documents
    ranks, length, width = places.shape
    flat = places.flatten(0, 1)
    starts = torch.zeros_like(places) if documents is None else documents.gather(0, flat).view_as(places)
    index = torch.arange(ranks * length, device=places.device)[:, None].expand_as(flat)
    holder = torch.empty_like(flat).scatter_(0, flat, index)  # rank x length + local index, by place
    column = torch.arange(width, device=places.device).expand(length, width)
    receiver = torch.arange(ranks, device=places.device)[:, None, None]

    near, needs, wanted = [], [], []
    for distance in range(1, depth + 1):
        exists = places - distance >= starts
        above = torch.zeros_like(exists)
        above[:, distance:] = exists[:, distance:] & (places[:, distance:] - places[:, :-distance] == distance)
        near.append(above[cut.axis.rank, distance:])
        source = holder.gather(0, (flat - distance).clamp(min=0)).view_as(places)
        # Sorted, these numbers are in the order of receivers, then of senders.
        key = (receiver * ranks * length + source) * width + column
        missing = exists & ~above
        needs.append(torch.where(missing, key, -1)[cut.axis.rank].flatten())
        wanted.append(key[missing])
    keys = torch.cat(wanted).unique()
    to = keys // (ranks * length * width)
    row = keys % (ranks * length * width)
    sender = row // (length * width)
    mine, here = to == cut.axis.rank, sender == cut.axis.rank
    far = []
    for need in needs:
        sees = (need >= 0).nonzero().flatten()
        far.append((sees, torch.searchsorted(keys[mine], need[sees])))
    return Halo(
        axis=cut.axis,
        near=near,
        far=far,
        sent=row[here] % (length * width),
        send_rows=torch.bincount(to[here], minlength=ranks).tolist(),
        receive_rows=torch.bincount(sender[mine], minlength=ranks).tolist(),
    )
