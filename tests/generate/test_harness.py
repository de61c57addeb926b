"""The model class for the lm-evaluation-harness, behind a stand-in for that package."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megalite.config import Config
from megalite.data.config import DataConfig
from megalite.data.tokenizer import ByteTokenizer
from megalite.models.transformer import Transformer
from megalite.nn.config import ModelConfig
from megalite.train.config import TrainConfig
from tests.generate import lm_eval_fake
from tests.generate.lm_eval_fake import Instance
from tests.generate.runs import write_run
from tests.nn.test_cache import whole_rows

CONFIG = Config(
    model=ModelConfig(num_layers=2, hidden_size=24, num_heads=4, ffn_hidden_size=20, vocab_size=257, init_std=0.3),
    data=DataConfig(tokenizer="byte", seq_len=16),
    train=TrainConfig(precision="fp64"),
)
EOD = ByteTokenizer.eod


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Transformer]:
    path = tmp_path_factory.mktemp("run")
    return path, write_run(path, CONFIG)


@pytest.fixture
def model(trained: tuple[Path, Transformer], monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    lm_eval_fake.install(monkeypatch)
    from megalite.generate.harness import MegaliteLM

    assert lm_eval_fake.REGISTERED["megalite"] is MegaliteLM
    built = MegaliteLM.create_from_arg_string(f"src={trained[0]},context=16", {"batch_size": 2, "device": "cpu"})
    yield built
    built.close()


@torch.no_grad()
def log_probs(trained: tuple[Path, Transformer], tokens: list[int]) -> torch.Tensor:
    """[n - 1, vocab]: of what follows each token but the last."""
    return trained[1].logits(whole_rows(torch.tensor(tokens)[:, None]))[:-1, 0].log_softmax(-1)


def test_likelihood_of_a_continuation(model: Any, trained: tuple[Path, Transformer]) -> None:
    pairs = [("Hello ", "world"), ("", "start"), ("A context of more than sixteen tokens", " x"), ("ab", "c")]
    found = model.loglikelihood([Instance(pair) for pair in pairs])
    rows = [[*b"Hello", *b" world"], [EOD, *b"start"], [*b"more than sixteen tokens x"][-17:], [*b"abc"]]
    counts = [6, 5, 2, 1]
    for (log_prob, is_greedy), tokens, count in zip(found, rows, counts, strict=True):
        wanted = log_probs(trained, tokens)[-count:]
        labels = torch.tensor(tokens[-count:])
        assert log_prob == pytest.approx(float(wanted.gather(1, labels[:, None]).sum()), rel=1e-10)
        assert is_greedy == bool((wanted.argmax(-1) == labels).all())
    assert [kept[0] for kept in model.cache_hook.kept] == ["loglikelihood"] * 4


def test_what_the_model_says_is_greedy(model: Any, trained: tuple[Path, Transformer]) -> None:
    tokens = [*b"Once"]
    for _ in range(3):
        tokens.append(int(log_probs(trained, [*tokens, 0])[-1].argmax()))
    if max(tokens) < 128:  # a text, then
        ((_, is_greedy),) = model.loglikelihood([Instance(("Once", bytes(tokens[4:]).decode()))])
        assert is_greedy


def test_rolling_likelihood_of_a_text(model: Any, trained: tuple[Path, Transformer]) -> None:
    texts = ["short", "a text of three windows of sixteen tokens each"]
    found = model.loglikelihood_rolling([Instance((text,)) for text in texts])
    row = [EOD, *texts[0].encode()]
    wanted = log_probs(trained, row).gather(1, torch.tensor(row[1:])[:, None]).sum()
    assert found[0] == pytest.approx(float(wanted), rel=1e-10)
    row = [EOD, *texts[1].encode()]
    total = 0.0
    for begin, count in ((0, 16), (16, 16), (30, 14)):  # inputs, and scored ones at their end
        of_window = log_probs(trained, row[begin : begin + 17])[-count:]
        labels = torch.tensor(row[begin + 17 - count : begin + 17])
        total += float(of_window.gather(1, labels[:, None]).sum())
    assert found[1] == pytest.approx(total, rel=1e-10)


def test_generation_until_a_text(model: Any) -> None:
    settings = {"until": [], "max_gen_toks": 6, "do_sample": False}
    prompts = ["One", "another prompt", "x"]
    free = model.generate_until([Instance((text, settings)) for text in prompts])
    assert free == model.generate_until([Instance((text, settings | {"temperature": 0.0})) for text in prompts])
    assert all(len(text.encode()) >= 1 for text in free) and len(set(free)) == 3
    end = free[0][2]
    (ended,) = model.generate_until([Instance((prompts[0], settings | {"until": end}))])
    assert ended == free[0].partition(end)[0]
    sampled = settings | {"do_sample": True, "temperature": 2.0}
    assert model.generate_until([Instance(("One", sampled))]) != free[:1]


def test_the_harness_sees_one_rank(model: Any, trained: tuple[Path, Transformer]) -> None:
    assert (model.rank, model.world_size) == (0, 1) and model.tokenizer_name == f"{trained[0]}:byte"
