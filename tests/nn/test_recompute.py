"""What is computed again: the same bits, less memory, and with a stash no communication twice."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megalite.config import Config
from megalite.layout import parse_layout
from megalite.mpu import ParallelConfig, ParallelState
from megalite.nn.recompute import Recompute, region, without_keeping
from megalite.parallel.data import main_grad
from megalite.parallel.shard import shard_of
from megalite.testing.layouts import prove_layouts
from megalite.testing.memory import LiveMemory
from megalite.testing.world import World
from megalite.train.build import build_training
from megalite.train.step import train_step
from tests.tiny import config_for

CPU = torch.device("cpu")
KINDS = ("full", "every:2", "block:1", "selective", "selective:mlp", "selective:norm", "selective:attention,mlp,norm")


def _grads(mpu: ParallelState, config: Config) -> dict[str, Tensor]:
    """Gradients after two steps, the second from moved weights."""
    training = build_training(config, mpu, CPU)
    for step in range(2):
        train_step(training, step)
    return {shard_of(p).name: main_grad(p).clone() for dp in training.data_parallels.values() for p in dp.parameters}


def _compare(mpu: ParallelState, plain: Config, others: list[Config]) -> list[str]:
    """Names of gradients that are not bit-equal to those of `plain`."""
    expected = _grads(mpu, plain)
    return [
        f"{config.train.recompute}: {name}"
        for config in others
        for name, grad in _grads(mpu, config).items()
        if not torch.equal(grad, expected[name])
    ]


def _config(model: str, tokens: str, folder: Path, recompute: str, stash: bool = False) -> Config:
    return config_for(model, tokens, folder, precision="fp32", recompute=recompute, recompute_stash=stash)


@pytest.mark.parametrize(
    "model",
    [
        "gpt2",
        pytest.param("llama", marks=pytest.mark.full),
        pytest.param("moe-gpt2", marks=pytest.mark.full),
        "moe-bias",
    ],
)
def test_no_bit_changes(model: str, tokens: str, tmp_path: Path) -> None:
    others = [_config(model, tokens, tmp_path, kind) for kind in KINDS]
    assert not _compare(ParallelState.single(), _config(model, tokens, tmp_path, "none"), others)


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ("gpt2", "tp2+sp"),
        pytest.param("llama", "tp2+pp2:zb_v", marks=pytest.mark.full),
        pytest.param("moe-gpt2", "tp2+etp2", marks=pytest.mark.full),
        ("moe", "tp2+sp+ep2+pp2:zb_h1"),
    ],
)
def test_no_bit_changes_on_several_ranks(model: str, layout: str, tokens: str, tmp_path: Path, world: World) -> None:
    place = parse_layout(layout)

    def at(kind: str, stash: bool) -> Config:
        config = place.apply(_config(model, tokens, tmp_path, "none"))
        return _with(config, kind, stash)

    others = [
        at("full", True),
        at("every:2", True),
        at("selective:attention,mlp,norm", True),
        at("selective:norm", False),
    ]
    for found in world.run(_compare, at("none", False), others, layout=place.parallel, ranks=place.num_ranks):
        assert not found


def _with(config: Config, kind: str, stash: bool) -> Config:
    return replace(config, train=replace(config.train, recompute=kind, recompute_stash=stash))


def _cut(config: Config, kind: str) -> Config:
    return replace(config, train=replace(config.train, recompute=kind, recompute_cut_input=True))


@pytest.mark.parametrize(
    ("model", "layout"),
    [("gpt2", "tp2+pp2:zb_h1"), pytest.param("moe-gpt2", "tp2+etp2+dp2+zero3", marks=pytest.mark.full)],
)
def test_inputs_that_are_cut_change_no_bit(model: str, layout: str, tokens: str, tmp_path: Path, world: World) -> None:
    place = parse_layout(layout)
    plain = place.apply(_config(model, tokens, tmp_path, "none"))
    others = [_cut(plain, "full"), _cut(plain, "selective:attention,mlp,norm")]
    for found in world.run(_compare_losses, plain, others, layout=place.parallel, ranks=place.num_ranks):
        assert not found


def _compare_losses(mpu: ParallelState, plain: Config, others: list[Config]) -> list[str]:
    """What differs in the third loss or gradient norm, to the bit."""

    def third(config: Config) -> tuple[float, float]:
        training = build_training(config, mpu, CPU)
        results = [train_step(training, step) for step in range(3)]
        return results[-1].loss, results[-1].grad_norm

    expected = third(plain)
    return [config.train.recompute for config in others if third(config) != expected]


def test_a_cut_input_leaves_nothing_for_the_loss_to_depend_on(tokens: str, tmp_path: Path, world: World) -> None:
    config = config_for("gpt2", tokens, tmp_path, recompute="full", recompute_cut_input=True)
    (difference,) = prove_layouts(config, [parse_layout("tp2+recompute:full")], world, tmp_path, num_steps=2)
    assert difference.passed, difference.first_diff


def _kept_and_sent(mpu: ParallelState, rows: int) -> tuple[int, int, bool]:
    """Bytes between forward and backward, bytes sent, whether the gradient is right."""
    start = torch.rand(rows, 8, generator=torch.Generator().manual_seed(0), requires_grad=True)
    mpu.reset_stats()
    with LiveMemory() as memory:
        out = region(lambda x: x.exp().sin().sum(), start * 2.0, cut_over=mpu.tp)
        kept = memory.now - out.nbytes
        out.backward()
    expected = start.detach().clone().requires_grad_()
    (expected * 2.0).exp().sin().sum().backward()
    assert start.grad is not None and expected.grad is not None
    return kept, mpu.tp.stats.bytes_sent, torch.equal(start.grad, expected.grad)


@pytest.mark.parametrize("rows", [64, 1])
def test_a_cut_input_is_kept_once_over_all_ranks(rows: int, world: World) -> None:
    part = -(-rows * 8 // 3) * 4
    for found in world.run(_kept_and_sent, rows, layout=ParallelConfig(tp=3), ranks=3):
        assert found == (part, 2 * part, True)


def test_parsing() -> None:
    assert Recompute.parse("none") == Recompute() and Recompute.parse("full") == Recompute(every=1)
    assert Recompute.parse("every:3") == Recompute(every=3) and Recompute.parse("block:2") == Recompute(
        every=1, first=2
    )
    assert Recompute.parse("selective").parts == {"attention"}
    assert Recompute.parse("selective:mlp,norm").parts == {"mlp", "norm"}
    for text in ("every", "every:0", "block:-1", "selective:", "selective:head", "fully", "full:2"):
        with pytest.raises(ValueError, match="should be none, full, every:K"):
            Recompute.parse(text)


@pytest.mark.parametrize(
    ("text", "again"),
    [
        ("none", []), ("full", [4, 3, 2, 1, 0]), ("every:2", [4, 2, 3, 0, 1]), ("every:9", [0, 1, 2, 3, 4]),
        ("block:2", [1, 0]), ("block:9", [4, 3, 2, 1, 0]),
    ],
)  # fmt: skip
def test_regions_run_again_from_the_last_one_each_from_its_first_layer(text: str, again: list[int]) -> None:
    calls: list[int] = []

    def layer(number: int, x: Tensor, _: None) -> Tensor:
        calls.append(number)
        return (x * 1.5).exp().sin()

    x = torch.ones(3, requires_grad=True)
    layers = [lambda x, c, i=i: layer(i, x, c) for i in range(5)]
    y = Recompute.parse(text).run(layers, x, None)
    assert calls == [0, 1, 2, 3, 4]
    y.sum().backward()
    assert calls[5:] == again


def test_what_a_region_saves_is_gone_until_backward() -> None:
    x = torch.ones(4, requires_grad=True)
    alive: list[weakref.ref[Tensor]] = []

    def function(x: Tensor) -> Tensor:
        y = x * 3
        alive.append(weakref.ref(y))
        return y.exp().sum()

    out = region(function, x)
    gc.disable()  # no cycle may be needed to free it
    try:
        assert alive[0]() is None
        out.backward()
        assert len(alive) == 2 and alive[1]() is None
    finally:
        gc.enable()
    expected = torch.ones(4, requires_grad=True)
    (expected * 3).exp().sum().backward()
    assert torch.equal(x.grad, expected.grad)  # pyright: ignore[reportArgumentType]


def test_the_output_of_a_norm_is_not_kept_for_its_consumer() -> None:
    x = torch.rand(4, 3, requires_grad=True)
    weight = torch.rand(2, 3, requires_grad=True)
    alive: list[weakref.ref[Tensor]] = []

    def norm(x: Tensor) -> Tensor:
        y = x.sin()
        alive.append(weakref.ref(y))
        return y

    out = without_keeping(norm, x, lambda y: (y.view(12).view(4, 3) @ weight.t()).exp())
    assert alive[0]() is None
    out.sum().backward()
    assert len(alive) == 2, "made again once"
    found = [x.grad, weight.grad]
    x.grad = weight.grad = None
    (x.sin() @ weight.t()).exp().sum().backward()
    assert all(torch.equal(a, b) for a, b in zip(found, (x.grad, weight.grad), strict=True))  # pyright: ignore


def test_misuse_is_told() -> None:
    x = torch.ones(2, requires_grad=True)
    y = region(lambda x: x.exp(), x).sum()
    y.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="a second time"):
        y.backward()
    z = x * 2
    y = region(lambda x: x.exp(), z).sum()
    z.data.add_(1)  # unseen by autograd
    z.detach().add_(1)
    with pytest.raises(AssertionError, match="changed in place"):
        y.backward()
    fickle = iter([2, 1])
    y = region(lambda x: x.exp() if next(fickle) == 1 else x.exp().exp().exp(), x).sum()
    with pytest.raises(RuntimeError, match="saves 1 tensors, the first 3"):
        y.backward()
    with torch.no_grad():
        assert not region(lambda x: x.exp(), x).requires_grad
