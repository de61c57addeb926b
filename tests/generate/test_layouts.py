"""Every layout says the same: a checkpoint of one rank, loaded and continued on several."""

import dataclasses
from pathlib import Path

import pytest
import torch

from megalite.checkpoint import store
from megalite.config import Config, save_config
from megalite.data.config import DataConfig
from megalite.data.tokenizer import ByteTokenizer
from megalite.generate.generator import Generator
from megalite.generate.load import find_source, inference_layout, load_stage
from megalite.generate.row import Completion, Stop
from megalite.generate.sampling import Sampling
from megalite.layout import parse_layout
from megalite.models.transformer import StageSpec
from megalite.mpu import ParallelState
from megalite.nn.config import ModelConfig
from megalite.parallel.shard import buffer_tensors, shard_of
from megalite.testing.world import World
from megalite.train.build import build_stage
from megalite.train.config import TrainConfig

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
    for name, model in MODELS.items():
        path, mpu = tmp_path_factory.getbasetemp() / "generation" / name, ParallelState.single()
        config = Config(model=model, data=DataConfig(tokenizer="byte", seq_len=20), train=TrainConfig(precision="fp64"))
        save_config(config, path / "config.yaml")
        stage = build_stage(config, mpu, StageSpec(0, 1, range(4)), torch.device("cpu"))
        for buffer_name, buffer in stage.named_buffers():
            if buffer_name.endswith("expert_bias"):
                buffer.copy_(torch.linspace(-0.2, 0.2, len(buffer)))
        weights = [(shard_of(p), p.data) for p in stage.parameters()]
        store.save(path, 3, {"parameter": weights} | buffer_tensors(stage), {}, mpu)
    return tmp_path_factory.getbasetemp() / "generation"


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
