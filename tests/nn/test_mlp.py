"""The feed-forward block a chunk of the sequence at a time: the same numbers, and memory of one chunk."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from megalite.layout import parse_layout
from megalite.mpu import ParallelState
from megalite.nn.config import ModelConfig
from megalite.nn.mlp import GeluMLP, ParallelMLP
from megalite.parallel.cross_entropy import linear_cross_entropy
from megalite.parallel.random import initialize
from megalite.parallel.wgrad import WeightGradQueue
from megalite.testing import World, check_parallel_module
from megalite.testing.layouts import prove_layouts
from tests.tiny import config_for

CONFIG = ModelConfig(num_layers=2, hidden_size=24, num_heads=4, ffn_hidden_size=40, init_std=0.3)
KINDS: list[type[ParallelMLP]] = [ParallelMLP, GeluMLP]


def build(mpu: ParallelState, *, kind: type[ParallelMLP], chunk: int) -> ParallelMLP:
    mlp = kind(CONFIG, mpu)
    mlp.sequence_chunk = chunk
    return mlp


def call(module: ParallelMLP, x: Tensor) -> Tensor:
    y, bias = module(x, None)  # type: ignore[arg-type]  # the context is for blocks that mix positions
    return y if bias is None else y + bias


def inputs(s: int = 16) -> Tensor:
    return torch.randn(s, 3, 24, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@pytest.mark.parametrize("deferred", [False, True], ids=["at-once", "deferred"])
@pytest.mark.parametrize("chunk", [1, 12, 20, 3 * 16, 1000])
@pytest.mark.parametrize("kind", KINDS)
def test_chunks_change_nothing(kind: type[ParallelMLP], chunk: int, deferred: bool) -> None:
    results = []
    for tokens in (0, chunk):
        mlp = build(ParallelState.single(), kind=kind, chunk=tokens).double()
        initialize(mlp, seed=3)
        queue = WeightGradQueue(deferring=deferred)
        mlp.fc1.queue = mlp.fc2.queue = queue
        hooked: list[int] = []
        for parameter in mlp.parameters():
            parameter.register_post_accumulate_grad_hook(lambda p, hooked=hooked: hooked.append(id(p)))
        x = inputs().requires_grad_()
        y = call(mlp, x)
        y.backward(inputs().flip(0))
        if deferred:
            assert mlp.fc2.weight.grad is None and queue.num_waiting >= 2
            queue.drain(0)
        assert sorted(hooked) == sorted(map(id, mlp.parameters())), "once each, when the block is done"
        results.append([y, x.grad, *(p.grad for p in mlp.parameters())])
    for whole, chunked in zip(*results, strict=True):
        torch.testing.assert_close(chunked, whole, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_chunks_on_every_cut(kind: type[ParallelMLP], world: World) -> None:
    check_parallel_module(
        partial(build, kind=kind, chunk=15),
        inputs=[inputs()],
        layouts=["tp2", "tp2+sp", "tp4+sp"],
        call=call,
        world=world,
    )


@pytest.mark.parametrize("layout", ["tp2+sp+recompute:full", "pp2:zb_h1", "tp2+pp2"])
def test_models_in_chunks(layout: str, tokens: str, references: Path, world: World) -> None:
    config = config_for("moe-gpt2" if layout == "tp2+pp2" else "llama", tokens, references, sequence_chunk=20)
    (found,) = prove_layouts(config, [parse_layout(layout)], world, references, num_steps=1, timeout=120.0)
    assert found.passed, found.first_diff


def test_a_frozen_bias_stays_as_it_is() -> None:
    mlp = build(ParallelState.single(), kind=GeluMLP, chunk=6).double()
    mlp.fc1.requires_grad_(False)
    call(mlp, inputs().requires_grad_()).sum().backward()
    assert all(p.grad is None for p in mlp.fc1.parameters()) and mlp.fc2.weight.grad is not None


def peak_bytes(work: Callable[[], object]) -> int:
    """The most that `work` holds at once beyond what was there before, counted by the allocator."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        work()
    results: Any = prof.profiler
    events = [event for event in results.kineto_results.events() if event.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    held = peak = 0
    for event in events:
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def test_only_a_chunk_is_as_wide_as_the_layer() -> None:
    config = replace(CONFIG, hidden_size=64, ffn_hidden_size=1024)
    length, wide = 4096, 1024 * 4
    peaks = {}
    for chunk in (0, 256):
        mlp = ParallelMLP(config, ParallelState.single())
        mlp.sequence_chunk = chunk
        for parameter in mlp.parameters():
            parameter.grad = torch.zeros_like(parameter)
        x = torch.randn(length, 1, 64, requires_grad=True)
        dy = torch.randn(length, 1, 64)
        peaks[chunk] = peak_bytes(lambda mlp=mlp, x=x, dy=dy: call(mlp, x).backward(dy))
    narrow = length * 64 * 4  # y, dx, and the copies that autograd makes of them
    assert peaks[0] > 3 * length * wide
    assert peaks[256] < 8 * 256 * wide + 4 * narrow < peaks[0] / 3


def test_the_loss_never_holds_all_logits() -> None:
    vocab, h = 32768, 8
    weight = nn.Parameter(torch.randn(vocab, h))
    mpu = ParallelState.single()
    peaks = {}
    for length in (512, 2048):
        hidden = torch.randn(length, 1, h, requires_grad=True)
        labels, mask = torch.zeros(length, 1, dtype=torch.int64), torch.ones(length, 1)

        def loss(hidden: Tensor = hidden, labels: Tensor = labels, mask: Tensor = mask) -> None:
            linear_cross_entropy(
                hidden, weight, labels, mask, axis=mpu.tp, vocab_size=vocab, queue=WeightGradQueue()
            ).backward()

        peaks[length] = peak_bytes(loss)
    logits = 2048 * vocab * 4
    assert peaks[2048] < logits and peaks[2048] - peaks[512] < logits / 50
