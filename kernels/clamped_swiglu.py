"""The clamped SwiGLU of gpt-oss (arXiv:2508.10925), each row times its weight, saving nothing but its inputs.

With g = min(gate, limit) and u = up between -limit and limit: (u + 1) * g * sigmoid(alpha g). Clamped values have no
gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .activation import row_chunks


def weighted_clamped_swiglu(gate_up: Tensor, probs: Tensor, alpha: float, limit: float) -> Tensor:
    """The activation times prob for gate_up [n, 2f] (gate first) and probs [n]: [n, f], rounded once."""
    gate, up = gate_up.chunk(2, -1)
    out = torch.empty_like(gate, memory_format=torch.contiguous_format)
    wide = torch.promote_types(gate.dtype, torch.float32)
    for gate_rows, up_rows, prob, out_rows in row_chunks(gate, up, probs[:, None], out):
        g = gate_rows.to(wide, memory_format=torch.contiguous_format).clamp(max=limit)
        u = up_rows.to(wide).clamp(-limit, limit).add_(1)
        out_rows.copy_((g * alpha).sigmoid_().mul_(g).mul_(u).mul_(prob))
    return out


def weighted_clamped_swiglu_backward(
    dout: Tensor, gate_up: Tensor, probs: Tensor, alpha: float, limit: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(output again, gradient of gate_up, gradient of probs) of `weighted_clamped_swiglu` from its inputs alone."""
    gate, up = gate_up.chunk(2, -1)
    out = torch.empty_like(gate, memory_format=torch.contiguous_format)
    dgate_up, dprobs = torch.empty_like(gate_up, memory_format=torch.contiguous_format), torch.empty_like(probs)
    dgate, dup = dgate_up.chunk(2, -1)
    wide = torch.promote_types(gate.dtype, torch.float32)
    parts = row_chunks(dout, gate, up, probs[:, None], out, dgate, dup, dprobs[:, None])
    for dy, gate_rows, up_rows, prob, out_rows, dg, du, dprob in parts:
        dy = dy.to(wide, memory_format=torch.contiguous_format)
        g = gate_rows.to(wide, memory_format=torch.contiguous_format).clamp(max=limit)
        u = up_rows.to(wide).clamp(-limit, limit).add_(1)
        share = (g * alpha).sigmoid_()
        glu = g * share
        product = glu * u
        dprob.copy_((product * dy).sum(-1, keepdim=True))
        out_rows.copy_(product.mul_(prob))
        dy = dy * prob
        slope = share + alpha * glu * (1.0 - share)
        du.copy_((glu * dy).masked_fill_(up_rows.abs() > limit, 0.0))
        dg.copy_((dy * u).mul_(slope).masked_fill_(gate_rows > limit, 0.0))
    return out, dgate_up, dprobs
