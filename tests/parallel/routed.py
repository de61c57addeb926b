"""Tokens with their experts, the same on every layout, and a dense definition of what experts make of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megalite.mpu import ParallelState
from megalite.nn.config import ModelConfig
from megalite.nn.experts import Experts
from megalite.parallel.expert import Assignment, Dispatcher
from megalite.parallel.random import initialize
from megalite.parallel.shard import shard_of
from megalite.parallel.wgrad import WeightGradQueue

HIDDEN, WIDTH = 5, 7


@dataclass(frozen=True)
class Problem:
    """x [t, h], chosen bool [t, num_experts], gates [t, num_experts], dy [t, h]; places: unused ones of each expert."""

    x: Tensor
    chosen: Tensor
    gates: Tensor
    dy: Tensor
    places: int = 0


def problem(kind: str, *, num_tokens: int = 23, num_experts: int = 8) -> Problem:
    """Kinds: top2; one (every token to the same two experts); ragged (0 to all experts a token); none (no pair at all);
    padded (top2 with unused places)."""
    generator = torch.Generator().manual_seed(0)

    def values(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    scores = values(num_tokens, num_experts)
    chosen = torch.zeros(num_tokens, num_experts, dtype=torch.bool)
    if kind in ("top2", "padded"):
        chosen.scatter_(1, scores.topk(2).indices, True)
    elif kind == "one":
        chosen[:, [0, num_experts - 2]] = True
    elif kind == "ragged":
        chosen = (scores > 0.3) & (torch.arange(num_tokens) % 4 > 0)[:, None]
    else:
        assert kind == "none"
    dy = values(num_tokens, HIDDEN)
    return Problem(values(num_tokens, HIDDEN), chosen, scores.sigmoid(), dy, 2 if kind == "padded" else 0)


def assign(chosen: Tensor, gates: Tensor, places: int = 0) -> Assignment:
    """The pairs by expert and token; each expert has `places` unused ones besides."""
    expert, token = chosen.t().nonzero(as_tuple=True)
    probs, counts = gates[token, expert], chosen.sum(0)
    if places:
        size, num_experts = chosen.shape
        order = torch.cat((expert, torch.arange(num_experts).repeat(places))).sort(stable=True).indices
        token = torch.cat((token, token.new_full((num_experts * places,), size)))[order]
        expert = torch.cat((expert, torch.arange(num_experts).repeat(places)))[order]
        probs, counts = torch.cat((probs, probs.new_ones(num_experts * places)))[order], counts + places
    return Assignment(token, expert, probs, counts, has_unused=places > 0)


def experts_for(mpu: ParallelState, cls: type[Experts], num_experts: int) -> Experts:
    """Experts in float64 with biases that are not zero."""
    config = ModelConfig(
        num_layers=2, hidden_size=HIDDEN, num_experts=num_experts, expert_ffn_hidden_size=WIDTH, init_std=0.5
    )
    experts = cls(config, mpu).double()
    initialize(experts, seed=3)
    with torch.no_grad():
        for bias in (experts.fc1_bias, experts.fc2_bias):
            if bias is not None:
                shard = shard_of(bias)
                whole = torch.linspace(-1, 2, shard.shape[0] * shard.shape[1], dtype=torch.float64).view(shard.shape)
                for offset, sizes, view in shard.pieces(bias):
                    view.copy_(whole[window(offset, sizes)])
    return experts


def window(offset: tuple[int, ...], sizes: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(o, o + n) for o, n in zip(offset, sizes, strict=True))


@dataclass(frozen=True)
class Part:
    """What one rank found: its token rows, and the pieces of its gradients as (name, offset, sizes, values)."""

    rows: slice
    y: Tensor
    dx: Tensor
    dgates: Tensor
    pieces: list[tuple[str, tuple[int, ...], tuple[int, ...], Tensor]]


def tokens_here(mpu: ParallelState, size: int, first: int | None) -> slice:
    """This rank's tokens: an even part or, for the first rank, `first` of them."""
    cut = mpu.config.cut_expert_tokens or mpu.config.sequence_parallel
    rank, parts = (mpu.world.rank, mpu.world.size) if cut else (mpu.dp.rank, mpu.dp.size)
    borders = [i * size // parts for i in range(parts + 1)]
    if first is not None and parts > 1:
        borders = [0, *(first + i * (size - first) // (parts - 1) for i in range(parts))]
    return slice(borders[rank], borders[rank + 1])


def run_routed(
    mpu: ParallelState, cls: type[Experts], given: Problem, first: int | None = None, deferring: bool = False
) -> Part:
    """Dispatch, experts, combine and backward on this rank."""
    rows = tokens_here(mpu, len(given.x), first)
    experts = experts_for(mpu, cls, given.chosen.shape[1])
    experts.queue = queue = WeightGradQueue(deferring=deferring)
    x, gates = (t[rows].clone().requires_grad_() for t in (given.x, given.gates))
    dispatcher = Dispatcher(given.chosen.shape[1], mpu)
    arrived = dispatcher.send(x, assign(given.chosen[rows], gates, given.places)).wait()
    y = dispatcher.combine(experts(arrived.tokens, arrived.probs, arrived.counts), arrived)
    y.backward(given.dy[rows])
    if deferring:
        assert experts.fc1.grad is None and queue.num_waiting == 2, "the weight gradients must wait"
        queue.drain(0)
    assert x.grad is not None and gates.grad is not None
    pieces: list[tuple[str, tuple[int, ...], tuple[int, ...], Tensor]] = []
    for name, parameter in experts.named_parameters():
        grad: Any = parameter.grad
        pieces += [(name, offset, sizes, view.clone()) for offset, sizes, view in shard_of(parameter).pieces(grad)]
    return Part(rows, y.detach(), x.grad, gates.grad, pieces)


def gathered(parts: list[Part], given: Problem, cls: type[Experts]) -> dict[str, Tensor]:
    """The global results; what several ranks say of one token must agree, gradients of weights add up."""
    found = {
        "y": torch.full_like(given.x, torch.nan),
        "dx": torch.full_like(given.x, torch.nan),
        "dgates": torch.full_like(given.gates, torch.nan),
    }
    for part in parts:
        for name, value in (("y", part.y), ("dx", part.dx), ("dgates", part.dgates)):
            before = found[name][part.rows]
            if not before.isnan().any():
                torch.testing.assert_close(value, before, rtol=1e-12, atol=1e-12)
            found[name][part.rows] = value
    whole = experts_for(ParallelState.single(), cls, given.chosen.shape[1])
    found |= {name: torch.zeros_like(parameter) for name, parameter in whole.named_parameters()}
    for part in parts:
        for name, offset, sizes, values in part.pieces:
            found[name].detach()[window(offset, sizes)] += values
    return {name: value.detach() for name, value in found.items()}


def defined(given: Problem, cls: type[Experts]) -> dict[str, Tensor]:
    """The definition: every expert on every token, in plain autograd."""
    experts = experts_for(ParallelState.single(), cls, given.chosen.shape[1])
    x, gates = given.x.clone().requires_grad_(), given.gates.clone().requires_grad_()
    y = torch.zeros_like(x)
    for e in range(given.chosen.shape[1]):
        hidden = x @ experts.fc1[e].t()
        if experts.fc1_bias is not None:
            hidden = hidden + experts.fc1_bias[e]
        if cls is Experts:
            gate, up = hidden.chunk(2, -1)
            hidden = gate * torch.sigmoid(gate) * up
        else:
            hidden = experts.activation(hidden)
        out = hidden @ experts.fc2[e].t()
        if experts.fc2_bias is not None:
            out = out + experts.fc2_bias[e]
        y = y + out * (gates[:, e] * given.chosen[:, e])[:, None]
    named = dict(experts.named_parameters())
    grads = torch.autograd.grad(y, [x, gates, *named.values()], given.dy)
    found = {"y": y.detach(), "dx": grads[0], "dgates": grads[1]} | dict(zip(named, grads[2:], strict=True))
    if given.places and experts.fc2_bias is not None:
        # An unused place of prob 1 is a row of zeros for its expert; only the biases could tell, and nobody hears it.
        raise AssertionError("unused places are for experts without biases")
    return found


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")
