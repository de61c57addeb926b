"""The gated short convolution: LFM2's own block on one rank, and one rank on every cut."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor
from transformers import Lfm2Config
from transformers.models.lfm2.modeling_lfm2 import Lfm2ShortConv

from megalite.batch import MicroBatch
from megalite.layout import parse_layout
from megalite.mpu import ParallelState
from megalite.nn.config import ModelConfig
from megalite.nn.context import Context
from megalite.nn.short_conv import GatedShortConv
from megalite.parallel.collectives import sequence_part
from megalite.parallel.context import RowCut, cut_rows
from megalite.parallel.random import initialize
from megalite.testing import World, check_parallel_module
from tests.hugging_face import assert_equal, fill, float64

S, B, H = 8, 2, 20
CONFIG = ModelConfig(name="lfm2", num_layers=2, hidden_size=H, num_heads=2, init_std=0.5)


def padding() -> Tensor:
    """Rows that begin and end with padding."""
    mask = torch.ones(S, B, dtype=torch.bool)
    mask[:2, 0] = mask[6:, 1] = False
    return mask


def context_of(mask: Tensor | None) -> Context:
    ids = torch.zeros(S, B, dtype=torch.int64)
    batch = MicroBatch(
        tokens=ids, labels=ids, loss_mask=torch.ones(S, B), positions=ids, samples=torch.arange(B), step=0,
        token_mask=mask,
    )  # fmt: skip
    return Context.uncut(batch)


def build(mpu: ParallelState) -> GatedShortConv:
    return GatedShortConv(CONFIG, mpu, 0)


def call(mask: Tensor | None, module: GatedShortConv, x: Tensor) -> Tensor:
    y, bias = module(x, context_of(mask))
    assert bias is None
    return y


def inputs() -> Tensor:
    return torch.randn(S, B, H, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@pytest.mark.parametrize("mask", [None, padding()], ids=["whole", "padded"])
def test_one_rank_is_every_cut(mask: Tensor | None, world: World) -> None:
    check_parallel_module(
        build, inputs=[inputs()], layouts=["tp2", "tp2+sp", "tp4", "tp4+sp"], call=partial(call, mask), world=world
    )


@pytest.mark.parametrize("mask", [None, padding()], ids=["whole", "padded"])
def test_equals_the_block_of_lfm2(mask: Tensor | None) -> None:
    with float64():
        theirs = Lfm2ShortConv(Lfm2Config(hidden_size=H, num_hidden_layers=1, full_attn_idxs=[]), 0)
    fill(theirs)
    ours = build(ParallelState.single()).double()
    with torch.no_grad():
        for name, weight in zip("bcx", theirs.in_proj.weight.chunk(3), strict=True):
            ours.in_proj.part(name).weight.copy_(weight)
        ours.conv.copy_(theirs.conv.weight.squeeze(1))
        ours.proj.weight.copy_(theirs.out_proj.weight)

    x, x_theirs = inputs().requires_grad_(), inputs().transpose(0, 1).contiguous().requires_grad_()
    with float64():
        wanted = theirs(x_theirs, attention_mask=None if mask is None else mask.t())
    y = call(mask, ours, x)
    assert_equal(y, wanted.transpose(0, 1), "output")
    dy = inputs().flip(0)
    y.backward(dy)
    wanted.backward(dy.transpose(0, 1))
    assert x.grad is not None and ours.conv.grad is not None and theirs.in_proj.weight.grad is not None
    assert_equal(x.grad.transpose(0, 1), x_theirs.grad, "input")
    for name, grad in zip("bcx", theirs.in_proj.weight.grad.chunk(3), strict=True):
        assert_equal(ours.in_proj.part(name).weight.grad, grad, name)
    assert_equal(ours.conv.grad[:, None], theirs.conv.weight.grad, "conv")
    assert_equal(ours.proj.weight.grad, theirs.out_proj.weight.grad, "out_proj")


def test_a_token_sees_no_later_one_and_no_padding() -> None:
    ours = build(ParallelState.single()).double()
    initialize(ours, seed=2)
    x = inputs().requires_grad_()
    (dx,) = torch.autograd.grad(call(padding(), ours, x)[3].abs().sum(), x)
    sees = dx.abs().sum(-1) > 0
    assert sees[:, 0].tolist() == [False, False, True, True, False, False, False, False]
    assert sees[:, 1].tolist() == [False, True, True, True, False, False, False, False]


def documents() -> Tensor:
    """Rows of documents of 1, 2 and more tokens, and a row of one."""
    starts = torch.zeros(24, 3, dtype=torch.int64)
    for column, begins in enumerate(([0, 1, 3, 10, 11, 12, 17], [0, 2, 4, 6, 8, 22, 23], [0])):
        for begin in begins:
            starts[begin:, column] = begin
    return starts


def long_batch(packed: bool) -> MicroBatch:
    ids = torch.arange(24)[:, None].expand(24, 3)
    mask = torch.ones(24, 3, dtype=torch.bool)
    mask[20:, 1] = mask[5:7, 2] = False
    return MicroBatch(
        tokens=ids, labels=ids, loss_mask=torch.ones(24, 3), positions=ids, samples=torch.arange(3), step=0,
        token_mask=mask, documents=documents() if packed else None,
    )  # fmt: skip


def scattered(cp: int) -> Tensor:
    """int64 [cp, 24 / cp, 3]: places dealt out at random, another deal in each row."""
    generator = torch.Generator().manual_seed(5)
    deals = [torch.randperm(24, generator=generator).view(cp, -1).sort(1).values for _ in range(3)]
    return torch.stack(deals, -1)


def apply_cut(mpu: ParallelState, kernel: int, packed: bool, deal: str) -> dict[str, Tensor]:
    """Output and gradients of this rank's part of the rows, and the places that it holds."""
    rows = long_batch(packed)
    mpu.cp.stats.reset()
    batch, cut = cut_rows(rows, mpu.cp)
    if deal == "scattered" and mpu.cp.size > 1:
        cut = RowCut(mpu.cp, scattered(mpu.cp.size), rows.documents)
        batch = replace(rows, places=torch.arange(24)[:, None].expand(24, 3)).map(cut.here)
    context = replace(Context.uncut(rows), batch=batch, cut=cut)
    layer = GatedShortConv(replace(CONFIG, conv_kernel_size=kernel), mpu, 0).double()
    initialize(layer, seed=2)
    whole, dy = torch.randn(2, 24, 3, H, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    x = sequence_part(cut.here(whole), mpu.tp, layer.sequence_parallel).requires_grad_()
    y, _ = layer(x, context)
    y.backward(sequence_part(cut.here(dy), mpu.tp, layer.sequence_parallel))
    assert x.grad is not None and layer.conv.grad is not None
    places = sequence_part(cut.mine, mpu.tp, layer.sequence_parallel)
    grads = {name: mpu.cp.all_reduce(p.grad.clone()) for name, p in layer.named_parameters() if p.grad is not None}
    sent = torch.tensor(sum(c.bytes_sent for site, c in mpu.cp.stats.by_site.items() if "all_to_all" in site))
    return {"places": places, "output": y.detach(), "input": x.grad, "sent": sent} | (grads if mpu.tp.size == 1 else {})


@pytest.mark.parametrize("packed", [False, True], ids=["one", "packed"])
@pytest.mark.parametrize(
    ("layout", "kernel", "deal"),
    [
        ("cp2", 3, "zigzag"), ("cp2", 4, "scattered"), ("cp4", 3, "zigzag"), ("cp4", 6, "zigzag"),
        ("cp4", 3, "scattered"), ("cp2+tp2+sp", 3, "zigzag"), ("cp2+tp2", 3, "scattered"),
    ],
)  # fmt: skip
def test_context_parallel_ranks_fetch_what_their_taps_see(
    layout: str, kernel: int, deal: str, packed: bool, world: World
) -> None:
    parsed = parse_layout(layout)
    whole = apply_cut(ParallelState.single(), kernel, packed, "zigzag")
    parts = world.run(apply_cut, kernel, packed, deal, layout=parsed.parallel, ranks=parsed.num_ranks)
    for part in parts:
        for name in ("output", "input"):
            index = part["places"][..., None].expand_as(part[name])
            assert_equal(part[name], whole[name].gather(0, index), name)
        for name in part.keys() - {"places", "output", "input", "sent"}:
            assert_equal(part[name], whole[name], name)


def test_only_what_is_seen_elsewhere_is_sent(world: World) -> None:
    for packed in (False, True):
        starts = documents() if packed else torch.zeros(24, 3, dtype=torch.int64)
        parts = world.run(apply_cut, 3, packed, "zigzag", layout=parse_layout("cp2").parallel, ranks=2)
        rows = sum(int(part["sent"]) for part in parts) / (H * 8)
        holds = [{(place, row) for row in range(3) for place in part["places"][:, row].tolist()} for part in parts]
        seen = {
            (place - back, row, rank)
            for rank in range(2) for place, row in holds[rank] for back in (1, 2)
            if int(starts[place, row]) <= place - back and (place - back, row) not in holds[rank]
        }  # fmt: skip
        assert rows == 2 * len(seen), "each once, and its gradient back"
        assert packed or len(seen) == 12  # two inputs at two borders of three rows: the middle border is inside rank 1


def test_no_document_sees_another() -> None:
    layer = build(ParallelState.single()).double()
    initialize(layer, seed=2)
    starts = documents()
    x = torch.randn(24, 3, H, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    rows = replace(long_batch(True), token_mask=None)
    y = layer(x, Context.uncut(rows))[0]
    for place, row in ((3, 0), (5, 0), (23, 1), (23, 2)):
        (dx,) = torch.autograd.grad(y[place, row].abs().sum(), x, retain_graph=True)
        first = max(int(starts[place, row]), place - 2)
        assert dx.abs().sum(-1).nonzero().tolist() == [[seen, row] for seen in range(first, place + 1)]
    poisoned = x.detach().clone()
    poisoned[9, 0] = torch.nan  # the last token of a document
    y = layer(poisoned, Context.uncut(rows))[0]
    assert y[9, 0].isnan().all() and not y[10:].isnan().any()
