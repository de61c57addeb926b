from pathlib import Path

import pytest

from megalite.data.tokenizer import ByteTokenizer, load_tokenizer, train_sentencepiece

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
