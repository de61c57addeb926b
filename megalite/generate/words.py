"""Texts as the tokens that a model wants: its tokenizer, what it puts before a text, and what ends one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megalite.checkpoint.folder import Folder, folder_at
from megalite.checkpoint.hf import read_json
from megalite.data.tokenizer import HuggingFaceTokenizer, Tokenizer, load_tokenizer


@dataclass(frozen=True, kw_only=True)
class Words:
    """A tokenizer as a model was trained with it.

    prefix: ids before every text (models of Hugging Face often begin with one). ends: ids that end a text.
    """

    tokenizer: Tokenizer
    prefix: tuple[int, ...] = ()
    ends: tuple[int, ...] = ()

    @staticmethod
    def named(name: str | Path) -> Words:
        """Those of a tokenizer alone, see `load_tokenizer`: documents end with its token."""
        return Words.of(load_tokenizer(name))

    @staticmethod
    def of(tokenizer: Tokenizer) -> Words:
        """Those of data that were tokenized here."""
        return Words(tokenizer=tokenizer, ends=(tokenizer.eod,))

    def prompt(self, text: str) -> list[int]:
        """The tokens to continue; an empty text begins a document, as the end of another one does."""
        return [*self.prefix, *self.tokenizer.encode(text)] or [self.tokenizer.eod]

    def document(self, text: str) -> list[int]:
        """The tokens of a text whose first one is predicted from what comes before a text."""
        return [*self.beginning, *self.tokenizer.encode(text)]

    @property
    def beginning(self) -> tuple[int, ...]:
        """What comes before a text: the prefix, or the end of another document."""
        return self.prefix or (self.tokenizer.eod,)


def hugging_face_words(address: str | Path) -> Words | None:
    """Those in a folder with the files of a model of Hugging Face; None where it has no tokenizer."""
    folder = folder_at(address)
    if not isinstance(folder.address, Path):
        raise ValueError(
            f"{address}: the tokenizer of a model at a URL is not read; copy it and name it with --tokenizer"
        )
    name = next((name for name in ("tokenizer.json", "tokenizer.model") if folder.size(name) is not None), None)
    if name is None:
        return None
    settings = [_optional(folder, file) for file in ("generation_config.json", "config.json")]
    tokenizer = load_tokenizer(folder.address / name)
    if isinstance(tokenizer, HuggingFaceTokenizer):
        prefix = tokenizer.prefix
    else:
        adds = _optional(folder, "tokenizer_config.json").get("add_bos_token", True)
        prefix = _ids(settings, "bos_token_id") if adds else ()
    ends = dict.fromkeys((*_ids(settings, "eos_token_id"), tokenizer.eod))
    return Words(tokenizer=tokenizer, prefix=prefix, ends=tuple(ends))


def _optional(folder: Folder, name: str) -> Mapping[str, Any]:
    return read_json(folder, name) if folder.size(name) is not None else {}


def _ids(settings: list[Mapping[str, Any]], key: str) -> tuple[int, ...]:
    """The first that says something: a number, or a list of numbers."""
    found = next((value for of_file in settings if (value := of_file.get(key)) is not None), ())
    return tuple(found) if isinstance(found, list | tuple) else (int(found),)
