"""Tokens of a growing row as text: pieces that no later token changes, and an end at the first stop string."""

from __future__ import annotations

from collections.abc import Sequence

from megalite.data.tokenizer import Tokenizer

_BEFORE = 6
"""Tokens before the new ones that are decoded with them: a tokenizer may spell a token otherwise at a beginning."""
_UNFINISHED = "\ufffd"


class TextStream:
    """The text of a row's new tokens as they come.

    `push` returns what is certain by then: whole characters, and nothing with which a stop string may begin. `text` is
    everything so far, without the stop string and what follows it.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = (), stops: Sequence[str] = ()):
        self._tokenizer, self._stops = tokenizer, tuple(stop for stop in stops if stop)
        self._ids = list(prompt[-_BEFORE:])
        self._begin, self._read = 0, len(self._ids)
        self._given = 0
        self.text = ""
        self.stopped = False

    def push(self, token: int) -> str:
        """Takes a token; returns the text that is certain now."""
        self._ids.append(token)
        new = self._new_text()
        if new.endswith(_UNFINISHED):
            return ""  # part of a character: the rest may follow
        self._begin, self._read = self._read, len(self._ids)
        return self._add(new)

    def finish(self) -> str:
        """The text that was held back; no token follows."""
        piece = "" if self.stopped else self._add(self._new_text())
        self._begin = self._read = len(self._ids)
        return piece + self._give(len(self.text))

    def _new_text(self) -> str:
        """What the tokens since the last certain one add to the text before them."""
        before = self._tokenizer.decode(self._ids[self._begin : self._read])
        return self._tokenizer.decode(self._ids[self._begin :])[len(before) :]

    def _add(self, new: str) -> str:
        longest = max(map(len, self._stops), default=1)
        search_from = max(0, len(self.text) - longest + 1)
        self.text += new
        ends = [place for stop in self._stops if (place := self.text.find(stop, search_from)) >= 0]
        if ends:
            self.stopped = True
            self.text = self.text[: min(ends)]
            return self._give(len(self.text))
        return self._give(len(self.text) - self._held_back())

    def _held_back(self) -> int:
        """Characters at the end with which a stop string may begin."""
        lengths = {n for stop in self._stops for n in range(1, len(stop)) if self.text.endswith(stop[:n])}
        return max(lengths, default=0)

    def _give(self, end: int) -> str:
        piece = self.text[self._given : end]
        self._given = max(self._given, end)
        return piece
