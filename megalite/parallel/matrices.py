"""Whole matrices out of the slices that ranks keep, for update rules that need them (Muon, and others of second order).

A rank keeps a slice of the flat memory of a unit (ZeRO), and each of its parameters may be cut over tensor-parallel
ranks. Rules ask for a value per element, a momentum for example, as matrices of the global model, and put back what
becomes of it; they know neither slices nor cuts, and ZeRO does not know them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megalite.axis import Axis
from megalite.parallel.buckets import Bucket, Span
from megalite.parallel.shard import Segments, Shard, shard_of


@dataclass(frozen=True)
class _Join:
    """How one dim of a parameter is put together: the segments of each rank of `axis`."""

    axis: Axis
    dim: int
    size: int
    segments: tuple[Segments, ...]

    def whole(self, part: Tensor) -> Tensor:
        """From this rank's part; ranks may hold different lengths, and the same segments."""
        lengths = [sum(length for _, length in of_rank) for of_rank in self.segments]
        rows = part.movedim(self.dim, 0)
        padded = rows.new_zeros((max(lengths), *rows.shape[1:]))
        padded[: rows.shape[0]] = rows
        gathered = self.axis.all_gather(padded)
        out = rows.new_zeros((self.size, *rows.shape[1:]))
        for rank, of_rank in enumerate(self.segments):
            begin = rank * max(lengths)
            for start, length in of_rank:
                out[start : start + length] = gathered[begin : begin + length]
                begin += length
        return out.movedim(0, self.dim)

    def part(self, whole: Tensor) -> Tensor:
        """This rank's part."""
        rows = whole.movedim(self.dim, 0)
        mine = [rows[start : start + length] for start, length in self.segments[self.axis.rank]]
        return torch.cat(mine).movedim(0, self.dim)


class WholeMatrices:
    """The last two dims of some parameters of a bucket, as in the global model; dims before them stay cut (experts).

    All ranks that share the bucket or cut its parameters must make it, and call `gather`, at the same time.
    """

    def __init__(self, bucket: Bucket, wanted: Callable[[Shard], bool]):
        self._bucket = bucket
        self._spans = [span for span in bucket.spans if wanted(shard_of(span.parameter))]
        self._joins = {span.parameter: _joins(shard_of(span.parameter)) for span in self._spans}

    def __len__(self) -> int:
        return len(self._spans)

    def gather(self, values: Tensor) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """(parameter, matrix [.., m, n]) from values laid out as this rank's slice of the bucket, one at a time."""
        flat = self._bucket.axis.all_gather(values) if self._bucket.zero else values
        for span in self._spans:
            matrix = span.of(flat)
            for join in self._joins[span.parameter]:
                matrix = join.whole(matrix)
            yield span.parameter, matrix

    def slice_of(self, span: Span, matrix: Tensor) -> Tensor:
        """What `span`, of a segment of this rank, holds of its parameter's matrix, flat."""
        for join in self._joins[span.parameter]:
            matrix = join.part(matrix)
        flat = matrix.reshape(-1)
        return flat if span.run is None else flat[slice(*span.run)]


def _joins(shard: Shard) -> Sequence[_Join]:
    """The cuts of the last two dims."""
    return [
        _Join(cut.axis, cut.dim, shard.shape[cut.dim], tuple(cut.axis.gather_objects(cut.segments)))
        for cut in shard.cuts
        if cut.axis.size > 1 and cut.dim >= len(shard.shape) - 2
    ]
