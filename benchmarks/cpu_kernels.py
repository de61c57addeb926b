"""Each fused operation on the CPU, forward and backward, against the ways to write it in plain PyTorch.

eager is the definition in differentiable operations, compiled the same under torch.compile, aten what torch itself has
for it (where it has something). torch and own compile are the two forms in kernels/, one of which `auto` takes. The
ways take turns, and the best round of each counts. Dropout in aten draws other masks (a generator, not a hash).
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor

from megalite.files import output_file, replace_json
from megalite.kernels import compiled, norm
from megalite.kernels.activation import gelu, swiglu_packed
from megalite.kernels.attention import attention
from megalite.kernels.backends import Traits, compile_problem
from megalite.kernels.chosen import Kernels
from megalite.kernels.config import KernelConfig
from megalite.kernels.cpu import set_fp32_gemm, tune_malloc
from megalite.kernels.cross_entropy import CrossEntropyConfig, ce_grad_, ce_stats
from megalite.kernels.dropout import bias_dropout_add, dropout_key, keep_mask
from megalite.kernels.rope import apply_rope, rope_tables
from megalite.kernels.short_conv import gated_short_conv

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
EPS, DROP = 1e-5, 0.1
OURS = ("torch", "own compile")

Way = Callable[[], object]


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Of the activations."""

    tokens: int
    hidden: int
    ffn: int
    heads: int
    head_size: int
    vocab: int

    @property
    def seq_len(self) -> int:
        """Rows are four to a micro-batch."""
        return max(1, self.tokens // 4)


@dataclass(frozen=True, kw_only=True)
class Operation:
    """An operation and the ways to compute it, each a call with all its work."""

    name: str
    chosen: str
    """Which of its ways `auto` takes."""
    ways: Mapping[str, Way]


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """The definition."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS) * weight).to(x.dtype)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """The definition."""
    wide = x.float()
    centred = wide - wide.mean(-1, keepdim=True)
    return (centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + EPS) * weight + bias).to(x.dtype)


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The definition, as in Hugging Face's Llama."""
    cos, sin = (torch.cat((table, table), -1).unsqueeze(2).to(x.dtype) for table in (cos, sin))
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


def swiglu(x: Tensor) -> Tensor:
    """The definition."""
    gate, up = x.chunk(2, -1)
    return gate * torch.sigmoid(gate) * up


def tanh_gelu(x: Tensor) -> Tensor:
    """The definition."""
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)))


def drop_add(x: Tensor, bias: Tensor, residual: Tensor, key: Tensor, index: Tensor) -> Tensor:
    """The definition, with the stateless mask."""
    keep = keep_mask(key, DROP, index, x.shape[-1])
    return residual + torch.where(keep, (x + bias) / (1 - DROP), 0.0)


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """The definition, one loss a row."""
    wide = logits.float()
    return wide.logsumexp(-1) - wide.gather(1, labels[:, None])[:, 0]


def short_conv(x: Tensor, weight: Tensor) -> Tensor:
    """The definition; x is [s, b, 3h]."""
    b, c, x = x.chunk(3, -1)
    u, taps = b * x, weight.shape[1]
    padded = F.pad(u, (0, 0, 0, 0, taps - 1, 0))
    return c * sum((padded[j : j + len(u)] * weight[:, j] for j in range(1, taps)), padded[: len(u)] * weight[:, 0])


def aten_conv(x: Tensor, weight: Tensor) -> Tensor:
    """With torch's grouped convolution, as in Hugging Face's LFM2."""
    b, c, x = x.chunk(3, -1)
    channels, taps = weight.shape
    z = F.conv1d((b * x).permute(1, 2, 0), weight[:, None], groups=channels, padding=taps - 1)
    return c * z[..., : len(x)].permute(2, 0, 1)


def both_ways(function: Callable[..., Tensor], leaves: Sequence[Tensor], dy: Tensor, *rest: Any) -> Way:
    """Forward and backward of function(*leaves, *rest)."""

    def run() -> object:
        return torch.autograd.grad(function(*leaves, *rest), leaves, dy)

    return run


def operations(sizes: Sizes, dtype: torch.dtype) -> list[Operation]:
    """All of them, on tensors of their own."""
    generator = torch.Generator().manual_seed(0)

    def values(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype).requires_grad_()

    kernels = Kernels.resolve(KernelConfig(), device=torch.device("cpu"), dtype=dtype, width=sizes.hidden)
    rows, hidden = (sizes.seq_len, 4), sizes.hidden
    x, residual, dy = values(*rows, hidden), values(*rows, hidden), values(*rows, hidden).detach()
    weight, bias = values(hidden), values(hidden)
    heads = values(*rows, sizes.heads, sizes.head_size)
    positions = torch.arange(sizes.seq_len)[:, None].expand(rows)
    tables = rope_tables(positions, sizes.head_size, 1e4)
    key, index = dropout_key(0, 0, 1), torch.arange(sizes.seq_len * 4).view(rows)
    packed, wide = values(*rows, 2 * sizes.ffn), values(*rows, sizes.ffn)
    taps, gated = values(hidden, 3), values(*rows, 3 * hidden)

    def operation(
        op: str, leaves: Sequence[Tensor], dy: Tensor, *rest: Any, eager: Callable[..., Tensor],
        aten: Callable[..., Tensor] | None, own: Callable[..., Tensor], made: Callable[..., Tensor],
    ) -> Operation:  # fmt: skip
        ways = {
            "eager": both_ways(eager, leaves, dy, *rest),
            "compiled": both_ways(torch.compile(eager), leaves, dy, *rest),
            "torch": both_ways(own, leaves, dy, *rest),
            "own compile": both_ways(made, leaves, dy, *rest),
        }
        if aten is not None:
            ways["aten"] = both_ways(aten, leaves, dy, *rest)
        return Operation(name=op, chosen={"compiled": "own compile"}.get(kernels.chosen[op], "torch"), ways=ways)

    def dropped(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda x, bias, residual, key, index: function(x, bias, residual, DROP, key, index)

    made = [
        operation(
            "rms_norm", (x, weight), dy, eager=rms_norm, aten=lambda x, w: F.rms_norm(x, (hidden,), w, EPS),
            own=lambda x, w: norm.rms_norm(x, w, EPS), made=lambda x, w: compiled.rms_norm(x, w, EPS),
        ),
        operation(
            "layer_norm", (x, weight, bias), dy, eager=layer_norm,
            aten=lambda x, w, b: F.layer_norm(x, (hidden,), w, b, EPS),
            own=lambda x, w, b: norm.layer_norm(x, w, b, EPS), made=lambda x, w, b: compiled.layer_norm(x, w, b, EPS),
        ),
        operation(
            "rope", (heads,), heads.detach(), *tables, eager=rope, aten=None, own=apply_rope, made=compiled.apply_rope
        ),
        operation(
            "swiglu", (packed,), wide.detach(), eager=swiglu,
            aten=lambda x: F.silu(x[..., : sizes.ffn]) * x[..., sizes.ffn :],
            own=swiglu_packed, made=compiled.swiglu_packed,
        ),
        operation(
            "gelu", (wide,), wide.detach(), eager=tanh_gelu, aten=lambda x: F.gelu(x, approximate="tanh"),
            own=gelu, made=compiled.gelu,
        ),
        operation(
            "bias_dropout_add", (x, bias, residual), dy, key, index, eager=drop_add,
            aten=lambda x, bias, residual, key, index: residual + F.dropout(x + bias, DROP),
            own=dropped(bias_dropout_add), made=dropped(compiled.bias_dropout_add),
        ),
        operation(
            "short_conv", (gated, taps), dy, eager=short_conv, aten=aten_conv,
            own=gated_short_conv, made=compiled.gated_short_conv,
        ),
    ]  # fmt: skip
    logits = values(max(1, sizes.tokens // 4), sizes.vocab)
    labels = torch.randint(sizes.vocab, (len(logits),), generator=generator)
    return [*made, cross_entropies(logits, labels, kernels), attentions(sizes, dtype, values)]


def cross_entropies(logits: Tensor, labels: Tensor, kernels: Kernels) -> Operation:
    """Statistics and gradient of a quarter of the tokens, as the loss takes them; ours overwrite the logits."""
    terms = CrossEntropyConfig(vocab_size=logits.shape[1])
    dloss = torch.ones(len(logits))

    def ours(stats: Callable[..., Tensor], grad: Callable[..., Tensor]) -> object:
        with torch.no_grad():
            top, total = stats(logits, labels, terms)[:2]
            return grad(logits, labels, total.log() + top, dloss, terms)

    fast = torch.compile(cross_entropy)
    ways: dict[str, Way] = {
        "eager": both_ways(cross_entropy, (logits,), dloss, labels),
        "compiled": both_ways(fast, (logits,), dloss, labels),
        "aten": both_ways(partial(F.cross_entropy, reduction="none"), (logits,), dloss.to(logits.dtype), labels),
        "torch": partial(ours, ce_stats, ce_grad_),
        "own compile": partial(ours, compiled.ce_stats, compiled.ce_grad_),
    }  # fmt: skip
    chosen = {kernels.chosen["ce_stats"], kernels.chosen["ce_grad"]}
    if len(chosen) == 2:
        ways["mixed"] = partial(ours, kernels.ce_stats, kernels.ce_grad)
        return Operation(name="cross entropy", chosen="mixed", ways=ways)
    return Operation(name="cross entropy", chosen="own compile" if "compiled" in chosen else "torch", ways=ways)


def attentions(sizes: Sizes, dtype: torch.dtype, values: Callable[..., Tensor]) -> Operation:
    """Causal attention; torch.compile would only wrap its matrix products."""
    q, k, v = (values(sizes.seq_len, 4, sizes.heads, sizes.head_size) for _ in range(3))
    seen = torch.ones(sizes.seq_len, sizes.seq_len, dtype=torch.bool).tril()

    def eager(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
        scores = (q @ k.mT * sizes.head_size**-0.5).masked_fill(~seen, -math.inf)
        return (scores.softmax(-1) @ v).permute(2, 0, 1, 3)

    traits = Traits(device=q.device, dtype=dtype, seq_len=sizes.seq_len)
    dy = q.detach()
    return Operation(
        name="causal attention",
        chosen={"sdpa": "aten"}.get(str(Kernels().causal_attention(traits)), "torch"),
        ways={
            "eager": both_ways(eager, (q, k, v), dy),
            "compiled": both_ways(torch.compile(eager), (q, k, v), dy),
            "aten": both_ways(partial(attention, backend="sdpa"), (q, k, v), dy),
            "torch": both_ways(partial(attention, backend="block"), (q, k, v), dy),
        },
    )


def measure(operation: Operation, rounds: int) -> dict[str, float]:
    """Best seconds of each way."""
    best = dict.fromkeys(operation.ways, math.inf)
    for number in range(rounds + 1):
        for name, way in operation.ways.items():
            begin = time.perf_counter()
            way()
            if number:  # the first compiles
                best[name] = min(best[name], time.perf_counter() - begin)
    return best


def rows(sizes: Sizes, arguments: argparse.Namespace, console: Console) -> list[dict[str, Any]]:
    """One for each operation, dtype and number of threads."""
    found: list[dict[str, Any]] = []
    for threads in arguments.threads:
        torch.set_num_threads(threads)
        for name in arguments.dtypes:
            torch._dynamo.reset()
            with console.status(f"{name}, {threads} threads"):
                for operation in operations(sizes, DTYPES[name]):
                    if arguments.operations and operation.name not in arguments.operations:
                        continue
                    best = measure(operation, arguments.rounds)
                    ours = best[operation.chosen]
                    found.append(
                        {
                            "operation": operation.name, "dtype": name, "threads": threads, "auto": operation.chosen,
                            "auto_ms": 1e3 * ours, "auto_over_best": ours / min(best.values()),
                            "ms": {way: 1e3 * seconds for way, seconds in best.items()},
                        }
                    )  # fmt: skip
    return found


def table(found: Sequence[Mapping[str, Any]], sizes: Sizes) -> Table:
    """Milliseconds, and how auto's choice compares with the best."""
    made = Table(title=f"Forward and backward, ms; {sizes}")
    ways = ("eager", "compiled", "aten", *OURS)
    for column in ("operation", "dtype", "threads", *ways, "auto", "auto / best"):
        made.add_column(column, justify="left" if column in ("operation", "dtype", "auto") else "right")
    for row in found:
        times = (f"{row['ms'][way]:.2f}" if way in row["ms"] else "" for way in ways)
        ratio = f"{row['auto_over_best']:.2f}"
        made.add_row(row["operation"], row["dtype"], str(row["threads"]), *times, row["auto"], ratio)
    return made


def main() -> None:
    """Measures and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtypes", nargs="+", choices=tuple(DTYPES), default=tuple(DTYPES))
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--threads", nargs="+", type=int, default=sorted({1, cores}), help="(default 1 and all cores)")
    parser.add_argument("--operations", nargs="+", metavar="NAME", help="only these (default all)")
    parser.add_argument("--rounds", type=int, default=10, help="runs of each way (default 10)")
    for name, size in (
        ("tokens", 2048),
        ("hidden", 1024),
        ("ffn", 2816),
        ("heads", 16),
        ("head-size", 64),
        ("vocab", 32000),
    ):
        parser.add_argument(f"--{name}", type=int, default=size)
    parser.add_argument("--json", type=output_file, metavar="FILE", help="also write the table as JSON")
    arguments = parser.parse_args()
    if (problem := compile_problem(Traits())) is not None:
        sys.exit(f"cpu_kernels.py: torch.compile {problem}")
    names = ("tokens", "hidden", "ffn", "heads", "head_size", "vocab")
    sizes = Sizes(**{name: getattr(arguments, name) for name in names})
    set_fp32_gemm("auto")
    tune_malloc()
    console = Console() if sys.stdout.isatty() else Console(width=150)
    found = rows(sizes, arguments, console)
    console.print(table(found, sizes))
    if arguments.json is not None:
        replace_json(arguments.json, found)


if __name__ == "__main__":
    main()
