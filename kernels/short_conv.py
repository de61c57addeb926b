"""The gated short convolution of LFM2 (Liquid AI, 2025, arXiv:2511.23404), saving nothing but its inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from .saved import Saved, size_of, wide


class Reach(Protocol):
    """Which inputs the convolution sees, where rows hold several documents or lie on several ranks.

    Inputs and outputs are rows [s x b, h] of [s, b, h]. `back` counts from 1 to k - 1, and nobody sees one input twice.
    """

    @property
    def near(self) -> Sequence[Tensor]:
        """For each back bool [s - back, b]: whether output i + back sees input i."""
        ...

    @property
    def far(self) -> Sequence[tuple[Tensor, Tensor]]:
        """For each back (outputs, rows fetched), int64 [n] each: what else they see."""
        ...

    def fetch(self, inputs: Callable[[Tensor], Tensor]) -> Callable[[], Tensor]:
        """Begins to fetch inputs of rows, `inputs` here [n] -> [n, h]; the result waits for them, [n, h]."""
        ...

    def send_home(self, grads: Tensor) -> Callable[[], Sequence[tuple[Tensor, Tensor]]]:
        """Begins to return gradients of fetched rows; the result waits: [(this rank's rows, what to add to theirs)].

        No row is twice in one pair: the sum over pairs has one order.
        """
        ...


def gated_short_conv(bcx: Tensor, weight: Tensor, reach: Reach | None = None) -> Tensor:
    """c * conv(b * x), conv causal and by channel: z[t] = sum_j weight[:, j] * u[t - (k - 1) + j], u = 0 before t = 0.

    bcx [s, b, 3h] holds b, c and x side by side, weight [h, k]; returns [s, b, h]. Computed in float32 or wider.
    `reach` says which inputs an output sees where these are not just the ones above it.
    """
    return _GatedShortConv.apply(bcx, weight, reach)


def gated_short_conv_saved(shape: Sequence[int], dtype: torch.dtype, num_fetched: int = 0) -> Saved:
    """What `gated_short_conv` keeps of bcx [s, b, 3h]: bcx itself, and the rows it fetched."""
    return Saved(input=size_of(shape, dtype), own=size_of((num_fetched, shape[-1] // 3), wide(dtype)))


class _GatedShortConv(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, bcx: Tensor, weight: Tensor, reach: Reach | None) -> Tensor:
        b, c, x = _wide(bcx).chunk(3, -1)
        u = b * x
        arriving = reach.fetch(u.flatten(0, 1).__getitem__) if reach is not None else None
        z = _conv_near(u, taps_of(weight, c.dtype), reach)
        fetched = arriving() if arriving is not None else None
        _add_far_(z, taps_of(weight, c.dtype), reach, fetched)
        ctx.reach = reach
        ctx.save_for_backward(bcx, weight, fetched)
        return z.mul_(c).to(bcx.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        bcx, weight, fetched = ctx.saved_tensors
        reach: Reach | None = ctx.reach
        b, c, x = _wide(bcx).chunk(3, -1)
        dy, u, taps = grads[0].to(c.dtype), b * x, taps_of(weight, c.dtype)
        dz = dy * c
        dtaps = torch.zeros_like(taps)
        returning = None
        if reach is not None:
            returning = reach.send_home(far_grad(dz.flatten(0, 1).__getitem__, taps, reach, fetched))
            _add_far_taps_grad_(dtaps, dz, reach, fetched)
        dbcx = torch.empty_like(bcx)
        db, dc, dx = dbcx.chunk(3, -1)
        z = _conv_near(u, taps, reach)
        _add_far_(z, taps, reach, fetched)
        dc.copy_(z.mul_(dy))
        del z
        du = _near_backward(dz, u, taps, reach, dtaps)
        for rows, grads_home in returning() if returning is not None else ():
            du.flatten(0, 1)[rows] += grads_home
        dx.copy_(du * b)
        db.copy_(du.mul_(x))
        return dbcx, dtaps.t().to(weight.dtype), None


def _conv_near(u: Tensor, taps: Tensor, reach: Reach | None) -> Tensor:
    """The causal convolution of u [s, b, h] with taps [k, h] over what is in memory before it, a tensor of its own."""
    z = u * taps[-1]
    for back in range(1, min(len(taps), len(u))):
        z[back:].addcmul_(_seen(u[:-back], back, reach), taps[-1 - back])
    return z


def _near_backward(dz: Tensor, u: Tensor, taps: Tensor, reach: Reach | None, dtaps: Tensor) -> Tensor:
    """The gradient of u; that of the taps is added to `dtaps`."""
    du = dz * taps[-1]
    dtaps[-1] += (dz * u).sum((0, 1))
    for back in range(1, min(len(taps), len(u))):
        ahead = _seen(dz[back:], back, reach)
        du[:-back].addcmul_(ahead, taps[-1 - back])
        dtaps[-1 - back] += (ahead * u[:-back]).sum((0, 1))
    return du


def _seen(x: Tensor, back: int, reach: Reach | None) -> Tensor:
    """x [s - back, b, h] with zeros where an output does not see the input `back` places before it, whatever it is."""
    return x if reach is None else x.masked_fill(~reach.near[back - 1][..., None], 0.0)


def _add_far_(z: Tensor, taps: Tensor, reach: Reach | None, fetched: Tensor | None) -> None:
    if reach is None or fetched is None:
        return
    rows = z.view(-1, z.shape[-1])
    for back, (outputs, sources) in enumerate(reach.far, start=1):
        # No output is there twice, so that the sum has one order.
        rows[outputs] = torch.addcmul(rows[outputs], fetched[sources], taps[-1 - back])


def far_grad(dz: Callable[[Tensor], Tensor], taps: Tensor, reach: Reach, fetched: Tensor) -> Tensor:
    """The gradient of what was fetched; dz gives rows of the convolution's, taps [k, h]."""
    dfetched = torch.zeros_like(fetched)
    for back, (outputs, sources) in enumerate(reach.far, start=1):
        dfetched[sources] = torch.addcmul(dfetched[sources], dz(outputs), taps[-1 - back])
    return dfetched


def _add_far_taps_grad_(dtaps: Tensor, dz: Tensor, reach: Reach, fetched: Tensor) -> None:
    rows = dz.view(-1, dz.shape[-1])
    for back, (outputs, sources) in enumerate(reach.far, start=1):
        dtaps[-1 - back] += (rows[outputs] * fetched[sources]).sum(0)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def taps_of(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """weight [h, k] as [k, h], so that a tap is a contiguous row."""
    return weight.to(dtype).t().contiguous()
