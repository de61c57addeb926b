"""The command that evaluates on texts."""

import json
import math
from pathlib import Path

import pytest
import torch

from megalite.config import Config
from megalite.data.config import DataConfig
from megalite.data.indexed import IndexedWriter
from megalite.models.transformer import Transformer
from megalite.nn.config import ModelConfig
from megalite.train.config import TrainConfig
from tests.generate.runs import write_run
from tests.nn.test_cache import whole_rows
from tools.evaluate import main

CONFIG = Config(
    model=ModelConfig(
        num_layers=2, hidden_size=24, num_heads=4, ffn_hidden_size=20, vocab_size=257, init_std=0.3,
        label_smoothing=0.1, z_loss=0.1, hidden_dropout=0.2,
    ),
    data=DataConfig(tokenizer="byte", seq_len=16),
    train=TrainConfig(precision="fp64"),
)  # fmt: skip


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Transformer]:
    path = tmp_path_factory.mktemp("run")
    return path, write_run(path, CONFIG)


@torch.no_grad()
def nats(model: Transformer, tokens: list[int], context: int = 16, stride: int = 16) -> float:
    """The loss of all tokens but the first, a token at a time."""
    total = 0.0
    for place in range(1, len(tokens)):
        if place <= context:
            begin = 0
        else:  # the window that scores it
            end = min(context + -(-(place - context) // stride) * stride, len(tokens) - 1)
            begin = end - context
        logits = model.logits(whole_rows(torch.tensor(tokens[begin:place])[:, None]))[-1, 0]
        total -= float(logits.log_softmax(-1)[tokens[place]])
    return total


@pytest.mark.parametrize("stride", [16, 5])
def test_loss_of_texts(
    stride: int, trained: tuple[Path, Transformer], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, model = trained
    texts = ["A text that is longer than one window, é.", "short", "ab"]
    (tmp_path / "one.txt").write_text(texts[0], encoding="utf-8")
    (tmp_path / "many.jsonl").write_text("".join(json.dumps({"body": text}) + "\n" for text in (*texts[1:], "")))
    files = ["--text", str(tmp_path / "one.txt"), str(tmp_path / "many.jsonl"), "--text-key", "body"]
    out = tmp_path / "found.json"
    assert main([str(run), *files, "--stride", str(stride), "--batch-size", "3", "--json", str(out)]) == 0
    assert "perplexity" in capsys.readouterr().out
    found = json.loads(out.read_text())
    count = sum(len(text.encode()) for text in texts)
    wanted = sum(nats(model, [256, *text.encode()], stride=stride) for text in texts)
    assert (found["documents"], found["tokens"], found["bytes"], found["step"]) == (3, count, count, 3)
    assert found["loss"] == pytest.approx(wanted / count, rel=1e-10)
    assert found["perplexity"] == pytest.approx(math.exp(wanted / count), rel=1e-10)
    assert found["bits_per_byte"] == pytest.approx(wanted / math.log(2) / count, rel=1e-10)


def test_loss_of_a_token_file(trained: tuple[Path, Transformer], tmp_path: Path) -> None:
    run, model = trained
    documents = [[*b"first one", 256], [*b"2", 256], [*b"left out"]]
    with IndexedWriter(tmp_path / "data", dtype="uint16", vocab_size=257) as writer:
        for document in documents:
            writer.add_document(document)
    arguments = [str(run), "--data", str(tmp_path / "data"), "--num-documents", "2", "--json", str(tmp_path / "found")]
    assert main(arguments) == 0
    found = json.loads((tmp_path / "found").read_text())
    wanted = sum(nats(model, [256, *document]) for document in documents[:2])
    assert (found["documents"], found["tokens"], found["bytes"]) == (2, 12, 10)
    assert found["loss"] == pytest.approx(wanted / 12, rel=1e-10)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "nothing to evaluate: name files with --text or --data"),
        (["--text", "missing.txt"], "--text missing.txt: there is no such file"),
        (["--text", "EMPTY"], "there is no token to predict"),
        (["--text", "EMPTY", "--stride", "0"], "--stride=0 must be at least 1"),
        (["--text", "EMPTY", "--json", "no/folder.json"], "should be a file in a folder that is there"),
        (["--data", "missing"], "missing.idx does not exist"),
    ],
)
def test_the_command_says_what_is_wrong(
    trained: tuple[Path, Transformer], tmp_path: Path, arguments: list[str], message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    (tmp_path / "empty.txt").touch()
    assert main([str(trained[0]), *(word.replace("EMPTY", str(tmp_path / "empty.txt")) for word in arguments)]) == 1
    assert message in capsys.readouterr().err
