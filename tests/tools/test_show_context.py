"""`tools/show_context.py` as users start it."""

import json
import xml.etree.ElementTree as ElementTree
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from megalite.parallel.context_picture import COLOURS, bytes_text
from tests.tools.conftest import Script

ROOT = Path(__file__).parents[2]


@pytest.fixture
def run(script: Script) -> Script:
    """Runs the tool."""
    return partial(script, "show_context", columns=100)


def test_all_modes_in_all_forms(tmp_path: Path, run: Script) -> None:
    figures, picture = tmp_path / "figures.json", tmp_path / "context.svg"
    shown = run("--cp", 4, "--seq-len", 256, "--cells", 8, "--svg", picture, "--json", figures).stdout
    assert all(name in shown for name in ("ring, cp=4", "all_gather, cp=4", "ulysses, cp=4", "blocks of 2"))
    ring, gather, ulysses, both = json.loads(figures.read_text())
    assert [row[-1] for row in ring["rank"]] == [-1] * 7 + [0]  # the last keys are seen by the last queries alone
    assert [row[0] for row in ring["rank"]] == [0, 1, 2, 3, 3, 2, 1, 0]  # the zigzag, by the ranks of the queries
    assert [row[0] for row in ring["step"]] == [0, 3, 2, 1, 1, 2, 3, 0]  # in step t with the keys of rank + t
    assert [row[0] for row in gather["step"]] == [0, 1, 1, 1, 1, 1, 1, 0]
    assert {rank for row in ulysses["rank"] for rank in row} == {0, -1}
    assert {rank for row in both["rank"] for rank in row} == {0, 1, -1}
    assert all(figure["imbalance"] == 0 for figure in (ring, gather, ulysses, both))
    assert ring["work"] == ulysses["work"]
    tokens, per_token = 64, 2 * 2 * 8 * 128  # keys and values of 8 heads in 2 bytes
    assert sum(ring["forward_bytes"]) == sum(gather["forward_bytes"]) == 9 * tokens * per_token  # 3/4 of 4 ranks x 3
    assert ulysses["forward_bytes"] == [3 * tokens * 2 * per_token // 4] * 4  # q, k, v and out
    texts = [text.text for text in ElementTree.parse(picture).getroot().iter("{http://www.w3.org/2000/svg}text")]
    assert texts.count("queries down, keys to the right") == 4
    assert texts.count("0") + texts.count("1") + texts.count("2") + texts.count("3") == 4 * 36  # of 64 cells
    assert "ranks 2-3: 1/2 of heads each" in texts and f"{bytes_text(ring['forward_bytes'][3])} + " in str(texts)


def test_documents_are_told_apart(tmp_path: Path, run: Script) -> None:
    figures, image = tmp_path / "figures.json", tmp_path / "context.png"
    run("--cp", 2, "--cp-mode", "ring", "--documents", "50,30,1,47", "--cells", 16, "--json", figures, "--png", image)
    pixels = np.asarray(Image.open(image).convert("RGB")).reshape(-1, 3)
    values, counts = np.unique(pixels, axis=0, return_counts=True)
    colours = {f"#{r:02x}{g:02x}{b:02x}" for r, g, b in values[counts > 100].tolist()}
    assert set(COLOURS[:2]) <= colours and not colours & set(COLOURS[2:])
    (ring,) = json.loads(figures.read_text())
    assert ring["rank"][12][0] == -1 and ring["rank"][12][11] >= 0  # token 96 is in the fourth document
    assert ring["imbalance"] < 0.1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--cp-mode", "star"), "there are ring, all_gather, ulysses, ulysses_ring"),
        (("--cp-ulysses", 3), "does not divide parallel.cp=4"),
        (("--cp", 16, "--cp-mode", "ulysses"), "8 query heads of a rank cannot be exchanged over 16 ranks"),
        (("--documents", "9000", "--seq-len", 100), "do not fit into --seq-len=100"),
    ],
)
def test_errors_name_the_numbers(arguments: tuple[object, ...], said: str, run: Script) -> None:
    assert said in run(*arguments, code=1).stderr


def test_a_window_holds_no_negative_number_of_tokens(run: Script) -> None:
    assert "argument --window: -3 must be a whole number of at least 0" in run("--window", "-3", code=2).stderr
