"""Attention kernels made elsewhere as an `AttentionKernel`: torch's flash and cuDNN kernels, the flash_attn package.

A mask is given to them as the pieces of `AttentionMask.pieces`: spans of queries and keys, a call for each to torch's
kernels, sequences of one packed call to flash_attn's. The gradient of a piece follows from the final output and
log-sum-exp, as in ring attention (Liu et al., 2023, arXiv:2310.01889).
"""

from __future__ import annotations

import importlib
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .attention_kernel import AttentionKernel
from .attention_mask import AttentionMask, Piece, Shape, Span
from .attention_rows import AttentionDropout
from .masked_attention import merge


@dataclass(frozen=True, kw_only=True)
class TorchKernel(AttentionKernel):
    """The kernels below torch's scaled_dot_product_attention, for causal attention and documents (no windows).

    On a CPU, flash attention in any floating dtype; on a GPU flash attention or, with `cudnn`, cuDNN's, in 16 bits.
    """

    scale: float
    """Factor on q k^T."""
    cudnn: bool = False
    """Which kernel a GPU uses."""

    @property
    def name(self) -> str:
        """As in `kernels.attention`."""
        return "cudnn" if self.cudnn else "sdpa"

    @property
    def takes_any_widths(self) -> bool:
        """Flash kernels do not."""
        return False

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, dropout: AttentionDropout | None
    ) -> tuple[Tensor, Tensor]:
        """See `AttentionKernel.forward`."""
        assert dropout is None, "torch's kernels have no stateless dropout"
        out, lse = _nothing(q, v)
        for batch, queries, keys, causal in _rectangles(mask.pieces):
            heads = _heads_first(q, queries, batch), _heads_first(k, keys, batch), _heads_first(v, keys, batch)
            part, part_lse = self._forward(*heads, causal)
            rows = slice(*queries), batch
            merge(out[rows], lse[rows], part.permute(2, 0, 1, 3), part_lse.permute(2, 0, 1))
        return out, lse

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        delta: Tensor,
        mask: AttentionMask,
        dropout: AttentionDropout | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `AttentionKernel.backward`."""
        dq, dk, dv = grads = _zeros(q, k, v)
        dout, out = dout.to(q.dtype), out.to(q.dtype)
        for batch, queries, keys, causal in _rectangles(mask.pieces):
            q_part, do_part, out_part = (_heads_first(x, queries, batch) for x in (q, dout, out))
            k_part, v_part = (_heads_first(x, keys, batch) for x in (k, v))
            lse_part = lse[slice(*queries), batch].permute(1, 2, 0).contiguous()
            parts = self._backward(do_part, q_part, k_part, v_part, out_part, lse_part, causal)
            for grad, span, part in zip(grads, (queries, keys, keys), parts, strict=True):
                grad[slice(*span), batch].add_(part.permute(2, 0, 1, 3))
        return dq, dk, dv

    def _forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        """(out, log-sum-exp [b, heads, s]) of [b, heads, s, d]."""
        aten = torch.ops.aten
        if q.device.type == "cpu":
            return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=self.scale)
        if self.cudnn:
            result = aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal, scale=self.scale)
        else:
            result = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, scale=self.scale)
        return result[0], result[1].view(q.shape[:3])

    def _backward(
        self, do: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
    ) -> Sequence[Tensor]:
        aten, sizes = torch.ops.aten, (q.shape[2], k.shape[2])
        if q.device.type == "cpu":
            return aten._scaled_dot_product_flash_attention_for_cpu_backward(
                do, q, k, v, out, lse, 0.0, causal, scale=self.scale
            )
        # Without dropout nothing reads the state of a generator.
        seed = offset = torch.zeros((), dtype=torch.int64, device=q.device)
        if self.cudnn:
            return aten._scaled_dot_product_cudnn_attention_backward(
                do, q, k, v, out, lse.unsqueeze(-1), seed, offset, None, None, None, *sizes, 0.0, causal,
                scale=self.scale,
            )  # fmt: skip
        return aten._scaled_dot_product_flash_attention_backward(
            do, q, k, v, out, lse, None, None, *sizes, 0.0, causal, seed, offset, scale=self.scale
        )


@dataclass(frozen=True, kw_only=True)
class FlashAttnKernel(AttentionKernel):
    """The flash_attn package (Dao, 2023, arXiv:2307.08691): packed sequences of any length, windows, soft-capping."""

    scale: float
    """Factor on q k^T."""
    softcap: float = 0.0
    """See `BlockKernel`."""

    @property
    def name(self) -> str:
        """As in `kernels.attention`."""
        return "flash_attn"

    @property
    def takes_any_widths(self) -> bool:
        """It does not."""
        return False

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, dropout: AttentionDropout | None
    ) -> tuple[Tensor, Tensor]:
        """See `AttentionKernel.forward`."""
        assert dropout is None, "flash_attn has no stateless dropout"
        run, (out, lse) = _flash_attn("_flash_attn_varlen_forward"), _nothing(q, v)
        for pack in _packs(mask):
            results = run(pack.queries(q), pack.keys(k), pack.keys(v), **pack.options(q.device), **self._options)
            part, part_lse = results[0], results[1]
            for piece, rows in zip(pack.pieces, pack.query_rows, strict=True):
                here = piece.queries, piece.batch
                merge(_of(out, *here), _of(lse, *here), part[rows], part_lse[:, rows].t())
        return out, lse

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        delta: Tensor,
        mask: AttentionMask,
        dropout: AttentionDropout | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `AttentionKernel.backward`."""
        run = _flash_attn("_flash_attn_varlen_backward")
        dq, dk, dv = _zeros(q, k, v)
        for pack in _packs(mask):
            q_rows, k_rows, v_rows = pack.queries(q), pack.keys(k), pack.keys(v)
            grads = [torch.empty_like(x) for x in (q_rows, k_rows, v_rows)]
            run(
                pack.queries(dout.to(q.dtype)), q_rows, k_rows, v_rows, pack.queries(out.to(q.dtype)),
                pack.queries(lse).t().contiguous(), *grads, **pack.options(q.device), **self._options,
                alibi_slopes=None, deterministic=torch.are_deterministic_algorithms_enabled(),
            )  # fmt: skip
            for piece, q_at, k_at in zip(pack.pieces, pack.query_rows, pack.key_rows, strict=True):
                _of(dq, piece.queries, piece.batch).add_(grads[0][q_at])
                _of(dk, piece.keys, piece.batch).add_(grads[1][k_at])
                _of(dv, piece.keys, piece.batch).add_(grads[2][k_at])
        return dq, dk, dv

    @property
    def _options(self) -> dict[str, Any]:
        return {"dropout_p": 0.0, "softmax_scale": self.scale, "causal": False, "softcap": self.softcap}


def has_flash_attn() -> bool:
    """Whether the flash_attn package is there and can be loaded."""
    try:
        importlib.import_module("flash_attn.flash_attn_interface")
    except ImportError:
        return False
    return True


def _flash_attn(name: str) -> Callable[..., Any]:
    return getattr(importlib.import_module("flash_attn.flash_attn_interface"), name)


@dataclass(frozen=True)
class _Pack:
    """Pieces of one batch row each that go into one call, having the same window (left, right) of flash_attn."""

    pieces: tuple[Piece, ...]
    window: tuple[int, int]

    @property
    def query_rows(self) -> list[slice]:
        """Where the queries of each piece are in the pack."""
        return _runs([piece.queries for piece in self.pieces])

    @property
    def key_rows(self) -> list[slice]:
        """Where its keys are."""
        return _runs([piece.keys for piece in self.pieces])

    def options(self, device: torch.device) -> dict[str, Any]:
        """The sequences that `queries` and `keys` are made of, and the window."""
        options: dict[str, Any] = {"window_size_left": self.window[0], "window_size_right": self.window[1]}
        for side, spans in (("q", [p.queries for p in self.pieces]), ("k", [p.keys for p in self.pieces])):
            lengths = [stop - start for start, stop in spans]
            ends = [0, *itertools.accumulate(lengths)]
            options[f"cu_seqlens_{side}"] = torch.tensor(ends, dtype=torch.int32, device=device)
            options[f"max_seqlen_{side}"] = max(lengths)
        return options

    def queries(self, x: Tensor) -> Tensor:
        """The queries' part of x [sq, b, ...] as [total, ...]."""
        return torch.cat([_of(x, piece.queries, piece.batch) for piece in self.pieces])

    def keys(self, x: Tensor) -> Tensor:
        """The keys' part of x [sk, b, ...] as [total, ...]."""
        return torch.cat([_of(x, piece.keys, piece.batch) for piece in self.pieces])


def _packs(mask: AttentionMask) -> Iterator[_Pack]:
    """The pieces of all batch rows, by window, a batch row at a time within the piece."""
    packs: dict[tuple[int, int], list[Piece]] = {}
    for piece in mask.pieces:
        for row in range(piece.batch.start, piece.batch.stop):
            packs.setdefault(_window(piece), []).append(piece._replace(batch=slice(row, row + 1)))
    for window, pieces in packs.items():
        yield _Pack(tuple(pieces), window)


def _window(piece: Piece) -> tuple[int, int]:
    """flash_attn aligns the last query with the last key; each query sees `left` keys before its own, `right` after."""
    ahead = (piece.keys[1] - piece.keys[0]) - (piece.queries[1] - piece.queries[0])
    windows: dict[Shape, tuple[int, int]] = {
        "full": (-1, -1), "causal": (-1, 0), "band": (ahead, 0), "fade": (ahead, -1)
    }  # fmt: skip
    return windows[piece.shape]


def _rectangles(pieces: Sequence[Piece]) -> Iterator[tuple[slice, Span, Span, bool]]:
    """(batch, queries, keys, causal) for torch's kernels, which align a causal mask to the first query and key."""
    for batch, queries, keys, shape in pieces:
        assert shape in ("full", "causal"), "torch's kernels have no sliding window"
        ahead = (keys[1] - keys[0]) - (queries[1] - queries[0]) if shape == "causal" else keys[1] - keys[0]
        if ahead:
            yield batch, queries, (keys[0], keys[0] + ahead), False
        if shape == "causal":
            yield batch, queries, (keys[0] + ahead, keys[1]), True


def _heads_first(x: Tensor, span: Span, batch: slice) -> Tensor:
    """[b, heads, s, d] of a part of x [s, b, heads, d], without a copy."""
    return x[slice(*span), batch].permute(1, 2, 0, 3)


def _of(x: Tensor, span: Span, batch: slice) -> Tensor:
    """A view of the part of one batch row of x [s, b, ...]: [span, ...]."""
    return x[slice(*span), batch.start]


def _runs(spans: Sequence[Span]) -> list[slice]:
    ends = list(itertools.accumulate(stop - start for start, stop in spans))
    return [slice(first, last) for first, last in zip([0, *ends], ends, strict=False)]


def _nothing(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """(out, log-sum-exp) of queries that have seen no key."""
    wide = torch.promote_types(q.dtype, torch.float32)
    out = q.new_zeros(*q.shape[:3], v.shape[-1], dtype=wide)
    return out, q.new_full(q.shape[:3], -math.inf, dtype=wide)


def _zeros(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    wide = torch.promote_types(q.dtype, torch.float32)
    dq, dk, dv = (torch.zeros(x.shape, dtype=wide, device=x.device) for x in (q, k, v))
    return dq, dk, dv
