"""Products of many linear layers at once, each with its own run of rows: the experts of a mixture, tokens sorted.

x [n, in] holds `counts[e]` rows for expert e, one run after another; weight [E, out, in]. Counts are on the host.
The loop over experts defines the result and takes every dtype; `grouped_mm` is torch's grouped GEMM.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from .activation import row_chunks
from .linear import accumulate_weight_grad, input_grad_into, linear_into

GroupedBackend = Literal["loop", "grouped_mm"]

_STRIDE_BYTES = 16  # what grouped_mm wants the stride of a row to be a multiple of


def grouped_linear(
    x: Tensor, weight: Tensor, counts: Sequence[int], bias: Tensor | None = None, *, backend: GroupedBackend = "loop"
) -> Tensor:
    """x_e weight_e^T (+ bias_e) for each run of rows: x [n, in], weight [E, out, in], bias [E, out] -> [n, out]."""
    if backend == "grouped_mm":
        out = _grouped_mm(x, weight.mT, counts)
        for expert, rows in _runs(counts) if bias is not None else ():
            assert bias is not None
            out[rows].add_(bias[expert])
        return out
    out = x.new_empty(x.shape[0], weight.shape[1])
    for expert, rows in _runs(counts):
        linear_into(out[rows], x[rows], weight[expert], None if bias is None else bias[expert])
    return out


def grouped_input_grad(
    dy: Tensor, weight: Tensor, counts: Sequence[int], *, backend: GroupedBackend = "loop"
) -> Tensor:
    """dy_e weight_e for each run of rows: dy [n, out], weight [E, out, in] -> [n, in]."""
    if backend == "grouped_mm":
        return _grouped_mm(dy, weight, counts)
    dx = dy.new_empty(dy.shape[0], weight.shape[2])
    for expert, rows in _runs(counts):
        input_grad_into(dx[rows], dy[rows], weight[expert])
    return dx


def accumulate_grouped_weight_grad(
    main_grad: Tensor, dy: Tensor, x: Tensor, counts: Sequence[int], *, backend: GroupedBackend = "loop"
) -> None:
    """main_grad_e += dy_e^T x_e for main_grad [E, out, in]; experts without rows get exactly nothing.

    main_grad may be wider than dy and x: see `accumulate_weight_grad` for what is rounded (grouped_mm rounds as on a
    CPU).
    """
    if backend == "loop":
        for expert, rows in _runs(counts):
            accumulate_weight_grad(main_grad[expert], dy[rows], x[rows])
        return
    if not x.shape[0]:
        return
    wide_dy, wide_x = _padded(dy, -1), _padded(x, -1)
    product = F.grouped_mm(wide_dy.t(), wide_x, offs=_offsets(counts, x.device))
    product = product[:, : dy.shape[1], : x.shape[1]]
    if all(counts):
        main_grad.add_(product)
        return
    # Not every version of the kernel writes the slab of an empty run, and NaN times 0 would stay NaN.
    for expert, _ in _runs(counts):
        main_grad[expert].add_(product[expert])


def accumulate_grouped_bias_grad(grad: Tensor, dy: Tensor, counts: Sequence[int]) -> None:
    """grad_e += the sum of dy's rows of expert e, for grad [E, out]."""
    for expert, rows in _runs(counts):
        grad[expert].add_(dy[rows].sum(0, dtype=grad.dtype))


def weighted_swiglu(gate_up: Tensor, probs: Tensor) -> Tensor:
    """silu(gate) * up * prob for gate_up [n, 2f] (gate first) and probs [n]: [n, f], rounded once."""
    gate, up = gate_up.chunk(2, -1)
    out = torch.empty_like(gate, memory_format=torch.contiguous_format)
    wide = torch.promote_types(gate.dtype, torch.float32)
    for gate_rows, up_rows, prob, out_rows in row_chunks(gate, up, probs[:, None], out):
        product = F.silu(gate_rows.to(wide, memory_format=torch.contiguous_format))
        out_rows.copy_(product.mul_(up_rows).mul_(prob))
    return out


def weighted_swiglu_backward(dout: Tensor, gate_up: Tensor, probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(output again, gradient of gate_up, gradient of probs) of `weighted_swiglu` from its inputs alone."""
    gate, up = gate_up.chunk(2, -1)
    out = torch.empty_like(gate, memory_format=torch.contiguous_format)
    dgate_up, dprobs = torch.empty_like(gate_up, memory_format=torch.contiguous_format), torch.empty_like(probs)
    dgate, dup = dgate_up.chunk(2, -1)
    wide = torch.promote_types(gate.dtype, torch.float32)
    parts = row_chunks(dout, gate, up, probs[:, None], out, dgate, dup, dprobs[:, None])
    for dy, g, u, prob, out_rows, dg, du, dprob in parts:
        g, dy = (part.to(wide, memory_format=torch.contiguous_format) for part in (g, dy))
        silu = F.silu(g)
        product = silu * u
        dprob.copy_((product * dy).sum(-1, keepdim=True))
        out_rows.copy_(product.mul_(prob))
        dy = dy * prob
        du.copy_(silu.mul_(dy))
        dg.copy_(torch.ops.aten.silu_backward(dy.mul_(u), g))
    return out, dgate_up, dprobs


def _runs(counts: Sequence[int]) -> Iterator[tuple[int, slice]]:
    """(expert, its rows) of the experts that have any."""
    start = 0
    for expert, count in enumerate(counts):
        if count:
            yield expert, slice(start, start + count)
        start += count


def _offsets(counts: Sequence[int], device: torch.device) -> Tensor:
    return (
        torch.tensor(counts, dtype=torch.int32, device="cpu").cumsum(0, dtype=torch.int32).to(device, non_blocking=True)
    )


def _padded(x: Tensor, *dims: int) -> Tensor:
    """x with zeros after its values where the size of one of `dims` would make the strides odd for grouped_mm."""
    unit = _STRIDE_BYTES // x.element_size()
    missing = {dim % x.dim(): -x.shape[dim] % unit for dim in dims}
    if not any(missing.values()):
        return x.contiguous() if len(dims) == 1 else x
    pads: list[int] = []
    for dim in reversed(range(x.dim())):
        pads += [0, missing.get(dim, 0)]
    return F.pad(x, pads)


def _grouped_mm(x: Tensor, weight: Tensor, counts: Sequence[int]) -> Tensor:
    """x_e weight_e for x [n, k] and weight [E, k, m], of any sizes."""
    if not x.shape[0]:
        return x.new_empty(0, weight.shape[2])
    function: Any = F.grouped_mm
    out = function(_padded(x, -1), _padded(weight, -1, -2), offs=_offsets(counts, x.device))
    return out[:, : weight.shape[2]].contiguous()
