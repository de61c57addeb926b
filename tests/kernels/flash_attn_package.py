"""A stand-in for the package flash_attn (2.7 and later): its signatures and its demands, answered in plain torch."""

from __future__ import annotations

import math
import sys
from types import ModuleType

import pytest
import torch
from torch import Tensor


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts it where `import flash_attn` looks."""
    package, interface = ModuleType("flash_attn"), ModuleType("flash_attn.flash_attn_interface")
    for function in (_flash_attn_varlen_forward, _flash_attn_varlen_backward):
        setattr(interface, function.__name__, function)
    monkeypatch.setitem(sys.modules, package.__name__, package)
    monkeypatch.setitem(sys.modules, interface.__name__, interface)


def _flash_attn_varlen_forward(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    dropout_p: float, softmax_scale: float, causal: bool, window_size_left: int = -1, window_size_right: int = -1,
    softcap: float = 0.0, alibi_slopes: Tensor | None = None, return_softmax: bool = False,
    block_table: Tensor | None = None, leftpad_k: Tensor | None = None, seqused_k: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """q [total_q, heads, d], k and v [total_k, kv heads, d] -> out, log-sum-exp [heads, total_q], and two that nobody
    asked for."""
    _check(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    assert dropout_p == 0.0 and not return_softmax
    assert all(option is None for option in (alibi_slopes, block_table, leftpad_k, seqused_k))
    window = (window_size_left, 0 if causal else window_size_right)
    outs, sums = [], []
    for q_rows, k_rows, v_rows in _sequences(q, k, v, cu_seqlens_q, cu_seqlens_k):
        k_rows, v_rows = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k_rows, v_rows))
        scores = torch.einsum("ihd,jhd->hij", q_rows, k_rows) * softmax_scale
        scores = softcap * torch.tanh(scores / softcap) if softcap else scores
        seen = _seen(len(q_rows), len(k_rows), *window)
        assert seen.any(1).all(), "of a query without a key the package says that its log-sum-exp is +inf"
        scores = scores.masked_fill(~seen, -math.inf)
        sums.append(scores.logsumexp(-1))
        outs.append(torch.einsum("hij,jhd->ihd", scores.softmax(-1), v_rows))
    return torch.cat(outs), torch.cat(sums, 1), q.new_empty(0), torch.empty(2, dtype=torch.int64)


def _flash_attn_varlen_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor,
    dq: Tensor | None, dk: Tensor | None, dv: Tensor | None,
    cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    dropout_p: float, softmax_scale: float, causal: bool, window_size_left: int, window_size_right: int,
    softcap: float, alibi_slopes: Tensor | None, deterministic: bool, rng_state: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Writes dq, dk and dv; probabilities are those of `softmax_lse`, and row sums those of `out`."""
    _check(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    assert dout.shape == out.shape == q.shape and dout.dtype == out.dtype == q.dtype
    assert softmax_lse.shape == (q.shape[1], q.shape[0]) and softmax_lse.is_contiguous()
    q, k, v = leaves = tuple(x.detach().requires_grad_() for x in (q, k, v))
    with torch.enable_grad():
        part, lse, *_ = _flash_attn_varlen_forward(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
            window_size_left, window_size_right, softcap, alibi_slopes,
        )  # fmt: skip
    share = (lse - softmax_lse).exp().t().detach()
    delta = (dout * out).sum(-1)
    d_lse = (share * ((dout * part.detach()).sum(-1) - delta)).t()
    grads = torch.autograd.grad((part, lse), leaves, (dout * share[..., None], d_lse))
    for target, grad in zip((dq, dk, dv), grads, strict=True):
        assert target is not None and target.shape == grad.shape and target.is_contiguous()
        target.copy_(grad)
    return delta.t()


def _check(q: Tensor, k: Tensor, v: Tensor, ends_q: Tensor, ends_k: Tensor, most_q: int, most_k: int) -> None:
    """What the CUDA code demands, but for the dtype: here it is float64."""
    assert q.dim() == k.dim() == v.dim() == 3 and q.dtype == k.dtype == v.dtype
    assert k.shape == v.shape and q.shape[2] == k.shape[2] and q.shape[1] % k.shape[1] == 0
    assert q.shape[2] % 8 == 0 and q.shape[2] <= 256 and all(x.stride(-1) == 1 for x in (q, k, v))
    assert len(ends_q) == len(ends_k)
    for ends, x, most in ((ends_q, q, most_q), (ends_k, k, most_k)):
        assert ends.dtype == torch.int32 and ends.is_contiguous() and ends.device == x.device
        assert ends[0] == 0 and ends[-1] == len(x) and ends.diff().min() >= 0 and ends.diff().max() <= most


def _sequences(q: Tensor, k: Tensor, v: Tensor, ends_q: Tensor, ends_k: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
    sizes_q, sizes_k = ends_q.diff().tolist(), ends_k.diff().tolist()
    return list(zip(q.split(sizes_q), k.split(sizes_k), v.split(sizes_k), strict=True))


def _seen(sq: int, sk: int, left: int, right: int) -> Tensor:
    """Queries and keys of a sequence are aligned at their ends; a window around that, -1 for none."""
    own, key = torch.arange(sq)[:, None] + sk - sq, torch.arange(sk)[None]
    seen = torch.ones(sq, sk, dtype=torch.bool)
    if left >= 0:
        seen &= key >= own - left
    if right >= 0:
        seen &= key <= own + right
    return seen
