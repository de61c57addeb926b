"""Attention, products of experts and weight gradients on a GPU: errors against float64, then TFLOP/s next to peers.

Peers are torch's flash SDPA, compiled FlexAttention, flash-attn, torch's grouped GEMM and apex, those that are there.
The fraction is that of the rate of torch's own bfloat16 matrix product of 8192 x 8192 x 8192, measured here. Without a
GPU, in triton's interpreter (TRITON_INTERPRET=1), sizes are tiny and times mean nothing; it shows that all runs.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from megalite.files import replace_json
from megalite.kernels import grouped as grouped_reference
from megalite.kernels import linear as linear_reference
from megalite.kernels.attention_kernel import AttentionKernel, BlockKernel, attend
from megalite.kernels.attention_mask import AttentionMask, first_seen, num_pairs
from megalite.kernels.attention_rows import AttentionDropout
from megalite.kernels.dropout import dropout_key
from megalite.kernels.routing import Bags
from megalite.kernels.triton import grouped, routing
from megalite.kernels.triton.attention import TritonKernel
from megalite.kernels.triton.linear import accumulate_weight_grad

Call = Callable[[], Any]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One operation at one size."""

    operation: str
    """What it is, and which way."""
    size: str
    """The sizes that matter."""
    milliseconds: float
    """The median of our kernel."""
    rate: float
    """TFLOP/s, or for what only moves data GB/s."""
    unit: str
    """TFLOP/s or GB/s."""
    fraction: float | None = None
    """Of the measured rate of matrix products."""
    peers: Mapping[str, float] = field(default_factory=dict)
    """How many times as long each peer takes: above 1, ours is faster."""


@dataclass(frozen=True, kw_only=True)
class Check:
    """Errors of one operation against float64: root mean squares, relative to that of the result."""

    operation: str
    """What it is."""
    error: float
    """Ours."""
    eager: float
    """That of plain torch in the same dtype."""

    @property
    def passed(self) -> bool:
        """Whether ours is at most 1.1 times as far off."""
        return self.error <= 1.1 * self.eager + 1e-6


@dataclass(frozen=True, kw_only=True)
class Peer:
    """Something that attends, and what its backward pass needs."""

    run: Callable[[], Tensor]
    """The forward pass."""
    leaves: tuple[Tensor, ...]
    """What to differentiate by."""
    grad: Tensor
    """A gradient of what `run` returns."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """An attention."""

    name: str
    """For the table."""
    seq: int
    """Positions."""
    batch: int
    """Rows."""
    heads: int = 32
    """Query heads."""
    kv_heads: int = 8
    """Key heads."""
    d: int = 128
    """Features of a query or key."""
    dv: int = 128
    """Features of a value."""
    documents: int = 1
    """Equal documents in a row."""
    window: int = 0
    """Positions that each sees; 0: all before it."""
    softcap: float = 0.0
    """Bound of the scores; 0: none."""
    p: float = 0.0
    """Dropout."""

    def mask(self, device: torch.device) -> AttentionMask:
        """What each position sees."""
        places = torch.arange(self.seq, device=device)[:, None].expand(self.seq, self.batch)
        length = -(-self.seq // self.documents)
        documents = places // length * length if self.documents > 1 else None
        start = first_seen(places, documents, self.window)
        start = start[:, :1].expand_as(start)
        return AttentionMask(query=places, start=start, key=places)

    def inputs(self, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q, k, v, which require gradients, and a gradient of the output."""
        shapes = (self.heads, self.d), (self.kv_heads, self.d), (self.kv_heads, self.dv), (self.heads, self.dv)
        q, k, v, dout = (torch.randn(self.seq, self.batch, *shape, device=device).to(dtype) for shape in shapes)
        return q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), dout

    def dropout(self, device: torch.device) -> AttentionDropout | None:
        """Dropout with some key."""
        index = torch.arange(self.seq * self.batch, device=device).view(self.seq, self.batch)
        return AttentionDropout(p=self.p, key=dropout_key(0, 0, 0, device), token_index=index) if self.p else None


SHAPES = (
    Shape(name="causal 8192", seq=8192, batch=1),
    Shape(name="causal 2048", seq=2048, batch=4),
    Shape(name="16 documents", seq=8192, batch=1, documents=16),
    Shape(name="window 1024", seq=8192, batch=1, window=1024),
    Shape(name="d 64", seq=8192, batch=1, d=64, dv=64),
    Shape(name="d 192/128, 16 heads", seq=4096, batch=1, heads=16, kv_heads=16, d=192),
    Shape(name="d 256, 16 heads", seq=4096, batch=1, heads=16, kv_heads=16, d=256, dv=256),
)
CHECKS = (
    Shape(name="causal", seq=300, batch=2, heads=4, kv_heads=2),
    Shape(name="documents, window", seq=300, batch=1, heads=2, kv_heads=1, d=64, dv=64, documents=3, window=50),
    Shape(name="softcap, dropout", seq=300, batch=1, heads=2, kv_heads=2, d=96, dv=40, softcap=5.0, p=0.2),
    Shape(name="d 192/128", seq=200, batch=1, heads=2, kv_heads=2, d=192),
    Shape(name="d 256", seq=200, batch=1, heads=2, kv_heads=2, d=256, dv=256),
)
TINY = (Shape(name="causal 40", seq=40, batch=1, heads=2, kv_heads=1, d=16, dv=16),)


def faults(device: torch.device, tiny: bool = False) -> list[str]:
    """What is farther from float64 than it may be, one line each; prints all errors."""
    wrong = []
    for check in checks(device, TINY if tiny else CHECKS):
        line = f"{check.operation}: error {check.error:.2e}, eager's is {check.eager:.2e}"
        print(line, flush=True)
        if not check.passed:
            wrong.append(line)
    return wrong


def measure(device: torch.device, tiny: bool = False) -> list[Row]:
    """All rows."""
    attention = attention_rows(device, TINY if tiny else SHAPES)
    return [*attention, *expert_rows(device, tiny), *routing_rows(device, tiny)]


def checks(device: torch.device, shapes: tuple[Shape, ...] = CHECKS) -> Iterator[Check]:
    """All operations at small odd sizes, in bfloat16."""
    torch.manual_seed(0)
    for shape in shapes:
        inputs = shape.inputs(device, torch.bfloat16)
        options = {"scale": shape.d**-0.5, "softcap": shape.softcap}
        ours = _attention_results(shape, TritonKernel(**options), inputs)
        eager = _attention_results(shape, BlockKernel(**options), inputs)
        exact = _attention_results(shape, BlockKernel(**options), tuple(x.detach().double() for x in inputs))
        for name, *results in zip(("out", "dq", "dk", "dv"), ours, eager, exact, strict=True):
            yield _check(f"attention, {shape.name}: {name}", *results)
    counts = [0, 1, 16, 0, 130]
    x, weight, dy = (_random(device, *size) for size in ((147, 200), (5, 136, 200), (147, 136)))
    x_wide, weight_wide, dy_wide = (t.double() for t in (x, weight, dy))
    ours = grouped.grouped_linear(x, weight, counts)
    eager = grouped_reference.grouped_linear(x, weight, counts)
    yield _check("grouped product", ours, eager, grouped_reference.grouped_linear(x_wide, weight_wide, counts))
    ours = grouped.grouped_input_grad(dy, weight, counts)
    eager = grouped_reference.grouped_input_grad(dy, weight, counts)
    exact = grouped_reference.grouped_input_grad(dy_wide, weight_wide, counts)
    yield _check("grouped input gradient", ours, eager, exact)
    ours, eager = (torch.ones(5, 136, 200, device=device) for _ in range(2))
    exact = torch.ones(5, 136, 200, device=device, dtype=torch.float64)
    grouped.accumulate_grouped_weight_grad(ours, dy, x, counts)
    grouped_reference.accumulate_grouped_weight_grad(eager, dy, x, counts)
    grouped_reference.accumulate_grouped_weight_grad(exact, dy_wide, x_wide, counts)
    yield _check("grouped weight gradient", ours, eager, exact)
    # Exact or not at all: what the interpreter computes is what the GPU must choose.
    scores = torch.randn(100, 160, device=device).mul(4).round()
    order = scores.sort(dim=-1, descending=True, stable=True).indices[:, :6]
    wanted = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, order, True)
    wrong = (routing.choose_experts(scores, 6) != wanted).double().sum().item()
    yield Check(operation="choice of experts", error=wrong, eager=0.0)


def attention_rows(device: torch.device, shapes: tuple[Shape, ...] = SHAPES) -> Iterator[Row]:
    """Forward, and backward alone, of attention in bfloat16."""
    limit = matmul_rate(device)
    for shape in shapes:
        q, k, v, dout = shape.inputs(device, torch.bfloat16)
        mask, kernel = shape.mask(device), TritonKernel(scale=shape.d**-0.5)
        pairs = num_pairs(mask).allowed * shape.heads
        ours = Peer(run=partial(attend, q, k, v, mask, kernel), leaves=(q, k, v), grad=dout)
        forward, backward = {}, {}
        for name, peer in {"ours": ours, **_attention_peers(shape, q, k, v, dout)}.items():
            try:
                with torch.no_grad():
                    forward[name] = _milliseconds(peer.run, device)
                differentiate = partial(torch.autograd.grad, peer.run(), peer.leaves, peer.grad, retain_graph=True)
                backward[name] = _milliseconds(differentiate, device)
            except Exception as error:
                if name == "ours":
                    raise
                print(f"{name} cannot do {shape.name}: {str(error).splitlines()[0]}")
        flops = 2 * pairs * (shape.d + shape.dv)
        for way, times, work in (("forward", forward, flops), ("backward", backward, 2.5 * flops)):
            yield _row(f"attention {way}", shape.name, times, work, limit)


def expert_rows(device: torch.device, tiny: bool = False) -> Iterator[Row]:
    """Grouped products, their weight gradients, and that of one large linear."""
    limit = matmul_rate(device)
    tokens, hidden, ffn, experts = (64, 32, 48, 4) if tiny else (65536, 2048, 768, 128)
    share = torch.rand(experts, generator=torch.Generator().manual_seed(0)) + 0.2
    counts = (share / share.sum() * tokens).long()
    counts[0] += tokens - counts.sum()
    host, on_device = counts.tolist(), counts.to(device)
    x, weight, dy = (_random(device, *size) for size in ((tokens, hidden), (experts, ffn, hidden), (tokens, ffn)))
    main_grad = torch.zeros(experts, ffn, hidden, device=device)
    flops, size = 2 * tokens * hidden * ffn, f"{tokens} rows, {experts} x {ffn} x {hidden}"

    def timed(ours: Call, peer: Callable[[Any], Call]) -> dict[str, float]:
        calls = {"ours": ours, "loop": peer("loop")}
        if not tiny:
            calls["grouped_mm"] = peer("grouped_mm")
        return {name: _milliseconds(call, device) for name, call in calls.items()}

    times = timed(
        lambda: grouped.grouped_linear(x, weight, on_device),
        lambda backend: lambda: grouped_reference.grouped_linear(x, weight, host, backend=backend),
    )
    yield _row("grouped product", size, times, flops, limit)
    times = timed(
        lambda: grouped.grouped_input_grad(dy, weight, on_device),
        lambda backend: lambda: grouped_reference.grouped_input_grad(dy, weight, host, backend=backend),
    )
    yield _row("grouped input gradient", size, times, flops, limit)
    peer_wgrad = grouped_reference.accumulate_grouped_weight_grad
    times = timed(
        lambda: grouped.accumulate_grouped_weight_grad(main_grad, dy, x, on_device),
        lambda backend: lambda: peer_wgrad(main_grad, dy, x, host, backend=backend),
    )
    yield _row("grouped weight gradient", size, times, flops, limit)
    tokens, hidden, ffn = (64, 32, 48) if tiny else (8192, 4096, 14336)
    x, dy = _random(device, tokens, hidden), _random(device, tokens, ffn)
    main_grad = torch.zeros(ffn, hidden, device=device)
    calls: dict[str, Call] = {
        "ours": lambda: accumulate_weight_grad(main_grad, dy, x),
        "torch": lambda: linear_reference.accumulate_weight_grad(main_grad, dy, x),
    }
    apex: Any = _importable("fused_weight_gradient_mlp_cuda")
    if apex is not None:
        calls["apex"] = lambda: apex.wgrad_gemm_accum_fp32(x, dy, main_grad)
    times = {name: _milliseconds(call, device) for name, call in calls.items()}
    yield _row("weight gradient", f"{tokens} tokens, {ffn} x {hidden}", times, 2 * tokens * hidden * ffn, limit)


def routing_rows(device: torch.device, tiny: bool = False) -> Iterator[Row]:
    """Rows to their experts and back, and the choice of these."""
    tokens, hidden, k, experts = (16, 64, 2, 4) if tiny else (8192, 4096, 8, 128)
    scores = torch.rand(tokens, experts, device=device)
    times = {
        "ours": _milliseconds(lambda: routing.choose_experts(scores, k), device),
        "topk": _milliseconds(lambda: scores.topk(k), device),
    }
    yield _moved("choice of experts", f"{tokens} x {experts}, top {k}", times, tokens * experts * 5)
    token = scores.topk(k).indices.argsort(0).flatten() % tokens
    rows, bags = _random(device, tokens, hidden), Bags.of(token, tokens)
    there = routing.permute(rows, token)
    size, copied = f"{tokens} x {hidden}, {k} each", 2 * tokens * hidden * k
    times = {
        "ours": _milliseconds(lambda: routing.permute(rows, token), device),
        "index_select": _milliseconds(lambda: rows.index_select(0, token), device),
    }
    yield _moved("permute", size, times, copied + 2 * tokens * hidden)
    times = {
        "ours": _milliseconds(lambda: routing.unpermute(there, *bags), device),
        "embedding_bag": _milliseconds(lambda: torch.embedding_bag(there, *bags, mode=0)[0][:tokens], device),
    }
    yield _moved("unpermute", size, times, copied + 2 * tokens * hidden)


def matmul_rate(device: torch.device) -> float:
    """TFLOP/s of a large bfloat16 product by torch."""
    n = 8192 if device.type == "cuda" else 128
    a, b = _random(device, n, n), _random(device, n, n)
    return 2 * n**3 / _milliseconds(lambda: a @ b, device) / 1e9


def table(rows: Sequence[Row]) -> str:
    """Markdown."""
    lines = ["| operation | size | ms | rate | of matmul | peers' time / ours |", "|---|---|---|---|---|---|"]
    for row in rows:
        peers = ", ".join(f"{name} {ratio:.2f}" for name, ratio in row.peers.items())
        share = "" if row.fraction is None else f"{row.fraction:.2f}"
        lines.append(
            f"| {row.operation} | {row.size} | {row.milliseconds:.3f} | {row.rate:.0f} {row.unit} | {share} | {peers} |"
        )
    return "\n".join(lines)


def _attention_results(shape: Shape, kernel: AttentionKernel, inputs: tuple[Tensor, ...]) -> list[Tensor]:
    q, k, v = (x.detach().requires_grad_() for x in inputs[:3])
    out = attend(q, k, v, shape.mask(q.device), kernel, dropout=shape.dropout(q.device))
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), inputs[3])]


def _attention_peers(shape: Shape, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> dict[str, Peer]:
    """Those that can do `shape`, each in the layout that it likes best."""
    peers: dict[str, Peer] = {}
    plain = shape.documents == 1 and not shape.window
    by_head = _leaves([x.permute(1, 2, 0, 3) for x in (q, k, v)])
    if plain and q.is_cuda:
        peers["sdpa"] = Peer(run=partial(_sdpa, *by_head), leaves=by_head, grad=dout.permute(1, 2, 0, 3))
    if not plain and q.is_cuda:
        peers["flex"] = Peer(run=_flex(shape, by_head), leaves=by_head, grad=dout.permute(1, 2, 0, 3))
    flash: Any = _importable("flash_attn")
    if flash is not None and shape.documents == 1 and shape.d == shape.dv:
        by_row = _leaves([x.transpose(0, 1) for x in (q, k, v)])
        window = (shape.window - 1, 0) if shape.window else (-1, -1)
        run = partial(flash.flash_attn_func, *by_row, causal=True, window_size=window)
        peers["flash_attn"] = Peer(run=run, leaves=by_row, grad=dout.transpose(0, 1))
    return peers


def _leaves(tensors: list[Tensor]) -> tuple[Tensor, ...]:
    return tuple(x.detach().contiguous().requires_grad_() for x in tensors)


def _sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])


def _flex(shape: Shape, by_head: tuple[Tensor, ...]) -> Callable[[], Tensor]:
    length, window = math.ceil(shape.seq / shape.documents), shape.window or shape.seq

    def sees(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (query - key < window) & (query // length == key // length)

    block_mask = create_block_mask(sees, None, None, shape.seq, shape.seq, device=str(by_head[0].device))
    compiled: Any = torch.compile(flex_attention)
    return lambda: compiled(*by_head, block_mask=block_mask, enable_gqa=True)


def _milliseconds(call: Call, device: torch.device) -> float:
    """The median of as many calls as a tenth of a second has, at least five, after a warm-up."""
    if device.type != "cuda":
        start = time.perf_counter()
        call()
        return 1e3 * (time.perf_counter() - start)
    for _ in range(3):
        call()
    torch.cuda.synchronize(device)
    times: list[float] = []
    while len(times) < 5 or (sum(times) < 100.0 and len(times) < 100):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop))
    return statistics.median(times)


def _row(operation: str, size: str, times: Mapping[str, float], flops: float, limit: float) -> Row:
    ours = times["ours"]
    rate = flops / ours / 1e9
    peers = {name: other / ours for name, other in times.items() if name != "ours"}
    return Row(operation=operation, size=size, milliseconds=ours, rate=rate, unit="TFLOP/s", fraction=rate / limit,
               peers=peers)  # fmt: skip


def _moved(operation: str, size: str, times: Mapping[str, float], num_bytes: float) -> Row:
    ours = times["ours"]
    peers = {name: other / ours for name, other in times.items() if name != "ours"}
    return Row(operation=operation, size=size, milliseconds=ours, rate=num_bytes / ours / 1e6, unit="GB/s", peers=peers)


def _check(operation: str, ours: Tensor, eager: Tensor, exact: Tensor) -> Check:
    norm = exact.double().norm()
    errors = [((x.double() - exact.double()).norm() / norm).item() for x in (ours, eager)]
    return Check(operation=operation, error=errors[0], eager=errors[1])


def _random(device: torch.device, *shape: int) -> Tensor:
    return torch.randn(*shape, device=device, dtype=torch.bfloat16)


def _importable(name: str) -> Any:
    try:
        return __import__(name)
    except (ImportError, OSError):
        return None


def main() -> None:
    """Checks, then times, and writes what it found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, help="a JSON file for the rows")
    options = parser.parse_args()
    tiny = not torch.cuda.is_available()
    device = torch.device("cpu" if tiny else "cuda")
    if tiny:
        from megalite.testing.triton_interpreter import interpreting, repair

        if not interpreting():
            raise SystemExit("there is no GPU here; TRITON_INTERPRET=1 shows that all runs, at tiny sizes")
        repair()
    wrong = faults(device, tiny)
    rows = measure(device, tiny)
    print(table(rows), *wrong, sep="\n")
    if options.output:
        replace_json(options.output, {"errors": wrong, "rows": [asdict(row) for row in rows]})
    if wrong:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
