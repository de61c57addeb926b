"""Where text may be cut without changing its ids, so that a long document needs no memory of its length.

sentencepiece keeps some tens of bytes for each character of the text that it encodes at once.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from megalite.data.sentencepiece_model import BPE, SentencePieceModel

_SPACES = (" ", "\u2581")  # the second is how a model writes the first


def cuts_at_spaces(content: bytes) -> bool:
    """Whether a model file gives the same ids when text is cut before a space that follows another character.

    It does when no piece reaches across (a byte pair is never merged there then), and text is not changed at its ends.
    """
    model = SentencePieceModel.parse(content)
    changes_ends = model.charsmap or model.adds_dummy_prefix or model.removes_extra_whitespaces
    reaching = re.compile(f"[^{_SPACES[1]} ][{_SPACES[1]} ]")
    return model.algorithm == BPE and not changes_ends and not any(reaching.search(p.text) for p in model.pieces)


def pieces_at_spaces(text: str, size: int) -> Iterator[str]:
    """`text` cut before spaces that follow another character, about every `size` characters where there are any."""
    begin = 0
    while len(text) - begin > size:
        cut = begin + size
        while cut < len(text) and (text[cut] != " " or text[cut - 1] in _SPACES):
            cut += 1
        yield text[begin:cut]
        begin = cut
    if begin < len(text):
        yield text[begin:]
