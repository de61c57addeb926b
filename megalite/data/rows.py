"""Rows of tokens for language modelling, whatever way documents are laid into them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from megalite.data.indexed import FormatError, IndexedDataset
from megalite.data.loss_mask import loss_mask_of


class Sample(NamedTuple):
    """One row: tokens, labels, positions int64 [seq_len], loss_mask float32 [seq_len] (1 where the label counts).

    token_mask: bool [seq_len], False on padding (None: there is none). documents: int64 [seq_len], the place at which
    the document of each token begins (None: attention does not stop at documents). `loss_mask` and `positions` may
    be shared between samples and read-only; copy them before a change.
    """

    tokens: NDArray[np.int64]
    labels: NDArray[np.int64]
    loss_mask: NDArray[np.float32]
    positions: NDArray[np.int64]
    token_mask: NDArray[np.bool_] | None = None
    documents: NDArray[np.int64] | None = None


class SampleSource(Protocol):
    """Anything that a sampler can draw rows from."""

    def __len__(self) -> int: ...

    def __getitem__(self, i: int, /) -> Sample: ...


@dataclass(frozen=True, kw_only=True)
class DocumentRules:
    """Where documents end inside a row, and what that means; ValueError when an `eod` to look for is not known."""

    boundaries: Literal["index", "eod"] = "index"
    """Documents end where the index says, or after each `eod` (Megatron's rule for its attention mask)."""
    reset_attention: bool = False
    """Attention stays inside a document."""
    reset_positions: bool = False
    """Positions restart at each document."""
    eod: int | None = None
    """The id that ends a document, where it is known."""
    eod_mask_loss: bool = False
    """The labels that follow an `eod`, or belong to another document, do not count; without this they all do."""

    def __post_init__(self) -> None:
        needed = "eod_mask_loss" if self.eod_mask_loss else "data.boundaries=eod" if self.boundaries == "eod" else ""
        if needed and self.eod is None:
            raise ValueError(f"{needed} needs the id that ends a document; name the tokenizer")


class Piece(NamedTuple):
    """`length` tokens of a sequence of the source, from `begin` on."""

    sequence: int
    begin: int
    length: int


class DocumentRows(ABC):
    """Rows of `seq_len` tokens and their labels; a subclass says which pieces of documents fill row i.

    A row's labels are its tokens shifted by one, taken before the row is cut out of its text: with `extra` 1 the
    pieces hold one token more than the row, whose only use is as the last label. Padding is masked by place, never by
    value, and is a document of its own. With `vocab_size` each row read is checked (FormatError).
    """

    def __init__(
        self,
        source: IndexedDataset,
        *,
        seq_len: int,
        rules: DocumentRules,
        extra: int = 1,
        vocab_size: int | None = None,
    ):
        self.source, self.seq_len, self.rules, self.extra = source, seq_len, rules, extra
        self._vocab_size = vocab_size
        self._positions = _frozen(np.arange(seq_len, dtype=np.int64))
        self._full_mask = _frozen(np.ones(seq_len, dtype=np.float32))
        self._learnt = loss_mask_of(source)

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def pieces(self, i: int) -> Iterable[Piece]:
        """What row i is made of, in order: at most seq_len + extra tokens."""

    def __getitem__(self, i: int) -> Sample:
        row, count, starts = self._laid(i)
        size = min(count, self.seq_len)
        tokens = row[: self.seq_len]
        if self.rules.boundaries == "eod":
            starts = [0, *(np.flatnonzero(tokens[:size] == self.rules.eod) + 1).tolist()]
        labels = row[1:] if self.extra else np.append(row[1:], 0)
        if count < self.seq_len:
            starts.append(count)
        resets = self.rules.reset_attention or self.rules.reset_positions
        documents = _document_starts(starts, self.seq_len) if resets else None
        return Sample(
            tokens,
            labels,
            # The label of the last token that is there is unknown.
            self._learnt_part(i, self._loss_mask(tokens, count - 1, starts)),
            self._positions - documents if documents is not None and self.rules.reset_positions else self._positions,
            self._positions < size if size < self.seq_len else None,
            documents if self.rules.reset_attention else None,
        )

    def read(self, i: int) -> tuple[NDArray[np.int64], int]:
        """The int64 tokens of row i, [seq_len + extra], zero-padded, and how many of them are real."""
        row, count, _ = self._laid(i)
        return row, count

    def _laid(self, i: int) -> tuple[NDArray[np.int64], int, list[int]]:
        """`read`, and where the documents in the row begin."""
        row = np.zeros(self.seq_len + self.extra, dtype=np.int64)
        count, starts = 0, []
        for piece in self.pieces(i):
            if piece.length:
                starts.append(count)
                row[count : count + piece.length] = self.source.get(*piece)
                count += piece.length
        # Seen as unsigned, a negative id is large too.
        if self._vocab_size is not None and int(row.view(np.uint64).max()) >= self._vocab_size:
            raise FormatError(
                f"{self.source.prefix} has token id {row[row.view(np.uint64).argmax()]} in sample {i}, but the"
                f" vocabulary has {self._vocab_size} entries; is it the right tokenizer?"
            )
        return row, count, starts

    def _learnt_part(self, i: int, mask: NDArray[np.float32]) -> NDArray[np.float32]:
        """`mask` less the labels of row i that the mask beside the tokens (see loss_mask) leaves out."""
        if self._learnt is None:
            return mask
        row = np.zeros(self.seq_len + 1, dtype=np.float32)
        count = 0
        for piece in self.pieces(i):
            row[count : count + piece.length] = self._learnt.get(*piece)
            count += piece.length
        return mask * row[1:]

    def _loss_mask(self, tokens: NDArray[np.int64], known: int, starts: list[int]) -> NDArray[np.float32]:
        """Which labels count, of which the first `known` are there; `starts` may name the place after the row."""
        eod = self.rules.eod if self.rules.eod_mask_loss else None
        if known >= self.seq_len and eod is None:
            return self._full_mask
        mask = self._full_mask.copy()
        mask[max(known, 0) :] = 0.0
        if eod is not None:
            mask[np.array(starts[1:], dtype=np.int64) - 1] = 0.0
            mask[tokens == eod] = 0.0
        return mask


def _document_starts(starts: list[int], seq_len: int) -> NDArray[np.int64]:
    """int64 [seq_len]: the start of each place's document, from the starts of all."""
    inside = np.array([start for start in starts if start < seq_len], dtype=np.int64)
    return np.repeat(inside, np.diff(inside, append=seq_len))


def _frozen(values: NDArray[Any]) -> NDArray[Any]:
    values.flags.writeable = False
    return values
