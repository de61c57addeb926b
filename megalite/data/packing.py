"""Which documents share a row: best-fit-decreasing packing, and one document a row, in numpy.

Best fit keeps documents whole at almost no padding ("Fewer Truncations Improve Language Modeling", Ding et al., 2024,
arXiv:2404.10830). Documents of one length are placed together, so that the work grows with the number of different
lengths rather than of documents.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megalite.data.gpt_index import SEPARATE_LAST_EPOCH

WINDOW = 1 << 20
"""Pieces that are packed together; rows never mix windows."""
PIECE = np.dtype([("sequence", np.int64), ("begin", np.int64), ("length", np.int64)])


def cut_documents(lengths: NDArray[np.int32], first: int, seq_len: int, *, keep_rest: bool = True) -> NDArray[Any]:
    """PIECE [n]: the sequences `first`, `first` + 1, ... cut every `seq_len` tokens; empty ones have no piece.

    Without `keep_rest` only the first piece of each.
    """
    sizes = lengths.astype(np.int64)
    counts = -(-sizes // seq_len)
    if not keep_rest:
        counts = np.minimum(counts, 1)
    sequence = np.repeat(np.arange(len(sizes)), counts)
    place = np.arange(len(sequence)) - np.repeat(np.cumsum(counts) - counts, counts)
    pieces = np.empty(len(sequence), dtype=PIECE)
    pieces["sequence"], pieces["begin"] = first + sequence, place * seq_len
    pieces["length"] = np.minimum(sizes[sequence] - pieces["begin"], seq_len)
    return pieces


def pack_best_fit(
    pieces: NDArray[Any], seq_len: int, *, seed: int, window: int = WINDOW
) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """(The pieces in the order of rows, int64 [rows + 1]: where each row begins among them).

    Pieces are shuffled and packed `window` at a time; inside a row they stand in shuffled order.
    """
    pieces = pieces[np.random.RandomState(seed).permutation(len(pieces))]
    parts, bounds, done = [pieces[:0]], [np.zeros(1, dtype=np.int64)], 0
    for begin in range(0, len(pieces), window):
        part = pieces[begin : begin + window]
        rows = best_fit_rows(part["length"], seq_len)
        parts.append(part[np.argsort(rows, kind="stable")])
        bounds.append(done + np.cumsum(np.bincount(rows)))
        done += len(part)
    return np.concatenate(parts), np.concatenate(bounds)


def best_fit_rows(lengths: NDArray[np.int64], seq_len: int) -> NDArray[np.int64]:
    """The row of each piece: the longest first, each into the fullest row that has room, the earliest of equals."""
    order = np.argsort(-lengths, kind="stable")
    longest_first = lengths[order]
    begins = np.flatnonzero(np.diff(longest_first, prepend=-1))
    placed = np.empty(len(lengths), dtype=np.int64)
    rows = _OpenRows(seq_len)
    for begin, end in zip(begins.tolist(), [*begins[1:].tolist(), len(lengths)], strict=True):
        rows.place(int(longest_first[begin]), placed[begin:end])
    result = np.empty_like(placed)
    result[order] = placed
    return result


@dataclass
class _OpenRows:
    """Rows by the room that is left in them; `sizes` has bit n where a row with room n exists."""

    seq_len: int
    num_rows: int = 0
    sizes: int = 0
    by_room: dict[int, NDArray[np.int64]] = field(default_factory=dict)

    def place(self, length: int, out: NDArray[np.int64]) -> None:
        """Writes the rows of len(out) pieces of one `length`, in the order in which best fit would place them.

        A row that takes a piece and has room for another is now the fullest with room, so it takes that one too.
        """
        done = 0
        while done < len(out):
            room, rows = self._fullest(length, len(out) - done)
            each = room // length
            used = min(len(rows), -(-(len(out) - done) // each))
            here = min(used * each, len(out) - done)
            out[done : done + here] = np.repeat(rows[:used], each)[:here]
            done += here
            left = here - (used - 1) * each  # the last row may have room for more
            self._give_back(room, rows[used:])
            self._give_back(room - each * length, rows[: used - 1])
            self._give_back(room - left * length, rows[used - 1 : used])

    def _fullest(self, length: int, count: int) -> tuple[int, NDArray[np.int64]]:
        """Takes out the rows with the least room for `length`; else new ones, enough for `count` pieces."""
        fitting = self.sizes >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1
            self.sizes ^= 1 << room
            return room, self.by_room.pop(room)
        first, needed = self.num_rows, -(-count // (self.seq_len // length))
        self.num_rows += needed
        return self.seq_len, np.arange(first, first + needed, dtype=np.int64)

    def _give_back(self, room: int, rows: NDArray[np.int64]) -> None:
        if not room or not len(rows):
            return
        if self.sizes >> room & 1:
            rows = np.sort(np.concatenate((self.by_room[room], rows)))
        self.by_room[room] = rows
        self.sizes |= 1 << room


def draw_order(num_rows: int, num_samples: int | None, *, seed: int) -> NDArray[Any]:
    """The row of each sample, [epochs x num_rows]: whole epochs, as many as `num_samples` needs (None: one).

    As end-to-end samples are, those of all epochs are shuffled together, the last epoch apart when less than 80% of it
    is needed.
    """
    assert num_rows > 0
    epochs = max(1, -(-num_samples // num_rows)) if num_samples is not None else 1
    order = np.tile(np.arange(num_rows, dtype=np.uint32 if num_rows < 2**32 else np.int64), epochs)
    before = (epochs - 1) * num_rows
    needed = (num_samples if num_samples is not None else num_rows) - before
    random = np.random.RandomState(seed)
    if before == 0 or needed >= int(SEPARATE_LAST_EPOCH * num_rows):
        random.shuffle(order)
    else:
        random.shuffle(order[:before])
        random.shuffle(order[before:])
    return order
