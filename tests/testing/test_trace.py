"""All members of a group enter the same collectives in the same order, in whole training steps too."""

from pathlib import Path

import pytest
import torch

from megalite.config import Config
from megalite.data.config import DataConfig
from megalite.data.indexed import IndexedWriter
from megalite.layout import parse_layout
from megalite.mpu import ParallelConfig, ParallelState
from megalite.nn.config import ModelConfig
from megalite.optim.config import OptimConfig
from megalite.testing.trace import Entered, check_same_order, record_collectives
from megalite.testing.world import World
from megalite.train.build import build_training
from megalite.train.config import TrainConfig
from megalite.train.step import train_step


def _some_collectives(mpu: ParallelState, swapped: bool) -> list[Entered]:
    with record_collectives() as entered:
        mpu.tp.all_reduce(torch.ones(1))
        # Norms of two kinds of parameters, taken in another order on the second stage.
        for axis in (mpu.pp, mpu.dp) if mpu.pp.rank == 0 or not swapped else (mpu.dp, mpu.pp):
            axis.all_reduce(torch.ones(1))
    return entered


def test_what_is_recorded(world: World) -> None:
    entered = dict(enumerate(world.run(_some_collectives, False, layout=ParallelConfig(tp=2, pp=2), ranks=8)))
    check_same_order(entered)
    assert entered[5] == [Entered(ranks, "all_reduce") for ranks in ((4, 5), (1, 5), (5, 7))]


def test_orders_that_differ_between_groups_may_be_sound(world: World) -> None:
    """Each group sees the same order; that is the invariant, not one order for all groups together."""
    check_same_order(dict(enumerate(world.run(_some_collectives, False, layout=ParallelConfig(pp=2), ranks=4))))


def test_a_different_order_is_named() -> None:
    mine = [Entered((0, 1), "all_reduce"), Entered((0, 1), "all_gather")]
    with pytest.raises(AssertionError, match=r"group \(0, 1\), call 0: rank 1 enters all_gather, rank 0 enters all_re"):
        check_same_order({0: mine, 1: mine[::-1]})
    with pytest.raises(AssertionError, match=r"call 1: rank 1 enters nothing more, rank 0 enters all_gather"):
        check_same_order({0: mine, 1: mine[:1]})


def _training_steps(mpu: ParallelState, config: Config) -> list[Entered]:
    training = build_training(config, mpu, torch.device("cpu"))
    with record_collectives() as entered:
        for step in range(2):
            train_step(training, step)
    return entered


@pytest.mark.parametrize("layout", ["tp2+sp+pp2+dp2", "pp4+dp2", "tp2+pp3", "dp4"])
def test_training_steps_enter_collectives_in_one_order(layout: str, tmp_path: Path, world: World) -> None:
    """Stages with different parameters (embedding, tied head, norms and biases) reduce in step all the same."""
    with IndexedWriter(tmp_path / "tokens", dtype="uint16", vocab_size=31) as writer:
        for length in range(5, 60):
            writer.add_document((torch.arange(length) * length % 31).numpy())
    config = parse_layout(layout).apply(
        Config(
            model=ModelConfig(
                name="gpt2", num_layers=5, hidden_size=16, num_heads=4, vocab_size=31, max_positions=16,
                tie_embeddings=True,
            ),
            data=DataConfig(paths=(str(tmp_path / "tokens"),), seq_len=16, split="100,0,0", cache_dir=str(tmp_path)),
            optim=OptimConfig(clip_grad=0.5),
            train=TrainConfig(global_batch_size=16, micro_batch_size=2, num_steps=2, precision="fp32"),
        )
    )  # fmt: skip
    parsed = parse_layout(layout)
    results = world.run(_training_steps, config, layout=parsed.parallel, ranks=parsed.num_ranks)
    assert all(results)
    check_same_order(dict(enumerate(results)))
