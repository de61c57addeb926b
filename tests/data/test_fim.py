import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.data.fim import SENTINELS, FimOptions, fim_pieces, fim_sentinels
from megalite.data.indexed import IndexedDataset
from megalite.data.preprocess import TextOptions, preprocess
from megalite.data.tokenizer import load_tokenizer, train_sentencepiece

TEXTS = [f"def f{i}(x):\n    return x + {i}  # wörld {'ab ' * (i % 9)}\n" for i in range(400)]


@given(st.text(), st.integers(0, 9))
@settings(max_examples=60, deadline=None)
def test_the_parts_make_up_the_text(text: str, seed: int) -> None:
    for spm_rate in (0.0, 1.0):
        parts = fim_pieces(text, FimOptions(rate=1.0, spm_rate=spm_rate, seed=seed), (1, 2, 3))
        assert parts is not None
        assert sorted(p for p in parts if isinstance(p, int)) == [1, 2, 3]
        if spm_rate:
            prefix, suffix, after, middle, rest = parts
            assert (prefix, suffix, middle) == (1, 2, 3) and f"{rest}{after}" == text
        else:
            prefix, before, suffix, after, middle, inside = parts
            assert (prefix, suffix, middle) == (1, 2, 3) and f"{before}{inside}{after}" == text


def test_shares_and_seeds() -> None:
    texts = [f"text number {i}" for i in range(4000)]
    some = [fim_pieces(t, FimOptions(rate=0.3, spm_rate=0.25), (1, 2, 3)) for t in texts]
    chosen = [parts for parts in some if parts]
    assert abs(len(chosen) / 4000 - 0.3) < 0.03
    assert abs(sum(isinstance(parts[1], int) for parts in chosen) / len(chosen) - 0.25) < 0.05
    assert some != [fim_pieces(t, FimOptions(rate=0.3, spm_rate=0.25, seed=1), (1, 2, 3)) for t in texts]
    assert not any(fim_pieces(t, FimOptions(rate=0.0), (1, 2, 3)) for t in texts)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("fim") / "t.model"
    train_sentencepiece(TEXTS, path, 350, special_tokens=SENTINELS[0])
    return path


def test_files_keep_every_token(model: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(model)
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": t}) + "\n" for t in [*TEXTS, "<|fim_middle|> typed"]))
    options = TextOptions(fim=FimOptions(rate=0.5))
    totals = preprocess([path], tmp_path / "x", str(model), options=options)
    again = preprocess([path, path], tmp_path / "y", str(model), options=options)
    assert again.rearranged == 2 * totals.rearranged and 150 < totals.rearranged < 250
    data = IndexedDataset(tmp_path / "x")
    assert np.array_equal(IndexedDataset(tmp_path / "y").tokens, np.tile(data.tokens, 2))
    pre, suf, mid = sentinels = fim_sentinels(tokenizer.special_tokens)
    assert int(np.isin(data.tokens, sentinels).sum()) == 3 * totals.rearranged
    assert (data.side_file() or {})["counts"]["rearranged"] == totals.rearranged
    for text, ids in zip(TEXTS, (s.tolist() for s in data), strict=False):
        assert ids.pop() == tokenizer.eod
        if ids[0] == pre:
            cut = ids.index(suf)
            before, (after, middle) = ids[1:cut], _split(ids[cut + 1 :], mid)
            # Texts are cut between characters, so that the ids at a cut may differ: what they say does not.
            order = [before, middle, after] if before else [middle, after]
            assert "".join(map(tokenizer.decode, order)) == text
        else:
            assert tokenizer.encode(text) == ids


def _split(ids: list[int], at: int) -> tuple[list[int], list[int]]:
    place = ids.index(at)
    return ids[:place], ids[place + 1 :]


def test_a_tokenizer_without_sentinels_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(ValueError, match=r"<\|fim_prefix\|>.*--special-tokens"):
        preprocess([tmp_path / "a.txt"], tmp_path / "x", "byte", options=TextOptions(fim=FimOptions(rate=0.5)))
    assert FimOptions(rate=1.5).problems() == ["fim_rate=1.5 must be between 0 and 1"]
