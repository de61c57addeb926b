"""Every kernel on a GPU: correctness against float64, then speed beside eager, torch.compile, Liger and apex.

    PYTHONPATH=. python benchmarks/gpu_kernels.py [--json FILE] [--markdown FILE] [--only NAME]

One command, under six minutes. Sizes are those of an 8B model. A row gives milliseconds, gigabytes per second of the
bytes that the operation must move, that as a share of the copy bandwidth measured in the same run, and how many times
as long the others take. Without a GPU, `--check` runs the correctness part at small sizes in Triton's interpreter.
"""

from __future__ import annotations

import argparse
import importlib
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import gpu_attention
from megalite.files import output_file, replace_json, replace_text
from megalite.kernels import adamw, dropout, rope, softmax
from megalite.kernels.cross_entropy import CrossEntropyConfig
from megalite.kernels.grad_norm import sum_of_squares
from megalite.testing.gpu_time import gpu_seconds


@dataclass(frozen=True, kw_only=True)
class Size:
    """The shapes of one run."""

    tokens: int = 8192
    hidden: int = 4096
    ffn: int = 14336
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    vocab_size: int = 32064
    loss_rows: int = 2048
    scores: tuple[int, int, int] = (8, 2048, 2048)
    parameters: int = 1 << 28


SMALL = Size(
    tokens=6, hidden=48, ffn=80, heads=3, kv_heads=1, head_dim=16, vocab_size=101, loss_rows=5, scores=(2, 7, 9),
    parameters=500,
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One operation at one size, as several libraries have it; all take the same inputs."""

    name: str
    """With its size: "rms_norm 8192 x 4096"."""
    inputs: Sequence[Tensor]
    """Leaves; those that require a gradient get one in the backward part."""
    ours: Callable[..., Any]
    """The Triton kernel."""
    eager: Callable[..., Any]
    """The same by plain PyTorch operations, which is what torch.compile gets too, and float64 for the right value."""
    forward_bytes: int
    """The least that forward must move."""
    backward_bytes: int = 0
    """The least that backward must move; 0: there is none."""
    peers: dict[str, Callable[..., Any]] = field(default_factory=dict)
    """Other libraries', by name."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One measured direction of one operation."""

    name: str
    direction: str
    milliseconds: float
    gigabytes_per_second: float
    share_of_copy: float
    times_as_long: dict[str, float]
    """Library to its time over ours."""


def main() -> None:
    """Checks, measures, prints, writes."""
    arguments = _parser().parse_args()
    started = time.monotonic()
    if arguments.check:
        if os.environ.get("TRITON_INTERPRET") != "1":
            sys.exit("gpu_kernels.py: --check runs in the interpreter: TRITON_INTERPRET=1 python benchmarks/...")
        repair: Any = importlib.import_module("megalite.testing.triton_interpreter")
        repair.repair()
        print(*_check_all(_chosen(SMALL, "cpu", arguments.only), report=print), sep="\n")
        return
    if not torch.cuda.is_available():
        sys.exit("gpu_kernels.py: no GPU here; --check with TRITON_INTERPRET=1 does what can be done without one")
    errors = _check_all(_chosen(Size(tokens=515, parameters=1 << 20), "cuda", arguments.only), report=print)
    copy = _copy_bandwidth()
    rows = []
    for operation in _chosen(Size(), "cuda", arguments.only):
        rows += _measure(operation, copy)
        print(_markdown_row(rows[-1]), flush=True)
        if time.monotonic() - started > arguments.seconds:
            print(f"stopped after {arguments.seconds} seconds, at {operation.name}")
            break
    products: list[gpu_attention.Row] = []
    if not arguments.only:
        errors += gpu_attention.faults(torch.device("cuda"))
        products = gpu_attention.measure(torch.device("cuda"))
    _write(arguments, rows, products, errors, copy)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write all numbers there")
    parser.add_argument("--markdown", type=output_file, metavar="FILE", help="write the table there")
    parser.add_argument("--only", default="", help="only operations whose name contains this")
    parser.add_argument("--seconds", type=float, default=330.0, help="begin no further operation after so long")
    parser.add_argument("--check", action="store_true", help="correctness only, in the interpreter")
    return parser


def _chosen(size: Size, device: str, only: str) -> Iterator[Operation]:
    """The operations, made one after another, so that only one's tensors are in memory."""
    for make in (_norms, _gated, _gelu, _dropout, _rope, _softmax, _loss, _optimizer):
        yield from (operation for operation in make(size, device) if only in operation.name)


def _random(*shape: int, device: str, dtype: torch.dtype = torch.bfloat16, grad: bool = True) -> Tensor:
    generator = torch.Generator(device).manual_seed(sum(shape))
    return torch.randn(shape, device=device, generator=generator).to(dtype).requires_grad_(grad)


def _norms(size: Size, device: str) -> Iterator[Operation]:
    from megalite.kernels.triton import norm

    shape, n = (size.tokens, size.hidden), size.tokens * size.hidden
    x, residual = (_random(*shape, device=device) for _ in range(2))
    weight, bias = (_random(size.hidden, device=device) for _ in range(2))
    eps, dims = 1e-5, (size.hidden,)

    def rms_add(x: Tensor, r: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        total = x + r
        return F.rms_norm(total, dims, w, eps), total

    label = f"{size.tokens} x {size.hidden}"
    yield Operation(
        name=f"rms_norm {label}", inputs=[x, weight], forward_bytes=4 * n, backward_bytes=6 * n,
        ours=lambda x, w: norm.rms_norm(x, w, eps),
        eager=lambda x, w: F.rms_norm(x, dims, w, eps),
        peers=_peers(
            liger=(
                "liger_kernel.ops.rms_norm", "LigerRMSNormFunction",
                lambda f, x, w: f.apply(x, w, eps, 0.0, "none"),
            ),
            apex=("apex.normalization.fused_layer_norm", "fused_rms_norm_affine", lambda f, x, w: f(x, w, dims, eps)),
        ),
    )  # fmt: skip
    yield Operation(
        name=f"layer_norm {label}", inputs=[x, weight, bias], forward_bytes=4 * n, backward_bytes=6 * n,
        ours=lambda x, w, b: norm.layer_norm(x, w, b, eps),
        eager=lambda x, w, b: F.layer_norm(x, dims, w, b, eps),
        peers=_peers(
            liger=("liger_kernel.ops.layer_norm", "LigerLayerNormFunction", lambda f, x, w, b: f.apply(x, w, b, eps)),
            apex=(
                "apex.normalization.fused_layer_norm", "fused_layer_norm_affine",
                lambda f, x, w, b: f(x, w, b, dims, eps),
            ),
        ),
    )  # fmt: skip
    yield Operation(
        name=f"rms_norm_add {label}", inputs=[x, residual, weight], forward_bytes=8 * n, backward_bytes=8 * n,
        ours=lambda x, r, w: norm.rms_norm_add(x, r, w, eps), eager=rms_add,
    )  # fmt: skip


def _gated(size: Size, device: str) -> Iterator[Operation]:
    from megalite.kernels.triton import activation

    n = size.tokens * size.ffn
    packed = _random(size.tokens, 2 * size.ffn, device=device)
    forms = {
        "swiglu": (activation.swiglu_packed, F.silu, "swiglu", "LigerSiLUMulFunction"),
        "geglu": (activation.geglu_packed, lambda x: F.gelu(x, approximate="tanh"), "geglu", "LigerGELUMulFunction"),
    }

    def eager(act: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        return lambda x: act(x[..., : x.shape[-1] // 2]) * x[..., x.shape[-1] // 2 :]

    def halves(x: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = x.chunk(2, -1)
        return gate.contiguous(), up.contiguous()

    for name, (ours, act, module, function) in forms.items():
        yield Operation(
            name=f"{name} {size.tokens} x {size.ffn}", inputs=[packed], forward_bytes=6 * n, backward_bytes=10 * n,
            ours=ours, eager=eager(act),
            peers=_peers(
                liger=(f"liger_kernel.ops.{module}", function, lambda f, x: f.apply(*halves(x)))
            ),
        )  # fmt: skip


def _gelu(size: Size, device: str) -> Iterator[Operation]:
    from megalite.kernels.triton import activation

    x, bias = _random(size.tokens, size.ffn, device=device), _random(size.ffn, device=device)
    n = x.numel()
    yield Operation(
        name=f"bias_gelu {size.tokens} x {size.ffn}", inputs=[x, bias], forward_bytes=4 * n, backward_bytes=6 * n,
        ours=activation.gelu, eager=lambda x, b: F.gelu(x + b, approximate="tanh"),
    )  # fmt: skip


def _dropout(size: Size, device: str) -> Iterator[Operation]:
    from megalite.kernels.triton import dropout as ours

    x, residual = (_random(size.tokens, size.hidden, device=device) for _ in range(2))
    bias, n = _random(size.hidden, device=device), x.numel()
    key, tokens = dropout.dropout_key(1, 2, 3, device), torch.arange(size.tokens, device=device)
    yield Operation(
        name=f"bias_dropout_add {size.tokens} x {size.hidden}", inputs=[x, residual, bias],
        forward_bytes=6 * n, backward_bytes=4 * n,
        ours=lambda x, r, b: ours.bias_dropout_add(x, b, r, 0.1, key, tokens),
        eager=lambda x, r, b: dropout.bias_dropout_add(x, b, r, 0.1, key, tokens),
        # Another mask, so it is timed only: what a model without stateless dropout would run.
        peers={"torch dropout": lambda x, r, b: r + F.dropout(x + b, 0.1)},
    )  # fmt: skip


def _rope(size: Size, device: str) -> Iterator[Operation]:
    from megalite.kernels.triton.rope import apply_rope

    positions = torch.arange(size.tokens, device=device).unsqueeze(1)
    cos, sin = rope.rope_tables(positions, size.head_dim, 500000.0)
    packed = size.heads + 2 * size.kv_heads  # as layers call it; values pass through
    for heads, num_turned in ((size.heads, size.heads), (packed, size.heads + size.kv_heads)):
        x = _random(size.tokens, 1, heads, size.head_dim, device=device)
        least = 4 * x.numel() + 4 * (cos.numel() + sin.numel())
        yield Operation(
            name=f"rope {size.tokens} x {heads} x {size.head_dim}", inputs=[x],
            forward_bytes=least, backward_bytes=least,
            ours=partial(apply_rope, cos=cos, sin=sin, num_turned=num_turned),
            eager=partial(rope.apply_rope, cos=cos, sin=sin, num_turned=num_turned),
        )  # fmt: skip


def _softmax(size: Size, device: str) -> Iterator[Operation]:
    from megalite.kernels.triton.softmax import masked_softmax

    heads, queries, keys = size.scores
    scores = _random(1, heads, queries, keys, device=device)
    mask = torch.rand(1, 1, queries, keys, device=device) > 0.2
    n = scores.numel()
    yield Operation(
        name=f"masked_softmax {heads} x {queries} x {keys}", inputs=[scores], forward_bytes=5 * n, backward_bytes=6 * n,
        ours=lambda x: masked_softmax(x, mask, 0.1), eager=lambda x: softmax.masked_softmax(x, mask, 0.1),
    )  # fmt: skip


def _loss(size: Size, device: str) -> Iterator[Operation]:
    from megalite.kernels import cross_entropy as reference
    from megalite.kernels.triton import cross_entropy

    logits = _random(size.loss_rows, size.vocab_size, device=device, grad=False)
    targets = torch.arange(size.loss_rows, device=device) % size.vocab_size
    terms = CrossEntropyConfig(vocab_size=size.vocab_size, z_loss=1e-4)

    def both(module: Any) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
        def run(x: Tensor) -> tuple[Tensor, Tensor]:
            stats = module.ce_stats(x, targets, terms)
            lse, *_ = reference.merge_ce_stats(stats.unsqueeze(0))
            return stats, module.ce_grad_(x, targets, lse, torch.ones_like(lse), terms)

        return run

    yield Operation(
        name=f"cross_entropy {size.loss_rows} x {size.vocab_size}", inputs=[logits], forward_bytes=6 * logits.numel(),
        ours=both(cross_entropy), eager=both(reference),
        peers=_peers(
            liger=(
                "liger_kernel.ops.cross_entropy", "cross_entropy_forward",
                lambda f, x: f(x, targets, None, -100, 1e-4, 0.0, "sum", None, False),
            )
        ),
    )  # fmt: skip


def _optimizer(size: Size, device: str) -> Iterator[Operation]:
    from megalite.kernels.triton import adamw as ours
    from megalite.kernels.triton import grad_norm

    n = size.parameters
    state = [_random(n, device=device, dtype=torch.float32, grad=False) for _ in range(3)]
    state.append(torch.rand(n, device=device))
    lowp = torch.zeros(n, device=device, dtype=torch.bfloat16)
    numbers: dict[str, Any] = dict(lr=1e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, step=10)

    def stepped(module: Any) -> Callable[..., tuple[Tensor, ...]]:
        def run(param: Tensor, grad: Tensor, m: Tensor, v: Tensor, lowp: Tensor) -> tuple[Tensor, ...]:
            module.fused_adamw_(param, grad, m, v, lowp_copy=lowp, **numbers)
            return param, m, v

        return run

    yield Operation(
        name=f"adamw {n}", inputs=[*state, lowp], forward_bytes=30 * n, ours=stepped(ours), eager=stepped(adamw),
       
    )  # fmt: skip
    yield Operation(
        name=f"sum_of_squares {n}", inputs=[state[1]], forward_bytes=4 * n,
        ours=grad_norm.sum_of_squares, eager=sum_of_squares,
    )  # fmt: skip


def _peers(**libraries: tuple[str, str, Callable[..., Any]]) -> dict[str, Callable[..., Any]]:
    """Those that can be imported: name to (module, attribute, call), the attribute being the call's first argument."""
    found = {}
    for name, (module, attribute, call) in libraries.items():
        try:
            function = getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError):
            continue
        found[name] = lambda *inputs, call=call, function=function: call(function, *inputs)
    return found


def _check_all(operations: Iterator[Operation], report: Callable[[str], None]) -> list[str]:
    """Compares all with float64 and eager; returns what is wrong, one line each."""
    faults = []
    for operation in operations:
        ours, eager = (_results(operation, f, None) for f in (operation.ours, operation.eager))
        exact = _results(operation, operation.eager, torch.float64)
        for index, (mine, theirs, want) in enumerate(zip(ours, eager, exact, strict=True)):
            error, bound = _error(mine, want), 1.1 * _error(theirs, want) + 1e-6
            if not error <= bound:
                faults.append(f"{operation.name}: result {index} has error {error:.2e}, eager's is {bound / 1.1:.2e}")
        report(f"{operation.name}: {len(ours)} results against float64, {'wrong' if faults else 'right'} so far")
    return faults


def _results(operation: Operation, function: Callable[..., Any], dtype: torch.dtype | None) -> list[Tensor]:
    """Outputs, then gradients for a gradient of ones over the elements' number, in the inputs' dtype or in `dtype`."""
    inputs = [x.detach().clone().to(dtype or x.dtype).requires_grad_(x.requires_grad) for x in operation.inputs]
    outputs = function(*inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    leaves = [x for x in inputs if x.requires_grad]
    grads = torch.autograd.grad(outputs, leaves, [_gradient(y) for y in outputs]) if leaves else ()
    return [*(y.detach() for y in outputs), *grads]


def _gradient(y: Tensor) -> Tensor:
    place = torch.arange(y.numel(), device=y.device) % 17
    return (place.to(y.dtype) / 16 - 0.5).view(y.shape)


def _error(x: Tensor, exact: Tensor) -> float:
    """Root mean square error, relative to the root mean square of what is right."""
    exact = exact.double()
    return ((x.double() - exact).square().mean() / exact.square().mean().clamp(min=1e-30)).sqrt().item()


def _copy_bandwidth() -> float:
    """Bytes per second read and written by a copy of 1 GiB."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / gpu_seconds(lambda: target.copy_(source))


def _measure(operation: Operation, copy: float) -> list[Row]:
    """Forward, and backward where there is one."""
    functions = {"ours": operation.ours, "eager": operation.eager, "torch.compile": torch.compile(operation.eager)}
    functions |= operation.peers
    forward, backward = {}, {}
    for name, function in functions.items():
        try:
            forward[name] = gpu_seconds(lambda f=function: _no_grad(f, operation.inputs))
            if operation.backward_bytes:
                backward[name] = _backward_seconds(function, operation.inputs)
        except Exception as error:  # another library that does not run here is no reason to lose the rest
            if name == "ours":
                raise
            print(f"{operation.name}: {name} fails: {type(error).__name__}: {error}", file=sys.stderr)
        torch.compiler.reset()
    rows = [_row(operation.name, "forward", operation.forward_bytes, forward, copy)]
    if operation.backward_bytes:
        rows.append(_row(operation.name, "backward", operation.backward_bytes, backward, copy))
    return rows


def _no_grad(function: Callable[..., Any], inputs: Sequence[Tensor]) -> None:
    with torch.no_grad():
        function(*inputs)


def _backward_seconds(function: Callable[..., Any], inputs: Sequence[Tensor]) -> float:
    outputs = function(*inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    leaves, grads = [x for x in inputs if x.requires_grad], [_gradient(y) for y in outputs]
    return gpu_seconds(lambda: torch.autograd.grad(outputs, leaves, grads, retain_graph=True))


def _row(name: str, direction: str, least: int, seconds: dict[str, float], copy: float) -> Row:
    ours = seconds["ours"]
    return Row(
        name=name,
        direction=direction,
        milliseconds=1e3 * ours,
        gigabytes_per_second=least / ours / 1e9,
        share_of_copy=least / ours / copy,
        times_as_long={other: time / ours for other, time in seconds.items() if other != "ours"},
    )


def _markdown_row(row: Row) -> str:
    others = ", ".join(f"{name} {factor:.2f}" for name, factor in row.times_as_long.items())
    speed = f"{row.milliseconds:.3f} | {row.gigabytes_per_second:.0f} | {row.share_of_copy:.2f}"
    return f"| {row.name} | {row.direction} | {speed} | {others} |"


def _write(
    arguments: argparse.Namespace,
    rows: Sequence[Row],
    products: Sequence[gpu_attention.Row],
    errors: Sequence[str],
    copy: float,
) -> None:
    triton: Any = importlib.import_module("triton")
    machine = {
        "gpu": torch.cuda.get_device_name(),
        "copy_gigabytes_per_second": copy / 1e9,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
    }
    lines = [
        f"{machine['gpu']}, torch {machine['torch']}, triton {machine['triton']}; copy {copy / 1e9:.0f} GB/s",
        "",
        "| operation | direction | ms | GB/s | of copy | times as long |",
        "| --- | --- | ---: | ---: | ---: | --- |",
        *map(_markdown_row, rows),
        "",
        gpu_attention.table(products),
        "",
        *(errors or ["All results are as near to float64 as those of eager PyTorch."]),
    ]
    print(*lines, sep="\n")
    if arguments.markdown is not None:
        replace_text(arguments.markdown, "\n".join(lines) + "\n")
    if arguments.json is not None:
        result = {"machine": machine, "errors": list(errors), "rows": [asdict(row) for row in rows]}
        result["products"] = [asdict(row) for row in products]
        replace_json(arguments.json, result)
    if errors:
        sys.exit(1)


if __name__ == "__main__":
    main()
