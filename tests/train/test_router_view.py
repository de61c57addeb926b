"""What a run keeps and says of its routers."""

from __future__ import annotations

import io
import json
import logging
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.image import imread
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megalite.nn.router import EXTRA, RouterLoads
from megalite.train.callbacks import Callback, MetricsFiles, TensorBoard
from megalite.train.heat_map import MAX_BINS, LoadHistory, Panel, draw, log_share
from megalite.train.metrics import RouterStats
from megalite.train.router_view import DeadExperts, RouterView
from megalite.train.run_folder import read_rows
from tests.train.fakes import FakeTraining, make_trainer

EVEN, SKEWED = [5, 5, 5, 5], [2, 0, 12, 6]


def loads(*tokens: list[int], layers: tuple[int, ...] = (1, 3), dropped: float = 0.0, aux: float = 0.01) -> RouterLoads:
    """10 tokens with 2 experts each, of entropy ln 4 in the first layer and half of it in the others."""
    entropies = [10 * math.log(4) / (1 if place == 0 else 2) for place in range(len(layers))]
    extra = [[dropped, entropy, aux, 2 * aux, 10.0] for entropy in entropies]
    return RouterLoads(layers, torch.tensor(tokens, dtype=torch.float64), torch.tensor(extra, dtype=torch.float64))


class StopAt(Callback):
    def __init__(self, step: int):
        self.step = step

    def before_step(self, step: int) -> None:
        if step == self.step:
            raise RuntimeError("killed")


def run(
    path: Path, by_step: dict[int, RouterLoads], *extra: Callback, rows_every: int = 1, dead: int = 3, **options: Any
):
    """A run whose steps report these loads, of each step the last that was named."""
    results, current = {}, by_step[1]
    for step in range(1, options["num_steps"] + 1):
        current = by_step.get(step, current)
        results[step - 1] = {"router_loads": current}
    trainer, folder, _ = make_trainer(path, FakeTraining(results=results), **options)
    view = RouterView(folder, every=rows_every, dead_expert_steps=dead)
    trainer.callbacks = [*extra, MetricsFiles(folder), TensorBoard(folder.tensorboard), view]
    try:
        trainer.run()
    finally:
        folder.close()


def test_stats_are_their_definitions() -> None:
    stats = RouterStats.of(loads(EVEN, SKEWED, dropped=3.0))
    assert stats.tokens.tolist() == [EVEN, SKEWED] and stats.layers == (1, 3)
    assert stats.max_violation == (0.0, (12 - 5) / 5)
    assert stats.entropy == pytest.approx((math.log(4), math.log(4) / 2))
    assert stats.drop_rate == 6 / 40 and (stats.aux_loss, stats.z_loss) == (0.02, 0.04)
    assert len(EXTRA) == 5


def test_no_token_at_all_is_no_violation() -> None:
    stats = RouterStats.of(RouterLoads((0,), torch.zeros(1, 4), torch.zeros(1, len(EXTRA))))
    assert stats.max_violation == (0.0,) and stats.entropy == (0.0,) and stats.drop_rate == 0.0


def test_rows_hold_what_is_deterministic(tmp_path: Path) -> None:
    run(tmp_path, {1: loads(EVEN, SKEWED, dropped=1.0), 2: loads(EVEN, EVEN, aux=math.nan)}, num_steps=2)
    first, second = read_rows(tmp_path / "metrics.jsonl")
    assert first["moe"] == {
        "aux_loss": 0.02, "z_loss": 0.04, "drop_rate": 2 / 40, "max_violation": [0.0, 1.4],
        "entropy": [math.log(4), math.log(4) / 2],
    }  # fmt: skip
    assert second["moe"]["aux_loss"] is None and list(first)[-1] == "moe"
    assert (tmp_path / "router.jsonl").read_text().splitlines()[0] == json.dumps(
        {"step": 1, "layers": [1, 3], "tokens": [EVEN, SKEWED]}
    )


def test_a_dense_run_has_no_trace_of_routers(tmp_path: Path) -> None:
    trainer, folder, _ = make_trainer(tmp_path, FakeTraining(), num_steps=2)
    trainer.callbacks = [MetricsFiles(folder)]
    trainer.run()
    folder.close()
    assert "moe" not in (tmp_path / "metrics.jsonl").read_text() and not list(tmp_path.glob("router*"))


def test_tensorboard_has_each_layer(tmp_path: Path) -> None:
    run(tmp_path, {1: loads(EVEN, SKEWED)}, num_steps=1)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    values = {name: events.Scalars(name)[0].value for name in events.Tags()["scalars"] if name.startswith("moe")}
    assert values.keys() == {
        "moe/aux_loss", "moe/z_loss", "moe/drop_rate", "moe_max_violation/layer_001", "moe_max_violation/layer_003",
        "moe_entropy/layer_001", "moe_entropy/layer_003",
    }  # fmt: skip
    assert values["moe_max_violation/layer_003"] == pytest.approx(1.4)


def test_a_resumed_run_keeps_the_rows_of_one_that_was_never_interrupted(tmp_path: Path) -> None:
    by_step = {1: loads(EVEN, SKEWED), 4: loads(SKEWED, EVEN), 6: loads(SKEWED, SKEWED)}
    run(tmp_path / "whole", by_step, num_steps=8, every=2)
    with pytest.raises(RuntimeError, match="killed"):
        run(tmp_path / "broken", by_step, StopAt(6), num_steps=8, every=2)
    assert [row["step"] for row in read_rows(tmp_path / "broken/router.jsonl")] == [1, 2, 3, 4, 5]
    (tmp_path / "broken/router_heatmap.png").unlink()
    run(tmp_path / "broken", by_step, num_steps=8, every=2, resume="auto")
    whole, broken = ((tmp_path / name / "router.jsonl").read_bytes() for name in ("whole", "broken"))
    assert whole == broken
    pictures = [imread(tmp_path / name / "router_heatmap.png") for name in ("whole", "broken")]
    assert np.array_equal(pictures[0], pictures[1])


def test_rows_may_be_fewer(tmp_path: Path) -> None:
    run(tmp_path, {1: loads(EVEN, EVEN)}, num_steps=7, rows_every=3)
    assert [row["step"] for row in read_rows(tmp_path / "router.jsonl")] == [3, 6]


def test_dead_experts_are_told_once_and_when_they_revive(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "megalite"):
        run(tmp_path, {1: loads(EVEN, SKEWED), 6: loads(EVEN, EVEN), 7: loads([20, 0, 0, 0], EVEN)}, num_steps=11)
    said = [record.message for record in caplog.records if "expert" in record.message]
    assert said == [
        "step 3 | dead experts, no token in 3 steps: layer 3: 1",
        "step 6 | experts alive again: layer 3: 1",
        "step 9 | dead experts, no token in 3 steps: layer 1: 1 2 3",
    ]


def test_a_resume_does_not_repeat_what_was_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run(tmp_path, {1: loads(EVEN, SKEWED)}, num_steps=4)
    caplog.clear()
    with caplog.at_level(logging.WARNING, "megalite"):
        run(tmp_path, {1: loads(EVEN, SKEWED), 6: loads(EVEN, EVEN)}, num_steps=7, resume="auto")
    assert [m for m in caplog.messages if "expert" in m] == ["step 6 | experts alive again: layer 3: 1"]


def test_dead_experts_can_be_left_alone() -> None:
    watch = DeadExperts((1, 2), 0)
    assert not any(died.any() or revived.any() for died, revived in [watch.see(np.zeros((1, 2), dtype=int))] * 3)


def test_a_picture_that_fails_ends_no_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*arguments: Any, **options: Any) -> bytes:
        raise RuntimeError("no fonts")

    monkeypatch.setattr("megalite.train.router_view.draw", broken)
    run(tmp_path, {1: loads(EVEN, EVEN)}, num_steps=2)
    assert "router_heatmap.png was not drawn: RuntimeError: no fonts" in caplog.text
    assert len(read_rows(tmp_path / "router.jsonl")) == 2


@pytest.mark.parametrize("num_steps", [1, MAX_BINS, MAX_BINS + 1, 5 * MAX_BINS - 3])
def test_history_bins_hold_every_step_once(num_steps: int) -> None:
    history = LoadHistory((0,), 2)
    for step in range(1, num_steps + 1):
        history.add(step, np.array([[step, 1]]))
    bins, width = history.of_layer(0), history.steps_per_bin
    assert len(bins) == -(-num_steps // width) and (width == 1 or len(bins) > MAX_BINS / 2)
    for place, (total, count) in enumerate(bins):
        steps = range(place * width + 1, min((place + 1) * width, num_steps) + 1)
        assert (total, count) == (sum(steps), len(steps))


def test_colours_mean_shares() -> None:
    shares = log_share(np.array([[4.0, 4.0, 8.0, 0.0, 0.0, 0.0, 0.0, 16.0], [0.0] * 8, [63.0, *[0.0] * 6, 1.0]]))
    assert shares[0].tolist() == [0.0, 0.0, 1.0, *[-math.inf] * 4, 2.0]
    assert np.isnan(shares[1]).all()
    assert shares[2].tolist() == [2.0, *[-math.inf] * 6, -2.0]  # 7.9 and 1/8 of the even share


@pytest.mark.parametrize(("num_experts", "num_layers"), [(4, 1), (256, 7)])
def test_the_picture_shows_even_crowded_and_dead_experts(num_experts: int, num_layers: int) -> None:
    tokens = np.full((10, num_experts), 100.0)
    tokens[:, 0], tokens[:, -1], tokens[5] = 0.0, 1e9, 0.0
    panels = [Panel(title=f"layer {i}", tokens=tokens, dead=[0]) for i in range(num_layers)]
    picture = imread(io.BytesIO(draw(panels, title="t", steps_per_bin=1)))[..., :3]
    pixels = (picture * 255).round().astype(int)
    for colour in ([255, 212, 0], [103, 0, 31], [216, 216, 216]):  # no token, four times the even share, no data
        found = (pixels == colour).all(-1)
        assert found.any(0).sum() > 25 and found.any(1).sum() >= 1, colour
    assert picture.shape[0] > max(250, num_experts) and picture.shape[1] > 600
