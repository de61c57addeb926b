"""Our tokenizers as the files that transformers reads: tokenizer.json and tokenizer_config.json."""

from __future__ import annotations

import json
from typing import Any

from megalite.data.sentencepiece_model import BPE, BYTE, CONTROL, UNKNOWN, USER_DEFINED, Piece, SentencePieceModel
from megalite.data.tokenizer import ByteTokenizer, HuggingFaceTokenizer, SentencePieceTokenizer, Tokenizer

_SPACE = "\u2581"
_END = "<|endoftext|>"


def tokenizer_files(tokenizer: Tokenizer) -> dict[str, bytes]:
    """The files by name; ValueError when it cuts text in a way that tokenizer.json has no word for."""
    if isinstance(tokenizer, ByteTokenizer):
        return _files(_byte_definition(), eod=_END, more={})
    if isinstance(tokenizer, SentencePieceTokenizer):
        model = SentencePieceModel.parse(tokenizer.serialized())
        unknown = [("unk_token", piece.text) for piece in model.pieces if piece.kind == UNKNOWN]
        return _files(_sentencepiece_definition(model), eod=model.pieces[tokenizer.eod].text, more=dict(unknown))
    assert isinstance(tokenizer, HuggingFaceTokenizer)
    return _files(json.loads(tokenizer.definition), eod=tokenizer.token(tokenizer.eod), more={})


def _files(definition: dict[str, Any], *, eod: str, more: dict[str, str]) -> dict[str, bytes]:
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": eod, "clean_up_tokenization_spaces": False, **more,
    }  # fmt: skip
    contents = {"tokenizer.json": definition, "tokenizer_config.json": settings}
    return {
        name: (json.dumps(content, ensure_ascii=False, indent=1) + "\n").encode() for name, content in contents.items()
    }


def _byte_definition() -> dict[str, Any]:
    """Bytes as the characters by which byte-level tokenizers write them, in the order of their values."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [_added(256, _END, special=True)],
        "normalizer": None, "pre_tokenizer": byte_level, "post_processor": None, "decoder": byte_level,
        "model": _bpe({_byte_character(byte): byte for byte in range(256)}, []),
    }  # fmt: skip


def _byte_character(byte: int) -> str:
    """GPT-2's: printable Latin-1 as itself, the others from U+0100 on, in their order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    if byte in printable:
        return chr(byte)
    return chr(0x100 + [other for other in range(256) if other not in printable].index(byte))


def _sentencepiece_definition(model: SentencePieceModel) -> dict[str, Any]:
    if model.algorithm != BPE or model.charsmap or model.removes_extra_whitespaces:
        raise ValueError(
            "this sentencepiece model has no tokenizer.json: byte-pair encoding of text that is left as it is can be"
            " written, not unigram models or normalisation"
        )
    pieces = model.pieces
    unknown = next((piece.text for piece in pieces if piece.kind == UNKNOWN), None)
    added = [
        # Symbols of the user are found before anything is merged, in text whose spaces are marked already.
        _added(i, piece.text, special=piece.kind != USER_DEFINED)
        for i, piece in enumerate(pieces)
        if piece.kind in (CONTROL, UNKNOWN, USER_DEFINED)
    ]
    marks: list[dict[str, Any]] = [{"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}]
    unmarks: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"},
    ]  # fmt: skip
    if model.adds_dummy_prefix:
        marks.insert(0, {"type": "Prepend", "prepend": _SPACE})
        unmarks.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    vocabulary = {piece.text: i for i, piece in enumerate(pieces)}
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added,
        "normalizer": {"type": "Sequence", "normalizers": marks}, "pre_tokenizer": None, "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": unmarks},
        "model": _bpe(vocabulary, _merges(pieces, vocabulary)) | {
            "unk_token": unknown, "fuse_unk": True, "byte_fallback": any(piece.kind == BYTE for piece in pieces),
        },
    }  # fmt: skip


def _merges(pieces: tuple[Piece, ...], vocabulary: dict[str, int]) -> list[list[str]]:
    """Every way to make a piece of two others, the piece that sentencepiece would rather have first."""
    usable = {piece.text for piece in pieces if piece.kind not in (CONTROL, UNKNOWN, USER_DEFINED, BYTE)}
    found: list[tuple[float, int, list[str]]] = []
    for piece in pieces:
        if piece.text not in usable:
            continue
        for at in range(1, len(piece.text)):
            left, right = piece.text[:at], piece.text[at:]
            if left in usable and right in usable:
                found.append((-piece.score, vocabulary[piece.text], [left, right]))
    return [pair for _, _, pair in sorted(found, key=lambda one: one[:2])]


def _bpe(vocabulary: dict[str, int], merges: list[list[str]]) -> dict[str, Any]:
    return {
        "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
        "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
        "vocab": vocabulary, "merges": merges,
    }  # fmt: skip


def _added(number: int, text: str, *, special: bool) -> dict[str, Any]:
    return {
        "id": number, "content": text, "single_word": False, "lstrip": False, "rstrip": False,
        "normalized": not special, "special": special,
    }  # fmt: skip
