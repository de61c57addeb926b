"""Attention under interval masks against softmax over a dense mask, in float64."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megalite.kernels import attention_mask, attention_rows, flash_attention
from megalite.kernels.attention import attention
from megalite.kernels.attention_kernel import AttentionKernel, BlockKernel, attend
from megalite.kernels.attention_mask import AttentionMask, Piece, first_seen, num_pairs
from megalite.kernels.attention_rows import AttentionDropout
from megalite.kernels.chosen import Kernels
from megalite.kernels.config import AttentionChoice, KernelConfig
from megalite.kernels.dropout import dropout_key, feature_hash, keep_threshold, mix_, row_hash
from megalite.kernels.flash_attention import FlashAttnKernel, TorchKernel
from megalite.kernels.masked_attention import add_sinks_, masked_backward, masked_forward, merge
from megalite.kernels.registry import Traits, choose, problems

HEADS, GROUPS, DIM, SCALE = 6, 2, 5, 0.4
LENGTHS = [(1, 2, 7, 64, 3, 1, 23), (101,)]  # of the documents of each batch row


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_mask, "_BLOCK", 16)
    monkeypatch.setattr(attention_mask, "_WIDTH", 24)
    monkeypatch.setattr(attention_rows, "_CACHED", 500)


def rows(lengths: list[tuple[int, ...]] = LENGTHS, window: int = 0) -> AttentionMask:
    """Whole rows, each packed with documents of these lengths."""
    starts = [
        torch.tensor([start for n, start in zip(row, _sums(row), strict=False) for _ in range(n)]) for row in lengths
    ]
    documents = torch.stack(starts, 1)
    places = torch.arange(len(documents))[:, None].expand_as(documents)
    return AttentionMask(query=places, start=first_seen(places, documents, window), key=places)


def _sums(lengths: tuple[int, ...]) -> list[int]:
    return [sum(lengths[:n]) for n in range(len(lengths))]


def part(mask: AttentionMask, queries: Tensor, keys: Tensor, batch: slice = slice(None)) -> AttentionMask:
    """The mask of some queries and some keys."""
    query, start, key = mask.query[queries, batch], mask.start[queries, batch], mask.key[keys, batch]
    return AttentionMask(query=query, start=start, key=key)


def zigzag(size: int, rank: int, ranks: int = 3) -> Tensor:
    """Chunks of a row that a rank of a ring holds."""
    chunks = torch.arange(size).tensor_split(2 * ranks)
    return torch.cat((chunks[rank], chunks[2 * ranks - 1 - rank]))


def allowed(mask: AttentionMask) -> Tensor:
    """bool [b, 1, sq, sk]: the definition."""
    query, start, key = mask.query.t()[:, None, :, None], mask.start.t()[:, None, :, None], mask.key.t()[:, None, None]
    return (start <= key) & (key <= query)


Heads = tuple[Tensor, Tensor, Tensor]


def inputs(mask: AttentionMask, dtype: torch.dtype = torch.float64, dim: int = DIM) -> tuple[Heads, Tensor]:
    """q, k, v that require gradients, and a gradient of the output."""
    generator = torch.Generator().manual_seed(0)
    (sq, b), sk = mask.query.shape, mask.key.shape[0]
    shapes = [(sq, b, HEADS, dim), (sk, b, GROUPS, dim), (sk, b, GROUPS, dim), (sq, b, HEADS, dim)]
    q, k, v, dout = (torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes)
    return (q.requires_grad_(), k.requires_grad_(), v.requires_grad_()), dout


def detached(heads: Heads) -> Heads:
    q, k, v = heads
    return q.detach(), k.detach(), v.detach()


def reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: AttentionMask,
    *,
    softcap: float = 0.0,
    dropout: AttentionDropout | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(out, log-sum-exp) by a dense softmax in float64; differentiable."""
    q, k, v = (x.double() for x in (q, k, v))
    k, v = (x.repeat_interleave(HEADS // GROUPS, 2) for x in (k, v))
    scores = torch.einsum("ibhd,jbhd->bhij", q, k) * SCALE
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    scores = scores.masked_fill(~allowed(mask), -math.inf)
    everything = scores
    if sinks is not None:
        everything = torch.cat((scores, sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)), -1)
    lse = everything.logsumexp(-1, keepdim=True)
    probs = (scores - lse.masked_fill(lse == -math.inf, 0.0)).exp()
    if dropout is not None:
        probs = probs * kept(dropout, mask) / (1.0 - dropout.p)
    return torch.einsum("bhij,jbhd->ibhd", probs, v), lse.squeeze(-1).permute(2, 0, 1)


def kept(dropout: AttentionDropout, mask: AttentionMask) -> Tensor:
    """bool [b, heads, sq, sk], from the mask that a whole row has."""
    size = int(mask.key.max()) + 1
    token, heads = dropout.token_index, torch.arange(HEADS) + dropout.head_offset
    keys = mask.key.t()[:, None, None].expand(-1, HEADS, len(token), -1)
    return _whole_mask(dropout, token, heads, size).gather(-1, keys)


def _whole_mask(dropout: AttentionDropout, token: Tensor, heads: Tensor, size: int) -> Tensor:
    row = mix_(row_hash(dropout.key, token).t()[:, None] + (heads * 0x85EBCA77).to(torch.int32)[:, None])
    return mix_(row[..., None] + feature_hash(0, size, token.device)) >= keep_threshold(dropout.p)


def close(ours: Tensor | None, theirs: Tensor | None, tolerance: float = 1e-12, name: str = "") -> None:
    assert ours is not None and theirs is not None and ours.shape == theirs.shape, name
    ours, theirs = ours.detach().double(), theirs.detach().double()
    scale = theirs.masked_fill(theirs.isinf(), 0.0).abs().max().clamp_min(1e-2)
    worst = (ours - theirs).masked_fill(ours == theirs, 0.0).abs().max() / scale
    assert worst <= tolerance, f"{name}: off by {float(worst):.1e}"


MASKS: dict[str, Callable[[], AttentionMask]] = {
    "documents": rows,
    "causal": lambda: rows([(53,)] * 3),
    "window": lambda: rows(window=9),
    "window of one": lambda: rows([(20,)], window=1),
    "one token": lambda: rows([(1,)]),
    "no rows": lambda: part(rows(), torch.arange(5), torch.arange(5), batch=slice(0)),
    "zigzag": lambda: part(rows(), zigzag(101, 1), zigzag(101, 1)),
    "keys of another rank": lambda: part(rows(), zigzag(101, 0), zigzag(101, 2)),
    "window, keys of another rank": lambda: part(rows(window=30), zigzag(101, 2), zigzag(101, 1)),
    "gathered, rank by rank": lambda: part(
        rows(window=40), zigzag(101, 1), torch.cat([zigzag(101, rank) for rank in range(3)])
    ),
    "every third": lambda: part(rows(window=50), torch.arange(1, 101, 3), torch.arange(0, 101, 2)),
    "every other key": lambda: part(rows([(1,) * 40]), torch.arange(40), torch.arange(0, 40, 2)),
    "nothing": lambda: part(rows([(40,)]), torch.arange(20), torch.arange(20, 40)),
}  # fmt: skip


@pytest.mark.parametrize("softcap", [0.0, 1.5])
@pytest.mark.parametrize("name", MASKS)
def test_forward_and_backward(name: str, softcap: float) -> None:
    mask = MASKS[name]()
    leaves, dout = inputs(mask)
    wanted, wanted_lse = reference(*leaves, mask, softcap=softcap)
    out, lse = masked_forward(*detached(leaves), mask, scale=SCALE, softcap=softcap)
    if not out.numel():
        assert out.shape == wanted.shape
        return
    close(out, wanted, name="out")
    close(lse, wanted_lse, name="log-sum-exp")
    ours = attend(*leaves, mask, BlockKernel(scale=SCALE, softcap=softcap))
    ours_grads, grads = (torch.autograd.grad(y, leaves, dout) for y in (ours, wanted))
    for grad, wanted_grad, which in zip(ours_grads, grads, "qkv", strict=True):
        close(grad, wanted_grad, name=which)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lower_precision(dtype: torch.dtype) -> None:
    """Results are float32 and as close as the inputs' dtype lets them be."""
    mask = rows(window=40)
    leaves, dout = inputs(mask, dtype)
    tolerance = 4 * torch.finfo(dtype).eps
    out, lse = masked_forward(*detached(leaves), mask, scale=SCALE, softcap=3.0)
    wanted, wanted_lse = reference(*leaves, mask, softcap=3.0)
    assert out.dtype == lse.dtype == torch.float32
    close(out, wanted, tolerance)
    close(lse, wanted_lse, 1e-6)
    grads = torch.autograd.grad(wanted, leaves, dout.double())
    delta = (dout.float() * out).sum(-1)
    ours = masked_backward(dout, *detached(leaves), lse, delta, mask, scale=SCALE, softcap=3.0)
    for grad, wanted_grad, which in zip(ours, grads, "qkv", strict=True):
        assert grad.dtype == torch.float32
        close(grad, wanted_grad, tolerance, which)


@pytest.mark.parametrize("shift", [0.0, 300.0])
def test_scores_of_any_size(shift: float) -> None:
    """Keys with a large common part: no overflow, and forward and backward agree on the scores."""
    mask = rows()
    (q, k, v), dout = inputs(mask, torch.float32)
    leaves = q, (k + shift).detach().requires_grad_(), v
    ours = torch.autograd.grad(attend(*leaves, mask, BlockKernel(scale=SCALE)), leaves, dout)
    wanted = torch.autograd.grad(reference(*leaves, mask)[0], leaves, dout.double())
    for grad, wanted_grad, tolerance in zip(ours, wanted, (2e-2 if shift else 1e-5, 1e-3, 1e-3), strict=True):
        close(grad, wanted_grad, tolerance)


def cut_up(mask: AttentionMask, ranks: int = 3) -> Iterator[tuple[int, list[AttentionMask], list[Tensor]]]:
    """What the ranks of a ring see: (rank, masks of its queries with the keys of each rank, who holds which keys)."""
    held = [zigzag(len(mask.key), rank, ranks) for rank in range(ranks)]
    for rank in range(ranks):
        yield rank, [part(mask, held[rank], keys) for keys in held], held


class AutogradKernel(AttentionKernel):
    """What a user writes: a block and its log-sum-exp, in plain operations; here with heads of one group each."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, dropout: AttentionDropout | None
    ) -> tuple[Tensor, Tensor]:
        return reference(q, k, v, mask, dropout=dropout)


def kernels() -> list[AttentionKernel]:
    return [BlockKernel(scale=SCALE), TorchKernel(scale=SCALE), AutogradKernel()]


@pytest.mark.parametrize("kernel", kernels(), ids=lambda kernel: type(kernel).__name__)
def test_parts_make_the_whole(kernel: AttentionKernel) -> None:
    """Queries of a rank on the keys of all ranks, merged, with gradients from the final log-sum-exp."""
    mask = rows()
    leaves, dout = inputs(mask)
    wanted, wanted_lse = reference(*leaves, mask)
    grads = torch.autograd.grad(wanted, leaves, dout)
    q, k, v = detached(leaves)
    ours = [torch.zeros_like(x) for x in (q, k, v)]
    for rank, masks, held in cut_up(mask):
        mine = held[rank]
        parts = [kernel.forward(q[mine], k[keys], v[keys], m, None) for m, keys in zip(masks, held, strict=True)]
        out, lse = (x.clone() for x in parts[0])
        for other in parts[1:]:
            merge(out, lse, *other)
        close(out, wanted[mine])
        close(lse, wanted_lse[mine])
        delta = (dout[mine] * out).sum(-1)
        for m, keys in zip(masks, held, strict=True):
            found = kernel.backward(dout[mine], q[mine], k[keys], v[keys], out, lse, delta, m, None)
            for total, grad, at in zip(ours, found, (mine, keys, keys), strict=True):
                total[at] += grad
    for total, grad, which in zip(ours, grads, "qkv", strict=True):
        close(total, grad, name=which)


def test_merging_nothing_with_nothing() -> None:
    out, lse = torch.zeros(2, 1, 1, 3), torch.full((2, 1, 1), -math.inf)
    merge(out, lse, out.clone(), lse.clone())
    assert out.eq(0.0).all() and lse.eq(-math.inf).all()
    some, some_lse = torch.ones_like(out), torch.full_like(lse, 2.0)
    merge(out, lse, some, some_lse)
    assert out.equal(some) and lse.equal(some_lse)


@pytest.mark.parametrize("kernel", kernels(), ids=lambda kernel: type(kernel).__name__)
def test_sinks(kernel: AttentionKernel) -> None:
    mask = rows()
    leaves, dout = inputs(mask)
    sinks = torch.linspace(-1.0, 2.0, HEADS, dtype=torch.float64).requires_grad_()
    ours, (wanted, _) = attend(*leaves, mask, kernel, sinks=sinks), reference(*leaves, mask, sinks=sinks)
    close(ours, wanted)
    inputs_ = [*leaves, sinks]
    pairs = zip(torch.autograd.grad(ours, inputs_, dout), torch.autograd.grad(wanted, inputs_, dout), strict=True)
    for grad, wanted_grad in pairs:
        close(grad, wanted_grad)


def test_sinks_where_nothing_is_seen() -> None:
    out, lse = torch.zeros(1, 1, 2, 3), torch.full((1, 1, 2), -math.inf)
    add_sinks_(out, lse, torch.tensor([0.5, -1.0]))
    assert out.eq(0.0).all() and lse.flatten().tolist() == [0.5, -1.0]


def dropout_of(mask: AttentionMask, p: float = 0.3) -> AttentionDropout:
    samples = torch.arange(mask.query.shape[1]) + 5
    return AttentionDropout(p=p, key=dropout_key(1, 2, 3), token_index=samples * 1000 + mask.query, head_offset=4)


@pytest.mark.parametrize("name", ["documents", "window", "zigzag", "gathered, rank by rank", "every third"])
def test_dropout_goes_by_the_place_of_a_key(name: str) -> None:
    mask = MASKS[name]()
    dropout = dropout_of(mask)
    leaves, dout = inputs(mask)
    wanted, _ = reference(*leaves, mask, dropout=dropout)
    ours = attend(*leaves, mask, BlockKernel(scale=SCALE, softcap=0.0), dropout=dropout)
    close(ours, wanted)
    pairs = zip(torch.autograd.grad(ours, leaves, dout), torch.autograd.grad(wanted, leaves, dout), strict=True)
    for grad, wanted_grad in pairs:
        close(grad, wanted_grad)
    assert not torch.allclose(ours, reference(*leaves, mask)[0])


def test_dropout_is_that_of_causal_attention() -> None:
    mask = rows([(50,)] * 2)
    (q, k, v), _ = inputs(mask)
    dropout = dropout_of(mask)
    ours = attend(q, k, v, mask, BlockKernel(scale=SCALE), dropout=dropout)
    close(ours, attention(q, k, v, backend="block", scale=SCALE, dropout=dropout))


LEAKS = [*kernels(), BlockKernel(scale=SCALE, softcap=2.0)]


@pytest.mark.parametrize("kernel", LEAKS, ids=lambda kernel: type(kernel).__name__)
@pytest.mark.parametrize("place", [0, 6, 9])
def test_documents_do_not_leak(kernel: AttentionKernel, place: int) -> None:
    """A token of the first document changes no bit of the others, in output or gradient."""
    mask = rows([(10, 31, 20)])
    leaves, dout = inputs(mask)
    q, k, v, dout_changed = (x.detach().clone() for x in (*leaves, dout))
    for x in (q, k, v, dout_changed):
        x[place] += 10.0
    changed = q.requires_grad_(), k.requires_grad_(), v.requires_grad_()
    results = []
    for heads, gradient in ((leaves, dout), (changed, dout_changed)):
        out = attend(*heads, mask, kernel)
        results.append([out.detach(), *torch.autograd.grad(out, heads, gradient)])
    for before, after in zip(*results, strict=True):
        assert before[10:].equal(after[10:])
        assert not before[:10].equal(after[:10])


@pytest.mark.parametrize("name", MASKS)
def test_counts(name: str) -> None:
    mask = MASKS[name]()
    count = num_pairs(mask)
    assert count.allowed == int(allowed(mask).sum())
    assert count.computed >= count.allowed
    assert mask.is_empty == (count.allowed == 0)


def test_what_is_empty_is_not_computed() -> None:
    """Blocks of 16 queries: at most 15 idle keys a side for each block, and a zigzag's gap ends a block."""
    for mask in (rows(), rows(window=9), part(rows([(101,)]), zigzag(101, 1), zigzag(101, 1))):
        count = num_pairs(mask)
        assert count.computed <= count.allowed + 2 * 16 * mask.query.numel()
    assert num_pairs(part(rows([(96,)]), zigzag(96, 0), zigzag(96, 2))) == (16 * 32, 16 * 32)


def test_a_jump_of_the_keys_ends_a_block() -> None:
    """Places 24 .. 47 and 96 .. 119 on the whole row: blocks of 16, 8, 16 and 8 queries."""
    mask = part(rows([(144,)]), zigzag(144, 1), torch.arange(144))
    assert num_pairs(mask).computed == 16 * 40 + 8 * 48 + 16 * 112 + 8 * 120


def test_what_all_queries_see_is_not_compared() -> None:
    (columns,) = rows([(64,)], window=40).columns
    full = [(tile.full[1] - tile.full[0], block.queries[0]) for block in columns.blocks for tile in block.tiles]
    assert sum(length for length, begin in full if begin == 16) == 17
    assert sum(length for length, begin in full if begin == 48) == 49 - 24


def test_a_window_counts_the_token_itself() -> None:
    places = torch.arange(6)[:, None]
    assert first_seen(places, None, 3).flatten().tolist() == [0, 0, 0, 1, 2, 3]
    assert first_seen(places, torch.tensor([0, 0, 0, 0, 4, 4])[:, None], 3).flatten().tolist() == [0, 0, 0, 1, 4, 4]


class LargestTensor(TorchDispatchMode):
    """The number of elements of the largest tensor that is made inside."""

    size = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for made in result if isinstance(result, tuple | list) else (result,):
            if isinstance(made, Tensor):
                self.size = max(self.size, made.numel())
        return result


def test_no_mask_of_the_size_of_the_scores() -> None:
    size = 1024
    mask = rows([(size // 2, size // 2)])
    leaves, dout = inputs(mask, torch.float32)
    with LargestTensor() as largest:
        attend(*leaves, mask, BlockKernel(scale=SCALE)).backward(dout)
    assert largest.size <= size * HEADS * DIM < size * size / 8


def dense(pieces: tuple[Piece, ...], mask: AttentionMask) -> Tensor:
    """How often the pieces let each query see each key: int [b, sq, sk], by their definition."""
    (sq, b), sk = mask.query.shape, mask.key.shape[0]
    seen = torch.zeros(b, sq, sk, dtype=torch.int64)
    for piece in pieces:
        queries, keys = (torch.arange(stop - start) for start, stop in (piece.queries, piece.keys))
        i, j = queries[:, None], keys[None]
        ahead = len(keys) - len(queries)
        shapes = {"full": i + j >= 0, "causal": j <= i + ahead, "band": (j >= i) & (j <= i + ahead), "fade": j >= i}
        assert shapes[piece.shape].any(1).all()
        seen[piece.batch, slice(*piece.queries), slice(*piece.keys)] += shapes[piece.shape].expand(len(queries), -1)
    return seen


@pytest.mark.parametrize("name", MASKS)
def test_pieces_are_the_mask(name: str) -> None:
    mask = MASKS[name]()
    assert dense(mask.pieces, mask).equal(allowed(mask).squeeze(1).long())


def test_documents_are_a_piece_each() -> None:
    mask = rows([(1, 2, 7, 64)])
    assert [piece.queries for piece in mask.pieces] == [(0, 1), (1, 3), (3, 10), (10, 74)]
    assert all(piece.queries == piece.keys for piece in mask.pieces)


@pytest.mark.parametrize("name", ["documents", "causal", "one token", "zigzag", "keys of another rank", "nothing"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_torch_kernels(name: str, dtype: torch.dtype) -> None:
    mask = MASKS[name]()
    leaves, dout = inputs(mask, dtype, dim=8)
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2}[dtype]
    wanted, wanted_lse = reference(*leaves, mask)
    kernel = TorchKernel(scale=SCALE)
    out, lse = kernel.forward(*detached(leaves), mask, None)
    assert out.dtype == lse.dtype == torch.promote_types(dtype, torch.float32)
    close(out, wanted, tolerance)
    close(lse, wanted_lse, tolerance)
    ours = torch.autograd.grad(attend(*leaves, mask, kernel), leaves, dout)
    for grad, wanted_grad in zip(ours, torch.autograd.grad(wanted, leaves, dout.double()), strict=True):
        close(grad, wanted_grad, tolerance)


def _varlen_mask(options: dict[str, Any], sequence: int) -> tuple[slice, slice, Tensor]:
    """flash_attn's definition: queries and keys of a sequence, aligned at their ends, and a window around that."""
    ends = [options[f"cu_seqlens_{side}"].tolist() for side in "qk"]
    queries, keys = (slice(e[sequence], e[sequence + 1]) for e in ends)
    sq, sk = queries.stop - queries.start, keys.stop - keys.start
    assert sq <= options["max_seqlen_q"] and sk <= options["max_seqlen_k"] and not options["causal"]
    own = torch.arange(sq)[:, None] + sk - sq
    left, right = options["window_size_left"], options["window_size_right"]
    key = torch.arange(sk)[None]
    seen = (key >= own - left if left >= 0 else key >= 0) & (key <= own + right if right >= 0 else key >= 0)
    return queries, keys, seen


def _varlen(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor, None, None]:
    """The forward of flash_attn, written out: q [total, heads, d] -> out, log-sum-exp [heads, total]."""
    out, lse = torch.zeros_like(q), q.new_full((HEADS, len(q)), math.inf)
    for sequence in range(len(options["cu_seqlens_q"]) - 1):
        queries, keys, seen = _varlen_mask(options, sequence)
        k_here, v_here = (x[keys].repeat_interleave(HEADS // GROUPS, 1) for x in (k, v))
        scores = torch.einsum("ihd,jhd->hij", q[queries], k_here) * options["softmax_scale"]
        cap = options["softcap"]
        scores = (cap * torch.tanh(scores / cap) if cap else scores).masked_fill(~seen, -math.inf)
        lse[:, queries] = scores.logsumexp(-1)
        out[queries] = torch.einsum("hij,jhd->ihd", scores.softmax(-1), v_here)
    return out, lse, None, None


def _varlen_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dq: Tensor, dk: Tensor, dv: Tensor,
    *, alibi_slopes: None, deterministic: bool, **options: Any,
) -> None:  # fmt: skip
    """Its backward, which takes probabilities from the log-sum-exp and row sums from out."""
    q, k, v = leaves = tuple(x.detach().requires_grad_() for x in (q, k, v))
    with torch.enable_grad():
        part, part_lse, _, _ = _varlen(q, k, v, **options)
    share = (part_lse - lse).exp().t().detach()
    d_lse = (share * ((dout * part.detach()).sum(-1) - (dout * out).sum(-1))).t()
    grads = torch.autograd.grad((part, part_lse), leaves, (dout * share[..., None], d_lse))
    for target, grad in zip((dq, dk, dv), grads, strict=True):
        target.copy_(grad)


@pytest.mark.parametrize("name", [name for name in MASKS if name != "no rows"])
def test_flash_attn_is_asked_for_the_right_sequences(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package's calls, answered by its definition in plain torch."""
    stand_in = {"_flash_attn_varlen_forward": _varlen, "_flash_attn_varlen_backward": _varlen_backward}
    monkeypatch.setattr(flash_attention, "_flash_attn", stand_in.__getitem__)
    mask = MASKS[name]()
    leaves, dout = inputs(mask)
    sinks = torch.linspace(-1.0, 1.0, HEADS, dtype=torch.float64)
    kernel = FlashAttnKernel(scale=SCALE, softcap=2.0)
    ours = attend(*leaves, mask, kernel, sinks=sinks)
    wanted, _ = reference(*leaves, mask, softcap=2.0, sinks=sinks)
    close(ours, wanted)
    grads = torch.autograd.grad(wanted, leaves, dout)
    for grad, wanted_grad in zip(torch.autograd.grad(ours, leaves, dout), grads, strict=True):
        close(grad, wanted_grad)


def test_the_choice_of_a_backend() -> None:
    cpu = Traits(device=torch.device("cpu"), dtype=torch.float64)
    gpu = Traits(device=torch.device("cuda"), dtype=torch.bfloat16)

    def resolve(choice: AttentionChoice, traits: Traits = cpu) -> AttentionKernel:
        return Kernels(config=KernelConfig(attention=choice)).attention(traits, SCALE)

    softcap, window, dropout = (
        dataclasses.replace(cpu, **{name: value}) for name, value in (("softcap", 5.0), ("window", 5), ("dropout", 0.1))
    )
    assert resolve("block", softcap) == BlockKernel(scale=SCALE, softcap=5)
    assert resolve("auto", window) == BlockKernel(scale=SCALE)
    assert resolve("sdpa") == TorchKernel(scale=SCALE)
    for traits in (softcap, window, dropout):
        with pytest.raises(ValueError, match=r"kernels\.attention=block or auto"):
            resolve("sdpa", traits)
    with pytest.raises(ValueError, match="needs a GPU, and this run is on the cpu"):
        resolve("cudnn")
    with pytest.raises(ValueError, match="needs the package flash_attn"):
        resolve("flash_attn")
    assert "not in float32" in problems("attention", "sdpa", dataclasses.replace(gpu, dtype=torch.float32))[0]
    assert problems("attention", "sdpa", gpu) == []
    assert resolve("auto", gpu) == TorchKernel(scale=SCALE)
    assert choose("attention", "auto", dataclasses.replace(gpu, dropout=0.1)) == "triton"
