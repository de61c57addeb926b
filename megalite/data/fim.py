"""Fill-in-the-middle: some documents are rearranged so that a model learns to write what stands between two texts.

Bavarian et al., "Efficient Training of Language Models to Fill in the Middle", 2022 (arXiv:2207.14255).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

SENTINELS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    ("<PRE>", "<SUF>", "<MID>"),
    ("\u2581<PRE>", "\u2581<SUF>", "\u2581<MID>"),
)
"""Names under which tokenizers have the three ids."""


@dataclass(frozen=True, kw_only=True)
class FimOptions:
    """Which documents are rearranged, and how."""

    rate: float = 0.0
    """Share of documents that are."""
    spm_rate: float = 0.5
    """Of these, the share with the suffix first (SPM); the others have the prefix first (PSM)."""
    seed: int = 0
    """Decides, with the text of a document alone, what happens to it."""

    def problems(self) -> list[str]:
        """Values that cannot be."""
        rates = {"fim_rate": self.rate, "fim_spm_rate": self.spm_rate}
        return [f"{name}={value} must be between 0 and 1" for name, value in rates.items() if not 0 <= value <= 1]


def fim_sentinels(special_tokens: Mapping[str, int]) -> tuple[int, int, int]:
    """The ids of (prefix, suffix, middle); ValueError when the tokenizer has none."""
    for names in SENTINELS:
        if all(name in special_tokens for name in names):
            prefix, suffix, middle = (special_tokens[name] for name in names)
            return prefix, suffix, middle
    raise ValueError(
        f"fill-in-the-middle needs special tokens such as {', '.join(SENTINELS[0])}, which the tokenizer does not have;"
        " train one with them (tools/train_tokenizer.py --special-tokens)"
    )


def fim_pieces(text: str, options: FimOptions, sentinels: tuple[int, int, int]) -> list[str | int] | None:
    """Text and sentinel ids that replace `text`, or None for a document that stays.

    The text is cut at two characters drawn evenly; what lies between is the middle. PSM: PRE prefix SUF suffix MID
    middle. SPM, in the variant that shares its tokens with PSM: PRE SUF suffix MID prefix middle.
    """
    digest = hashlib.blake2b(f"{options.seed}\n".encode() + text.encode(), digest_size=32).digest()
    chosen, order, first, second = (int.from_bytes(digest[i : i + 8], "little") for i in range(0, 32, 8))
    if chosen >= options.rate * 2**64:
        return None
    low, high = sorted((first % (len(text) + 1), second % (len(text) + 1)))
    before, middle, after = text[:low], text[low:high], text[high:]
    prefix, suffix, mid = sentinels
    if order < options.spm_rate * 2**64:
        return [prefix, suffix, after, mid, before + middle]
    return [prefix, before, suffix, after, mid, middle]
