"""Every layout says the same, and finds texts as likely: a checkpoint of one rank, loaded on several."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from megalite.config import Config
from megalite.data.config import DataConfig
from megalite.data.tokenizer import ByteTokenizer
from megalite.generate.generator import Generator
from megalite.generate.load import find_source, inference_layout, load_stage
from megalite.generate.perplexity import Document, Perplexity, evaluate, evaluation_layout
from megalite.generate.row import Completion, Stop
from megalite.generate.sampling import Sampling
from megalite.generate.score import Score, score
from megalite.generate.windows import windows
from megalite.layout import parse_layout
from megalite.mpu import ParallelState
from megalite.nn.config import ModelConfig
from megalite.testing.world import World
from megalite.train.config import TrainConfig
from tests.generate.runs import write_run

LLAMA = ModelConfig(
    num_layers=4, hidden_size=32, num_heads=4, num_kv_heads=2, ffn_hidden_size=24, vocab_size=257, init_std=0.3,
    tie_embeddings=True, attention_sinks=True, window=6, window_layers="but_every:2",
)  # fmt: skip
EXPERTS = dataclasses.replace(
    LLAMA, name="lfm2", attention_layers="1,3", attention_sinks=False, num_experts=6, top_k=2, moe_layers="from:1",
    expert_ffn_hidden_size=12, shared_ffn_hidden_size=8, router_score="sigmoid", expert_bias=True, capacity_factor=1.0,
)  # fmt: skip
MODELS = {"llama": LLAMA, "experts": EXPERTS}
PROMPTS = ["Hello", "Wörld, and more", "x"]
ROWS = [
    ("llama", "tp2"), ("llama", "tp4"), ("llama", "pp2"), ("llama", "tp2+pp2"), ("llama", "pp4"),
    ("experts", "ep2"), ("experts", "tp2"), ("experts", "tp2+ep2"), ("experts", "pp2+ep2"), ("experts", "tp2+etp2"),
]  # fmt: skip
FULL = {("llama", "tp4"), ("llama", "pp4"), ("experts", "pp2+ep2"), ("experts", "tp2+etp2")}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder of each model, with random weights in float64."""
    folder = tmp_path_factory.mktemp("generation")
    for name, model in MODELS.items():
        config = Config(model=model, data=DataConfig(tokenizer="byte", seq_len=20), train=TrainConfig(precision="fp64"))
        write_run(folder / name, config)
    return folder


def say(mpu: ParallelState, run: str) -> list[Completion]:
    """What this rank's part of the run's model says, to rows that outgrow the context and end at different times."""
    torch.set_grad_enabled(True)
    tokenizer, device = ByteTokenizer(), torch.device("cpu")
    source = find_source(run)
    stage = load_stage(source, mpu, device).stage
    assert stage.hidden_dtype == torch.float64
    generator = Generator(stage, mpu, device, context=source.context, prefill_chunk=7)
    sampling = Sampling(temperature=1.5, top_k=60, seed=5, repetition_penalty=1.1)
    stop = Stop(max_new_tokens=13, tokens=(tokenizer.eod, 88), strings=("q",))
    return generator.generate([tokenizer.encode(text) for text in PROMPTS], sampling, stop, tokenizer=tokenizer)


@pytest.fixture(scope="module")
def alone(runs: Path) -> dict[str, list[Completion]]:
    return {name: say(ParallelState.single(), str(runs / name)) for name in MODELS}


@pytest.mark.parametrize(
    ("model", "layout"),
    [pytest.param(*row, marks=pytest.mark.full) if row in FULL else row for row in ROWS],
)
def test_every_layout_says_the_same(
    model: str, layout: str, runs: Path, alone: dict[str, list[Completion]], world: World
) -> None:
    asked = parse_layout(layout)
    parallel = inference_layout(asked.parallel, asked.num_ranks)
    for rank in world.run(say, str(runs / model), layout=parallel, ranks=asked.num_ranks):
        assert rank == alone[model]
    assert sum(len(row.tokens) for row in alone[model]) > 15


TEXTS = ("A text of one window", "é" * 37, "and one more, of a few windows of twenty tokens: as long as this is.", "!")


def documents() -> list[Document]:
    """Documents of one and of several windows."""
    tokenizer = ByteTokenizer()
    ids = [np.array([tokenizer.eod, *tokenizer.encode(text)]) for text in TEXTS]
    return [Document(tokens, len(text.encode())) for tokens, text in zip(ids, TEXTS, strict=True)]


def predict(mpu: ParallelState, run: str) -> Perplexity:
    """How well the run's model predicts the texts."""
    source, device = find_source(run), torch.device("cpu")
    stage = load_stage(source, mpu, device).stage
    return evaluate(documents(), stage, mpu, device, context=source.context, stride=8, batch_size=2)


def score_texts(mpu: ParallelState, run: str) -> list[Score]:
    """How likely it finds each window of them."""
    source, device = find_source(run), torch.device("cpu")
    stage = load_stage(source, mpu, device).stage
    rows = [window for document in documents() for window in windows(document.tokens, source.context, 8)]
    return score(rows, stage, mpu, device, batch_size=3)


EVALUATED = [
    ("llama", "tp2+sp+pp2"), ("llama", "cp2"), ("llama", "pp2+dp2"), ("experts", "ep2"), ("experts", "tp2+sp+cp2"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("model", "layout"),
    [pytest.param(*row, marks=pytest.mark.full) if row[1] in ("pp2+dp2", "tp2+sp+cp2") else row for row in EVALUATED],
)
def test_every_layout_predicts_as_well(model: str, layout: str, runs: Path, world: World) -> None:
    run, asked = str(runs / model), parse_layout(layout)
    alone = predict(ParallelState.single(), run)
    parallel = evaluation_layout(asked.parallel)
    for rank in world.run(predict, run, layout=parallel, ranks=asked.num_ranks):
        assert rank.nats == pytest.approx(alone.nats, rel=1e-12)
        assert (rank.tokens, rank.bytes) == (alone.tokens, alone.bytes) == (163, 163)


@pytest.mark.parametrize(("model", "layout"), [("llama", "tp2+pp2"), ("experts", "ep2")])
def test_every_layout_finds_windows_as_likely(model: str, layout: str, runs: Path, world: World) -> None:
    run, asked = str(runs / model), parse_layout(layout)
    alone = score_texts(ParallelState.single(), run)
    total = predict(ParallelState.single(), run).nats
    assert -sum(found.log_prob for found in alone) == pytest.approx(total, rel=1e-12)
    parallel = inference_layout(asked.parallel, asked.num_ranks)
    for rank in world.run(score_texts, run, layout=parallel, ranks=asked.num_ranks):
        assert [found.is_greedy for found in rank] == [found.is_greedy for found in alone]
        assert [found.log_prob for found in rank] == pytest.approx([found.log_prob for found in alone], rel=1e-11)
