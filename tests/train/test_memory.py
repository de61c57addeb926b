"""The memory that is predicted: against published and counted figures, and against a real step."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megalite.config import Config, check, load_config
from megalite.layout import parse_layout
from megalite.mpu import ParallelConfig
from megalite.pipeline.schedule import make_plan
from megalite.pipeline.simulate import peak_activations
from megalite.testing.step_memory import beside_predicted, measure
from megalite.testing.world import World
from megalite.train.memory import KINDS, STATE, RankMemory, predict
from tests.tiny import config_for

ROOT = Path(__file__).parents[2]
CUDA = torch.device("cuda")


def _preset(name: str, *options: str) -> Config:
    return load_config(["--config", str(ROOT / "configs" / f"{name}.yaml"), *options])


def _compare(config: Config, layout: str, world: World) -> None:
    place = parse_layout(layout)
    config = place.apply(config)
    check(config, place.num_ranks)
    found = world.run(measure, config, layout=config.parallel, ranks=place.num_ranks, timeout=300.0)
    for rank, counted in beside_predicted(config, place.num_ranks, found):
        assert {kind: rank.kinds[kind] for kind in STATE} == counted.state
        assert sum(rank.settled.values()) == pytest.approx(counted.step, rel=0.05), layout
        for kind, size in counted.units.items():
            assert rank.kinds[kind] == pytest.approx(size, rel=0.05), (layout, kind)


@pytest.mark.parametrize("layout", ["dp2+zero3+recompute:selective", "tp2+sp+pp2:zb_v"])
def test_a_step_needs_what_was_predicted(layout: str, tokens: str, tmp_path: Path, world: World) -> None:
    _compare(config_for("llama", tokens, tmp_path, precision="bf16"), layout, world)


@pytest.mark.full
@pytest.mark.parametrize("layout", ["pp2", "tp2+sp+recompute:full", "dp2+zero3", "pp2:zb_h1+dp2+zero2"])
def test_multi_token_prediction_needs_so_much(layout: str, tokens: str, tmp_path: Path, world: World) -> None:
    _compare(config_for("mtp", tokens, tmp_path, precision="bf16"), layout, world)


@pytest.mark.full
@pytest.mark.parametrize(
    "layout",
    [
        "single", "tp2+sp", "pp2", "pp2:zb_v", "pp2:zb_h1+dp2+zero3", "cp2", "dp2+zero1", "dp2+zero2", "dp2+zero3",
        "recompute:full", "recompute:selective", "recompute:every:2", "recompute:block:3", "tp2+recompute:selective",
    ],
)  # fmt: skip
def test_the_demo_needs_what_was_predicted(layout: str, world: World) -> None:
    _compare(_preset("demo"), layout, world)


@pytest.mark.full
@pytest.mark.parametrize("layout", ["ep2", "ep2+pp2:zb_h1", "ep2+zero3+recompute:full", "tp2+sp+zero2"])
def test_the_demo_of_experts_needs_what_was_predicted(layout: str, world: World) -> None:
    _compare(_preset("moe_demo"), layout, world)


def _state(rank: RankMemory) -> int:
    return sum(rank.kinds[kind] for kind in STATE)


def test_state_of_a_parameter_by_zero_stage() -> None:
    config = replace(_preset("llama_1b"), parallel=ParallelConfig())
    ranks, size = 16, 1235814400
    for zero, (whole, divided) in enumerate([(18, 0), (6, 12), (2, 16), (0, 18)]):
        staged = replace(config, parallel=ParallelConfig(zero=zero))
        (rank,) = predict(staged, ranks, device=CUDA)
        assert _state(rank) / size == pytest.approx(whole + divided / ranks, rel=1e-4)


def test_gpt3_on_64_ranks_holds_the_published_parameters() -> None:
    config = _preset("gpt3_175b")
    ranks = predict(replace(config, train=replace(config.train, global_batch_size=16)), 64, device=CUDA)
    count = sum(rank.kinds["parameters"] for rank in ranks) / 2 * 8
    assert count == pytest.approx(174.6e9, rel=0.01)  # both ends hold the word embedding, and tp ranks the norms
    full = 2 * 2048 * 12288 // 8  # bytes of a layer's input, cut over tp
    assert ranks[3].stages[0].saved.total == 12 * full and ranks[3].kinds["activations"] == 12 * full * 5


def test_a_llama_layer_keeps_the_closed_form() -> None:
    config = _preset("llama3_8b", "--parallel.pp", "1")
    (rank,) = predict(config, 4, device=CUDA)
    h, f, kv, heads, s = 4096, 14336, 2 * 1024, 32, 8192
    # norm and linear inputs, q k v turned in one piece, output; gate, up, product: bf16. Statistics: float32.
    layer = 2 * (4 * h + (h + kv) + h + 3 * f) // 4 + 4 * (heads // 4 + 2 // 4)
    (stage,) = rank.stages
    expected = 32 * s * layer + 32 * s * 2 * 4 // 4
    ends = 2 * s * 4096 // 4 + 4 * s // 4 + s * 9 + 2 * s * 64 * 4
    assert stage.saved.total == expected + ends


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb_h1", "zb_h2"])
def test_micro_batches_in_flight_are_those_of_the_plan(schedule: str) -> None:
    config = _preset("demo", "--parallel.pp", "4", "--parallel.schedule", schedule)
    ranks = predict(config, 4, device=CUDA)
    assert [rank.stages[0].peak for rank in ranks] == peak_activations(make_plan(schedule, 4, 16))
    assert any(rank.kinds["deferred"] for rank in ranks) == schedule.startswith("zb")


def test_rows_loaded_ahead_wait_in_the_memory_of_the_host() -> None:
    config = _preset("demo")
    when_due = replace(config, data=replace(config.data, prefetch=0))
    for device, ahead in ((torch.device("cpu"), config.data.prefetch), (CUDA, 0)):
        (due,), (early,) = (predict(each, 1, device=device) for each in (when_due, config))
        assert early.kinds["batch"] == (1 + ahead) * due.kinds["batch"] > 0


def test_what_costs_what() -> None:
    def total(*options: str, expert_load: float = 1.0, preset: str = "mixtral_8x7b") -> dict[str, int]:
        config = _preset(preset, "--train.global_batch_size", "64", *options)
        return dict(predict(config, 32, device=CUDA, expert_load=expert_load)[0].kinds)

    plain = total()
    assert set(plain) == set(KINDS)
    assert total(expert_load=2.0)["activations"] > 1.3 * plain["activations"]
    full = total("--train.recompute", "full")
    assert full["activations"] < plain["activations"] / 20 and full["recompute"] > plain["activations"] / 40
    assert total("--optim.name", "sgd")["optimizer"] == 0
    assert total("--optim.master_weights", "none")["master"] == 0
    assert total("--optim.post_validation", "true")["master"] == 2 * plain["master"]
    assert total("--train.reduce_dtype", "bf16")["reduction"] > 0 == plain["reduction"]
