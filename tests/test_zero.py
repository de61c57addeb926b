"""ZeRO counted: bytes kept and sent by the formulas, equal bits, resuming, and what holds whole gradients when."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megalite.axis import Axis
from megalite.checkpoint import store
from megalite.config import Config
from megalite.config.check import check
from megalite.mpu import ParallelConfig, ParallelState
from megalite.parallel.buckets import Bucket
from megalite.parallel.shard import Shard
from megalite.testing.world import World
from megalite.train.build import build_training
from megalite.train.step import Training, evaluate, train_step
from tests.tiny import config_for

Pieces = dict[tuple[str, tuple[int, ...]], Tensor]


def _training(config: Config, mpu: ParallelState) -> Training:
    return build_training(dataclasses.replace(config, parallel=mpu.config), mpu, torch.device("cpu"))


def _buckets(training: Training) -> list[Bucket]:
    return [bucket for part in training.data_parallels.values() for bucket in part.buckets]


def _tensors(training: Training) -> dict[str, list[tuple[Shard, Tensor]]]:
    kinds: dict[str, list[tuple[Shard, Tensor]]] = dict(training.optimizer.state_tensors())
    for part in training.data_parallels.values():
        for kind, tensors in part.state_tensors().items():
            kinds.setdefault(kind, []).extend(tensors)
    return kinds


def _whole(ranks: list[Pieces], shapes: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Global tensors from the pieces of all ranks."""
    found: dict[str, Tensor] = {}
    for (name, offset), piece in (item for pieces in ranks for item in pieces.items()):
        target = found.setdefault(name, torch.full(shapes[name], torch.nan, dtype=piece.dtype))
        target[tuple(slice(o, o + n) for o, n in zip(offset, piece.shape, strict=True))] = piece
    return found


def _run(mpu: ParallelState, config: Config) -> tuple[Pieces, dict[str, tuple[int, ...]], list[float]]:
    """Two steps; the state afterwards, and losses."""
    training = _training(config, mpu)
    losses = [train_step(training, step).loss for step in range(2)]
    tensors = [(kind, *item) for kind, of_kind in _tensors(training).items() for item in of_kind]
    pieces = {
        (f"{kind}/{shard.name}", offset): view.clone()
        for kind, shard, local in tensors
        for offset, _, view in shard.pieces(local)
    }
    return pieces, {f"{kind}/{shard.name}": shard.shape for kind, shard, _ in tensors}, losses


def _state(world: World, config: Config, zero: int) -> tuple[dict[str, Tensor], list[float]]:
    results = world.run(_run, config, layout=ParallelConfig(zero=zero), ranks=2)
    shapes = {name: shape for _, of_rank, _ in results for name, shape in of_rank.items()}
    return _whole([pieces for pieces, _, _ in results], shapes), results[0][2]


@pytest.mark.parametrize(
    ("model", "precision"),
    [
        pytest.param("llama", "bf16", marks=pytest.mark.full),
        ("moe", "bf16"),
        pytest.param("llama", "fp16", marks=pytest.mark.full),
    ],
)
def test_two_ranks_get_the_bits_of_zero_0(
    model: str, precision: str, tokens: str, tmp_path: Path, world: World
) -> None:
    for micro_batch_size, stages in ((4, (1,)), (8, (2, 3))):  # per-pass sums differ with several micro-batches
        config = config_for(
            model, tokens, tmp_path, precision=precision, micro_batch_size=micro_batch_size, global_batch_size=16
        )
        # The norm's squares add up in another order; without clipping it does not touch the weights.
        config = dataclasses.replace(config, optim=dataclasses.replace(config.optim, clip_grad=0.0))
        expected, losses = _state(world, config, 0)
        for zero in stages:
            found, same_losses = _state(world, config, zero)
            assert same_losses == losses and found.keys() == expected.keys()
            for name, value in expected.items():
                assert torch.equal(found[name], value), f"zero {zero}: {name}"


def _kept_bytes(mpu: ParallelState, config: Config) -> tuple[int, int, int, int]:
    """After a step: bytes of model state, padded parameters, elements of optimizer state, buckets."""
    training = _training(config, mpu)
    train_step(training, 0)
    memory = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for bucket in _buckets(training)
        for tensor in (bucket.param, bucket.grad, bucket.param_shard, bucket.grad_shard)
    }
    states = training.optimizer._states
    elements = sum(state.master.numel() for state in states)
    kept = sum(memory.values()) + sum(t.nbytes for s in states for t in (s.master, *s.moments))
    return kept, sum(bucket.param.numel() for bucket in _buckets(training)), elements, len(_buckets(training))


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_bytes_of_model_state(ranks: int, tokens: str, tmp_path: Path, world: World) -> None:
    config = config_for("llama", tokens, tmp_path, precision="bf16", global_batch_size=16)
    for zero, (whole, divided) in enumerate([(18, 0), (6, 12), (2, 16), (0, 18)]):
        results = world.run(_kept_bytes, config, layout=ParallelConfig(zero=zero), ranks=ranks)
        for kept, size, elements, num_buckets in results:
            share = size // ranks if zero else size
            # Padding at a bucket's end has no optimizer state.
            assert kept == whole * size + divided * size // ranks - 12 * (share - elements)
            assert share - elements <= num_buckets * 64 * ranks
        if zero:
            padding = sum(size // ranks - elements for _, size, elements, _ in results)
            assert padding < results[0][3] * 64 * ranks, "less than a slice's alignment on each rank"


@pytest.mark.parametrize("block", [1, 2, 4])
def test_bytes_of_model_state_with_replicas(block: int, tokens: str, tmp_path: Path, world: World) -> None:
    config = config_for("llama", tokens, tmp_path, precision="bf16", micro_batch_size=1, global_batch_size=16)
    for zero, (whole, divided) in ((1, (6, 12)), (2, (2, 16)), (3, (0, 18))):
        layout = ParallelConfig(zero=zero, zero_shard_size=block)
        for kept, size, elements, _ in world.run(_kept_bytes, config, layout=layout, ranks=4):
            slices = size // block
            expected = whole * size + divided * slices if block > 1 else 18 * size
            assert kept == expected - 12 * (slices - elements)


def _sent(axis: Axis) -> int:
    """By the buckets."""
    sites = axis.stats.by_site.items()
    return sum(entry.bytes_sent for site, entry in sites if site.startswith("parallel.buckets"))


def _sent_bytes(mpu: ParallelState, config: Config) -> tuple[int, int]:
    training = _training(config, mpu)
    mpu.reset_stats()
    train_step(training, 0)
    return _sent(mpu.dp_cp), sum(bucket.param.numel() for bucket in _buckets(training))


def _sent_in_blocks(mpu: ParallelState, config: Config) -> tuple[int, int, int, int]:
    """Inside of a block, across blocks, and over all copies; elements."""
    training = _training(config, mpu)
    mpu.reset_stats()
    train_step(training, 0)
    across = _sent(mpu.shard_replica)
    return _sent(mpu.shard), across, _sent(mpu.dp_cp), sum(bucket.param.numel() for bucket in _buckets(training))


@pytest.mark.parametrize(("ranks", "block"), [(4, 2), (8, 4)])
def test_bytes_sent_with_replicas(ranks: int, block: int, tokens: str, tmp_path: Path, world: World) -> None:
    config, grad, param = config_for("llama", tokens, tmp_path, precision="bf16", global_batch_size=16), 4, 2
    m = config.train.global_batch_size // config.train.micro_batch_size // ranks
    replicas = ranks // block
    for zero, width in ((1, grad + param), (2, m * grad + param), (3, m * (2 * param + grad))):
        layout = ParallelConfig(zero=zero, zero_shard_size=block)
        for inside, across, over_all, size in world.run(_sent_in_blocks, config, layout=layout, ranks=ranks):
            assert inside == (block - 1) * size * width // block, f"zero {zero}"
            assert across == 2 * (replicas - 1) * (size // block) * grad // replicas, "slices, once a step"
            assert over_all == 0


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_bytes_sent_in_a_step(ranks: int, tokens: str, tmp_path: Path, world: World) -> None:
    config, grad, param = config_for("llama", tokens, tmp_path, precision="bf16", global_batch_size=16), 4, 2
    m = config.train.global_batch_size // config.train.micro_batch_size // ranks
    for zero, width in enumerate([2 * grad, grad + param, m * grad + param, m * (2 * param + grad)]):
        for sent, size in world.run(_sent_bytes, config, layout=ParallelConfig(zero=zero), ranks=ranks):
            assert sent == (ranks - 1) * size * width // ranks, f"zero {zero}"
    again = dataclasses.replace(config, train=dataclasses.replace(config.train, recompute="full"))
    for sent, size in world.run(_sent_bytes, again, layout=ParallelConfig(zero=3), ranks=ranks):
        assert sent == (ranks - 1) * size * m * (2 * param + grad) // ranks, "recompute finds parameters gathered"


def _resume(mpu: ParallelState, config: Config, folder: str) -> bool:
    """Whether a run that was saved and loaded goes on with the bits of one that was not."""
    whole = _training(config, mpu)
    train_step(whole, 0)
    store.save(folder, 1, _tensors(whole), {}, mpu)
    train_step(whole, 1)
    again = _training(config, mpu)
    store.load(folder, _tensors(again), mpu)
    again.optimizer.steps = 1
    train_step(again, 1)
    pairs = zip(_tensors(whole).values(), _tensors(again).values(), strict=True)
    return all(torch.equal(a, b) for one, other in pairs for (_, a), (_, b) in zip(one, other, strict=True))


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_a_resumed_run_has_the_same_bits(zero: int, tokens: str, tmp_path: Path, world: World) -> None:
    config = config_for("tied-llama", tokens, tmp_path, precision="bf16", global_batch_size=16)
    assert all(world.run(_resume, config, str(tmp_path / "run"), layout=ParallelConfig(zero=zero), ranks=2))


def _pass_on(mpu: ParallelState, config: Config, before: str | None, after: str) -> Any:
    """Loads a state, or makes one in a step, and saves it; what there is of it here, and global shapes."""
    training = _training(config, mpu)
    if before is None:
        train_step(training, 0)
    else:
        store.load(before, _tensors(training), mpu)
    store.save(after, 1, _tensors(training), {}, mpu)
    tensors = [(kind, *item) for kind, of_kind in _tensors(training).items() for item in of_kind]
    pieces = {(f"{k}/{s.name}", offset): view.clone() for k, s, local in tensors for offset, _, view in s.pieces(local)}
    return pieces, {f"{kind}/{shard.name}": shard.shape for kind, shard, _ in tensors}


def test_a_checkpoint_goes_from_any_stage_to_any_other(tokens: str, tmp_path: Path, world: World) -> None:
    config = config_for("moe", tokens, tmp_path, precision="bf16", global_batch_size=16)
    chain = [(0, None, 2), (3, 2, 4), (1, None, 2), (2, None, 4), (0, None, 4), (1, 2, 4), (3, None, 2), (2, 1, 2)]
    before, expected = None, None
    for number, (zero, block, ranks) in enumerate(chain):
        layout, after = ParallelConfig(zero=zero, zero_shard_size=block), str(tmp_path / str(number))
        results = world.run(_pass_on, config, before, after, layout=layout, ranks=ranks)
        found = _whole([pieces for pieces, _ in results], {name: s for _, of in results for name, s in of.items()})
        expected = expected if expected is not None else found
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(found[name], value), f"{layout}: {name}"
        before = after


def _memory_in_a_step(mpu: ParallelState, config: Config) -> Any:
    """The most units with whole parameters, and with whole gradients, at a time; what is left; the loss again."""
    training = _training(config, mpu)
    (part,) = training.data_parallels.values()
    most = [0, 0]

    def look(*_: object) -> None:
        for i, flats in enumerate(([b.param for b in part.buckets], [b.grad for b in part.buckets])):
            most[i] = max(most[i], sum(flat.untyped_storage().nbytes() > 0 for flat in flats))

    for stage in training.stages.values():
        for module in stage.modules():
            module.register_forward_hook(look)
        for parameter in stage.parameters():
            parameter.register_post_accumulate_grad_hook(look)
    train_step(training, 0)
    left = sum(t.untyped_storage().nbytes() for bucket in part.buckets for t in (bucket.param, bucket.grad))
    persistent = sum(bucket.param.numel() for bucket in part.buckets if bucket.zero < 3)
    return most, left, persistent


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_at_most_two_units_are_whole_at_a_time(recompute: str, tokens: str, tmp_path: Path, world: World) -> None:
    config = config_for("llama", tokens, tmp_path, recompute=recompute)  # 7 units
    for most, left, _ in world.run(_memory_in_a_step, config, layout=ParallelConfig(zero=3), ranks=2):
        assert most[0] == 2 and most[1] <= 3 and left == 0


def test_small_parameters_may_stay(tokens: str, tmp_path: Path, world: World) -> None:
    config = config_for("llama", tokens, tmp_path)
    layout = ParallelConfig(zero=3, zero_persistent=48)
    for _, left, persistent in world.run(_memory_in_a_step, config, layout=layout, ranks=2):
        assert persistent == 6 * 128 and left == persistent * 4  # 2 norms of 48 a layer; the last one


def _evaluated(mpu: ParallelState, config: Config) -> float:
    training = _training(config, mpu)
    training.validation = training.batches
    train_step(training, 0)
    return evaluate(training, 1)


def test_evaluation_gathers_parameters_too(tokens: str, tmp_path: Path, world: World) -> None:
    config = config_for("gpt2", tokens, tmp_path, precision="fp64")
    (expected, _) = world.run(_evaluated, config, layout=ParallelConfig(), ranks=2)
    for value in world.run(_evaluated, config, layout=ParallelConfig(zero=3), ranks=2):
        assert value == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("clip_grad", [0.5, 1e9])
def test_an_update_before_the_global_norm_is_known(clip_grad: float, tokens: str, tmp_path: Path, world: World) -> None:
    """Clipping takes the first update back, and whole parameters with it."""
    config = config_for("llama", tokens, tmp_path, precision="fp64")
    optim = dataclasses.replace(config.optim, clip_grad=clip_grad, post_validation=True)
    config = dataclasses.replace(config, optim=optim)
    layouts = [ParallelConfig(pp=2, schedule="zb_h1", zero=zero) for zero in (0, 1, 3)]
    results = [world.run(_run, config, layout=layout, ranks=4) for layout in layouts]
    states = [_whole([r[0] for r in ranks], {n: s for r in ranks for n, s in r[1].items()}) for ranks in results]
    for state in states[1:]:
        for name, value in states[0].items():
            torch.testing.assert_close(state[name], value, rtol=1e-9, atol=1e-12)


def test_what_zero_cannot_be_is_refused(tokens: str, tmp_path: Path) -> None:
    config = config_for("llama", tokens, tmp_path)
    for parallel, message in (
        (ParallelConfig(zero=4), "parallel.zero=4 must be 0, 1, 2 or 3"),
        (ParallelConfig(zero=2, zero_persistent=9), "parallel.zero_persistent=9: .* under zero=3 only"),
        (ParallelConfig(zero=3, zero_persistent=-1), "parallel.zero_persistent=-1 must be at least 0"),
        (ParallelConfig(zero_shard_size=2), "parallel.zero_shard_size=2: nothing is divided under zero=0"),
        (ParallelConfig(zero=1, zero_shard_size=3), "zero_shard_size=3 does not divide the 2 ranks .* can be 1, 2"),
        (ParallelConfig(zero=1, zero_shard_size=0), "zero_shard_size=0 does not divide the 2 ranks"),
    ):
        with pytest.raises(ValueError, match=message):
            check(dataclasses.replace(config, parallel=parallel), 2)
