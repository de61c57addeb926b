"""The GEMM floor of a training step: its matrix products alone, each by the fastest path found for its shape.

No implementation on the same threads can be faster than this floor, so "step / floor" compares across machines.
Counted are all linear layers and the output head (forward, input gradient, weight gradient) and attention's products
(forward and backward) at half their square, which is what the causal mask leaves. On a CPU without 16-bit products the
floor of bf16 is that of float32.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

from megalite.kernels.cpu import set_fp32_gemm
from megalite.kernels.products import product_dtype
from megalite.nn.config import ModelConfig

_ONEDNN: Any = torch.backends.mkldnn


@dataclass(kw_only=True)
class Product:
    """One matrix product of the step and the ways to run it."""

    name: str
    """What it is, such as "head wgrad"."""
    flops: float
    """Of one of its runs at the size of its tensors."""
    count: float
    """Runs in a step; halves for causal products."""
    ways: list[Callable[[], object]]
    """Calls that all compute it."""
    seconds: float = field(default=float("inf"))
    """The best time of a run so far."""


class GemmFloor:
    """Times the products of one micro-batch with torch's present number of threads; more rounds only lower it."""

    def __init__(self, model: ModelConfig, *, seq_len: int, batch: int, dtype: torch.dtype):
        tokens, dtype = seq_len * batch, product_dtype(torch.empty(1, dtype=dtype))
        self.products = [
            product
            for name, inputs, outputs, count in _linears(model)
            for product in _linear_products(name, tokens, inputs, outputs, count, dtype)
        ] + _attention_products(model, seq_len, batch, dtype)
        self._precisions = ["ieee"]
        if dtype == torch.float32:
            with _fp32_precision():
                if set_fp32_gemm("auto").startswith("onednn"):
                    self._precisions.append("bf16")

    def measure(self) -> float:
        """Times every way of every product once; returns the floor of one micro-batch by these times alone.

        Like the time of a whole step, that is never made of several moments at which a shared machine was quiet.
        """
        now = [float("inf")] * len(self.products)
        for precision in self._precisions:
            with _fp32_precision(precision):
                for number, product in enumerate(self.products):
                    for way in product.ways:
                        begin = time.perf_counter()
                        way()
                        now[number] = min(now[number], time.perf_counter() - begin)
        for product, seconds in zip(self.products, now, strict=True):
            product.seconds = min(product.seconds, seconds)
        return sum(product.count * seconds for product, seconds in zip(self.products, now, strict=True))

    @property
    def seconds(self) -> float:
        """The floor of one micro-batch, from the best times so far."""
        return sum(product.count * product.seconds for product in self.products)

    @property
    def flops(self) -> float:
        """What it counts, a multiply-add as two."""
        return sum(product.count * product.flops for product in self.products)


def gemm_floor(
    model: ModelConfig, *, seq_len: int, batch: int, dtype: torch.dtype, threads: int, rounds: int = 5
) -> float:
    """Seconds of the GEMM floor of one micro-batch of `batch` rows, on `threads` threads of this process."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    floor = GemmFloor(model, seq_len=seq_len, batch=batch, dtype=dtype)
    for _ in range(rounds + 1):  # the first warms up
        floor.measure()
    torch.set_num_threads(before)
    return floor.seconds


def _linears(model: ModelConfig) -> Iterator[tuple[str, int, int, int]]:
    """(name, inputs, outputs, count); matrices that share their input run as one."""
    query, key_value = model.num_heads * model.head_size, model.kv_heads * model.head_size
    gated = 1 if model.name == "gpt2" else 2
    yield "qkv", model.hidden_size, query + 2 * key_value, model.num_layers
    yield "proj", query, model.hidden_size, model.num_layers
    yield "fc1", model.hidden_size, gated * model.ffn_size, model.num_layers
    yield "fc2", model.ffn_size, model.hidden_size, model.num_layers
    yield "head", model.hidden_size, model.vocab_size, 1


def _linear_products(
    name: str, tokens: int, inputs: int, outputs: int, count: int, dtype: torch.dtype
) -> list[Product]:
    x, w, dy = (torch.randn(shape).to(dtype) for shape in ((tokens, inputs), (outputs, inputs), (tokens, outputs)))
    ways: dict[str, list[Callable[[], object]]] = {
        "forward": [lambda: torch.mm(x, w.t()), lambda: F.linear(x, w)],
        "dgrad": [lambda: torch.mm(dy, w), lambda: F.linear(dy, w.t())],
        "wgrad": [lambda: torch.mm(dy.t(), x), lambda: F.linear(dy.t(), x.t())],
    }
    flops = 2.0 * tokens * inputs * outputs
    return [Product(name=f"{name} {part}", flops=flops, count=count, ways=calls) for part, calls in ways.items()]


def _attention_products(model: ModelConfig, seq_len: int, batch: int, dtype: torch.dtype) -> list[Product]:
    """Scores and their gradient, weighted values and query gradient, key and value gradients; heads of a group fold."""
    groups, rows = batch * model.kv_heads, seq_len * model.num_heads // model.kv_heads
    q, k, p = (
        torch.randn(shape).to(dtype)
        for shape in (
            (groups, rows, model.head_size),
            (groups, seq_len, model.head_size),
            (groups, rows, seq_len),
        )
    )
    k_cols, p_cols = k.mT.contiguous(), p.mT.contiguous()
    ways: dict[str, list[Callable[[], object]]] = {
        "scores": [lambda: torch.bmm(q, k.mT), lambda: torch.bmm(q, k_cols)],
        "values": [lambda: torch.bmm(p, k)],
        "keys": [lambda: torch.bmm(p.mT, q), lambda: torch.bmm(p_cols, q)],
    }
    flops = 2.0 * groups * rows * seq_len * model.head_size
    # Two products of each kind in a layer (scores and dP, values and dQ, dK and dV), of each what is not above the
    # diagonal.
    count = 2 * model.num_layers * (seq_len + 1) / (2 * seq_len)
    return [Product(name=f"attention {n}", flops=flops, count=count, ways=calls) for n, calls in ways.items()]


@contextmanager
def _fp32_precision(value: str | None = None) -> Iterator[None]:
    """Restores torch's switch for float32 products afterwards; sets it to `value` meanwhile."""
    before = _ONEDNN.matmul.fp32_precision
    if value is not None:
        _ONEDNN.matmul.fp32_precision = value
    try:
        yield
    finally:
        _ONEDNN.matmul.fp32_precision = before
