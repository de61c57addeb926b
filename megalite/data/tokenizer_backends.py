"""Tokenizers of optional packages: tiktoken, and gigatoken where it gives the ids of Hugging Face's `tokenizers`."""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megalite.data.text_sources import optional_package
from megalite.data.tokenizer import EOD_NAMES, HuggingFaceTokenizer, Ids
from megalite.files import replace_text

GPT4_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""How text is cut before ranks are applied, unless the file's .json says otherwise."""
PROBES = (
    "", " ", "  a  b", "\n", "\r\n\r\n", "\t\tx", "It's 1234567 o'clock, isn't it?", "caf\u00e9 e\u0301 \u00fc\u00df",
    "\u65e5\u672c\u8a9e\u3000\u0645\u0631\u062d\u0628\u0627", "\U0001f600\U0001f468\u200d\U0001f469\u200d\U0001f467",
    "x" + " " * 37 + "y\n    indented\n\n\n", "\0\x01\x7f\u00a0\u2028\ufeff", "def f(x):\n\treturn x_y ** 2 != 0x1F\n",
    "AAAAaaaa" * 9, "https://example.org/a?b=c&d=%20#e", "!!!???...---___```$$$",
    "\u0130\u0131\u1e9e\u01c5", "\ufffd\ufffe",
)  # fmt: skip
"""Texts that tell tokenizers apart."""
_CHECKED_TEXTS = 64


class TiktokenTokenizer:
    """A .tiktoken file of ranks, or the name of an encoding that the tiktoken package knows (and may download).

    FILE.json beside the file may hold {"pattern": ..., "special_tokens": {name: id}}; by default the pattern is
    GPT-4's and the id after the last rank is <|endoftext|>.
    """

    def __init__(self, path: str | Path):
        package = optional_package("tiktoken", f"tokenizer tiktoken:{path}")
        self._backend: Any = _ranks(package, Path(path)) if Path(path).is_file() else _named(package, str(path))
        backend = self._backend
        self.special_tokens: dict[str, int] = {n: backend.encode_single_token(n) for n in backend.special_tokens_set}
        self.vocab_size: int = backend.max_token_value + 1
        definition = [backend._pat_str, sorted(self.special_tokens.items())]
        digest = hashlib.sha256(json.dumps(definition).encode())
        for token in backend.token_byte_values():
            digest.update(token + b"\n%d\n" % backend.encode_single_token(token))
        self.fingerprint = digest.hexdigest()[:16]
        self.eod = find_eod(str(path), self.special_tokens)

    def encode(self, text: str) -> list[int]:
        """The ids of `text`; special tokens are never produced."""
        return self._backend.encode_ordinary(text)

    def encode_batch(self, texts: Sequence[str]) -> Sequence[Ids]:
        """The ids of each text."""
        return [self._backend.encode_ordinary(text) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`; special tokens disappear."""
        special = set(self.special_tokens.values())
        return self._backend.decode([int(i) for i in ids if int(i) not in special])


def find_eod(path: str, special_tokens: Mapping[str, int]) -> int:
    """The id that ends a document; ValueError when no special token has such a name."""
    for name in EOD_NAMES:
        if name in special_tokens:
            return special_tokens[name]
    raise ValueError(f"{path} has none of {', '.join(EOD_NAMES)} to end documents with")


def _named(package: Any, name: str) -> Any:
    if name not in package.list_encoding_names():
        known = ", ".join(package.list_encoding_names())
        raise FileNotFoundError(f"tokenizer tiktoken:{name} is neither a file nor one of {known}")
    try:
        return package.get_encoding(name)
    except Exception as error:  # whatever its downloader raises
        raise ValueError(f"tiktoken cannot fetch the encoding {name!r}: {error}") from error


def _ranks(package: Any, path: Path) -> Any:
    settings_path = path.with_name(path.name + ".json")
    settings = json.loads(settings_path.read_text()) if settings_path.is_file() else {}
    ranks: dict[bytes, int] = {}
    try:
        for line in path.read_bytes().split(b"\n"):
            if line.strip():
                token, rank = line.split()
                ranks[base64.b64decode(token, validate=True)] = int(rank)
    except (ValueError, binascii.Error) as error:
        raise ValueError(
            f"{path}:{len(ranks) + 1}: not a tiktoken file of base64 tokens and ranks ({error})"
        ) from error
    if not all(bytes([i]) in ranks for i in range(256)):
        raise ValueError(f"{path} has no rank for each of the 256 bytes")
    special = settings.get("special_tokens") or {EOD_NAMES[0]: max(ranks.values()) + 1}
    pattern = settings.get("pattern") or GPT4_PATTERN
    return package.Encoding(path.name, pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)


class GigaTokenizer(HuggingFaceTokenizer):
    """A tokenizer.json encoded by the gigatoken package: the same ids, tens of times faster.

    The ids of the probes, and of the first texts of each process, are compared with those of `tokenizers`; ValueError
    when they differ. Its fingerprint is that of the Hugging Face tokenizer. A text in which a special token is written
    goes to `tokenizers`, since gigatoken always takes these for real.
    """

    def __init__(self, path: str | Path):
        package = optional_package("gigatoken", f"tokenizer gigatoken:{path}")
        super().__init__(path)
        self._path = path
        self._fast: Any = package.Tokenizer(str(path))
        names = sorted(self.special_tokens, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, names)) or "(?!)")
        self._unchecked = _CHECKED_TEXTS
        for probe in PROBES:
            self._compare(probe, self._fast.encode(probe))

    def _compare(self, text: str, ids: Any) -> None:
        if ids.tolist() != super().encode(text):
            raise ValueError(
                f"gigatoken gives other ids than tokenizers for {text[:60]!r} with {self._path}; use"
                f" huggingface:{self._path}"
            )

    def encode(self, text: str) -> list[int]:
        """The ids of `text`, without special tokens."""
        if self._special.search(text):
            return super().encode(text)
        ids = self._fast.encode(text)
        if self._unchecked > 0:
            self._unchecked -= 1
            self._compare(text, ids)
        return ids.tolist()

    def encode_batch(self, texts: Sequence[str]) -> Sequence[Ids]:
        """The ids of each text, as arrays where gigatoken made them."""
        found: list[Any] = []
        for text in texts:
            fast = self._unchecked <= 0 and not self._special.search(text)
            found.append(self._fast.encode(text) if fast else self.encode(text))
        return found


def train_byte_bpe(
    texts: Iterable[str], path: str | Path, vocab_size: int, *, special_tokens: Sequence[str] = ()
) -> HuggingFaceTokenizer:
    """Trains byte-level BPE, cut as GPT-4 does, and writes it to `path` as tokenizer.json of `vocab_size` ids.

    <|endoftext|> and `special_tokens` come first, then the bytes. The same texts give the same bytes. ValueError when
    the texts cannot fill the vocabulary.
    """
    package = optional_package("tokenizers", "training a Hugging Face tokenizer")
    split = package.pre_tokenizers.Split(package.Regex(GPT4_PATTERN), behavior="isolated")
    level = package.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend = package.Tokenizer(package.models.BPE())
    backend.pre_tokenizer = package.pre_tokenizers.Sequence([split, level])
    backend.decoder = package.decoders.ByteLevel()
    trainer = package.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOD_NAMES[0], *special_tokens],
        initial_alphabet=sorted(package.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    backend.train_from_iterator(texts, trainer)
    found = backend.get_vocab_size()
    if found != vocab_size:
        raise ValueError(f"no vocabulary of {vocab_size} ids can be made of this text: it gives {found}")
    replace_text(Path(path), backend.to_str())
    return HuggingFaceTokenizer(path)
