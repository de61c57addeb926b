"""Attention over a sequence that is cut over 2 ranks with a thread each, against one rank with 2 threads.

Forward and backward of causal attention, or of packed documents, with grouped heads. The floor is attention on one rank
by the fastest way that it has; "x floor" compares across machines. Peers on the same 2 ranks are torch's experimental
context parallelism, where it runs, and what people write by hand: all keys and values gathered, then SDPA under a mask.
All take turns, and the best turn of each counts; the time of a turn is that of its slower rank.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from torch import Tensor

from megalite.batch import MicroBatch
from megalite.files import output_file, replace_json
from megalite.kernels.attention import attention
from megalite.kernels.attention_kernel import AttentionKernel, attend
from megalite.kernels.attention_mask import AttentionMask, first_seen
from megalite.kernels.backends import Traits
from megalite.kernels.chosen import Kernels
from megalite.kernels.cpu import set_fp32_gemm, tune_malloc
from megalite.mpu import ParallelConfig, ParallelState
from megalite.parallel.collectives import gather_sequence
from megalite.parallel.context import cut_rows
from megalite.parallel.context_attention import ContextAttention
from megalite.testing.world import World

HEADS, KV_HEADS, HEAD_SIZE = 8, 2, 64
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
MODES = ("ring", "all_gather", "ulysses")
TORCH, BY_HAND = "torch context_parallel", "all-gather of KV, SDPA"

Pass = Callable[[], Tensor]


def make_batch(seq_len: int, documents: int) -> MicroBatch:
    """One row; `documents` > 0 packs documents of that many tokens, of half, a quarter, ..., and again."""
    place = torch.arange(seq_len)[:, None]
    starts = None
    if documents:
        lengths, size = [], documents
        while sum(lengths) < seq_len:
            lengths.append(min(size, seq_len - sum(lengths)))
            size = size // 2 if size > 64 else documents
        ends = torch.tensor([0, *lengths]).cumsum(0)
        starts = torch.repeat_interleave(ends[:-1], torch.tensor(lengths))[:, None]
    return MicroBatch(
        tokens=place, labels=place, loss_mask=torch.ones(seq_len, 1), positions=place, samples=torch.zeros(1).long(),
        step=0, documents=starts,
    )  # fmt: skip


def make_tensors(seq_len: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Whole q, k, v and the gradient of the output, the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    heads = (HEADS, KV_HEADS, KV_HEADS, HEADS)
    q, k, v, dout = (torch.randn(seq_len, 1, h, HEAD_SIZE, generator=generator).to(dtype) for h in heads)
    return q, k, v, dout


def make_kernel(dtype: torch.dtype) -> AttentionKernel:
    """What "auto" chooses."""
    return Kernels().attention(Traits(device=torch.device("cpu"), dtype=dtype), HEAD_SIZE**-0.5)


def run_pass(forward: Callable[[Tensor, Tensor, Tensor], Tensor], tensors: tuple[Tensor, ...]) -> Pass:
    """Forward and backward; returns the output."""
    q, k, v = (x.contiguous().requires_grad_() for x in tensors[:3])
    dout = tensors[3].contiguous()

    def both() -> Tensor:
        out = forward(q, k, v)
        out.backward(dout)
        return out.detach()

    return both


def one_rank_ways(batch: MicroBatch, dtype: torch.dtype) -> dict[str, Pass]:
    """Attention of whole rows."""
    tensors, place = make_tensors(batch.seq_len, dtype), batch.tokens
    mask = AttentionMask(query=place, start=first_seen(place, batch.documents), key=place)
    kernel = make_kernel(dtype)
    ways = {"one rank": run_pass(lambda q, k, v: attend(q, k, v, mask, kernel), tensors)}
    if batch.documents is None:
        ways["one rank, SDPA"] = run_pass(lambda q, k, v: attention(q, k, v, backend="sdpa"), tensors)
    return ways


def two_rank_ways(states: dict[str, ParallelState], batch: MicroBatch, dtype: torch.dtype) -> dict[str, Pass]:
    """megalite's modes, and all-gather by hand."""
    tensors, kernel, ways = make_tensors(batch.seq_len, dtype), make_kernel(dtype), {}
    for mode, mpu in states.items():
        _, cut = cut_rows(batch, mpu.cp)
        across = ContextAttention.of(mpu)
        here = tuple(cut.here(x) for x in tensors)
        ways[mode] = run_pass(lambda q, k, v, a=across, c=cut: a(q, k, v, c, kernel), here)
    return ways | {BY_HAND: _by_hand(states["ring"], batch, tensors)}


def _by_hand(mpu: ParallelState, batch: MicroBatch, tensors: tuple[Tensor, ...]) -> Pass:
    """A contiguous cut, keys and values gathered, and a mask of the size of the scores."""
    n = batch.seq_len // mpu.cp.size
    mine = slice(mpu.cp.rank * n, (mpu.cp.rank + 1) * n)
    place = batch.tokens[:, 0]
    starts = torch.zeros_like(place) if batch.documents is None else batch.documents[:, 0]
    allowed = (place[None] <= place[mine, None]) & (place[None] >= starts[mine, None])

    def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = gather_sequence(k, mpu.cp), gather_sequence(v, mpu.cp)
        q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=allowed, enable_gqa=True).permute(2, 0, 1, 3)

    return run_pass(forward, tuple(x[mine] for x in tensors))


def torch_context_parallel(mpu: ParallelState, seq_len: int, dtype: torch.dtype) -> float:
    """Seconds of one pass of torch's ring attention; every query head gets its own keys there."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel

    mesh = init_device_mesh("cpu", (mpu.cp.size,))
    q, k, v, dout = make_tensors(seq_len, dtype)
    k, v = (x.repeat_interleave(HEADS // KV_HEADS, 2) for x in (k, v))
    buffers = [x.permute(1, 2, 0, 3).contiguous() for x in (q, k, v, dout)]
    with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2] * 4):
        q, k, v = (x.detach().requires_grad_() for x in buffers[:3])
        begin = time.perf_counter()
        F.scaled_dot_product_attention(q, k, v, is_causal=True).backward(buffers[3])
        return time.perf_counter() - begin


def measure(mpu: ParallelState, batch: MicroBatch, precision: str, rounds: int) -> dict[str, list[float]]:
    """Seconds of each turn on this rank, by way; ways of one rank run on rank 0, with a thread for each rank."""
    tune_malloc()
    dtype = DTYPES[precision]
    if dtype == torch.float32:
        set_fp32_gemm("auto")
    states = {mode: ParallelState.build(ParallelConfig(cp=mpu.cp.size, cp_mode=mode)) for mode in MODES}
    alone = one_rank_ways(batch, dtype) if mpu.cp.is_first else {}
    together = two_rank_ways(states, batch, dtype)
    seconds: dict[str, list[float]] = {name: [] for name in (*alone, *together)}
    for number in range(rounds + 1):  # the first turn warms up
        for name, run in alone.items():
            torch.set_num_threads(mpu.cp.size)
            taken = _time(run)
            torch.set_num_threads(1)
            seconds[name] += [taken] if number else []
        for name, run in together.items():
            dist.barrier()
            taken = _time(run)
            seconds[name] += [taken] if number else []
    return seconds


def measure_torch(mpu: ParallelState, seq_len: int, precision: str, rounds: int) -> list[float]:
    """The same for torch's context parallelism."""
    return [torch_context_parallel(mpu, seq_len, DTYPES[precision]) for _ in range(rounds + 1)][1:]


def _time(run: Pass) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def compare(world: World, seq_len: int, documents: int, precision: str, rounds: int) -> dict[str, Any]:
    """One group of lines: milliseconds by way, and why a peer is missing."""
    batch, layout = make_batch(seq_len, documents), ParallelConfig(cp=2)
    found = world.run(measure, batch, precision, rounds, layout=layout, timeout=1800.0)
    best = {name: min(map(max, zip(*(rank[name] for rank in found if name in rank), strict=True))) for name in found[0]}
    missing = {}
    if documents:
        missing[TORCH] = "knows no documents"
    else:
        try:
            turns = world.run(measure_torch, seq_len, precision, rounds, layout=layout, timeout=1800.0)
            best[TORCH] = min(map(max, zip(*turns, strict=True)))
        except Exception as error:  # whatever keeps the peer from running is a line of the table
            missing[TORCH] = _last_line(error)
    floor = min(value for name, value in best.items() if name.startswith("one rank"))
    return {
        "seq_len": seq_len,
        "documents": documents,
        "precision": precision,
        "milliseconds": {name: 1e3 * value for name, value in best.items()},
        "over_floor": {name: value / floor for name, value in best.items()},
        "missing": missing,
    }


def _last_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if "Error" in line]
    return (lines[0] if lines else str(error).splitlines()[0])[:160]


def _table(results: list[dict[str, Any]]) -> Table:
    title = f"{HEADS} heads, {KV_HEADS} KV heads of {HEAD_SIZE}; 2 ranks x 1 thread, one rank x 2 threads"
    table = Table(title=title, box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in ("tokens", "documents", "precision", "way", "ms", "x floor"):
        table.add_column(column, justify="left" if column == "way" else "right", no_wrap=True)
    for result in results:
        first = (str(result["seq_len"]), str(result["documents"] or "-"), result["precision"])
        for name, value in result["milliseconds"].items():
            table.add_row(*first, name, f"{value:.1f}", f"{result['over_floor'][name]:.2f}")
            first = ("", "", "")
        for name, reason in result["missing"].items():
            table.add_row(*first, f"{name}: {reason}", "-", "-")
    return table


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seq-len", type=int, nargs="+", default=[4096, 8192, 16384])
    parser.add_argument(
        "--documents", type=int, nargs="+", default=[0, 2048], help="longest document of a packed row; 0: one"
    )
    parser.add_argument("--precision", choices=DTYPES, nargs="+", default=["fp32"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write the figures")
    arguments = parser.parse_args()
    results = []
    with World(2) as world:
        for precision in arguments.precision:
            for seq_len in arguments.seq_len:
                for documents in arguments.documents:
                    results.append(compare(world, seq_len, documents, precision, arguments.rounds))
    Console(width=110).print(_table(results))
    if arguments.json is not None:
        replace_json(arguments.json, results)


if __name__ == "__main__":
    main()
