"""The promise for every pipeline schedule: with tied weights, recompute, other cuts, odd micro-batches, uneven stages.

Rows run in float64 with ragged loss masks against one rank; the default run is a pairwise cover of the table.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megalite.config import Config, ConfigError, check
from megalite.layout import Layout, parse_layout
from megalite.mpu import ParallelConfig, ParallelState
from megalite.parallel.data import main_grad
from megalite.parallel.shard import shard_of
from megalite.pipeline.plan import PlanError
from megalite.pipeline.schedule import SCHEDULES, make_plan
from megalite.pipeline.schedule.csv_file import write_csv
from megalite.testing.layouts import prove_layouts
from megalite.testing.trace import Entered, check_same_order, record_collectives
from megalite.testing.world import World
from megalite.train.build import build_training
from megalite.train.step import evaluate, train_step
from tests.tiny import config_for

CHUNKS = {"interleaved": 2, "looped_bfs": 2, "interleaved_zb": 2}
"""Stages on a rank, for the schedules that take a number."""
NUM_LAYERS = 8


@dataclasses.dataclass(frozen=True)
class Row:
    """A row of the table, on four ranks."""

    schedule: str
    tied: bool
    cut: str
    """What the ranks do besides: nothing (pp4), tensor with sequence parallel (pp2), data parallel (pp2)."""
    recompute: bool
    odd: bool
    """An odd number of micro-batches."""
    uneven: bool

    def __str__(self) -> str:
        flags = [name for name in ("tied", "recompute", "odd", "uneven") if getattr(self, name)]
        return "-".join([self.schedule, self.cut, *flags])

    @property
    def pp(self) -> int:
        return 4 if self.cut == "pp4" else 2

    @property
    def num_microbatches(self) -> int | None:
        """The largest odd number up to 9 for which the schedule has a plan (None: there is none), or 8."""
        for num_microbatches in (9, 7, 5, 3) if self.odd else (8,):
            try:
                make_plan(self.schedule, self.pp, num_microbatches, CHUNKS.get(self.schedule, 1))
            except PlanError:
                continue
            return num_microbatches
        return None

    @property
    def layout(self) -> Layout:
        chunks = CHUNKS.get(self.schedule, 1)
        cut = {"pp4": "", "tp2+sp": "+tp2+sp", "dp2": "+dp2"}[self.cut]
        layout = parse_layout(
            f"pp{self.pp}v{chunks}:{self.schedule}{cut}+mbs1{'+recompute:full' if self.recompute else ''}"
        )
        return dataclasses.replace(
            layout,
            parallel=dataclasses.replace(layout.parallel, layers_per_stage=self._layers() if self.uneven else None),
        )

    def _layers(self) -> tuple[int, ...]:
        """Fewer layers at the ends, none where there are as many stages as layers."""
        num_stages = make_plan(self.schedule, self.pp, 8, CHUNKS.get(self.schedule, 1)).num_stages
        counts = [NUM_LAYERS // num_stages] * num_stages
        counts[0] -= 1
        counts[num_stages // 2] += 1
        if num_stages > 2:
            counts[-1] -= 1
            counts[1] += 1
        return tuple(counts)


def _rows() -> list[Row]:
    flags = (False, True)
    rows = itertools.starmap(Row, itertools.product(SCHEDULES, flags, ("pp4", "tp2+sp", "dp2"), flags, flags, flags))
    return [row for row in rows if row.num_microbatches is not None]


def _pairs(row: Row) -> set[tuple[tuple[str, object], ...]]:
    """All pairs of (column, value) in a row."""
    return set(itertools.combinations(dataclasses.asdict(row).items(), 2))


def pairwise_cover(rows: Sequence[Row]) -> Iterator[Row]:
    """Few rows that have every pair of values which occurs together in any row: greedily the row with most new ones."""
    pairs = {row: _pairs(row) for row in rows}
    missing = set().union(*pairs.values())
    while missing:
        best = max(rows, key=lambda row: len(pairs[row] & missing))
        missing -= pairs[best]
        yield best


TABLE = _rows()
COVER = list(pairwise_cover(TABLE))
NUM_FIRST = 12
"""Rows of the cover, those with most new pairs, that every run of the tests takes; the others are for the full one."""


def prove(row: Row, tokens: str, folder: Path, world: World) -> None:
    """Asserts that the row's layout gives one rank's numbers."""
    assert row.num_microbatches is not None
    config = config_for("tied-llama" if row.tied else "llama", tokens, folder)
    config = dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, num_layers=NUM_LAYERS),
        train=dataclasses.replace(
            config.train, global_batch_size=row.num_microbatches * row.layout.dp, micro_batch_size=1
        ),
    )
    check(row.layout.apply(config), row.layout.num_ranks)
    (difference,) = prove_layouts(config, [row.layout], world, folder, timeout=120.0)
    assert difference.passed, difference.first_diff
    assert max(difference.loss, difference.grads, difference.grad_norm, difference.weights) < 1e-10


@pytest.mark.parametrize("row", COVER[:NUM_FIRST], ids=str)
def test_schedule(row: Row, tokens: str, references: Path, world: World) -> None:
    prove(row, tokens, references, world)


@pytest.mark.full
@pytest.mark.parametrize("row", [row for row in TABLE if row not in COVER[:NUM_FIRST]], ids=str)
def test_schedule_full_table(row: Row, tokens: str, references: Path, world: World) -> None:
    prove(row, tokens, references, world)


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ("pp4:dualpipe+mbs4", "dualpipe"),  # 4 micro-batches over 4 ranks
        ("pp2:dualpipe+mbs16", "dualpipe"),  # 1 micro-batch
        ("pp3:dualpipe+mbs1", "dualpipe"),  # an odd number of ranks
        ("pp4:dualpipe_v+mbs4", "dualpipe_v"),
        ("pp2v2:1f1b", "parallel.vpp=2 must be 1"),
        ("pp2v3:zb_v", "parallel.vpp=3 must be 1 or 2"),
        ("pp4v2:zb_h2", "parallel.vpp=2 must be 1"),
        ("pp2:zb_w", "did you mean zb_v?"),
        ("pp4v2g1:interleaved", "group_size=1 deadlocks with 4 ranks, 8 .* nearest sizes that will do: 4"),
        ("pp2g4:1f1b", r"parallel\.group_size=4 is for the interleaved schedule"),
        ("pp4v4:interleaved", "num_layers=8 is too few for 16 pipeline stages"),
    ],
)
def test_what_has_no_plan_is_refused_at_once(layout: str, message: str, tokens: str, tmp_path: Path) -> None:
    config = config_for("llama", tokens, tmp_path, global_batch_size=16)
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, num_layers=NUM_LAYERS))
    parsed = parse_layout(layout)
    with pytest.raises(ConfigError, match=message) as error:
        check(parsed.apply(config), parsed.num_ranks)
    assert "Traceback" not in str(error.value)


@pytest.mark.parametrize(
    ("layout", "layers_per_stage"),
    [
        ("pp1:zb_v+mbs2", (0, 8)),
        pytest.param("pp1v3:interleaved_zb+mbs4+dp2", None, marks=pytest.mark.full),
        ("pp1:dualpipe_v+mbs4+tp2", None),
        ("pp3:zb_v+mbs8", None),  # a single micro-batch
        ("pp3:v_min+mbs2+recompute:full", (0, 2, 2, 2, 2, 0)),
        pytest.param("pp3v2:looped_bfs+mbs1", (1, 1, 3, 1, 2, 0), marks=pytest.mark.full),
        ("pp2:dualpipe+mbs2+recompute:full", (0, 8)),
        ("pp2:v_half+mbs4+dp2+recompute:full", (0, 4, 4, 0)),
    ],
)
def test_corners(
    layout: str, layers_per_stage: tuple[int, ...] | None, tokens: str, references: Path, world: World
) -> None:
    """Odd sizes, a pipeline of one rank, ends without layers; weights are tied."""
    config = config_for("tied-llama", tokens, references)
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, num_layers=NUM_LAYERS))
    place = parse_layout(layout)
    place = dataclasses.replace(place, parallel=dataclasses.replace(place.parallel, layers_per_stage=layers_per_stage))
    check(place.apply(config), place.num_ranks)
    (difference,) = prove_layouts(config, [place], world, references)
    assert difference.passed, difference.first_diff


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("layout", ["pp2", pytest.param("pp4:zb_h1+mbs4", marks=pytest.mark.full), "pp2:zb_v+mbs4"])
def test_a_large_vocabulary_leaves_no_rank_without_work(
    layout: str, tied: bool, tokens: str, references: Path, world: World
) -> None:
    """The head outweighs the two layers by far: ends without layers, and no rank without parameters."""
    config = config_for("llama", tokens, references)
    model = dataclasses.replace(
        config.model, num_layers=2, hidden_size=16, num_heads=4, vocab_size=3001, tie_embeddings=tied
    )
    config = dataclasses.replace(config, model=model)
    check(parse_layout(layout).apply(config), parse_layout(layout).num_ranks)
    (difference,) = prove_layouts(config, [parse_layout(layout)], world, references)
    assert difference.passed, difference.first_diff


@pytest.mark.parametrize(
    "layout", ["pp2v2g4:interleaved+mbs2", pytest.param("pp2v3g5:interleaved+mbs1+tp2", marks=pytest.mark.full)]
)
def test_group_size_is_a_deployment_detail(layout: str, tokens: str, references: Path, world: World) -> None:
    config = config_for("tied-llama", tokens, references)
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, num_layers=NUM_LAYERS))
    parsed = parse_layout(layout)
    check(parsed.apply(config), parsed.num_ranks)
    (difference,) = prove_layouts(config, [parsed], world, references)
    assert difference.passed, difference.first_diff


def _copies(mpu: ParallelState, config: Config) -> dict[str, list[Tensor]]:
    """Two AdamW steps under dualpipe; [weight, gradient] of every parameter that this rank holds, by owner or copy."""
    training = build_training(config, mpu, torch.device("cpu"))
    for step in range(2):
        train_step(training, step)
    found = {}
    for data_parallel in training.data_parallels.values():
        for parameter in data_parallel.parameters:
            shard = shard_of(parameter)
            key = f"{shard.tied_to or shard.name} {'owner' if shard.is_owner(mpu) else 'copy'}"
            assert key not in found, key
            found[key] = [parameter.detach().clone(), main_grad(parameter).clone()]
    return found


@pytest.mark.parametrize("model", ["llama", "tied-llama"])
def test_both_copies_of_a_bidirectional_pipeline_are_equal_bit_for_bit(
    model: str, tokens: str, tmp_path: Path, world: World
) -> None:
    config = config_for(model, tokens, tmp_path, micro_batch_size=1)
    parallel = ParallelConfig(pp=4, schedule="dualpipe")
    config = dataclasses.replace(config, parallel=parallel)
    ranks = world.run(_copies, config, layout=parallel)
    found = {key: tensors for rank in ranks for key, tensors in rank.items()}
    assert len(found) == sum(len(rank) for rank in ranks), "a parameter has two owners or two copies"
    names = {key.split()[0] for key in found}
    assert len(found) == 2 * len(names)
    for name in names:
        for one, other in zip(found[f"{name} owner"], found[f"{name} copy"], strict=True):
            assert torch.equal(one, other), name


def _gradients(mpu: ParallelState, config: Config) -> dict[str, Tensor]:
    """The gradients that this rank holds after one step."""
    training = build_training(config, mpu, torch.device("cpu"))
    train_step(training, 0)
    return {
        f"{shard_of(parameter).name} on {mpu.rank}": main_grad(parameter).clone()
        for data_parallel in training.data_parallels.values()
        for parameter in data_parallel.parameters
    }


@pytest.mark.parametrize(
    ("chunks", "schedules"),
    [(1, ("1f1b", "gpipe", "zb_h1", "zb_h2")), (2, ("interleaved", "looped_bfs", "interleaved_zb"))],
)
def test_deferring_weight_gradients_changes_no_bit(
    chunks: int, schedules: tuple[str, ...], tokens: str, tmp_path: Path, world: World
) -> None:
    """Each stage sums its micro-batches in one order, and no contribution, of a tied weight least of all, is late."""
    config = config_for("tied-llama", tokens, tmp_path, micro_batch_size=1, reduce_dtype="bf16")
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, num_layers=NUM_LAYERS))
    found = []
    for schedule in schedules:
        parallel = ParallelConfig(pp=2, vpp=chunks, schedule=schedule)
        config = dataclasses.replace(config, parallel=parallel)
        ranks = world.run(_gradients, config, layout=parallel, ranks=4)
        found.append({name: grad for rank in ranks for name, grad in rank.items()})
    for schedule, grads in zip(schedules[1:], found[1:], strict=True):
        assert grads.keys() == found[0].keys()
        for name, grad in grads.items():
            assert torch.equal(grad, found[0][name]), f"{name} under {schedule}"


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_how_a_batch_is_split_into_microbatches_is_a_deployment_detail(
    schedule: str, tokens: str, references: Path, world: World
) -> None:
    """Neither the loss nor its gradient is scaled by the number of micro-batches, nor by their tokens."""
    config = config_for("gpt2", tokens, references)
    layouts = [parse_layout(f"pp2:{schedule}+mbs{size}") for size in (1, 2, 8)]
    for difference in prove_layouts(config, layouts, world, references):
        assert difference.passed, difference.first_diff


def _stepped(mpu: ParallelState, config: Config) -> list[Tensor]:
    """The norms and what three AdamW steps leave on this rank."""
    training = build_training(config, mpu, torch.device("cpu"))
    norms = [train_step(training, step).grad_norm for step in range(3)]
    weights = [p.detach().clone() for d in training.data_parallels.values() for p in d.parameters]
    return [torch.tensor(norms, dtype=torch.float64), *weights]


@pytest.mark.parametrize("schedule", ["zb_h2", "zb_v"])
@pytest.mark.parametrize("clip_grad", [1e-3, 1e3])
def test_post_validation_changes_no_bit(
    schedule: str, clip_grad: float, tokens: str, tmp_path: Path, world: World
) -> None:
    config = config_for("tied-llama" if schedule == "zb_v" else "llama", tokens, tmp_path, num_steps=3)
    parallel = ParallelConfig(pp=2, schedule=schedule)
    found = []
    for early in (False, True):
        optim = dataclasses.replace(config.optim, post_validation=early, clip_grad=clip_grad)
        config = dataclasses.replace(config, parallel=parallel, optim=optim)
        check(config, 4)
        found.append(world.run(_stepped, config, layout=parallel, ranks=4))
    for plain, early in zip(*found, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(plain, early, strict=True))


@pytest.mark.parametrize(("model", "schedule"), [("tied-llama", "zb_h2"), ("llama", "dualpipe")])
def test_post_validation_is_refused_where_ranks_share_weights(
    model: str, schedule: str, tokens: str, tmp_path: Path
) -> None:
    config = config_for(model, tokens, tmp_path)
    config = dataclasses.replace(
        config,
        parallel=ParallelConfig(pp=2, schedule=schedule),
        optim=dataclasses.replace(config.optim, post_validation=True),
    )
    with pytest.raises(ConfigError, match=r"optim\.post_validation=true"):
        check(config, 2)


@pytest.mark.parametrize(("model", "schedule"), [("tied-llama", "zb_v"), ("tied-llama", "dualpipe"), ("llama", "1f1b")])
def test_a_plan_of_ones_own(
    model: str, schedule: str, tokens: str, tmp_path: Path, references: Path, world: World
) -> None:
    """A CSV file as the library writes it gives the bits of the built-in plan, copies of stages included."""
    file = tmp_path / "mine.csv"
    write_csv(make_plan(schedule, 2, 4), file)
    config = config_for(model, tokens, references)
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, num_layers=NUM_LAYERS))
    layout = parse_layout(f"pp2:csv:{file}")
    check(layout.apply(config), 2)
    (difference,) = prove_layouts(config, [layout], world, references)
    assert difference.passed, difference.first_diff
    found = []
    for parallel in (layout.parallel, parse_layout(f"pp2:{schedule}").parallel):
        config = dataclasses.replace(config, parallel=parallel)
        found.append(world.run(_stepped, config, layout=parallel, ranks=2))
    for mine, built_in in zip(*found, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, built_in, strict=True))


def test_a_plan_of_ones_own_must_fit(tokens: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.csv"
    write_csv(make_plan("zb_v", 2, 8), file)
    config = config_for("tied-llama", tokens, tmp_path)
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, num_layers=NUM_LAYERS))
    with pytest.raises(ConfigError, match="8 microbatches"):
        check(parse_layout(f"pp2:csv:{file}+mbs4").apply(config), 2)
    with pytest.raises(ConfigError, match="cannot be read"):
        check(parse_layout(f"pp2:csv:{tmp_path}/nowhere.csv").apply(config), 2)


def _evaluated(mpu: ParallelState, config: Config) -> float:
    """The validation loss after a step."""
    training = build_training(config, mpu, torch.device("cpu"))
    train_step(training, 0)
    training.validation = training.batches
    return evaluate(training, 2)


@pytest.mark.parametrize("model", [pytest.param("llama", marks=pytest.mark.full), "tied-llama"])
def test_every_schedule_evaluates_the_same(model: str, tokens: str, tmp_path: Path, world: World) -> None:
    config = config_for(model, tokens, tmp_path, precision="fp64")
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, num_layers=NUM_LAYERS))
    losses = {}
    for schedule in ("single", *SCHEDULES):
        chunks = f"v{CHUNKS[schedule]}" if schedule in CHUNKS else ""
        place = parse_layout("single" if schedule == "single" else f"pp2{chunks}:{schedule}")
        applied = place.apply(config)
        found = world.run(_evaluated, applied, layout=place.parallel, ranks=place.num_ranks)
        assert len(set(found)) == 1, schedule
        losses[schedule] = found[0]
    assert losses == pytest.approx(dict.fromkeys(losses, losses["single"]), rel=1e-12)


def _order(mpu: ParallelState, config: Config) -> list[Entered]:
    training = build_training(config, mpu, torch.device("cpu"))
    with record_collectives() as entered:
        train_step(training, 0)
    return entered


@pytest.mark.parametrize(
    "schedule",
    [
        "interleaved_zb",
        pytest.param("zb_v", marks=pytest.mark.full),
        pytest.param("v_min", marks=pytest.mark.full),
        "dualpipe",
    ],
)
def test_ranks_with_several_stages_reduce_in_one_order(
    schedule: str, tokens: str, tmp_path: Path, world: World
) -> None:
    parallel = ParallelConfig(pp=2, vpp=CHUNKS.get(schedule, 1), schedule=schedule, tp=2, sequence_parallel=True)
    config = config_for("tied-llama", tokens, tmp_path, micro_batch_size=1)
    config = dataclasses.replace(config, parallel=parallel)
    check_same_order(dict(enumerate(world.run(_order, config, layout=parallel, ranks=8))))
