"""Text that comes in pieces."""

import pytest

from megalite.data.tokenizer import ByteTokenizer, Tokenizer, train_sentencepiece
from megalite.generate.text import TextStream

TEXT = "  Grüße, 世界! 🎉🎉 The end\n\n\tof it.  "


@pytest.fixture(scope="module")
def pieces(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A vocabulary in which most of TEXT falls back to bytes."""
    path = tmp_path_factory.mktemp("tokenizer") / "tiny.model"
    return train_sentencepiece(["the end of the world " * 20, "of it"], path, 300)


def streamed(tokenizer: Tokenizer, prompt: str, text: str, stops: tuple[str, ...] = ()) -> tuple[list[str], TextStream]:
    stream = TextStream(tokenizer, tokenizer.encode(prompt), stops)
    found = []
    for token in tokenizer.encode(text):
        found.append(stream.push(token))
        if stream.stopped:
            break
    return [*found, stream.finish()], stream


@pytest.mark.parametrize("prompt", ["", "Before: ", "é"])
def test_pieces_make_up_the_text(prompt: str, pieces: Tokenizer) -> None:
    for tokenizer in (ByteTokenizer(), pieces):
        found, stream = streamed(tokenizer, prompt, TEXT)
        assert "".join(found) == stream.text == TEXT
        assert all("\ufffd" not in piece for piece in found)  # characters come whole
        assert sum(map(bool, found)) > 10  # and as soon as they are


def test_half_a_character_at_the_end() -> None:
    stream = TextStream(ByteTokenizer())
    assert [stream.push(byte) for byte in (65, 0xF0, 0x9F)] == ["A", "", ""]
    assert stream.finish() == "\ufffd" and stream.text == "A\ufffd"


def test_bytes_that_are_no_text_do_not_hold_up_what_follows() -> None:
    stream = TextStream(ByteTokenizer())
    assert [stream.push(byte) for byte in (0xFF, 65, 66)] == ["", "\ufffdA", "B"]


def test_text_ends_before_the_first_stop_string(pieces: Tokenizer) -> None:
    for tokenizer in (ByteTokenizer(), pieces):
        found, stream = streamed(tokenizer, "x", TEXT, ("end\n", "The e", "nothing"))
        assert stream.stopped and "".join(found) == stream.text == TEXT[: TEXT.index("The e")]


def test_what_may_become_a_stop_string_is_held_back() -> None:
    found, stream = streamed(ByteTokenizer(), "", "abababac", ("abac",))
    assert found[:4] == ["", "", "", "ab"]
    assert "".join(found) == stream.text == "abab" and stream.stopped
    found, stream = streamed(ByteTokenizer(), "", "abaX aba", ("abac",))
    assert "".join(found) == "abaX aba" and not stream.stopped
    assert found[:4] == ["", "", "", "abaX"] and found[-1] == "aba"
