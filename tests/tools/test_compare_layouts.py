"""Layouts that the proof refuses before it starts a rank."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from megalite.config import ConfigError
from megalite.layout import parse_layout
from tests.test_config_rules import config_with


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    path = Path(__file__).parents[2] / "tools" / "compare_layouts.py"
    spec = importlib.util.spec_from_file_location("compare_layouts", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_loss_of_micro_batches_is_compared_at_one_size_of_them(tool: ModuleType) -> None:
    layouts = [parse_layout(text) for text in ("ep2", "ep2+mbs2", "ep2+mbs4", "mbs1")]
    model = {"num_experts": 4, "aux_loss": "micro_batch"}
    config = config_with(model=model, train={"micro_batch_size": 2, "global_batch_size": 8})
    with pytest.raises(ConfigError) as caught:
        tool._check(config, layouts, 1)
    assert [problem.split(":")[0] for problem in caught.value.problems] == ["ep2+mbs4", "mbs1"]
    assert "model.aux_loss=micro_batch depends on the micro-batch size, which is 2" in str(caught.value)
    tool._check(config, layouts[:2], 1)
    for other in ({"aux_loss": "sequence"}, {"aux_loss_coeff": 0.0}):
        free = config_with(model=model | other, train={"micro_batch_size": 2, "global_batch_size": 8})
        tool._check(free, layouts, 1)


def test_every_layout_that_cannot_run_is_named(tool: ModuleType) -> None:
    with pytest.raises(ConfigError) as caught:
        tool._check(config_with(), [parse_layout(text) for text in ("tp2", "ep2", "tp3")], 1)
    text = "\n".join(caught.value.problems)
    assert "ep2: parallel.ep=2 needs experts" in text and "tp3: model.num_heads=8" in text and "tp2:" not in text
