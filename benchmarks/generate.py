"""Tokens a second of greedy generation, beside transformers' generate with its cache, on the same weights.

Both continue the same random prompts by the same number of tokens; the time is that of the whole call, prompts
included. They take turns, so that both meet the same machine, and the best round of each counts. `cpu_ratio` is the
same of the processor time of this process, which other processes disturb less. `same` is the share of new tokens that
are equal up to each row's first difference: rounding may part two rows of random weights.

    PYTHONPATH=. python benchmarks/generate.py --json generate.json
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from benchmarks.llama import LLAMA_32M, huggingface_llama
from benchmarks.table import make_table
from megalite.generate.generator import Generator
from megalite.generate.load import frozen
from megalite.generate.row import Stop
from megalite.generate.sampling import Sampling
from megalite.kernels.chosen import Kernels
from megalite.kernels.config import KernelConfig
from megalite.kernels.inference import for_inference
from megalite.models import MODELS
from megalite.models.transformer import Transformer
from megalite.mpu import ParallelState
from megalite.nn.config import ModelConfig
from megalite.parallel.random import initialize

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
CPU = torch.device("cpu")
COLUMNS = {
    "dtype": "", "batch": "d", "megalite": ",.1f", "transformers": ",.1f", "ratio": ".2f", "cpu_ratio": ".2f",
    "same": ".2f",
}  # fmt: skip


def build(model: ModelConfig, dtype: torch.dtype) -> Transformer:
    """Our model with kernels for inference, before `frozen`."""
    kernels = Kernels.resolve(KernelConfig(compile=False), device=CPU, dtype=dtype, width=model.hidden_size)
    stage = MODELS[model.name](model, ParallelState.single(), kernels=for_inference(kernels, CPU))
    initialize(stage, seed=0)
    return _cast(stage, dtype)


def _cast(stage: Transformer, dtype: torch.dtype) -> Transformer:
    """The parameters in `dtype`, and what was side by side in memory is so again."""
    for parameter in stage.parameters():
        parameter.data = parameter.data.to(dtype)
    return stage


def build_theirs(model: ModelConfig, ours: Transformer, max_length: int) -> Any:
    """transformers' model with the same weights."""
    theirs = huggingface_llama(model, max_length).to(next(ours.parameters()).dtype).eval()
    theirs.generation_config.pad_token_id = 0
    theirs.generation_config.eos_token_id = None
    names = {
        "attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm",
        "attention.qkv.q": "self_attn.q_proj", "attention.qkv.k": "self_attn.k_proj",
        "attention.qkv.v": "self_attn.v_proj", "attention.proj": "self_attn.o_proj",
        "mlp.fc1.gate": "mlp.gate_proj", "mlp.fc1.up": "mlp.up_proj", "mlp.fc2": "mlp.down_proj",
    }  # fmt: skip
    ends = {"embedding": "model.embed_tokens", "final_norm": "model.norm", "head": "lm_head"}
    targets = dict(theirs.named_parameters())
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            path = name.removesuffix(".weight")
            if path.startswith("layers."):
                _, layer, inside = path.split(".", 2)
                path = f"model.layers.{layer}.{names[inside]}"
            targets[f"{ends.get(path, path)}.weight"].copy_(parameter)
    return theirs


def measure(model: ModelConfig, dtype: str, batch: int, *, prompt: int, new: int, rounds: int) -> dict[str, Any]:
    """One row of the table."""
    ours = build(model, DTYPES[dtype])
    theirs = build_theirs(model, ours, prompt + new)
    ours = frozen(ours, batch)
    tokens = torch.randint(model.vocab_size, (batch, prompt), generator=torch.Generator().manual_seed(1))
    generator = Generator(ours, ParallelState.single(), CPU, context=prompt + new)

    def run_ours() -> Tensor:
        rows = generator.generate(tokens.tolist(), Sampling(temperature=0.0), Stop(max_new_tokens=new))
        return torch.tensor([row.tokens for row in rows])

    @torch.inference_mode()
    def run_theirs() -> Tensor:
        found = theirs.generate(
            tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=new, do_sample=False, use_cache=True
        )
        return found[:, prompt:]

    results = [run() for run in (run_ours, run_theirs)]  # warms both up
    assert results[0].shape == results[1].shape == (batch, new), [x.shape for x in results]
    times = [[_time(run) for run in (run_ours, run_theirs)] for _ in range(rounds)]
    wall, their_wall = (min(turn[who][0] for turn in times) for who in (0, 1))
    cpu, their_cpu = (min(turn[who][1] for turn in times) for who in (0, 1))
    return {
        "dtype": dtype, "batch": batch, "prompt": prompt, "new": new, "rounds": rounds,
        "threads": torch.get_num_threads(), "megalite": batch * new / wall, "transformers": batch * new / their_wall,
        "ratio": their_wall / wall, "cpu_ratio": their_cpu / cpu,
        "same": float((results[0] == results[1]).to(torch.int64).cumprod(-1).double().mean()),
    }  # fmt: skip


def _time(run: Callable[[], Tensor]) -> tuple[float, float]:
    """(seconds by the clock, seconds of the processor)."""
    began, cpu = time.perf_counter(), time.process_time()
    run()
    return time.perf_counter() - began, time.process_time() - cpu


def main(argv: Sequence[str] | None = None) -> int:
    """Measures all combinations and prints the table; with --json, writes it too."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--prompt", type=int, default=32, help="tokens of each prompt")
    parser.add_argument("--new", type=int, default=32, help="tokens added to each")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", help="a file for the rows")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(arguments.threads)
    rows = [
        measure(
            LLAMA_32M, dtype, batch, prompt=arguments.prompt, new=arguments.new, rounds=arguments.rounds
        )
        for dtype in arguments.dtypes
        for batch in arguments.batches
    ]  # fmt: skip
    title = (
        f"tokens/s, greedy, {arguments.prompt} + {arguments.new} tokens, Llama of 32 M parameters,"
        f" {arguments.threads} threads, best of {arguments.rounds} rounds in turn"
    )
    Console(highlight=False, width=110).print(make_table(title, rows, COLUMNS))
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump(rows, file, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
