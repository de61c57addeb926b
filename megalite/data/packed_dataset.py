"""Rows of whole documents, padded where none fits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from megalite.data.cache import cached_arrays, key_of
from megalite.data.indexed import IndexedDataset
from megalite.data.packing import WINDOW, cut_documents, draw_order, pack_best_fit
from megalite.data.rows import DocumentRows, DocumentRules, Piece

INDEX_VERSION = 1


class PackedDataset(DocumentRows):
    """Rows of `seq_len` tokens that hold whole documents (sequences of `source`), best fit or one each.

    pack "best_fit": documents are packed into rows by best-fit decreasing, `window` at a time; one that is longer
    than a row is cut every `seq_len` tokens, and no label is lost at such a cut. "none": one document a row, cut to its
    length; what is beyond it is not used. The rest of a row is padding. Rows are made once, for one epoch, and drawn
    in an order shuffled from `seed`, for as many epochs as `num_samples` needs (None: one); `len(dataset)` counts
    whole epochs.

    The index is cached in `cache_dir` under a hash of everything it depends on, as that of GPTDataset is.
    Raises ValueError for a split without tokens.
    """

    def __init__(
        self,
        source: IndexedDataset,
        *,
        pack: Literal["best_fit", "none"],
        seq_len: int,
        seed: int,
        rules: DocumentRules | None = None,
        num_samples: int | None = None,
        sequences: tuple[int, int] | None = None,
        split_name: str = "train",
        vocab_size: int | None = None,
        cache_dir: Path | None = None,
        window: int = WINDOW,
    ):
        if seq_len < 1:
            raise ValueError(f"data.seq_len={seq_len} must be at least 1")
        rules = rules if rules is not None else DocumentRules()
        super().__init__(source, seq_len=seq_len, rules=rules, vocab_size=vocab_size)
        self.pack, self.split_name = pack, split_name
        self.first, self.last = sequences if sequences is not None else (0, len(source))
        lengths = source.lengths[self.first : self.last]
        self.tokens_per_epoch = int(lengths.sum(dtype=np.int64))
        if self.tokens_per_epoch == 0:
            raise ValueError(
                f"the {split_name} split of {source.prefix} has {len(lengths)} of {len(source)} sequences and no tokens"
                " to pack; change data.split"
            )
        self.index, self.bounds, self.order = self._arrays(lengths, seed, num_samples, cache_dir, window)

    def _arrays(
        self, lengths: NDArray[np.int32], seed: int, num_samples: int | None, cache_dir: Path | None, window: int
    ) -> tuple[NDArray[Any], NDArray[np.int64], NDArray[Any]]:
        """PIECE [pieces] in the order of rows, where each row begins among them, and the row of each sample."""

        def build() -> dict[str, NDArray[Any]]:
            pieces = cut_documents(lengths, self.first, self.seq_len, keep_rest=self.pack == "best_fit")
            if self.pack == "none":
                return {"pieces": pieces, "rows": np.arange(len(pieces) + 1)}
            pieces, rows = pack_best_fit(pieces, self.seq_len, seed=seed, window=window)
            return {"pieces": pieces, "rows": rows}

        settings = {
            "version": INDEX_VERSION, "pack": self.pack, "seq_len": self.seq_len, "seed": seed, "first": self.first,
            "window": window,
        }  # fmt: skip
        key = "pack-" + key_of(settings, lengths) if cache_dir is not None else ""
        packed = cached_arrays(
            cache_dir, key, {"pieces": (None,), "rows": (None,)}, build,
            what=f"rows of the {len(lengths)} documents of {self.source.prefix}", seconds=1e-6 * len(lengths),
        )  # fmt: skip
        return packed["pieces"], packed["rows"], draw_order(len(packed["rows"]) - 1, num_samples, seed=seed)

    @property
    def num_rows(self) -> int:
        """Different rows: samples of one epoch."""
        return len(self.bounds) - 1

    @property
    def num_epochs(self) -> int:
        """How often the split is read."""
        return len(self.order) // self.num_rows

    def __len__(self) -> int:
        return len(self.order)

    def pieces(self, i: int) -> Iterator[Piece]:
        """The documents of sample i; IndexError beyond the last sample."""
        if not 0 <= i < len(self):
            raise IndexError(f"sample {i} of {len(self)} in the {self.split_name} split")
        row = int(self.order[i])
        for sequence, begin, length in self.index[self.bounds[row] : self.bounds[row + 1]].tolist():
            # The first token after a cut is the last label before it. A piece that is cut fills its row.
            yield Piece(sequence, begin, min(int(self.source.lengths[sequence]) - begin, length + self.extra))

    @property
    def report(self) -> str:
        """How documents fill the rows, for people."""
        tokens, places = int(self.index["length"].sum()), self.num_rows * self.seq_len
        text = (
            f"{self.num_rows} rows of {self.seq_len} tokens, pack {self.pack}: {len(self.index) / self.num_rows:.1f}"
            f" documents a row, {1 - tokens / places:.1%} padding"
        )
        lost = self.tokens_per_epoch - tokens
        return text + (f", {lost / self.tokens_per_epoch:.1%} of all tokens are beyond the row" if lost else "")
