"""What `parallel.partition` weighs."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from megalite.config import Config, ConfigError, check, save_config
from megalite.layout import parse_layout
from megalite.mpu import ParallelConfig, ParallelState
from megalite.nn.config import ModelConfig
from megalite.pipeline.measured import TRACE
from megalite.pipeline.partition import PartCosts
from megalite.pipeline.schedule import make_plan
from megalite.testing.layouts import prove_layouts
from megalite.testing.world import World
from megalite.train.build import build_stages
from megalite.train.stages import parameter_counts, stage_layers
from tests.pipeline.test_measured import write_trace
from tests.tiny import GPT2, LLAMA, TIED_LLAMA, config_for

EIGHT = dataclasses.replace(LLAMA, num_layers=8)


def _counts(model: ModelConfig, schedule: str = "1f1b", pp: int = 4, **parallel: object) -> list[int]:
    config = ParallelConfig(pp=pp, schedule=schedule, **parallel)  # type: ignore
    return list(map(len, stage_layers(model, config, make_plan(schedule, pp, 8))))


@pytest.mark.parametrize("model", [LLAMA, GPT2, TIED_LLAMA], ids=lambda model: model.name)
def test_parameters_are_counted_as_they_are_built(model: ModelConfig, tokens: str, tmp_path: Path) -> None:
    plan = make_plan("1f1b", 1, 8)
    config = dataclasses.replace(config_for("llama", tokens, tmp_path), model=model)
    stages = build_stages(config, ParallelState.single(), plan, [range(model.num_layers)], torch.device("cpu"))
    counts = parameter_counts(model, ends_meet=model.tie_embeddings)
    total = sum(counts.layers) + counts.embedding + counts.head
    assert total == sum(parameter.numel() for parameter in stages[0].parameters())


def test_a_tied_head_counts_where_it_is_a_matrix_of_its_own() -> None:
    large = dataclasses.replace(EIGHT, vocab_size=4000, tie_embeddings=True)  # 192k; a layer has about 10k
    assert _counts(large, partition="parameters") == [0, 4, 4, 0]
    v_shaped = _counts(large, "zb_v", pp=2, partition="parameters")
    assert v_shaped[0] == 0 and v_shaped[-1] > 0
    assert _counts(large, partition="cost")[0] > 0, "a look-up costs no time"


def _traced(tmp_path: Path, model: ModelConfig, head: float) -> Path:
    """The folder of a run of `model`."""
    folder = tmp_path / "traced"
    folder.mkdir()
    parts = PartCosts(layers=(1.0,) * model.num_layers, embedding=0.0, head=head)
    write_trace(folder / TRACE, make_plan("1f1b", 4, 8), (2, 2, 2, 2), parts)
    save_config(Config(model=model), folder / "config.yaml")
    return folder


def test_measured_times_decide(tmp_path: Path) -> None:
    folder = _traced(tmp_path, EIGHT, head=3.0)
    counts = _counts(EIGHT, partition=f"measured:{folder}")
    assert counts[-1] == 0 and max(counts) == 3
    # A rate is not a size.
    assert _counts(dataclasses.replace(EIGHT, hidden_dropout=0.5), partition=f"measured:{folder}") == counts


@pytest.mark.parametrize("by", ["parameters", "measured"])
def test_the_partition_is_a_deployment_detail(
    by: str, tokens: str, tmp_path: Path, references: Path, world: World
) -> None:
    config = dataclasses.replace(config_for("llama", tokens, references), model=EIGHT)
    by = f"measured:{_traced(tmp_path, EIGHT, head=3.0)}" if by == "measured" else by
    layout = parse_layout("pp4:zb_h1+mbs2")
    layout = dataclasses.replace(layout, parallel=dataclasses.replace(layout.parallel, partition=by))
    check(layout.apply(config), 4)
    (difference,) = prove_layouts(config, [layout], world, references)
    assert difference.passed, difference.first_diff


def test_what_cannot_be_weighed_is_refused(tokens: str, tmp_path: Path) -> None:
    config = dataclasses.replace(config_for("llama", tokens, tmp_path), model=EIGHT)
    folder = _traced(tmp_path, EIGHT, head=3.0)

    def said(config: Config, **parallel: object) -> str:
        config = dataclasses.replace(config, parallel=ParallelConfig(pp=4, **parallel))  # type: ignore
        with pytest.raises(ConfigError) as error:
            check(config, 4)
        return str(error.value)

    assert "'time' is not known; it can be cost, parameters or measured:RUN_DIR" in said(config, partition="time")
    assert "it can be cost, parameters or measured:RUN_DIR" in said(config, partition="measured:")
    assert "does not exist; train.trace_pipeline=true writes it" in said(config, partition=f"measured:{tmp_path}/no")
    both = said(config, partition="parameters", layers_per_stage=(2, 2, 2, 2))
    assert "both say which stage holds which layers" in both
    other = dataclasses.replace(config, model=dataclasses.replace(EIGHT, num_layers=9, vocab_size=99))
    message = said(other, partition=f"measured:{folder}")
    assert "another model: num_layers=8 there, 9 here, vocab_size=61 there, 99 here" in message
    own = dataclasses.replace(config.train, run_dir=str(folder), trace_pipeline=True)
    message = said(dataclasses.replace(config, train=own), partition=f"measured:{tmp_path}/./traced")
    assert "train.trace_pipeline would overwrite that trace" in message
    (folder / "config.yaml").write_text("[")
    assert "config.yaml is damaged" in said(config, partition=f"measured:{folder}")
    (folder / "config.yaml").write_text("model: 3")
    assert "config.yaml is damaged: it has no model" in said(config, partition=f"measured:{folder}")
    (folder / "config.yaml").unlink()
    assert "config.yaml cannot be read" in said(config, partition=f"measured:{folder}")
