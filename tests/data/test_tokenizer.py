import base64
import json
import random
import sys
from pathlib import Path

import numpy as np
import pytest

from megalite.data.sentencepiece_cuts import cuts_at_spaces
from megalite.data.tokenizer import ByteTokenizer, absolute_name, load_tokenizer, train_sentencepiece
from megalite.data.tokenizer_backends import train_byte_bpe

TEXTS = [
    "def f(x):\n    return x  # hello wörld\n\n\n        deep\ttab\r\nüñ 日本 </s> end " * 3,
    "the cat sat on the mat. " * 20,
] * 5
AWKWARD = ["", " ", "  a", "a  ", "\n", " \n  \n", "\0x", "\u3000x\u00a0y", "x" + " " * 37 + "y", "e\u0301", "</s>"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "t.model"
    train_sentencepiece(TEXTS, path, 331)
    return path


def test_training_is_deterministic(model: Path, tmp_path: Path) -> None:
    again = train_sentencepiece(TEXTS, tmp_path / "u.model", 331)
    assert (tmp_path / "u.model").read_bytes() == model.read_bytes()
    assert (again.vocab_size, again.eod) == (331, 1)
    assert again.fingerprint == load_tokenizer(model).fingerprint
    assert train_sentencepiece(TEXTS, tmp_path / "u.model", 340).fingerprint != again.fingerprint


def test_text_survives(model: Path) -> None:
    for tokenizer in (load_tokenizer(model), load_tokenizer("byte")):
        for text in TEXTS[:2] + AWKWARD:
            ids = tokenizer.encode(text)
            assert tokenizer.decode(ids) == text
            assert tokenizer.eod not in ids
            assert all(0 <= i < tokenizer.vocab_size for i in ids)
            assert tokenizer.decode([*ids, tokenizer.eod]) == text


def test_bytes() -> None:
    tokenizer = ByteTokenizer()
    assert (tokenizer.vocab_size, tokenizer.eod) == (257, 256)
    assert tokenizer.encode("é") == [0xC3, 0xA9]
    assert tokenizer.decode([0xC3]) == "\ufffd"


def test_vocabulary_that_cannot_be_made(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no vocabulary of 33000 ids"):
        train_sentencepiece(TEXTS, tmp_path / "t.model", 33000)
    with pytest.raises(ValueError, match="no vocabulary of 100 ids"):
        train_sentencepiece(TEXTS, tmp_path / "t.model", 100)
    assert not list(tmp_path.iterdir())


def test_files_that_are_no_tokenizers(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"missing\.model does not exist"):
        load_tokenizer(tmp_path / "missing.model")
    (tmp_path / "bad.model").write_bytes(b"not a model")
    with pytest.raises(ValueError, match=r"bad\.model is not a sentencepiece model"):
        load_tokenizer(tmp_path / "bad.model")


def test_unigram_and_special_tokens(tmp_path: Path) -> None:
    special = ["<|fim_prefix|>", "<mine>"]
    tokenizer = train_sentencepiece(TEXTS, tmp_path / "u.model", 300, model_type="unigram", special_tokens=special)
    assert tokenizer.special_tokens == {"</s>": 1, "<|fim_prefix|>": 2, "<mine>": 3}
    for text in (*AWKWARD, "<|fim_prefix|> and <mine> typed"):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text and not {1, 2, 3} & set(ids)


def test_batches_are_the_same_as_single_texts(model: Path, tmp_path: Path) -> None:
    train_byte_bpe(TEXTS, tmp_path / "tokenizer.json", 300)
    texts = TEXTS[:2] + AWKWARD
    for name in (str(model), "byte", str(tmp_path)):
        tokenizer = load_tokenizer(name)
        assert [list(ids) for ids in tokenizer.encode_batch(texts)] == list(map(tokenizer.encode, texts))


def test_long_texts_are_cut_only_where_their_ids_stay(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = random.Random(5)
    parts = [*" \n\u2581\0ü日", "  ", " the", "cat ", "\n\n  deep", "def f(x)", " \t "]
    texts = ["".join(draw.choices(parts, k=draw.randrange(1, 400))) for _ in range(60)]
    tokenizer = load_tokenizer(model)
    whole = [tokenizer.encode(text) for text in texts]
    monkeypatch.setattr("megalite.data.tokenizer.LONG_TEXT", 7)
    found = tokenizer.encode_batch(texts)
    assert [list(ids) for ids in found] == whole
    assert any(isinstance(ids, np.ndarray) for ids in found)
    unigram = train_sentencepiece(TEXTS, tmp_path / "u.model", 296, model_type="unigram")
    assert cuts_at_spaces(model.read_bytes()) and not cuts_at_spaces(unigram.serialized())


def test_names_and_kinds(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_tokenizer(f"sentencepiece:{model}").fingerprint == load_tokenizer(model).fingerprint
    monkeypatch.chdir(model.parent)
    assert absolute_name("sentencepiece:t.model") == f"sentencepiece:{model}"
    assert absolute_name("t.model") == str(model) and absolute_name("byte") == "byte"
    assert absolute_name("tiktoken:gpt2") == "tiktoken:gpt2"
    with pytest.raises(FileNotFoundError, match=r"none\.json does not exist"):
        load_tokenizer("hf:none.json")
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    with pytest.raises(ImportError, match="needs the package tiktoken: pip install tiktoken"):
        load_tokenizer("tiktoken:gpt2")


def _ranks(path: Path) -> Path:
    """A file of ranks: bytes in the order of GPT-2, then a few pairs."""
    tokens = [bytes([b]) for b in (*range(33, 256), *range(33))] + [b"th", b" t", b"the", b" the", b"at"]
    path.write_bytes(b"".join(base64.b64encode(t) + b" %d\n" % i for i, t in enumerate(tokens)))
    return path


def test_tiktoken_file(tmp_path: Path) -> None:
    pytest.importorskip("tiktoken", reason="optional package")
    path = _ranks(tmp_path / "r.tiktoken")
    tokenizer = load_tokenizer(path)
    assert tokenizer.vocab_size == 262 and tokenizer.special_tokens == {"<|endoftext|>": 261} and tokenizer.eod == 261
    assert tokenizer.encode(" the cat")[0] == 259
    for text in (*TEXTS[:2], *AWKWARD, "<|endoftext|>"):
        ids = tokenizer.encode(text)
        assert tokenizer.decode([*ids, 261]) == text and 261 not in ids
    assert [list(i) for i in tokenizer.encode_batch(AWKWARD)] == list(map(tokenizer.encode, AWKWARD))
    settings = {"special_tokens": {"<|endoftext|>": 300}, "pattern": r"\s+|\S+"}
    (tmp_path / "r.tiktoken.json").write_text(json.dumps(settings))
    other = load_tokenizer(f"tiktoken:{path}")
    assert (other.vocab_size, other.eod) == (301, 300) and other.fingerprint != tokenizer.fingerprint
    path.write_bytes(b"dGhl 0\nbroken\n")
    with pytest.raises(ValueError, match=r"r\.tiktoken:2: not a tiktoken file"):
        load_tokenizer(path)
    with pytest.raises(FileNotFoundError, match="neither a file nor one of"):
        load_tokenizer("tiktoken:no_such_encoding")


def test_gigatoken_gives_the_ids_of_tokenizers(tmp_path: Path) -> None:
    pytest.importorskip("gigatoken", reason="optional package")
    slow = train_byte_bpe(TEXTS, tmp_path / "tokenizer.json", 320, special_tokens=["<|fim_middle|>"])
    fast = load_tokenizer(f"gigatoken:{tmp_path}")
    assert fast.fingerprint == slow.fingerprint and fast.eod == slow.eod and fast.vocab_size == slow.vocab_size
    texts = [*TEXTS, *AWKWARD, "a <|fim_middle|> typed", *(f"text number {i}, don't" for i in range(99))]
    assert [list(ids) for ids in fast.encode_batch(texts)] == list(map(slow.encode, texts))
    assert not set(slow.special_tokens.values()) & set(fast.encode("<|endoftext|><|fim_middle|>"))


def test_gigatoken_is_refused_where_its_ids_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gigatoken = pytest.importorskip("gigatoken", reason="optional package")
    train_byte_bpe(TEXTS, tmp_path / "tokenizer.json", 320)
    other = tmp_path / "other"
    other.mkdir()
    train_byte_bpe(TEXTS, other / "tokenizer.json", 300)
    real = gigatoken.Tokenizer
    monkeypatch.setattr(gigatoken, "Tokenizer", lambda _: real(str(other / "tokenizer.json")))
    with pytest.raises(ValueError, match="gigatoken gives other ids than tokenizers"):
        load_tokenizer(f"gigatoken:{tmp_path}")


def test_added_sentinels_are_special(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="optional package")
    train_byte_bpe(TEXTS, tmp_path / "tokenizer.json", 300)
    backend = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    backend.add_tokens(["<|fim_prefix|>", "<plain>"])  # as some published tokenizers have them: not special
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.special_tokens == {"<|endoftext|>": 0, "<|fim_prefix|>": 300} and tokenizer.vocab_size == 302
    assert 300 not in tokenizer.encode("a <|fim_prefix|> b") and 301 in tokenizer.encode("a <plain> b")


def test_byte_bpe_training(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers", reason="optional package")
    tokenizer = train_byte_bpe(TEXTS, tmp_path / "a.json", 300)
    train_byte_bpe(TEXTS, tmp_path / "b.json", 300)
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()
    assert (tokenizer.vocab_size, tokenizer.eod) == (300, 0)
    for text in TEXTS[:2] + AWKWARD:
        assert tokenizer.decode(tokenizer.encode(text)) == text
    with pytest.raises(ValueError, match="no vocabulary of 100000 ids"):
        train_byte_bpe(TEXTS, tmp_path / "c.json", 100000)
    assert not (tmp_path / "c.json").exists()


def test_hugging_face_file(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="optional package")
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(TEXTS, trainer)
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    typed = "a <|endoftext|> b"
    assert tokenizer.eod == 0 and tokenizer.eod not in tokenizer.encode(typed)
    assert tokenizer.decode(tokenizer.encode(typed)) == typed
