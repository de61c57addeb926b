"""`tools/memory.py` as users start it."""

import json
from functools import partial
from pathlib import Path

import pytest
import yaml

from megalite.train.memory import KINDS
from tests.tools.conftest import Script

ROOT = Path(__file__).parents[2]


@pytest.fixture
def run(script: Script) -> Script:
    """Runs the tool."""
    return partial(script, "memory", columns=130)


def test_all_forms(tmp_path: Path, run: Script) -> None:
    figures, picture = tmp_path / "figures.json", tmp_path / "bytes.png"
    shown = run(
        "--config", ROOT / "configs" / "llama3_8b.yaml", "--num-ranks", 16, "--parallel.zero", 3, "--capacity", 20,
        "--json", figures, "--png", picture,
    ).stdout  # fmt: skip
    assert "unit parameters" in shown and "pp 0 is the largest" in shown and "it does not fit" in shown
    written = json.loads(figures.read_text())
    assert [rank["pp_rank"] for rank in written["ranks"]] == [0, 1]
    for rank in written["ranks"]:
        assert set(rank["kinds"]) == set(KINDS) and rank["total"] == sum(rank["kinds"].values())
    assert [stage["peak_microbatches"] for rank in written["ranks"] for stage in rank["stages"]] == [2, 1]
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_stages_of_zero_side_by_side(tmp_path: Path, run: Script) -> None:
    figures = tmp_path / "figures.json"
    run("--layout", "dp4+mbs1", "--compare", "zero", "--train.precision", "bf16", "--json", figures)
    totals = [rank["kinds"]["optimizer"] for rank in json.loads(figures.read_text())["ranks"]]
    assert totals[0] == 4 * totals[1] and totals[1:] == totals[1:2] * 3


def test_counted_in_a_step(tmp_path: Path, tokens: str, run: Script) -> None:
    config = tmp_path / "tiny.yaml"
    sizes = {"num_layers": 2, "hidden_size": 64, "num_heads": 4, "ffn_hidden_size": 128, "vocab_size": 61}
    train = {"global_batch_size": 8, "num_steps": 2, "precision": "bf16"}
    data = {"paths": [tokens], "seq_len": 32, "split": "100,0,0", "cache_dir": str(tmp_path)}
    config.write_text(yaml.safe_dump({"model": sizes, "train": train, "data": data}))
    figures = tmp_path / "figures.json"
    shown = run("--config", config, "--layout", "dp2+zero2", "--measure", "--json", figures).stdout
    assert "Predicted and counted in a step" in shown and "more than" not in shown
    rows = json.loads(figures.read_text())["measured"]
    kinds = {"parameters", "gradients", "master", "optimizer", "between actions", "unit gradients"}
    assert {row["kind"] for row in rows} == kinds and all(row["near"] for row in rows)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--num-ranks", 3, "--parallel.tp", 2), "world size 3 is not divisible by tp"),
        (("--layout", "tp2+zerro3"), "did you mean zero"),
        (("--measure", "--device", "cuda"), "leave out --compare and --device cuda"),
    ],
)
def test_errors_name_the_numbers(arguments: tuple[object, ...], said: str, run: Script) -> None:
    assert said in run(*arguments, code=1).stderr


def test_a_device_has_memory(run: Script) -> None:
    assert "argument --capacity: -1 must be a finite number above 0" in run("--capacity", "-1", code=2).stderr
