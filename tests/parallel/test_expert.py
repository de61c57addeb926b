"""Dispatch and combine on every layout against the dense definition, and the bytes that they send."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megalite.mpu import ParallelConfig, ParallelState
from megalite.nn.experts import ClampedSwigluExperts, Experts, GeluExperts
from megalite.parallel.expert import Assignment, Dispatcher, Reorder, Spread
from megalite.testing.world import World
from tests.parallel.routed import HIDDEN, Part, Problem, assert_equal, assign, defined, gathered, problem, run_routed

LAYOUTS = {
    "ep2": (ParallelConfig(ep=2), 2),
    "ep4": (ParallelConfig(ep=4), 4),
    "ep3": (ParallelConfig(ep=3), 3),
    "etp2": (ParallelConfig(etp=2), 2),
    "tp2+etp2+ep2": (ParallelConfig(tp=2, etp=2, ep=2), 4),
    "tp2+ep4": (ParallelConfig(tp=2, ep=4), 4),
    "ep2+dp4": (ParallelConfig(ep=2), 4),
    "tp2+etp2+ep2+dp4": (ParallelConfig(tp=2, etp=2, ep=2), 8),
    "ep before tp": (ParallelConfig(tp=2, etp=2, ep=2, order="ep-dp-tp-cp-pp"), 4),
}
DISPATCHES = ("all_to_all", "all_gather", "hierarchical")


def _config(layout: ParallelConfig, dispatch: str, **more: Any) -> ParallelConfig:
    node: dict[str, Any] = {"expert_node_size": 2 if layout.ep % 2 == 0 else 1} if dispatch == "hierarchical" else {}
    return replace(layout, expert_dispatch=dispatch, **node, **more)


@pytest.mark.parametrize(
    ("name", "dispatch"),
    [
        pytest.param(name, dispatch, marks=() if (i + j) % 2 == 0 else pytest.mark.full)
        for i, name in enumerate(LAYOUTS)
        for j, dispatch in enumerate(DISPATCHES)
    ],
)
def test_layouts(world: World, name: str, dispatch: str) -> None:
    layout, ranks = LAYOUTS[name]
    config = _config(layout, dispatch)
    cases = [("top2", None), ("top2", 0), ("one", 3), ("ragged", 2), ("none", None), ("padded", 1)]
    _assert_all_equal(world, Experts, [(problem(kind), first) for kind, first in cases], config, ranks)


def _run_all(mpu: ParallelState, cls: type[Experts], cases: list[tuple[Problem, int | None]]) -> list[Part]:
    return [run_routed(mpu, cls, given, first) for given, first in cases]


def _assert_all_equal(
    world: World, cls: type[Experts], cases: list[tuple[Problem, int | None]], config: ParallelConfig, ranks: int
) -> None:
    found = world.run(_run_all, cls, cases, layout=config, ranks=ranks)
    for (given, _), parts in zip(cases, zip(*found, strict=True), strict=True):
        assert_equal(gathered(list(parts), given, cls), defined(given, cls))


@pytest.mark.parametrize("dispatch", DISPATCHES)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_nodes_and_fewer_tokens_than_ranks(world: World, dispatch: str, size: int) -> None:
    config = ParallelConfig(ep=4, expert_dispatch=dispatch, expert_node_size=size)  # pyright: ignore
    sizes = ((2, 4), (1, 4), (9, 6), (3, 3))
    cases = [(problem("top2", num_tokens=tokens, num_experts=experts), None) for tokens, experts in sizes]
    _assert_all_equal(world, Experts, [*cases], config, 4)


@pytest.mark.parametrize("cls", [GeluExperts, ClampedSwigluExperts])
@pytest.mark.parametrize("cut", [True, False])
def test_biases_are_added_once(world: World, cls: type[Experts], cut: bool) -> None:
    config = ParallelConfig(tp=2, etp=2, ep=2, cut_expert_tokens=cut)
    _assert_all_equal(world, cls, [(problem(kind), None) for kind in ("top2", "one")], config, 4)


@pytest.mark.parametrize("dispatch", DISPATCHES)
@pytest.mark.parametrize(("tp", "ranks"), [(2, 2), (2, 4), (2, 8), (4, 8)])
def test_whole_tokens(world: World, dispatch: str, tp: int, ranks: int) -> None:
    """Every tensor-parallel rank sends the same tokens: no gradient is counted twice."""
    layout = ParallelConfig(tp=tp, etp=tp, ep=min(2, ranks // tp), cut_expert_tokens=False)
    config = _config(layout, dispatch)
    cases = [(problem(kind), None) for kind in ("top2", "one", "none", "padded")]
    _assert_all_equal(world, Experts, [*cases], config, ranks)


@pytest.mark.parametrize("kind", ["top2", "one", "ragged", "none", "padded"])
@pytest.mark.parametrize("dispatch", DISPATCHES)
def test_one_rank(kind: str, dispatch: str) -> None:
    given, single = problem(kind), ParallelState.single()
    assert_equal(gathered([run_routed(single, Experts, given)], given, Experts), defined(given, Experts))


def test_deferred_weight_gradients(world: World) -> None:
    given, config = problem("one"), ParallelConfig(tp=2, etp=2, ep=2)
    parts = world.run(run_routed, Experts, given, None, True, layout=config, ranks=4)
    assert_equal(gathered(parts, given, Experts), defined(given, Experts))


def _bytes(mpu: ParallelState, given: Problem) -> dict[str, int]:
    """Bytes sent by this rank for the layer: all-to-all and, over etp, all-gather, reduce-scatter and all-reduce."""
    mpu.reset_stats()
    run_routed(mpu, Experts, given)
    found: dict[str, int] = {}
    for axis in (mpu.ep, mpu.etp):
        for site, stats in axis.stats.by_site.items():
            operation = site.rpartition(":")[2]
            found[f"{axis.name} {operation}"] = found.get(f"{axis.name} {operation}", 0) + stats.bytes_sent
    return found


def _sum(found: list[dict[str, int]], name: str) -> int:
    return sum(part.get(name, 0) for part in found)


@pytest.mark.parametrize("tp", [2, 4])
def test_cut_tokens_send_fewer_bytes(world: World, tp: int) -> None:
    """tp2+etp2+ep2+dp2 and tp4+etp4+ep2+dp2: the all-to-all shrinks tp times; the all-gather is what pays for it."""
    given = problem("top2", num_tokens=32)
    layout, ranks = ParallelConfig(tp=tp, etp=tp, ep=2), 2 * tp
    cut = world.run(_bytes, given, layout=layout, ranks=ranks)
    whole = world.run(_bytes, given, layout=_config(layout, "all_to_all", cut_expert_tokens=False), ranks=ranks)
    assert 0 < _sum(cut, "ep all_to_all") * tp == _sum(whole, "ep all_to_all")
    # All-gather and reduce-scatter of cut tokens, once in each direction, are what an all-reduce in each direction is.
    assert _sum(cut, "etp all_gather") > 0 and _sum(whole, "etp all_gather") == 0
    assert _sum(whole, "etp all_reduce") > 0 and _sum(cut, "etp all_reduce") == 0


def _sent_all_to_all(mpu: ParallelState, given: Problem) -> tuple[int, int]:
    """(bytes of the all-to-all in the forward pass, bytes of the pairs whose expert is elsewhere)."""
    mpu.reset_stats()
    rows = slice(mpu.world.rank * 8, (mpu.world.rank + 1) * 8)
    assignment = assign(given.chosen[rows], given.gates[rows])
    Dispatcher(8, mpu).send(given.x[rows], assignment).wait()
    elsewhere = int((assignment.expert * mpu.ep.size // 8 != mpu.ep.rank).sum())
    sites = mpu.ep.stats.by_site.items()
    return sum(s.bytes_sent for site, s in sites if site.endswith(":all_to_all")), elsewhere * (HIDDEN + 1) * 8


def test_only_needed_rows_travel(world: World) -> None:
    given = problem("top2", num_tokens=32)
    for sent, needed in world.run(_sent_all_to_all, given, layout=ParallelConfig(ep=4), ranks=4):
        assert sent == needed > 0


def _overlap(mpu: ParallelState) -> tuple[bool, str]:
    """Whether anything was waited for to the end after the last thing that send had started, and what that was."""
    given = problem("top2", num_tokens=8)
    dispatcher = Dispatcher(8, mpu)
    travelling = dispatcher.send(given.x, assign(given.chosen, given.gates))
    return mpu.last_call.finished, f"{mpu.last_call.operation} {len(travelling.wait().tokens) > 0}"


def test_send_returns_while_tokens_travel(world: World) -> None:
    for finished, last in world.run(_overlap, layout=ParallelConfig(ep=2), ranks=2):
        assert not finished and last == "all_to_all True"


def _nothing_kept(mpu: ParallelState) -> list[int]:
    """Rows of what autograd keeps of the way there and back."""
    given = problem("top2", num_tokens=16)
    saved: list[int] = []
    x, gates = given.x.clone().requires_grad_(), given.gates.clone().requires_grad_()
    assignment = assign(given.chosen, gates)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()) or t, lambda t: t):
        dispatcher = Dispatcher(8, mpu)
        arrived = dispatcher.send(x, assignment).wait()
        dispatcher.combine(arrived.tokens, arrived)
    return saved


def test_keeps_no_rows_for_backward(world: World) -> None:
    assert world.run(_nothing_kept, layout=ParallelConfig(ep=2), ranks=2) == [[], []]


def test_refuses_what_cannot_be() -> None:
    with pytest.raises(ValueError, match=r"needs etp = tp, not etp=1 and tp=2: set etp=2"):
        Dispatcher(4, _pretend(ParallelConfig(tp=2, cut_expert_tokens=False), 2))
    with pytest.raises(ValueError, match=r"divides ep=6, not 4; it can be 1, 2, 3, 6"):
        Dispatcher(6, _pretend(ParallelConfig(ep=6, expert_dispatch="hierarchical", expert_node_size=4), 6))


def _pretend(config: ParallelConfig, ranks: int) -> ParallelState:
    """The first rank of a layout, without processes."""
    single, grid = ParallelState.single(), config.grid(ranks)
    state = replace(single, config=config, grid=grid)
    for name in ("tp", "ep", "etp"):
        axis = getattr(state, name)
        axis.ranks, axis.size = grid.members(0, (name,)), len(grid.members(0, (name,)))
    state.world.ranks = tuple(range(ranks))
    return state


def _random(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).to(dtype)


@pytest.mark.parametrize("zeros", [False, True])
def test_spread_and_its_transpose(zeros: bool) -> None:
    token = torch.tensor([3, 0, 3, 1, 0, 3])
    if zeros:
        token = torch.tensor([3, 0, 4, 1, 4, 3])
    spread = Spread(token, 4, zeros=zeros)
    matrix = torch.nn.functional.one_hot(token, 5)[:, :4].double()
    x, y = _random(4, 3), _random(6, 3)
    torch.testing.assert_close(spread.out(x), matrix @ x)
    torch.testing.assert_close(spread.home(y), matrix.t() @ y)
    assert spread.home(y)[2].eq(0).all(), "a token of no expert"


def test_half_precision_sums_are_rounded_once() -> None:
    token, rows = torch.arange(8).repeat(64), _random(512, 16, dtype=torch.bfloat16)
    exact = rows.double().view(64, 8, 16).sum(0)
    assert torch.equal(Spread(token, 8).home(rows), exact.float().to(torch.bfloat16))


def test_reorder_leaves_zeros_in_padding() -> None:
    reorder = Reorder(torch.tensor([4, 0, 2]), 5)
    assert reorder.home(torch.tensor([1.0, 2.0, 3.0])).tolist() == [2.0, 0.0, 3.0, 0.0, 1.0]
    assert reorder.out(torch.arange(5.0)).tolist() == [4.0, 0.0, 2.0]


def test_an_unused_place_that_nobody_announced_is_an_error() -> None:
    chosen, gates = torch.ones(2, 2, dtype=torch.bool), torch.ones(2, 2, dtype=torch.float64)
    good = assign(chosen, gates, places=1)
    bad = Assignment(good.token, good.expert, good.probs, good.counts)
    with pytest.raises(IndexError):
        Dispatcher(2, ParallelState.single()).send(_random(2, 3), bad)
