"""Attention over a sequence that is cut: ring, all-gather, all-to-all (Ulysses), and the two-level mode.

Every mode is two stages. Inner ranks exchange sequence for heads (`head_exchange`), so that together they hold what is
then one rank's part of the sequence; over outer ranks, keys and values travel (`context_routes`), and partial results
are merged by their log-sum-exp. Pure modes have one stage of size 1 (two levels: Fang and Zhao, 2024,
arXiv:2405.07719). What the mask makes empty is neither computed nor sent.

Only inputs, output and log-sum-exp are saved; backward lets the keys travel again. Partial results and the gradients of
keys and values are merged and sent in promote_types(dtype, float32).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor

from megalite.axis import Axis
from megalite.kernels.attention import AttentionDropout
from megalite.kernels.attention_kernel import AttentionKernel
from megalite.kernels.attention_mask import AttentionMask
from megalite.kernels.masked_attention import add_sinks_, merge, sinks_grad
from megalite.mpu import ParallelState
from megalite.parallel.context import RowCut
from megalite.parallel.context_plan import Block, Sight, gather_plan, ring_plan
from megalite.parallel.context_routes import Gather, Ring
from megalite.parallel.head_exchange import head_exchange_problems, kv_repeats, to_heads, to_sequence


@dataclass(frozen=True)
class _Rows:
    """What all layers with the same window share: the plan of this rank's rows, and its masks.

    first, last, places: int64 [n, b], of this rank's tokens after the exchange over `inner`, which `order` sorts.
    """

    route: Ring | Gather
    first: Tensor
    last: Tensor
    places: Tensor
    order: Tensor
    masks: dict[Block, AttentionMask] = field(default_factory=dict)

    def mask(self, block: Block) -> AttentionMask:
        """What the block's queries see of its keys."""
        if block not in self.masks:
            rows = block.queries
            self.masks[block] = AttentionMask(query=self.last[rows], start=self.first[rows], key=block.key)
        return self.masks[block]


@dataclass(frozen=True)
class _Call:
    """What one attention call is made of, apart from tensors that learn."""

    rows: _Rows
    kernel: AttentionKernel
    dropout: AttentionDropout | None

    def arguments(self, block: Block) -> tuple[AttentionMask, AttentionDropout | None]:
        """Mask and dropout of the block's queries."""
        if self.dropout is None:
            return self.rows.mask(block), None
        token_index = self.dropout.token_index[block.queries]
        return self.rows.mask(block), dataclasses.replace(self.dropout, token_index=token_index)


class _Attend(torch.autograd.Function):
    """Attention of one rank's queries over everyone's keys; sinks are an epilogue on output and log-sum-exp."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, call: _Call) -> Tensor:
        out, lse = _forward(q, k, v, call)
        if sinks is not None:
            add_sinks_(out, lse, sinks)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse, sinks)
        ctx.call = call
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, sinks = ctx.saved_tensors
        call: _Call = ctx.call
        dout = grads[0]
        delta = (dout.to(lse.dtype) * out).sum(-1)
        dq = torch.zeros_like(q, dtype=lse.dtype, memory_format=torch.contiguous_format)
        back = call.rows.route.backward(k, v, lse.dtype)
        for block, k_block, v_block in back.travel():
            rows = block.queries
            dq_rows, dk, dv = call.kernel.backward(
                dout[rows], q[rows], k_block, v_block, out[rows], lse[rows], delta[rows], *call.arguments(block)
            )
            dq[rows] += dq_rows
            back.add(dk, dv)
        dk, dv = back.own
        dsinks = None if sinks is None else sinks_grad(sinks, lse, delta).to(sinks.dtype)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dsinks, None


def _forward(q: Tensor, k: Tensor, v: Tensor, call: _Call) -> tuple[Tensor, Tensor]:
    """(out, log-sum-exp) over all keys, in promote_types(dtype, float32)."""
    out, lse = None, None
    wide = torch.promote_types(q.dtype, torch.float32)
    for block, k_block, v_block in call.rows.route.forward(k, v):
        rows = block.queries
        part, part_lse = call.kernel.forward(q[rows], k_block, v_block, *call.arguments(block))
        if out is None and len(part) == len(q):
            out, lse = part, part_lse
            continue
        if out is None or lse is None:
            out, lse = _nothing_seen(q, v, wide)
        merge(out[rows], lse[rows], part, part_lse)
    return (out, lse) if out is not None and lse is not None else _nothing_seen(q, v, wide)


def _nothing_seen(q: Tensor, v: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    out = torch.zeros(*q.shape[:3], v.shape[-1], dtype=dtype, device=q.device)
    return out, torch.full(q.shape[:3], float("-inf"), dtype=dtype, device=q.device)


@dataclass(frozen=True)
class ContextAttention:
    """How attention crosses the sequence cut on this rank.

    inner: ranks that exchange sequence for heads; outer: over which keys and values travel, under all_gather at once.
    """

    inner: Axis
    outer: Axis
    mode: str

    @staticmethod
    def of(mpu: ParallelState, layer: int = 0) -> ContextAttention:
        """The mode that the configuration names for a layer; every rank of mpu.cp must ask at the same time."""
        mode = mpu.config.cp_mode_of(layer)
        inner, outer = mpu.context_levels(mode)
        if mpu.cp.device.type == "cuda" and outer.size > 1:
            outer.barrier()  # NCCL wants all ranks in the first call of a group
        return ContextAttention(inner, outer, mode)

    @property
    def num_ranks(self) -> int:
        """Over how many ranks the sequence is cut."""
        return self.inner.size * self.outer.size

    def problems(self, num_heads: int) -> list[str]:
        """Why this many query heads of a rank cannot be exchanged (empty when they can)."""
        return head_exchange_problems(num_heads, self.inner.size)

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cut: RowCut,
        kernel: AttentionKernel,
        *,
        window: int = 0,
        dropout: AttentionDropout | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Causal attention of this rank's tokens: q [n, b, H, d], k [n, b, G, d], v [n, b, G, dv] -> [n, b, H, dv].

        A token sees its document so far, at most `window` tokens of it (0: no limit). dropout.token_index: [n, b], of
        the same tokens. sinks: [H], see `add_sinks_`.
        """
        key = (self.mode, window, q.device)
        if key not in cut.plans:
            cut.plans[key] = self._prepare(cut.sight(window), q.device)
        return self._attend(q, k, v, cut.plans[key], kernel, dropout, sinks)

    def with_sight(self, q: Tensor, k: Tensor, v: Tensor, sight: Sight, kernel: AttentionKernel) -> Tensor:
        """The same for any `sight` of the tokens of all ranks."""
        return self._attend(q, k, v, self._prepare(sight, q.device), kernel, None, None)

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        rows: _Rows,
        kernel: AttentionKernel,
        dropout: AttentionDropout | None,
        sinks: Tensor | None,
    ) -> Tensor:
        dropout = dropout if dropout is not None and dropout.p > 0.0 else None
        inner = self.inner
        if inner.size == 1:
            return _Attend.apply(q, k, v, sinks, _Call(rows, kernel, dropout))
        value_size = v.shape[-1]
        q, k, v = self._enter(q, k, v, rows.order)
        first_head = inner.rank * q.shape[2]
        if dropout is not None:
            dropout = dataclasses.replace(
                dropout,
                token_index=self._token_index(dropout.token_index, rows),
                head_offset=dropout.head_offset + first_head,
            )
        if sinks is not None:
            sinks = sinks.narrow(0, first_head, q.shape[2])
        out = cast(Tensor, _Attend.apply(q, k, v, sinks, _Call(rows, kernel, dropout)))
        return to_sequence(out.flatten(2), inner, rows.order).unflatten(2, (-1, value_size))

    def _token_index(self, mine: Tensor, rows: _Rows) -> Tensor:
        """The numbers in the run of the tokens of all `inner` ranks, from those of this rank's."""
        n = len(mine)
        unsorted = torch.empty_like(rows.places)
        order = rows.order if rows.order.dim() == 2 else rows.order[:, None].expand_as(rows.places)
        unsorted.scatter_(0, order, rows.places)
        return rows.places + (mine[:1] - unsorted[self.inner.rank * n][None])

    def _enter(self, q: Tensor, k: Tensor, v: Tensor, order: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """All tokens of some heads from some tokens of all heads, q, k and v in one message."""
        size = self.inner.size
        repeats = kv_repeats(q.shape[2], k.shape[2], size)
        if repeats > 1:
            k, v = k.repeat_interleave(repeats, 2), v.repeat_interleave(repeats, 2)
        parts = [x.unflatten(2, (size, -1)).flatten(3) for x in (q, k, v)]  # [n, b, ranks, features]
        together = torch.cat(parts, -1).flatten(2)
        whole = to_heads(together, self.inner, order)
        split = whole.split([part.shape[-1] for part in parts], -1)
        q, k, v = (x.unflatten(-1, (-1, like.shape[-1])) for x, like in zip(split, (q, k, v), strict=True))
        return q, k, v

    def _prepare(self, sight: Sight, device: torch.device) -> _Rows:
        joined, orders = sight.joined(self.inner.size)
        me = self.outer.rank
        order = orders[me]
        if bool((order == order[:, :1]).all()):
            order = order[:, 0]
        route: Ring | Gather
        if self.mode == "all_gather" and self.outer.size > 1:
            route = Gather(gather_plan(joined, me).to(device), self.outer)
        else:
            route = Ring(ring_plan(joined, me).to(device), self.outer)
        mine = (x[me].to(device) for x in (joined.first, joined.last, joined.places))
        return _Rows(route, *mine, order=order.to(device))
