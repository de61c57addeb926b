"""Flash attention against softmax over a dense mask, in float64, and no farther from it than the `block` backend."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.kernels.attention_kernel import AttentionKernel, BlockKernel, attend
from megalite.kernels.attention_mask import AttentionMask, first_seen
from megalite.kernels.attention_rows import AttentionDropout
from megalite.kernels.dropout import dropout_key
from megalite.kernels.masked_attention import merge
from megalite.kernels.triton import attention as module
from megalite.kernels.triton import masked_attention
from megalite.kernels.triton.attention import TritonKernel, attention_backward_op, attention_op
from megalite.kernels.triton.attention_tiles import Places
from megalite.kernels.triton.launch import Launch
from tests.kernels.interpreter.checks import DTYPES, assert_no_worse, canaries, guarded


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles so small that short rows have many."""

    def row(kernel: str, dtype: torch.dtype, size: int = 0) -> Launch:
        tiles = {
            "attention_key_grads": {"BLOCK_M": 32, "BLOCK_N": 16},
            "attention_merge": {"ROWS": 8},
            "attention_delta": {"BLOCK_M": 16},
        }
        constants = tiles.get(kernel, {"BLOCK_M": 16, "BLOCK_N": 32})
        return Launch(kernel=kernel, arch="", dtype="", up_to=0, constants=constants, num_warps=4, num_stages=1)

    monkeypatch.setattr(module, "launch_row", row)
    monkeypatch.setattr(masked_attention, "launch_row", row)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A small attention."""

    seq: int
    heads: int = 2
    kv_heads: int = 1
    d: int = 16
    dv: int = 16
    window: int = 0
    softcap: float = 0.0
    sinks: bool = False
    p: float = 0.0
    documents: tuple[tuple[int, ...], ...] = ()
    """Lengths, by batch row."""

    @property
    def batch(self) -> int:
        return max(1, len(self.documents))

    @property
    def scale(self) -> float:
        return 1.3 / math.sqrt(self.d)

    def mask(self) -> AttentionMask:
        places = torch.arange(self.seq)[:, None].expand(self.seq, self.batch)
        documents = None
        if self.documents:
            documents = torch.tensor([[n for n, m in enumerate(row) for _ in range(m)] for row in self.documents]).t()
            documents = (documents[None] != documents[:, None]).long().cumprod(0).sum(0)
        return AttentionMask(query=places, start=first_seen(places, documents, self.window), key=places)

    def inputs(self, dtype: torch.dtype) -> list[Tensor]:
        """q, k, v, dout, and sinks if there are any."""
        generator = torch.Generator().manual_seed(self.seq)
        s, b = self.seq, self.batch
        shapes = [(s, b, self.heads, self.d), (s, b, self.kv_heads, self.d), (s, b, self.kv_heads, self.dv)]
        shapes += [(s, b, self.heads, self.dv)] + [(self.heads,)] * self.sinks
        return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]

    def dropout(self) -> AttentionDropout | None:
        if not self.p:
            return None
        index = torch.arange(self.seq * self.batch).view(self.seq, self.batch) + (1 << 33)
        return AttentionDropout(p=self.p, key=dropout_key(1, 2, 3), token_index=index, head_offset=5)

    def run(self, kernel: AttentionKernel, inputs: list[Tensor]) -> list[Tensor]:
        """The output, and the gradients of q, k, v and sinks."""
        q, k, v, dout, *sinks = (x.detach() for x in inputs)
        leaves = [x.requires_grad_() for x in (q, k, v, *sinks)]
        out = attend(q, k, v, self.mask(), kernel, dropout=self.dropout(), sinks=sinks[0] if sinks else None)
        return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


CASES = {
    "one token": Case(seq=1),
    "one tile": Case(seq=13, d=24, dv=8, sinks=True),
    "groups": Case(seq=50, heads=6, kv_heads=2, d=20, dv=33),
    "documents": Case(seq=50, heads=2, documents=((3, 1, 30, 16), (50,))),
    "window": Case(seq=70, window=19, softcap=3.0, sinks=True),
    "dropout": Case(seq=40, kv_heads=2, p=0.3, documents=((20, 20),)),
    "capped dropout": Case(seq=33, heads=1, p=0.2, softcap=1.5, window=9),
}


def dense(case: Case, inputs: list[Tensor]) -> list[Tensor]:
    """The definition, in float64."""
    q, k, v, dout, *sinks = (x.detach().double().requires_grad_() for x in inputs)
    mask, group = case.mask(), case.heads // case.kv_heads
    heads_first = (q, k.repeat_interleave(group, 2), v.repeat_interleave(group, 2))
    qh, kh, vh = (x.permute(1, 2, 0, 3) for x in heads_first)
    scores = qh @ kh.mT * case.scale
    if case.softcap:
        scores = case.softcap * (scores / case.softcap).tanh()
    scores = scores.masked_fill(~seen(mask)[:, None], -math.inf)
    if sinks:
        scores = torch.cat((scores, sinks[0][None, :, None, None].expand(*scores.shape[:3], 1)), -1)
    probs = scores.softmax(-1)[..., : case.seq]
    out = (probs @ vh).permute(2, 0, 1, 3)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v, *sinks), dout)]


def seen(mask: AttentionMask) -> Tensor:
    """bool [b, sq, sk]."""
    query, start, key = mask.query.t()[:, :, None], mask.start.t()[:, :, None], mask.key.t()[:, None]
    return (start <= key) & (key <= query)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_attention(case: Case, dtype: torch.dtype) -> None:
    inputs = case.inputs(dtype)
    block = BlockKernel(scale=case.scale, softcap=case.softcap)
    # What dropout keeps is not the definition's affair: the block backend has tests of its own.
    exact = case.run(block, [x.double() for x in inputs]) if case.p else dense(case, inputs)
    eager = case.run(block, inputs)
    kernel = TritonKernel(scale=case.scale, softcap=case.softcap)
    with canaries():
        ours = case.run(kernel, [guarded(x, gap=3 if x.dim() > 1 else 0) for x in inputs])
    for mine, theirs, want in zip(ours, eager, exact, strict=True):
        assert mine.dtype == dtype and mine.shape == want.shape
        assert_no_worse(mine, theirs, want)
        if dtype == torch.float32:
            # Gradients of scores are differences of sums about one: where these cancel, their rounding is what stays.
            torch.testing.assert_close(mine.double(), want, rtol=0.0, atol=1e-5 * max(want.abs().max().item(), 1.0))


def test_heads_that_lie_in_one_tensor() -> None:
    """q, k and v as views of a fused projection need no copies, and the strides of one another do not matter."""
    case = Case(seq=20, heads=4, kv_heads=2, documents=((7, 13), (20,)))
    qkv = torch.randn(20, 2, 8 * 16, generator=torch.Generator().manual_seed(0))
    q, k, v = qkv.unflatten(-1, (-1, 16)).split([4, 2, 2], 2)
    kernel = TritonKernel(scale=0.3)
    apart = kernel.forward(q.contiguous(), k.contiguous(), v.contiguous(), case.mask(), None)
    together = kernel.forward(q, k, v, case.mask(), None)
    assert all(torch.equal(a, b) for a, b in zip(apart, together, strict=True))


def zigzag(size: int, rank: int, ranks: int) -> Tensor:
    chunks = torch.arange(size).tensor_split(2 * ranks)
    return torch.cat((chunks[rank], chunks[2 * ranks - 1 - rank]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_keys_that_come_in_parts(dtype: torch.dtype) -> None:
    """What a ring does: merged outputs are those of all keys, gradients add up; some queries see nothing of a part."""
    case = Case(seq=60, heads=2, documents=((25, 35), (60,)), p=0.25, softcap=2.0)
    q, k, v, dout = case.inputs(dtype)
    whole, dropout = case.mask(), case.dropout()
    kernel, block = (make(scale=case.scale, softcap=case.softcap) for make in (TritonKernel, BlockKernel))
    out, lse = block.forward(q.double(), k.double(), v.double(), whole, dropout)
    delta = (dout.double() * out).sum(-1)
    exact = block.backward(dout.double(), q.double(), k.double(), v.double(), out, lse, delta, whole, dropout)
    parts = [zigzag(60, rank, 2) for rank in range(2)]
    masks = [AttentionMask(query=whole.query, start=whole.start, key=whole.key[part]) for part in parts]
    results = [kernel.forward(q, k[p], v[p], mask, dropout) for p, mask in zip(parts, masks, strict=True)]
    hidden = ~torch.cat([seen(mask).any(-1).t()[..., None] for mask in masks], -1)
    assert bool(hidden.any())
    for n, (part_out, part_lse) in enumerate(results):
        assert part_out.dtype == part_lse.dtype == torch.float32
        assert bool((part_out[hidden[..., n]] == 0).all() and (part_lse[hidden[..., n]] == -math.inf).all())
    merged, merged_lse = masked_attention.merge(*results[0], *results[1])
    bound = 1e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(merged.double(), out, rtol=bound, atol=bound)
    torch.testing.assert_close(merged_lse.double(), lse, rtol=1e-5, atol=1e-5)
    wide = merged_lse, delta.float()
    grads = [
        kernel.backward(dout, q, k[p], v[p], merged, *wide, mask, dropout) for p, mask in zip(parts, masks, strict=True)
    ]
    dq = grads[0][0] + grads[1][0]
    dk, dv = (torch.zeros_like(x, dtype=torch.float32) for x in (k, v))
    for part, (_, dk_part, dv_part) in zip(parts, grads, strict=True):
        dk[part], dv[part] = dk_part, dv_part
    for mine, want in zip((dq, dk, dv), exact, strict=True):
        torch.testing.assert_close(mine.double(), want, rtol=0.0, atol=bound * want.abs().max().item())


def test_documents_are_rows_of_their_own() -> None:
    case = Case(seq=45, documents=((10, 35),))
    inputs = case.inputs(torch.float32)
    kernel = TritonKernel(scale=case.scale)
    together = case.run(kernel, inputs)
    for rows in (slice(0, 10), slice(10, 45)):
        alone = Case(seq=rows.stop - rows.start, d=case.d)
        for mine, want in zip(alone.run(kernel, [x[rows] for x in inputs]), together, strict=True):
            torch.testing.assert_close(mine, want[rows], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("sq", "sk"), [(0, 5), (5, 0), (0, 0)])
def test_nobody_or_nothing(sq: int, sk: int) -> None:
    q, k = torch.randn(sq, 2, 2, 16), torch.randn(sk, 2, 1, 16)
    places = [torch.arange(n)[:, None].expand(n, 2) for n in (sq, sk)]
    mask = AttentionMask(query=places[0], start=torch.zeros_like(places[0]), key=places[1])
    kernel = TritonKernel(scale=1.0)
    with canaries():
        out, lse = kernel.forward(q, k, k, mask, None)
        grads = kernel.backward(torch.ones_like(out), q, k, k, out, lse, lse, mask, None)
    assert bool((out == 0).all() and (lse == -math.inf).all())
    assert all(bool((x == 0).all()) for x in grads)


def test_gradients_are_derivatives() -> None:
    """In float64, by finite differences; of the log-sum-exp, too."""
    case = Case(seq=8, heads=2, softcap=2.0, sinks=True, window=5)
    q, k, v, _, sinks = (x.requires_grad_() for x in case.inputs(torch.float64))
    visible = module._visible(case.mask(), q, v)

    def run(*leaves: Tensor) -> tuple[Tensor, Tensor]:
        return attention_op(*leaves, visible, 0.5, 2.0, None, 0.0, 0)

    torch.autograd.gradcheck(run, (q, k, v, sinks), fast_mode=True)


@pytest.mark.parametrize("plain", [True, False])
def test_ops_are_as_they_are_declared(plain: bool) -> None:
    case = Case(seq=9, heads=2, kv_heads=1, dv=24)
    q, k, v, dout = case.inputs(torch.float32)
    visible = module._visible(case.mask(), q, v)
    hashes = None if plain else torch.arange(9, dtype=torch.int32)[None]
    sinks = None if plain else torch.zeros(2).requires_grad_()
    rest: tuple[Any, ...] = (visible, 0.25, 0.0 if plain else 2.0, hashes, 0.0 if plain else 0.5, 0)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    torch.library.opcheck(attention_op, (*leaves, sinks, *rest))
    out, lse = (x.detach() for x in attention_op(q, k, v, None, *rest))
    dlse = None if plain else torch.ones_like(lse)
    given = dout, dlse, *(x.detach() for x in leaves), out, lse
    torch.library.opcheck(attention_backward_op, (*given, *rest), test_utils=("test_schema", "test_faketensor"))


def test_addresses_beyond_32_bits() -> None:
    """Positions 2^24 elements apart: memory that is reserved, of which a few pages are touched."""
    case = Case(seq=147)
    inputs = case.inputs(torch.bfloat16)[:3]
    strides = (1 << 24) - 16, 64, 16, 1
    far = torch.empty(146 * (1 << 24), dtype=torch.bfloat16).as_strided((147, 1, 4, 16), strides)
    q, k, v = far.split([2, 1, 1], 2)
    for view, x in zip((q, k, v), inputs, strict=True):
        view.copy_(x)
    kernel = TritonKernel(scale=0.3)
    near = kernel.forward(inputs[0], inputs[1], inputs[2], case.mask(), None)
    distant = kernel.forward(q, k, v, case.mask(), None)
    assert all(torch.equal(a, b) for a, b in zip(near, distant, strict=True))


@pytest.mark.parametrize("num_keys", [75, 41])
def test_lists_of_tiles_are_complete(num_keys: int) -> None:
    """Every pair that the mask allows is in a listed tile, and tiles without a mask are full."""
    whole = Case(seq=75, documents=((3, 40, 32), (75,)), window=45).mask()
    mask = AttentionMask(query=whole.query, start=whole.start, key=whole.key[:num_keys])
    padded = F.pad(seen(mask), (0, -num_keys % 16, 0, 5))
    allowed = padded.unflatten(2, (-1, 16)).unflatten(1, (-1, 16))
    some, every = allowed.any(4).any(2), allowed.all(4).all(2)
    for by_keys in (False, True):
        lists = Places.of(mask).lists(16, 16, by_keys=by_keys)
        listed, full = (torch.zeros_like(some.mT if by_keys else some) for _ in range(2))
        for b, n in ((b, n) for b in range(2) for n in range(listed.shape[1])):
            tiles = lists.tiles[b, n].tolist()
            listed[b, n, tiles[: lists.seen[b, n]]] = True
            full[b, n, tiles[: lists.full[b, n]]] = True
        listed, full = (x.mT if by_keys else x for x in (listed, full))
        assert not bool((some & ~listed).any()) and not bool((full & ~every).any())
        assert bool(full.any()) and not bool(listed.all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_merge(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    out, out_b = (torch.randn(5, 2, 3, 20, generator=generator, dtype=torch.float64) for _ in range(2))
    lse, lse_b = (torch.randn(5, 2, 3, generator=generator, dtype=torch.float64) * 30 for _ in range(2))
    for rows, log, value in ((0, lse, out), (0, lse_b, out_b), (1, lse, out), (2, lse_b, out_b)):
        log[rows], value[rows] = -math.inf, 0.0
    given = [x.to(dtype) for x in (out, lse, out_b, lse_b)]
    exact = merge(out.clone(), lse.clone(), out_b, lse_b)
    mine = [guarded(x, gap=2) for x in given]
    got = masked_attention.merge(*mine)
    bound = 1e-5 if dtype == torch.float32 else 1e-12
    for x, want in zip(got, exact, strict=True):
        torch.testing.assert_close(x.double(), want, rtol=bound, atol=bound)
    assert got[0] is mine[0] and bool((got[1][0] == -math.inf).all())
