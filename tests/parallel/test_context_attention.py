"""Attention over a cut sequence equals attention over the whole one, for every mode, mask and number of ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from megalite.batch import MicroBatch
from megalite.kernels.attention import AttentionDropout
from megalite.kernels.attention_kernel import AttentionKernel, BlockKernel, attend
from megalite.kernels.attention_mask import AttentionMask, first_seen
from megalite.kernels.dropout import dropout_key
from megalite.mpu import ParallelConfig, ParallelState
from megalite.parallel.context import cut_rows, pad_rows, row_multiple
from megalite.parallel.context_attention import ContextAttention
from megalite.parallel.context_balance import zigzag
from megalite.parallel.context_plan import Needs, Sight, gather_plan, ring_plan
from megalite.testing.world import World
from tests.parallel.dense_attention import causal_mask, dense_attention, starts_of

MODES = ("ring", "all_gather", "ulysses", "ulysses_ring")


@dataclass(frozen=True, kw_only=True)
class Case:
    """Sizes and mask of an attention call; documents: lengths in each row of the batch (None: one to a row)."""

    seq_len: int = 32
    documents: tuple[tuple[int, ...], ...] | None = None
    rows: int = 2
    heads: int = 8
    kv_heads: int = 8
    window: int = 0
    softcap: float = 0.0
    sinks: bool = False
    dropout: float = 0.0
    head_size: int = 6


PACKED = ((1, 2, 7, 1, 21, 16), (40, 3, 1, 4))
CASES = {
    "causal": Case(),
    "odd": Case(seq_len=37),
    "grouped": Case(kv_heads=2, seq_len=33),
    "one-kv-head": Case(kv_heads=1),
    "three-kv-heads": Case(heads=24, kv_heads=3, head_size=2),
    "packed": Case(seq_len=48, documents=PACKED, kv_heads=2),
    "one-token-documents": Case(seq_len=24, documents=((1,) * 24, (24,))),
    "window": Case(window=5, seq_len=48),
    "packed-window": Case(window=3, seq_len=48, documents=PACKED),
    "softcap-and-sinks": Case(softcap=2.0, sinks=True, kv_heads=4),
    "dropout": Case(dropout=0.3, seq_len=45, kv_heads=2),
    "one-row": Case(rows=1, kv_heads=2, seq_len=64),
}


class WrittenOut(AttentionKernel):
    """A user's own kernel: forward alone, with whole score matrices."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, dropout: AttentionDropout | None
    ) -> tuple[Tensor, Tensor]:
        group = q.shape[2] // k.shape[2]
        k, v = k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)
        hidden = (mask.key[None] > mask.query[:, None]) | (mask.key[None] < mask.start[:, None])
        scores = torch.einsum("qbhd,kbhd->bhqk", q, k) * 0.3
        scores = scores.masked_fill(hidden.permute(2, 0, 1)[:, None], -torch.inf)
        lse = scores.logsumexp(-1)
        shift = lse.detach().masked_fill(lse.detach() == -torch.inf, 0.0)
        probs = (scores - shift[..., None]).exp()
        total = probs.sum(-1, keepdim=True)
        out = torch.einsum("bhqk,kbhd->qbhd", probs / total.masked_fill(total == 0, 1.0), v)
        return out, (shift + total[..., 0].log()).permute(2, 0, 1)


def tensors(case: Case) -> dict[str, Tensor]:
    """q, k, v, the gradient of the output and sinks, whole."""
    generator = torch.Generator().manual_seed(case.seq_len + case.heads)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    shape = (case.seq_len, case.rows)
    return {
        "q": draw(*shape, case.heads, case.head_size),
        "k": draw(*shape, case.kv_heads, case.head_size),
        "v": draw(*shape, case.kv_heads, case.head_size + 1),
        "dout": draw(*shape, case.heads, case.head_size + 1),
        "sinks": draw(case.heads),
    }


def batch_of(case: Case) -> MicroBatch:
    """A batch that holds the numbers of its tokens."""
    place = torch.arange(case.seq_len)[:, None].expand(-1, case.rows).contiguous()
    return MicroBatch(
        tokens=place, labels=place, loss_mask=torch.ones_like(place).float(), positions=place,
        samples=torch.arange(5, 5 + case.rows), step=0,
        documents=None if case.documents is None else starts_of(*map(list, case.documents)),
    )  # fmt: skip


def kernel_of(case: Case) -> AttentionKernel:
    return BlockKernel(scale=0.3, softcap=case.softcap)


def attention(mpu: ParallelState, case: Case, kernel: AttentionKernel, whole: dict[str, Tensor]) -> dict[str, Any]:
    """What this rank's part of the attention gives: places, out and gradients, where each row really has tokens."""
    rows = pad_rows(batch_of(case), row_multiple(mpu.cp.size, 1, False))
    batch, cut = cut_rows(rows, mpu.cp)

    def here(x: Tensor) -> Tensor:
        pad = rows.seq_len - case.seq_len
        return cut.here(torch.cat((x, torch.full((pad, *x.shape[1:]), 7.0, dtype=x.dtype)))).requires_grad_()

    q, k, v = here(whole["q"]), here(whole["k"]), here(whole["v"])
    sinks = whole["sinks"].clone().requires_grad_() if case.sinks else None
    dropout = None
    if case.dropout:
        dropout = AttentionDropout(p=case.dropout, key=dropout_key(1, 2, 3), token_index=batch.token_index)
    out = ContextAttention.of(mpu)(q, k, v, cut, kernel, window=case.window, dropout=dropout, sinks=sinks)
    real = (cut.mine < case.seq_len)[..., None, None]
    out.backward(here(whole["dout"]).detach() * real)
    found = {"out": out.detach(), "dq": q.grad, "dk": k.grad, "dv": v.grad, "places": cut.mine}
    return found | ({"dsinks": sinks.grad} if sinks is not None else {})


def reassemble(case: Case, parts: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Whole tensors from the ranks' parts; gradients of what all ranks hold are summed."""
    found: dict[str, Tensor] = {}
    places = torch.cat([part["places"] for part in parts])
    for name in ("out", "dq", "dk", "dv"):
        together = torch.cat([part[name] for part in parts])
        index = places[..., None, None].expand_as(together)
        found[name] = torch.empty_like(together).scatter_(0, index, together)[: case.seq_len]
    if case.sinks:
        found["dsinks"] = torch.stack([part["dsinks"] for part in parts]).sum(0)
    return found


def reference(case: Case, kernel: AttentionKernel | None = None) -> dict[str, Tensor]:
    """The same from one rank: written out, or with dropout by the kernel."""
    whole, batch = tensors(case), batch_of(case)
    q, k, v, sinks = (whole[name].requires_grad_() for name in ("q", "k", "v", "sinks"))
    starts = torch.zeros_like(batch.tokens) if batch.documents is None else batch.documents
    if case.dropout:
        places = batch.tokens
        mask = AttentionMask(query=places, start=first_seen(places, batch.documents, case.window), key=places)
        dropout = AttentionDropout(p=case.dropout, key=dropout_key(1, 2, 3), token_index=batch.token_index)
        out = attend(q, k, v, mask, kernel_of(case), dropout=dropout)
    else:
        out = dense_attention(
            q, k, v, causal_mask(starts, case.window), scale=0.3, softcap=case.softcap,
            sinks=sinks if case.sinks else None,
        )  # fmt: skip
    out.backward(whole["dout"])
    found = {"out": out.detach(), "dq": q.grad, "dk": k.grad, "dv": v.grad} | (
        {"dsinks": sinks.grad} if case.sinks else {}
    )
    return {name: value for name, value in found.items() if value is not None}


def compare(mpu: ParallelState, cases: dict[str, Case]) -> dict[str, dict[str, Any]]:
    return {name: attention(mpu, case, kernel_of(case), tensors(case)) for name, case in cases.items()}


@pytest.mark.parametrize("cp", [2, 4, 8])
@pytest.mark.parametrize("mode", MODES)
def test_every_mask_equals_one_rank(mode: Any, cp: int, world: World) -> None:
    results = world.run(compare, CASES, layout=ParallelConfig(cp=cp, cp_mode=mode), timeout=120.0)
    for name, case in CASES.items():
        found = reassemble(case, [result[name] for result in results])
        for key, expected in reference(case).items():
            assert (found[key] - expected).abs().max() < 1e-12 * max(1.0, float(expected.abs().max())), (name, key)


def own_kernel(mpu: ParallelState, case: Case) -> dict[str, Any]:
    return attention(mpu, case, WrittenOut(), tensors(case))


@pytest.mark.parametrize("mode", MODES)
def test_attention_of_your_own_needs_only_forward(mode: Any, world: World) -> None:
    case = CASES["packed"]
    found = reassemble(case, world.run(own_kernel, case, layout=ParallelConfig(cp=4, cp_mode=mode)))
    for key, expected in reference(case).items():
        assert (found[key] - expected).abs().max() < 1e-12 * max(1.0, float(expected.abs().max())), key


def perturbed(mpu: ParallelState, case: Case) -> list[dict[str, Any]]:
    """Without and with another token at the place 4 of both rows, which is in the third document and in the first."""
    whole, other = tensors(case), tensors(case)
    for name in ("q", "k", "v"):
        other[name][4] += 10.0
    return [attention(mpu, case, kernel_of(case), values) for values in (whole, other)]


@pytest.mark.parametrize("mode", MODES)
def test_documents_do_not_leak(mode: Any, world: World) -> None:
    case = CASES["packed"]
    results = world.run(perturbed, case, layout=ParallelConfig(cp=4, cp_mode=mode))
    before, after = (reassemble(case, [result[i] for result in results]) for i in (0, 1))
    for row, inside in ((0, slice(3, 10)), (1, slice(0, 40))):
        untouched = torch.ones(case.seq_len, dtype=torch.bool)
        untouched[inside] = False
        for name in ("out", "dq", "dk", "dv"):
            assert torch.equal(before[name][untouched, row], after[name][untouched, row]), (row, name)
            assert not torch.equal(before[name][inside, row], after[name][inside, row]), (row, name)


def count_bytes(mpu: ParallelState, case: Case, full: bool) -> dict[str, tuple[int, int]]:
    """(forward, backward) bytes by axis, for a mask in which everyone sees everything, or a causal one."""
    rows = pad_rows(batch_of(case), row_multiple(mpu.cp.size, 1, False))
    _, cut = cut_rows(rows, mpu.cp)
    sight = cut.sight()
    if full:
        sight = Sight(sight.places, torch.zeros_like(sight.places), torch.full_like(sight.places, rows.seq_len - 1))
    whole = tensors(case)
    q, k, v = (cut.here(whole[name]).requires_grad_() for name in ("q", "k", "v"))
    across = ContextAttention.of(mpu)
    mpu.reset_stats()
    out = across.with_sight(q, k, v, sight, kernel_of(case))
    forward = {name: axis.stats.bytes_sent for name, axis in mpu.axes().items()}
    out.sum().backward()
    return {name: (forward[name], axis.stats.bytes_sent - forward[name]) for name, axis in mpu.axes().items()}


@pytest.mark.parametrize("cp", [2, 4, 8])
def test_bytes_of_a_full_mask_are_the_formulas(cp: int, world: World) -> None:
    case = Case(seq_len=64, kv_heads=4, rows=2)
    tokens = case.seq_len // cp * case.rows
    features = 2 * case.head_size + 1  # of a key and its value
    kv, both = 8 * tokens * case.kv_heads * features, 8 * tokens * case.heads * features

    def run(mode: Any) -> list[dict[str, tuple[int, int]]]:
        return world.run(count_bytes, case, True, layout=ParallelConfig(cp=cp, cp_mode=mode))

    assert all(r["cp"] == ((cp - 1) * kv, 2 * (cp - 1) * kv) for r in run("ring"))
    assert all(r["cp"] == ((cp - 1) * kv, 2 * (cp - 1) * kv) for r in run("all_gather"))
    replicated = max(1, cp // case.kv_heads)
    exchanged = (both + replicated * kv) * (cp - 1) // cp
    assert all(r["cp"] == (exchanged, exchanged) for r in run("ulysses"))
    if cp > 2:
        exchanged, passed_on = (both + kv) // 2, (cp // 2 - 1) * kv
        for result in run("ulysses_ring"):
            assert result["cp_inner"] == (exchanged, exchanged)
            assert result["cp_outer"] == (passed_on, 2 * passed_on)
            assert result["cp"] == (0, 0)


@pytest.mark.parametrize("name", ["causal", "packed", "window"])
@pytest.mark.parametrize("mode", ["ring", "all_gather"])
def test_bytes_of_other_masks_are_the_plans(mode: Any, name: str, world: World) -> None:
    cp, base = 4, CASES[name]
    case = Case(seq_len=48, documents=base.documents, kv_heads=2)
    token = 8 * case.kv_heads * (2 * case.head_size + 1)
    results = world.run(count_bytes, case, False, layout=ParallelConfig(cp=cp, cp_mode=mode))
    _, cut = cut_rows(batch_of(case), FakeAxis(cp))
    needs = Needs(cut.sight())
    for rank, result in enumerate(results):
        plan = (ring_plan if mode == "ring" else gather_plan)(cut.sight(), rank, needs)
        forward, backward = plan.tokens_sent * token, (plan.tokens_sent + plan.grad_tokens_sent) * token
        assert result["cp"] == (forward, backward)
        assert forward <= (cp - 1) * case.seq_len // cp * case.rows * token
    assert sum(r["cp"][0] for r in results) < cp * (cp - 1) * case.seq_len // cp * case.rows * token


def FakeAxis(size: int) -> Any:
    """An axis of which only the size is asked."""

    class Sized:
        rank = 0

    axis = Sized()
    axis.size = size  # pyright: ignore[reportAttributeAccessIssue]
    return axis


def test_a_window_travels_few_hops() -> None:
    places = zigzag(512, 8)[..., None]
    sight = Sight.causal(places, None, 16)
    plans = [ring_plan(sight, rank) for rank in range(8)]
    hops = [
        len([m for plan in plans for step in plan.steps for m in step.sends if m.owner == owner]) for owner in range(8)
    ]
    assert max(hops) <= 3  # the next chunk of both chunks, and for one rank a chunk's own neighbour
    assert sum(plan.tokens_sent for plan in plans) == 14 * 15  # before each chunk but the first and rank 7's second


def test_an_empty_ring_has_one_step() -> None:
    sight = Sight.causal(torch.arange(8)[None, :, None])
    plan = ring_plan(sight, 0)
    assert len(plan.steps) == 1 and plan.tokens_sent == plan.grad_tokens_sent == 0
