"""The router on one rank: choices, ties, groups, capacity, losses and counts; the layout tests prove it on several."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megalite.batch import BatchTotals, MicroBatch
from megalite.mpu import ParallelState
from megalite.nn.config import ModelConfig
from megalite.nn.context import Context
from megalite.nn.router import Router, RouterLoss, attach_loss, finish_step, sinkhorn
from megalite.parallel.expert import Assignment

S, B, H, E = 6, 3, 10, 4
MPU = ParallelState.single()


def config_of(**fields: Any) -> ModelConfig:
    plain: dict[str, Any] = {"hidden_size": H, "num_heads": 2, "num_experts": E, "top_k": 2, "aux_loss": "none"}
    return ModelConfig(**(plain | fields))


def router_of(**fields: Any) -> Router:
    router = Router(config_of(**fields), MPU, 0, None).double()
    with torch.no_grad():
        router.weight.copy_(torch.randn(E, H, generator=torch.Generator().manual_seed(3), dtype=torch.float64))
    return router


def batch_of(rows: int = B, *, mask: Tensor | None = None, index: int = 0, total_rows: int | None = None) -> MicroBatch:
    ids = torch.zeros(S, rows, dtype=torch.int64)
    tokens = S * rows if mask is None else int(mask.sum())
    return MicroBatch(
        tokens=ids, labels=ids, loss_mask=torch.ones(S, rows), positions=ids, samples=torch.arange(rows) + 10 * index,
        step=0, token_mask=mask, index=index,
        totals=BatchTotals(num_rows=total_rows or rows, num_tokens=tokens * (total_rows or rows) // rows),
    )  # fmt: skip


def context_of(batch: MicroBatch, training: bool = True) -> Context:
    return Context.uncut(batch, seed=5, training=training)


def inputs(rows: int = B, seed: int = 0) -> Tensor:
    return torch.randn(S, rows, H, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def route(router: Router, x: Tensor, batch: MicroBatch, training: bool = True) -> tuple[Assignment, RouterLoss | None]:
    return router(x, context_of(batch, training))


def dense(assignment: Assignment, num_tokens: int) -> Tensor:
    """[num_tokens, E] weights."""
    out = torch.zeros(num_tokens + 1, E, dtype=assignment.probs.dtype)
    out[assignment.token, assignment.expert] = assignment.probs.detach()
    return out[:num_tokens]


def aux_of(router: Router, x: Tensor, batch: MicroBatch) -> Tensor:
    _, loss = route(router, x, batch)
    assert loss is not None
    return loss.finish()


def test_softmax_top_k_normalised() -> None:
    router, x = router_of(), inputs()
    logits = x.flatten(0, 1) @ router.weight.t()
    best = logits.topk(2).indices
    expected = torch.zeros(S * B, E, dtype=torch.float64).scatter(1, best, logits.gather(1, best).softmax(-1))
    assert torch.allclose(dense(route(router, x, batch_of())[0], S * B), expected, atol=1e-14)


@pytest.mark.parametrize("scale", [1.0, 2.5])
def test_sigmoid_scores_with_bias_for_selection_only(scale: float) -> None:
    router, x = router_of(router_score="sigmoid", expert_bias=True, router_scale=scale), inputs()
    router.expert_bias.copy_(torch.tensor([0.0, 5.0, 0.0, 0.0]))
    scores = (x.flatten(0, 1) @ router.weight.t()).sigmoid()
    best = (scores + router.expert_bias).topk(2).indices
    picked = scores.gather(1, best)
    picked = picked / (picked.sum(-1, keepdim=True) + 1e-20) * scale
    expected = torch.zeros(S * B, E, dtype=torch.float64).scatter(1, best, picked)
    found = dense(route(router, x, batch_of())[0], S * B)
    assert torch.allclose(found, expected, atol=1e-14) and bool((found[:, 1] > 0).all())


def test_pairs_are_sorted_by_expert_then_token() -> None:
    assignment, _ = route(router_of(), inputs(), batch_of())
    order = assignment.expert * 1000 + assignment.token
    assert torch.equal(order, order.sort().values)
    assert torch.equal(assignment.counts, torch.bincount(assignment.expert, minlength=E))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equal_logits_go_to_the_first_experts(dtype: torch.dtype) -> None:
    router = router_of().to(dtype)
    torch.nn.init.constant_(router.weight, 0.25)
    for _ in range(2):  # a recompute chooses the same
        assignment, _ = route(router, inputs().to(dtype), batch_of())
        assert assignment.counts.tolist() == [S * B, S * B, 0, 0]


def test_groups_limit_the_choice() -> None:
    router, x = router_of(num_expert_groups=2, top_k_groups=1), inputs()
    logits = x.flatten(0, 1) @ router.weight.t()
    probs = logits.softmax(-1)
    best_group = probs.view(-1, 2, 2).sum(-1).argmax(-1)
    found = dense(route(router, x, batch_of())[0], S * B) > 0
    assert torch.equal(found.view(-1, 2, 2).all(-1).long().argmax(-1), best_group)
    assert torch.equal(found.sum(-1), torch.full((S * B,), 2))


@pytest.mark.parametrize("policy", ["probability", "position"])
def test_capacity_drops_within_a_row(policy: Any) -> None:
    router, x = router_of(top_k=1, router_normalize=False, capacity_factor=1.0, drop_policy=policy), inputs()
    capacity = 2  # ceil(6 * 1 / 4)
    probs = (x @ router.weight.detach().t()).softmax(-1)
    choice = probs.argmax(-1)
    kept = dense(route(router, x, batch_of())[0], S * B).view(S, B, E) > 0
    for row in range(B):
        for expert in range(E):
            wanted = [t for t in range(S) if choice[t, row] == expert]
            if policy == "probability":
                wanted.sort(key=lambda t: -float(probs[t, row, expert]))
            assert kept[:, row, expert].nonzero().flatten().tolist() == sorted(wanted[:capacity])
    dropped = router.tallies[0].extra[0]
    assert dropped == S * B - kept.sum() > 0


def test_padded_places_weigh_nothing() -> None:
    router = router_of(capacity_factor=1.0, pad_to_capacity=True)
    assignment, _ = route(router, inputs(), batch_of())
    assert assignment.counts.tolist() == [3 * B] * E and len(assignment.token) == 3 * B * E
    unused = assignment.token == S * B
    assert bool((assignment.probs[unused] == 0).all())
    plain, _ = route(router_of(capacity_factor=1.0), inputs(), batch_of())
    assert torch.equal(dense(assignment, S * B), dense(plain, S * B))


def test_expert_choice_fills_every_expert() -> None:
    router, x = router_of(routing="expert_choice", router_normalize=False), inputs()
    found = dense(route(router, x, batch_of())[0], S * B).view(S, B, E)
    probs = (x @ router.weight.t()).softmax(-1)
    assert bool(((found > 0).sum(0) == 3).all())  # ceil(6 * 2 / 4) in every row
    least, most = torch.where(found > 0, probs, 1.0).amin(0), torch.where(found > 0, 0.0, probs).amax(0)
    assert bool((least >= most).all())


def test_sinkhorn_balances_rows_and_columns() -> None:
    matrix = sinkhorn(torch.randn(32, 2, E, generator=torch.Generator().manual_seed(1), dtype=torch.float64))
    assert torch.allclose(matrix.sum(0), torch.full((2, E), 1 / E, dtype=torch.float64), rtol=1e-3)
    assert torch.allclose(matrix.sum(-1), torch.full((32, 2), 1 / 32, dtype=torch.float64), rtol=2e-2)


def sequence_loss(router: Router, x: Tensor, lengths: list[int]) -> Tensor:
    """The definition, row by row."""
    total = torch.zeros((), dtype=torch.float64)
    for row, n in enumerate(lengths):
        probs = (x[:n, row] @ router.weight.t()).softmax(-1)
        fraction = torch.bincount(probs.topk(2).indices.flatten(), minlength=E) / (2 * n)
        total = total + E * (fraction * probs.mean(0)).sum()
    return 0.3 * total / len(lengths)


def test_sequence_loss_is_its_definition() -> None:
    router, x = router_of(aux_loss="sequence", aux_loss_coeff=0.3), inputs()
    found, expected = aux_of(router, x, batch_of()), sequence_loss(router, x, [S] * B)
    assert torch.allclose(found, expected, rtol=1e-12)
    grads = [torch.autograd.grad(loss, router.weight)[0] for loss in (found, expected)]
    assert torch.allclose(*grads, rtol=1e-10)
    assert router.tallies[0].extra[2] == found.detach()


def test_padding_is_neither_routed_nor_counted() -> None:
    x, lengths = inputs(), [3, 6, 1]
    mask = torch.arange(S)[:, None] < torch.tensor(lengths)
    router = router_of(aux_loss="sequence", aux_loss_coeff=0.3, router_z_loss=0.1)
    assignment, loss = route(router, x, batch_of(mask=mask))
    assert loss is not None
    assert not bool((dense(assignment, S * B).view(S, B, E)[~mask] > 0).any())
    assert int(router.tallies[0].tokens.sum()) == 2 * sum(lengths)
    z = 0.1 * (x @ router.weight.t()).logsumexp(-1).square()[mask].mean()
    assert torch.allclose(loss.finish(), sequence_loss(router, x, lengths) + z, rtol=1e-12)


def test_padding_takes_no_place_of_an_expert() -> None:
    mask = torch.ones(S, B, dtype=torch.bool)
    mask[:2] = False  # the first positions would win
    router = router_of(top_k=1, router_normalize=False, capacity_factor=1.0, drop_policy="position")
    torch.nn.init.zeros_(router.weight)
    assignment, _ = route(router, inputs(), batch_of(mask=mask))
    assert assignment.token.view(-1).tolist() == [2 * B + i for i in range(2 * B)]


@pytest.mark.parametrize("kind", ["sequence", "global"])
def test_micro_batches_do_not_change_the_loss(kind: Any) -> None:
    """Four rows in one micro-batch, or one by one: the same value and gradient."""
    x = inputs(4)
    whole, parts = (router_of(aux_loss=kind, aux_loss_coeff=0.3, router_z_loss=0.1) for _ in range(2))
    for router in (whole, parts):
        router.fractions.copy_(torch.tensor([0.1, 0.2, 0.3, 0.4]))
    aux_of(whole, x, batch_of(4)).backward()
    for row in range(4):
        aux_of(parts, x[:, row : row + 1], batch_of(1, index=row, total_rows=4)).backward()
    assert whole.weight.grad is not None and parts.weight.grad is not None
    assert torch.allclose(whole.weight.grad, parts.weight.grad, rtol=1e-10)
    totals = [finish_step([router], config_of(num_layers=1), MPU, updated=False) for router in (whole, parts)]
    assert torch.allclose(totals[0].tokens, totals[1].tokens) and torch.allclose(totals[0].extra, totals[1].extra)


def test_micro_batch_loss_is_that_of_switch() -> None:
    router, x = router_of(aux_loss="micro_batch", aux_loss_coeff=0.3), inputs()
    probs = (x.flatten(0, 1) @ router.weight.t()).softmax(-1)
    fraction = torch.bincount(probs.topk(2).indices.flatten(), minlength=E) / (2 * S * B)
    expected = 0.3 * E * (fraction * probs.mean(0)).sum() * B / 12  # its share of a global batch of 12 rows
    assert torch.allclose(aux_of(router, x, batch_of(total_rows=12)), expected, rtol=1e-12)


def test_a_balanced_router_pays_the_coefficient() -> None:
    router = router_of(aux_loss="global", aux_loss_coeff=0.3)
    torch.nn.init.zeros_(router.weight)
    assert torch.allclose(aux_of(router, inputs(), batch_of()), torch.tensor(0.3, dtype=torch.float64))


def test_attached_loss_reaches_the_graph_once() -> None:
    x, w = torch.ones(3, requires_grad=True), torch.tensor(2.0, requires_grad=True)
    y = attach_loss(x * 1.0, w * w, 0.5)
    torch.autograd.backward(y, torch.ones(3))
    assert w.grad == 0.5 * 4.0 and x.grad is not None and torch.equal(x.grad, torch.ones(3))


def test_counts_are_assigned_so_a_recompute_counts_once() -> None:
    router = router_of()
    for _ in range(2):
        route(router, inputs(), batch_of())
    loads = finish_step([router], config_of(num_layers=1), MPU, updated=True)
    assert int(loads.tokens.sum()) == 2 * S * B and not router.tallies


def test_evaluation_counts_nothing() -> None:
    router = router_of(aux_loss="sequence")
    _, loss = route(router, inputs(), batch_of(), training=False)
    assert loss is None and not router.tallies


def test_the_bias_moves_towards_the_mean_once_per_update() -> None:
    router = router_of(expert_bias=True, expert_bias_rate=0.25)
    config = replace(router.config, num_layers=1)
    router.expert_bias.copy_(torch.zeros(E))
    with torch.no_grad():
        router.weight.zero_()  # ties: experts 0 and 1 take everything
    route(router, inputs(), batch_of())
    finish_step([router], config, MPU, updated=False)
    assert router.expert_bias.tolist() == [0.0] * E
    route(router, inputs(), batch_of())
    finish_step([router], config, MPU, updated=True)
    assert router.expert_bias.tolist() == [-0.25, -0.25, 0.25, 0.25]
    assert router.fractions.tolist() == [0.5, 0.5, 0.0, 0.0]


def test_jitter_is_stateless() -> None:
    router, x = router_of(router_jitter=0.5), inputs()
    first, again = (route(router, x, batch_of())[0].probs for _ in range(2))
    assert torch.equal(first, again)
    assert not torch.equal(first, route(router, x, batch_of(), training=False)[0].probs)
    row, _ = route(router, x[:, 1:2], replace(batch_of(1), samples=torch.tensor([1])))
    assert torch.allclose(dense(row, S), dense(route(router, x, batch_of())[0], S * B).view(S, B, E)[:, 1])
