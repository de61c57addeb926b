"""`tools/route_lab.py`: recorded logits under other rules."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from megalite.nn.config import MoEConfig
from megalite.parallel.expert import Assignment
from megalite.train.router_record import Recording, read_recording, recorded_files
from megalite.train.router_replay import ReplayError, Rule, Synthetic, figures_of, parse_rule, simulate, traffic_of
from tests.tools.conftest import Script
from tests.train.test_router_record import record_one_rank

ROOT = Path(__file__).parents[2]
SMALL = Synthetic(
    experts=8, top_k=2, hidden_size=16, layers=1, steps=4, rows=4, seq_len=32, skew=1.0, topics=0.3, seed=3
)


@pytest.fixture
def run(script: Script) -> Script:
    """Runs the tool."""
    return partial(script, "route_lab", columns=80)


def _steps() -> list[Recording]:
    return next(SMALL.recordings())


def test_choices_are_those_of_the_scores() -> None:
    steps = _steps()
    (outcomes,) = simulate(Rule("same"), steps, ep=2, repeat=1)
    for step, outcome in zip(steps, outcomes, strict=True):
        chosen = step.logits.topk(2).indices
        assert outcome.stats.tokens.tolist() == [torch.bincount(chosen.flatten(), minlength=8).tolist()]
        assert outcome.num_tokens == 4 * 32 and outcome.traffic.unserved == 0
        there = chosen // 4  # 2 ranks of 4 experts
        here = (torch.arange(4) % 2)[:, None, None]
        assert outcome.traffic.pairs_leaving == int((there != here).sum())
        assert outcome.traffic.tokens_leaving == int((there != here).any(-1).sum())
        arriving = torch.bincount(there.flatten(), minlength=2)
        assert outcome.traffic.rank_load == pytest.approx(float(arriving.max() / (4 * 32)))


def test_padding_is_not_routed() -> None:
    step = _steps()[0]
    mask = step.mask.clone()
    mask[1, 5:] = False
    ((outcome,),) = simulate(Rule("same"), [replace(step, mask=mask)], ep=2, repeat=1)
    assert outcome.num_tokens == int(mask.sum()) == int(outcome.stats.tokens.sum()) / 2
    assert outcome.traffic.unserved == 0


def test_a_bias_balances_over_the_steps_and_a_replay_as_recorded_uses_the_recorded_one() -> None:
    steps = _steps()
    rule = parse_rule("bias: expert_bias=true expert_bias_rate=0.01 router_score=sigmoid")
    outcomes = simulate(rule, steps, ep=2, repeat=20)
    first, last = (outcome.stats.max_violation[0] for outcome in (outcomes[0][0], outcomes[-1][-1]))
    assert last < 0.5 * first
    bias = torch.tensor([0.0, 0.0, 0.0, 9.0, 0.0, 0.0, 0.0, 0.0])
    moe = replace(steps[0].moe, expert_bias=True)
    steps = [replace(steps[0], moe=moe), replace(steps[1], moe=moe, expert_bias=bias)]
    (outcomes,) = simulate(Rule("as recorded"), steps, ep=2, repeat=1)
    assert outcomes[0].stats.tokens[0][3] < outcomes[1].stats.tokens[0][3] == 4 * 32


def test_capacity_drops_and_leaves_tokens_without_an_expert() -> None:
    steps = _steps()
    rule = parse_rule("top_k=1 router_normalize=false capacity_factor=1")
    (outcomes,) = simulate(rule, steps, ep=2, repeat=1)
    figures = figures_of(rule.name, [[outcomes]], bytes_per_token=10)
    places = 4  # ceil(32 * 1 / 8) in each row
    dropped = 0
    for step in steps:
        chosen = torch.nn.functional.one_hot(step.logits.argmax(-1), 8).sum(1)
        dropped += int((chosen - places).clamp(min=0).sum())
    assert figures.drop_rate == figures.unserved_rate == dropped / (4 * 4 * 32) > 0
    assert figures.dispatch_bytes == figures.dispatch_bytes_once == sum(o.traffic.pairs_leaving for o in outcomes) * 2.5


def test_padded_places_travel() -> None:
    (outcomes,) = simulate(parse_rule("capacity_factor=1.25 pad_to_capacity=true"), _steps(), ep=4, repeat=1)
    places = 4 * 8 * 10  # rows, experts, ceil(32 * 2 / 8 * 1.25)
    for outcome in outcomes:
        assert outcome.traffic.pairs_leaving == places * 3 // 4 and outcome.traffic.rank_load == 1.0


def test_traffic_of_nothing() -> None:
    none = torch.zeros(0, dtype=torch.int64)
    assignment = Assignment(none, none, torch.zeros(0), torch.zeros(4, dtype=torch.int64))
    traffic = traffic_of(assignment, torch.ones(3, 2, dtype=torch.bool), 4, 2)
    assert (traffic.pairs_leaving, traffic.tokens_leaving, traffic.rank_load, traffic.unserved) == (0, 0, 0.0, 6)


def test_even_and_crowded_loads_in_figures() -> None:
    logits = torch.full((2, 4, 4), -5.0)
    logits[..., 2] = 5.0
    moe = MoEConfig(num_experts=4, top_k=1)
    crowded = replace(_steps()[0], logits=logits, moe=moe, mask=torch.ones(2, 4, dtype=torch.bool), layer=7,
                      samples=torch.arange(2), expert_bias=torch.zeros(4))  # fmt: skip
    figures = figures_of("x", [simulate(Rule("x"), [crowded], ep=2, repeat=1)], bytes_per_token=1)
    assert (figures.max_violation, figures.dead_experts, figures.load_entropy, figures.rank_load) == (3.0, 3, 0.0, 2.0)
    even = replace(crowded, logits=torch.eye(4).expand(2, 4, 4))
    figures = figures_of("x", [simulate(Rule("x"), [even], ep=2, repeat=1)], bytes_per_token=1)
    assert (figures.max_violation, figures.dead_experts, figures.rank_load) == (0.0, 0, 1.0)
    assert figures.load_entropy == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("top_kk=2", "fields are top_k, "),
        ("num_experts=4", "is not field=value"),
        ("routing=hash", "routing=hash can be top_k, sinkhorn, expert_choice"),
        ("top_k=2.5", "top_k=2.5 must be of type int"),
        ("expert_bias=1", "expert_bias=1 must be of type bool"),
    ],
)
def test_rules_that_mean_nothing_are_refused(text: str, reason: str) -> None:
    with pytest.raises(ReplayError, match=reason):
        parse_rule(text)


def test_rules_have_names_and_types() -> None:
    rule = parse_rule("tight: capacity_factor=1 drop_policy=position expert_ffn_hidden_size=7")
    assert rule == Rule("tight", {"capacity_factor": 1.0, "drop_policy": "position", "expert_ffn_hidden_size": 7})
    assert parse_rule("top_k=1 expert_bias=true").name == "top_k=1 expert_bias=true"


def test_synthetic_logits_from_the_command_line(tmp_path: Path, run: Script) -> None:
    figures, picture = tmp_path / "figures.json", tmp_path / "loads.png"
    shown = run(
        "--synthetic", "--experts", 8, "--top-k", 2, "--steps", 3, "--rows", 4, "--layers", 2, "--ep", 4,
        "--json", figures, "--png", picture,
    ).stdout  # fmt: skip
    assert "2 layers of 8 experts, 3 steps of 256 tokens, ep 4" in shown and "expert choice" in shown
    rows = {row["rule"]: row for row in json.loads(figures.read_text())}
    assert list(rows) == ["synthetic", "bias", "capacity 1", "capacity 1.25", "sinkhorn", "expert choice"]
    assert rows["expert choice"]["max_violation"] == 0.0 < rows["sinkhorn"]["max_violation"] < 1.0
    assert rows["capacity 1"]["drop_rate"] > rows["capacity 1.25"]["drop_rate"] > 0.0 == rows["bias"]["drop_rate"]
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_run_from_the_command_line(tmp_path: Path, run: Script) -> None:
    record_one_rank(tmp_path / "router_logits")
    figures = tmp_path / "figures.json"
    run(tmp_path, "--rule", "wide: top_k=4", "--ep", 2, "--json", figures)
    recorded, wide = json.loads(figures.read_text())
    assert (recorded["rule"], wide["rule"]) == ("as recorded", "wide")
    leaving = 0
    for (file,) in recorded_files(tmp_path).values():
        step = read_recording(file)
        (outcomes,) = simulate(Rule("same"), [step], ep=2, repeat=1)
        leaving += outcomes[0].traffic.pairs_leaving
        assert outcomes[0].stats.tokens.sum() == 2 * 23
    assert recorded["dispatch_bytes"] == leaving * 5 * 2


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ((), "give either the folder of a run or --synthetic"),
        (("nowhere",), "no router logits in nowhere: was the run made with --train.record-router"),
        (("--synthetic", "--ep", 3), "--ep 3 must divide num_experts=64 and the 16 rows of a step; it can be 1, 2, 4"),
        (("--synthetic", "--rule", "x"), "'x' is not field=value"),
        (("--synthetic", "--rule", "top_k=65"), "rule 'top_k=65': model.top_k=65 is more than num_experts=64"),
        (("--synthetic", "--rows", 0), "--rows=0 must be at least 1"),
    ],
)
def test_what_cannot_be_done_is_told_plainly(arguments: tuple[object, ...], reason: str, run: Script) -> None:
    error = run(*arguments, code=1).stderr
    assert error.startswith("route_lab.py: ") and reason in error and "Traceback" not in error
