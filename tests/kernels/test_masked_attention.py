"""Attention under interval masks against softmax over a dense mask, in float64."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megalite.kernels.attention import attention
from megalite.kernels.attention_kernel import AttentionKernel, BlockKernel, attend
from megalite.kernels.attention_mask import AttentionMask
from megalite.kernels.attention_rows import AttentionDropout
from megalite.kernels.dropout import dropout_key
from megalite.kernels.flash_attention import TorchKernel
from megalite.kernels.masked_attention import add_sinks_, masked_backward, masked_forward, merge
from tests.kernels.masked import (
    DIM,
    HEADS,
    MASKS,
    SCALE,
    close,
    detached,
    inputs,
    part,
    reference,
    rows,
    zigzag,
)

pytestmark = pytest.mark.usefixtures("small_blocks")


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
