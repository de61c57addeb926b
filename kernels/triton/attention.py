"""Flash attention in Triton: any interval mask, grouped heads, soft-capping, sinks and stateless dropout.

The kernels are in `attention_kernels`, the tiles that they walk in `attention_tiles`. The gradients are deterministic.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from ..attention_kernel import AttentionKernel
from ..attention_mask import AttentionMask
from ..attention_rows import AttentionDropout
from ..dropout import keep_threshold, row_hash
from ..masked_attention import sinks_grad
from . import attention_kernels as kernels
from .attention_tiles import Places, kept_lists
from .launch import Launch, launch, launch_row

MAX_HEAD_DIM = 256
"""The largest head that fits into a program."""
_FARTHEST = 1 << 24  # elements from one position to the next, at most 128 of which make a tile


@dataclass(frozen=True, kw_only=True)
class TritonKernel(AttentionKernel):
    """The `triton` backend: any mask, soft-capping, sinks and dropout, on a GPU or in triton's interpreter.

    Heads have up to MAX_HEAD_DIM features; powers of 2 waste nothing. scale must be positive.
    """

    scale: float
    """Factor on q k^T."""
    softcap: float = 0.0
    """See `BlockKernel`."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, dropout: AttentionDropout | None
    ) -> tuple[Tensor, Tensor]:
        """See `AttentionKernel.forward`."""
        problem = _Problem.of(q, k, v, _visible(mask, q, v), self.scale, self.softcap, *_dropping(dropout))
        return problem.forward(None, _wide(q))

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
        problem = _Problem.of(q, k, v, _visible(mask, q, v), self.scale, self.softcap, *_dropping(dropout))
        return problem.backward(dout.to(q.dtype), lse, delta, _wide(q))

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: AttentionMask,
        dropout: AttentionDropout | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """See `AttentionKernel.attend`: output and gradients are rounded where they are made, sinks cost nothing."""
        return attention_op(q, k, v, sinks, _visible(mask, q, v), self.scale, self.softcap, *_dropping(dropout))[0]


@torch.library.custom_op("megalite::triton_attention", mutates_args=())
def attention_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    visible: Sequence[Tensor],
    scale: float,
    softcap: float,
    hashes: Tensor | None,
    p: float,
    head_offset: int,
) -> tuple[Tensor, Tensor]:
    """(out [sq, b, heads, dv] in q's dtype, log-sum-exp [sq, b, heads]), both differentiable.

    visible: `_Visible`. hashes: int32 [b, sq], of the query tokens, for dropout with probability p.
    """
    return _Problem.of(q, k, v, visible, scale, softcap, hashes, p, head_offset).forward(sinks, q.dtype)


@torch.library.custom_op("megalite::triton_attention_backward", mutates_args=())
def attention_backward_op(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    visible: Sequence[Tensor],
    scale: float,
    softcap: float,
    hashes: Tensor | None,
    p: float,
    head_offset: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(dq, dk, dv in the dtype of q, delta [sq, b, heads]); with a gradient of lse, delta is less by it."""
    delta = attention_delta(dout, out)
    if dlse is not None:
        delta -= dlse
    problem = _Problem.of(q, k, v, visible, scale, softcap, hashes, p, head_offset)
    return *problem.backward(dout, lse, delta, q.dtype), delta


def attention_delta(dout: Tensor, out: Tensor) -> Tensor:
    """rowsum(dout * out) [sq, b, heads] in float32 or wider, for dout and out [sq, b, heads, dv]."""
    dout, out = _dense(dout), _dense(out)
    delta = _by_head(out)
    sq, b, heads, dv = out.shape
    block_dv = _block(dv)
    row = launch_row("attention_delta", out.dtype, block_dv)
    grid = (triton.cdiv(sq, row["BLOCK_M"]), heads, b)
    launch(
        kernels.delta_kernel, grid, row, dout, out, delta, sq, *_strides(dout), *_strides(out), *_strides(delta),
        DV=dv, BLOCK_DV=block_dv, ACC=_acc(out),
    )  # fmt: skip
    return delta


class _Visible(NamedTuple):
    """What the queries see, as a flat list of tensors: `Places`, then `TileLists` of each of the three kernels."""

    query: Tensor
    start: Tensor
    key: Tensor
    forward: Sequence[Tensor]
    query_grad: Sequence[Tensor]
    key_grads: Sequence[Tensor]

    @staticmethod
    def of(tensors: Sequence[Tensor]) -> _Visible:
        query, start, key, *lists = tensors
        return _Visible(query, start, key, lists[:3], lists[3:6], lists[6:])


def _visible(mask: AttentionMask, q: Tensor, v: Tensor) -> list[Tensor]:
    places = Places.of(mask)
    tensors = [places.query, places.start, places.key]
    for name in ("attention_forward", "attention_query_grad", "attention_key_grads"):
        row = _row(name, q, v)
        tensors += kept_lists(mask, row["BLOCK_M"], row["BLOCK_N"], by_keys=name == "attention_key_grads")
    return tensors


def _dropping(dropout: AttentionDropout | None) -> tuple[Tensor | None, float, int]:
    """(hashes of the query tokens int32 [b, sq], p, number of the first head)."""
    if dropout is None or dropout.p == 0.0:
        return None, 0.0, 0
    return row_hash(dropout.key, dropout.token_index).t().contiguous(), dropout.p, dropout.head_offset


@dataclass(frozen=True, kw_only=True)
class _Problem:
    """What all kernels of one attention are launched with; tensors are dense in their last dimension."""

    q: Tensor
    k: Tensor
    v: Tensor
    visible: _Visible
    scale: float
    softcap: float
    hashes: Tensor | None
    p: float
    head_offset: int

    @staticmethod
    def of(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        visible: Sequence[Tensor],
        scale: float,
        softcap: float,
        hashes: Tensor | None,
        p: float,
        head_offset: int,
    ) -> _Problem:
        assert scale > 0.0, f"scale={scale} is not positive"
        assert max(q.shape[-1], v.shape[-1]) <= MAX_HEAD_DIM, f"a head of {q.shape[-1]} features does not fit"
        return _Problem(
            q=_dense(q), k=_dense(k), v=_dense(v), visible=_Visible.of(visible), scale=scale, softcap=softcap,
            hashes=hashes, p=p, head_offset=head_offset,
        )  # fmt: skip

    def forward(self, sinks: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """(out in dtype, log-sum-exp)."""
        q, row = self.q, _row("attention_forward", self.q, self.v)
        out = torch.empty(*q.shape[:3], self.v.shape[-1], dtype=dtype, device=q.device)
        lse = _by_head(q)
        launch(
            kernels.forward_kernel, self._by_query(row), row, q, self.k, self.v, q if sinks is None else sinks,
            *self._mask(self.visible.forward), out, lse, *self._sizes(row), *_strides(out), *_strides(lse),
            *self._numbers(), **self._constants(), SINKS=sinks is not None,
        )  # fmt: skip
        return out, lse

    def backward(self, dout: Tensor, lse: Tensor, delta: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """(dq, dk, dv) in dtype."""
        dout = _dense(dout)
        dq, dk, dv = (torch.empty(x.shape, dtype=dtype, device=x.device) for x in (self.q, self.k, self.v))
        inputs = self.q, self.k, self.v, dout, lse, delta
        given = [stride for x in (dout, lse, delta) for stride in _strides(x)]
        row = _row("attention_query_grad", self.q, self.v)
        launch(
            kernels.query_grad_kernel, self._by_query(row), row, *inputs, *self._mask(self.visible.query_grad), dq,
            *self._sizes(row), *given, *_strides(dq), *self._numbers(), **self._constants(),
        )  # fmt: skip
        row = _row("attention_key_grads", self.q, self.v)
        grid = (triton.cdiv(dk.shape[0], row["BLOCK_N"]), dk.shape[2], dk.shape[1])
        launch(
            kernels.key_grads_kernel, grid, row, *inputs, *self._mask(self.visible.key_grads), dk, dv,
            *self._sizes(row), *given, *_strides(dk), *_strides(dv), *self._numbers(), **self._constants(),
        )  # fmt: skip
        return dq, dk, dv

    def _by_query(self, row: Launch) -> tuple[int, int, int]:
        sq, b, heads, _ = self.q.shape
        return triton.cdiv(sq, row["BLOCK_M"]), heads, b

    def _mask(self, lists: Sequence[Tensor]) -> tuple[Tensor, ...]:
        visible, hashes = self.visible, self.hashes
        return visible.query, visible.start, visible.key, visible.query if hashes is None else hashes, *lists

    def _sizes(self, row: Launch) -> tuple[int, ...]:
        (sq, _, heads, _), (sk, _, kv_heads, _) = self.q.shape, self.k.shape
        tiles, by_row = (
            (triton.cdiv(sq, row["BLOCK_M"]), triton.cdiv(sk, row["BLOCK_N"])),
            self.visible.query.shape[0] > 1,
        )
        strides = *_strides(self.q), *_strides(self.k), *_strides(self.v)
        return sq, sk, heads // kv_heads, *tiles, int(by_row), *strides

    def _numbers(self) -> tuple[float | int, ...]:
        return self.scale, self.softcap, 1.0 / (1.0 - self.p), keep_threshold(self.p), self.head_offset

    def _constants(self) -> dict[str, Any]:
        d, dv = self.q.shape[-1], self.v.shape[-1]
        return {
            "D": d, "DV": dv, "BLOCK_D": _block(d), "BLOCK_DV": _block(dv), "ACC": _acc(self.q),
            "CAPPED": self.softcap > 0.0, "DROPOUT": self.hashes is not None,
        }  # fmt: skip


def _row(name: str, q: Tensor, v: Tensor) -> Launch:
    return launch_row(name, q.dtype, max(_block(q.shape[-1]), _block(v.shape[-1])))


def _block(features: int) -> int:
    return max(16, triton.next_power_of_2(features))


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _acc(x: Tensor) -> Any:
    return triton.language.float64 if x.dtype == torch.float64 else triton.language.float32


def _by_head(x: Tensor) -> Tensor:
    """Empty [s, b, heads], whose positions are neighbours in memory, for x [s, b, heads, d]."""
    s, b, heads, _ = x.shape
    return torch.empty(b, heads, s, dtype=_wide(x), device=x.device).permute(2, 0, 1)


def _dense(x: Tensor) -> Tensor:
    """x as kernels can address it: within a tile of rows in 32 bits."""
    return x if x.stride(-1) == 1 and x.stride(0) < _FARTHEST else x.contiguous()


def _strides(x: Tensor) -> tuple[int, ...]:
    return x.stride()[:3]


@attention_op.register_fake
def _attention_shapes(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, visible: Sequence[Tensor], *numbers: Any
) -> tuple[Tensor, Tensor]:
    return q.new_empty(*q.shape[:3], v.shape[-1]), _by_head(q)


@attention_backward_op.register_fake
def _attention_backward_shapes(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *numbers: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    return dq, dk, dv, _by_head(out)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, sinks, visible, scale, softcap, hashes, p, head_offset = inputs
    ctx.save_for_backward(q, k, v, sinks, hashes, *output, *visible)
    ctx.numbers = scale, softcap, p, head_offset


def _backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
    q, k, v, sinks, hashes, out, lse, *visible = ctx.saved_tensors
    scale, softcap, p, head_offset = ctx.numbers
    dout = dout if dout is not None else torch.zeros_like(out)
    dq, dk, dv, delta = attention_backward_op(
        dout, dlse, q, k, v, out, lse, visible, scale, softcap, hashes, p, head_offset
    )
    dsinks = None if sinks is None else sinks_grad(sinks, lse, delta).to(sinks.dtype)
    return dq, dk, dv, dsinks, [None] * len(visible), None, None, None, None, None


attention_op.register_autograd(_backward, setup_context=_save)
