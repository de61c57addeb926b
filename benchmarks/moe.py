"""Forward and backward of one mixture-of-experts layer on the CPU, against its GEMM floor and other implementations.

Every implementation gets the same tokens, the same weights and the same routing, must give the same output, and runs
in one process with the same settings (malloc keeps freed memory; float32 products use oneDNN where it is accurate).
They take turns, a pass at a time, so that a busy machine is busy for all of them, and the best pass of each counts.
Peers are the blocks of transformers (their default experts and their eager ones) and a loop over expert modules as
tutorials write it. megalite adds to float32 main gradients, as its training does; peers write `grad` in the precision
itself. The floor is the products of router and experts alone, for the tokens that each expert got, each by the fastest
path found. Routing is balanced (every expert the same number of tokens) or skewed (expert i wanted as 1 / (i + 1)).
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.nn.functional as F
from floor import GemmFloor, Product
from rich.console import Console
from rich.table import Table
from table import make_table
from torch import Tensor, nn

from megalite.batch import MicroBatch
from megalite.files import output_file, replace_json
from megalite.kernels.chosen import Kernels
from megalite.kernels.config import GroupedChoice, KernelConfig
from megalite.kernels.cpu import set_fp32_gemm, tune_malloc
from megalite.kernels.products import product_dtype
from megalite.mpu import ParallelState
from megalite.nn.config import ModelConfig
from megalite.nn.context import Context
from megalite.nn.moe import MoELayer
from megalite.nn.router import Router

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
ROWS = 4  # of a micro-batch
Routing = Literal["balanced", "skewed"]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One group of lines of the table."""

    num_experts: int
    top_k: int
    routing: Routing
    precision: str
    tokens: int
    hidden: int
    ffn: int

    @property
    def dtype(self) -> torch.dtype:
        """Of tokens and weights."""
        return DTYPES[self.precision]


@dataclass(frozen=True)
class Layer:
    """What all implementations compute: x [tokens, h] and weights [E, ...], gate rows before up rows."""

    x: Tensor
    dy: Tensor
    router: Tensor
    fc1: Tensor
    fc2: Tensor
    top_k: int


def make_layer(setting: Setting) -> Layer:
    """Random weights, and tokens whose first features are their router logits."""
    torch.manual_seed(0)
    tokens, experts, hidden, ffn = setting.tokens, setting.num_experts, setting.hidden, setting.ffn
    assert experts <= hidden, f"{experts} experts need as many features, not hidden={hidden}"
    x = torch.randn(tokens, hidden)
    if setting.routing == "balanced":
        logits = 0.1 * torch.rand(tokens, experts)
        turn = torch.arange(tokens)[:, None] * setting.top_k + torch.arange(setting.top_k)
        logits.scatter_add_(1, turn % experts, torch.ones(tokens, setting.top_k))
    else:
        # The largest of log-weights with Gumbel noise are a draw with these weights, without replacement.
        noise = -torch.empty(tokens, experts).exponential_().log()
        logits = noise - torch.arange(1.0, experts + 1).log()
    # Steps of a quarter down from the best: exact in bfloat16, where ties would be broken differently by each peer.
    x[:, :experts] = -0.25 * logits.argsort(1, descending=True).argsort(1)
    return Layer(
        x.to(setting.dtype),
        torch.randn(tokens, hidden).to(setting.dtype),
        torch.eye(experts, hidden).to(setting.dtype),
        (torch.randn(experts, 2 * ffn, hidden) * hidden**-0.5).to(setting.dtype),
        (torch.randn(experts, hidden, ffn) * ffn**-0.5).to(setting.dtype),
        setting.top_k,
    )


def _use(module: Any, name: str, values: Tensor) -> nn.Parameter:
    """Makes `values`, which all implementations share, a parameter of `module`."""
    parameter = nn.Parameter(values)
    setattr(module, name, parameter)
    return parameter


def _input(layer: Layer) -> Tensor:
    return layer.x.clone().requires_grad_()


def megalite_pass(layer: Layer, grouped: GroupedChoice) -> Callable[[], Tensor]:
    """`MoELayer` as in a model; no balancing loss, which the peers leave to their models."""
    (experts, hidden, ffn), mpu = layer.fc2.shape, ParallelState.single()
    config = ModelConfig(
        num_layers=1, hidden_size=hidden, num_experts=experts, top_k=layer.top_k, expert_ffn_hidden_size=ffn,
        aux_loss="none",
    )  # fmt: skip
    kernels = Kernels.resolve(KernelConfig(grouped=grouped), device=layer.x.device, dtype=layer.x.dtype, width=hidden)
    with torch.device("meta"):
        module = MoELayer(config, mpu, 0, kernels)
    module.router = Router(config, mpu, 0, None)
    _use(module.router, "weight", layer.router)
    for name, values in (("fc1", layer.fc1), ("fc2", layer.fc2)):
        weight: Any = _use(module.experts, name, values)
        weight.main_grad = torch.zeros_like(values, dtype=torch.float32)
    seq_len = layer.x.shape[0] // ROWS
    context = _context(seq_len)
    x = _input(layer)

    def run() -> Tensor:
        x.grad = module.router.weight.grad = None
        y, _ = module(x.view(seq_len, ROWS, hidden), context)
        y.backward(layer.dy.view_as(y))
        return y.detach().view_as(x)

    return run


def _context(seq_len: int) -> Context:
    tokens = torch.zeros(seq_len, ROWS, dtype=torch.int64)
    batch = MicroBatch(
        tokens=tokens, labels=tokens, loss_mask=torch.ones(seq_len, ROWS), positions=tokens,
        samples=torch.arange(ROWS), step=0,
    )  # fmt: skip
    return Context.uncut(batch)


def huggingface_pass(
    layer: Layer, family: Literal["mixtral", "qwen3_moe"], experts: str | None
) -> Callable[[], Tensor]:
    """A block of transformers, with its default implementation of the experts or a named one."""
    import transformers
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    experts_config: dict[str, Any] = {"num_experts_per_tok": layer.top_k, "hidden_size": layer.x.shape[1]}
    num_experts, ffn = layer.fc1.shape[0], layer.fc2.shape[2]
    config: Any
    if family == "mixtral":
        config = transformers.MixtralConfig(num_local_experts=num_experts, intermediate_size=ffn, **experts_config)
        model, block_cls = transformers.MixtralModel, MixtralSparseMoeBlock
    else:
        experts_config |= {"moe_intermediate_size": ffn, "norm_topk_prob": True}
        config = transformers.Qwen3MoeConfig(num_experts=num_experts, **experts_config)
        model, block_cls = transformers.Qwen3MoeModel, Qwen3MoeSparseMoeBlock
    with torch.device("meta"):
        if experts is None:  # only a model knows its default
            config.num_hidden_layers = 1
            experts = model(config).config._experts_implementation
        config._experts_implementation = experts
        block: Any = block_cls(config)
    _use(block.gate, "weight", layer.router)
    _use(block.experts, "gate_up_proj", layer.fc1)
    _use(block.experts, "down_proj", layer.fc2)
    return _peer(block.train(), layer)


class PlainLoop(nn.Module):
    """A module for each expert, and a loop over them."""

    def __init__(self, layer: Layer):
        super().__init__()
        num_experts, width, hidden = layer.fc1.shape
        self.top_k = layer.top_k
        with torch.device("meta"):
            self.gate = nn.Linear(hidden, num_experts, bias=False)
            self.fc1 = nn.ModuleList(nn.Linear(hidden, width, bias=False) for _ in range(num_experts))
            self.fc2 = nn.ModuleList(nn.Linear(width // 2, hidden, bias=False) for _ in range(num_experts))
        _use(self.gate, "weight", layer.router)
        for modules, values in ((self.fc1, layer.fc1), (self.fc2, layer.fc2)):
            for module, value in zip(modules, values, strict=True):
                _use(module, "weight", value)

    def forward(self, x: Tensor) -> Tensor:
        """[1, tokens, h] -> the same."""
        x = x[0]
        probs = self.gate(x).softmax(-1, dtype=torch.float32)
        gates, chosen = probs.topk(self.top_k)
        gates = (gates / gates.sum(-1, keepdim=True)).to(x.dtype)
        y = torch.zeros_like(x)
        for number, (fc1, fc2) in enumerate(zip(self.fc1, self.fc2, strict=True)):
            token, place = torch.where(chosen == number)
            gate, up = fc1(x[token]).chunk(2, -1)
            y.index_add_(0, token, fc2(F.silu(gate) * up) * gates[token, place, None])
        return y[None]


def _peer(block: nn.Module, layer: Layer) -> Callable[[], Tensor]:
    x = _input(layer)

    def run() -> Tensor:
        block.zero_grad(set_to_none=True)
        x.grad = None
        y = block(x[None])
        y.backward(layer.dy[None])
        return y.detach()[0]

    return run


class ExpertFloor(GemmFloor):
    """The products of the router and of all experts' runs of tokens, whole by each way of doing them."""

    def __init__(self, layer: Layer):
        dtype = product_dtype(layer.x)
        self._precisions = ["ieee"]
        if dtype == torch.float32 and set_fp32_gemm("auto").startswith("onednn"):
            self._precisions.append("bf16")
        chosen = (layer.x.float() @ layer.router.float().t()).topk(layer.top_k).indices
        self.counts = chosen.flatten().bincount(minlength=layer.fc1.shape[0]).tolist()
        self.products = [
            *_products("router", layer.router[None].to(dtype), [layer.x.shape[0]]),
            *_products("fc1", layer.fc1.to(dtype), self.counts),
            *_products("fc2", layer.fc2.to(dtype), self.counts),
        ]


def _products(name: str, weight: Tensor, counts: Sequence[int]) -> list[Product]:
    """Forward, input gradient and weight gradient of runs of `counts` rows."""
    _, outputs, inputs = weight.shape
    x, dy = (torch.randn(sum(counts), size).to(weight.dtype) for size in (inputs, outputs))
    runs = [(w, a, b) for w, a, b in zip(weight, x.split(counts), dy.split(counts), strict=True) if len(a)]
    ends = torch.tensor(counts).cumsum(0).to(torch.int32)
    y, dx, dw = torch.empty_like(dy), torch.empty_like(x), torch.empty_like(weight)
    out = [(a, b, c) for a, b, c in zip(y.split(counts), dx.split(counts), dw, strict=True) if len(a)]
    ways: dict[str, list[Callable[[], object]]] = {
        "forward": [
            lambda: [torch.mm(a, w.t(), out=o) for (w, a, _), (o, _, _) in zip(runs, out, strict=True)],
            lambda: [F.linear(a, w) for w, a, _ in runs],
            lambda: F.grouped_mm(x, weight.mT, offs=ends),
        ],
        "dgrad": [
            lambda: [torch.mm(b, w, out=o) for (w, _, b), (_, o, _) in zip(runs, out, strict=True)],
            lambda: [F.linear(b, w.t()) for w, _, b in runs],
            lambda: F.grouped_mm(dy, weight, offs=ends),
        ],
        "wgrad": [
            lambda: [torch.mm(b.t(), a, out=o) for (_, a, b), (_, _, o) in zip(runs, out, strict=True)],
            lambda: [F.linear(b.t(), a.t()) for _, a, b in runs],
            lambda: F.grouped_mm(dy.t(), x, offs=ends),
        ],
    }
    flops = 2.0 * sum(counts) * inputs * outputs
    return [Product(name=f"{name} {part}", flops=flops, count=1, ways=calls) for part, calls in ways.items()]


@dataclass(kw_only=True)
class Runner:
    """One line of the table while it is measured."""

    name: str
    run: Callable[[], Tensor]
    seconds: list[float] = field(default_factory=list)

    def step(self) -> None:
        """One timed pass."""
        begin = time.perf_counter()
        self.run()
        self.seconds.append(time.perf_counter() - begin)


def make_runners(layer: Layer) -> list[Runner]:
    """megalite with either backend, its peers, and a check that all of them compute the same."""
    runners = [
        Runner(name="megalite (loop)", run=megalite_pass(layer, "loop")),
        Runner(name="megalite (grouped_mm)", run=megalite_pass(layer, "grouped_mm")),
        Runner(name="HF mixtral", run=huggingface_pass(layer, "mixtral", None)),
        Runner(name="HF mixtral (eager)", run=huggingface_pass(layer, "mixtral", "eager")),
        Runner(name="HF qwen3_moe", run=huggingface_pass(layer, "qwen3_moe", None)),
        Runner(name="HF qwen3_moe (eager)", run=huggingface_pass(layer, "qwen3_moe", "eager")),
        Runner(name="plain loop", run=plain_pass(layer)),
    ]
    expected = runners[0].run()
    bound = (1e-5 if expected.dtype == torch.float32 else 0.03) * expected.float().abs().max()
    for runner in runners[1:]:
        difference = (runner.run().float() - expected.float()).abs().max()
        assert difference < bound, f"{runner.name} differs from {runners[0].name} by {difference}, over {bound}"
    return runners


def plain_pass(layer: Layer) -> Callable[[], Tensor]:
    """A pass of the plain loop."""
    return _peer(PlainLoop(layer), layer)


def measure(setting: Setting, rounds: int) -> list[dict[str, object]]:
    """Rows of the table of one setting."""
    layer = make_layer(setting)
    floor, runners = ExpertFloor(layer), make_runners(layer)
    for _ in range(rounds):
        floor.measure()
        for runner in runners:
            runner.step()
    best = {runner.name: min(runner.seconds) for runner in runners}
    peers = min(seconds for name, seconds in best.items() if not name.startswith("megalite"))
    mean = sum(floor.counts) / len(floor.counts)
    return [
        vars(setting)
        | {
            "name": name,
            "step_over_floor": seconds / floor.seconds,
            "over_best_peer": peers / seconds,
            "tokens_per_second": setting.tokens / seconds,
            "floor_seconds": floor.seconds,
            "floor_gflops_per_second": floor.flops / floor.seconds / 1e9,
            "max_over_mean_load": max(floor.counts) / mean,
        }
        for name, seconds in best.items()
    ]


def _table(rows: Sequence[dict[str, object]], tokens: int) -> Table:
    columns = {
        "name": "", "precision": "", "num_experts": "d", "top_k": "d", "routing": "", "max_over_mean_load": ".1f",
        "step_over_floor": ".2f", "over_best_peer": ".2f", "tokens_per_second": ",.0f",
    }  # fmt: skip
    heads = {"step_over_floor": "pass / floor", "over_best_peer": "best peer / pass", "max_over_mean_load": "max load"}
    return make_table(f"One MoE layer, forward and backward, {tokens} tokens", rows, columns, heads)


def main() -> None:
    """Measures and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtypes", nargs="+", choices=tuple(DTYPES), default=tuple(DTYPES))
    parser.add_argument("--experts", nargs="+", default=("8:2", "64:8"), metavar="EXPERTS:TOP_K")
    parser.add_argument("--routing", nargs="+", choices=("balanced", "skewed"), default=("balanced", "skewed"))
    parser.add_argument("--tokens", type=int, default=4096, help=f"a multiple of {ROWS} (default 4096)")
    parser.add_argument("--hidden", type=int, default=512, help="width of a token (default 512)")
    parser.add_argument("--ffn", type=int, default=1024, help="width of an expert (default 1024)")
    parser.add_argument("--rounds", type=int, default=5, help="passes of each implementation (default 5)")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--json", type=output_file, metavar="FILE", help="also write the table as JSON")
    arguments = parser.parse_args()
    if arguments.tokens % ROWS:
        parser.error(f"--tokens {arguments.tokens} is not a multiple of {ROWS}")
    torch.set_num_threads(arguments.threads)
    tune_malloc()
    set_fp32_gemm("auto")
    console = Console() if sys.stdout.isatty() else Console(width=140)
    rows: list[dict[str, object]] = []
    for precision in arguments.dtypes:
        for num_experts, top_k in (map(int, text.split(":")) for text in arguments.experts):
            for routing in arguments.routing:
                setting = Setting(
                    num_experts=num_experts, top_k=top_k, routing=routing, precision=precision,
                    tokens=arguments.tokens, hidden=arguments.hidden, ffn=arguments.ffn,
                )  # fmt: skip
                with console.status(f"{precision}, {num_experts} experts, {routing}"):
                    rows += measure(setting, arguments.rounds)
    console.print(_table(rows, arguments.tokens))
    if arguments.json is not None:
        replace_json(arguments.json, rows)


if __name__ == "__main__":
    main()
