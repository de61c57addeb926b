"""FLOPs counted by formula against FLOPs counted while other people's models run."""

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from megalite.nn.config import ModelConfig
from megalite.train import flops
from megalite.train.config import TrainConfig

LLAMA = ModelConfig(
    name="llama", num_layers=3, hidden_size=48, num_heads=6, num_kv_heads=2, head_dim=10, ffn_hidden_size=100,
    vocab_size=131,
)  # fmt: skip
EAGER: Any = {"attn_implementation": "eager"}
GPT2 = ModelConfig(name="gpt2", num_layers=2, hidden_size=48, num_heads=6, vocab_size=131, max_positions=32)


def peer(model: ModelConfig) -> torch.nn.Module:
    if model.name == "gpt2":
        return GPT2LMHeadModel(
            GPT2Config(
                n_layer=model.num_layers, n_embd=model.hidden_size, n_head=model.num_heads, vocab_size=model.vocab_size,
                n_positions=model.max_positions, **EAGER,
            )
        )  # fmt: skip
    return LlamaForCausalLM(
        LlamaConfig(
            num_hidden_layers=model.num_layers, hidden_size=model.hidden_size, num_attention_heads=model.num_heads,
            num_key_value_heads=model.kv_heads, head_dim=model.head_size, intermediate_size=model.ffn_size,
            vocab_size=model.vocab_size, **EAGER,
        )
    )  # fmt: skip


@pytest.mark.parametrize("model", [LLAMA, GPT2], ids=lambda model: model.name)
def test_step_flops_are_those_that_a_plain_model_runs(model: ModelConfig) -> None:
    rows, seq_len = 3, 16
    tokens = torch.arange(rows * seq_len).reshape(rows, seq_len) % model.vocab_size
    network = peer(model)
    with FlopCounterMode(display=False) as counter:
        network(tokens, labels=tokens).loss.backward()
    full_attention = 2 * flops.attention_flops(model, seq_len)  # the peer also computes the half that is masked
    forward = 2 * flops.matmul_parameters(model) * seq_len + full_attention
    assert counter.get_total_flops() == 3 * rows * forward
    assert flops.step_flops(model, seq_len, rows) == 3 * rows * (forward - full_attention // 2)


def test_six_flops_per_parameter_and_token() -> None:
    """Llama-3-8B: 7.5 billion parameters multiply (all but the input embedding); attention adds an eighth at 8192."""
    model = ModelConfig(
        num_layers=32, hidden_size=4096, num_heads=32, num_kv_heads=8, ffn_hidden_size=14336, vocab_size=128256
    )
    assert flops.matmul_parameters(model) == 7_504_658_432
    per_token = flops.step_flops(model, 8192, 1) / 8192
    assert per_token == 6 * 7_504_658_432 + 6 * 8192 * 32 * 128 * 32
    with_full_attention = per_token + 3 * flops.attention_flops(model, 8192) / 8192
    assert with_full_attention / per_token == pytest.approx(1.125, rel=2e-3)


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA H200", 989.4),
        ("NVIDIA GB200", 2500.0),
        ("NVIDIA L4", 121.0),
        ("NVIDIA L40S", 362.05),
        ("AMD Instinct MI300X", 1307.4),
        ("NVIDIA GeForce RTX 3060", None),
    ],
)
def test_peaks_by_device_name(name: str, peak: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert flops.peak_tflops(torch.device("cuda"), "bf16") == peak
    assert flops.peak_tflops(torch.device("cuda"), "fp32") is None
    assert flops.peak_tflops(torch.device("cpu"), "bf16") is None


def test_workload_counts_the_global_batch_whatever_the_layout() -> None:
    train = TrainConfig(global_batch_size=6, micro_batch_size=2, peak_tflops=2.0)
    for num_ranks in (1, 4):
        workload = flops.workload_of(LLAMA, train, seq_len=16, num_ranks=num_ranks, device=torch.device("cpu"))
        assert (workload.samples, workload.tokens, workload.num_ranks) == (6, 96, num_ranks)
        assert workload.flops == flops.step_flops(LLAMA, 16, 6) and workload.peak_tflops == 2.0
