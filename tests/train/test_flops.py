"""FLOPs counted by formula against FLOPs counted while other people's models run."""

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Lfm2Config,
    Lfm2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
)

from megalite.mpu import ParallelConfig
from megalite.nn.config import ModelConfig
from megalite.pipeline.schedule import make_plan
from megalite.train import flops
from megalite.train.config import TrainConfig
from megalite.train.stages import stage_layers

LLAMA = ModelConfig(
    name="llama", num_layers=3, hidden_size=48, num_heads=6, num_kv_heads=2, head_dim=10, ffn_hidden_size=100,
    vocab_size=131,
)  # fmt: skip
EAGER: Any = {"attn_implementation": "eager"}
GPT2 = ModelConfig(name="gpt2", num_layers=2, hidden_size=48, num_heads=6, vocab_size=131, max_positions=32)
MIXTRAL = ModelConfig(
    num_layers=2, hidden_size=48, num_heads=6, num_kv_heads=2, ffn_hidden_size=100, vocab_size=131, num_experts=5,
    top_k=2,
)  # fmt: skip
QWEN2_MOE = ModelConfig(
    num_layers=3, hidden_size=48, num_heads=6, num_kv_heads=2, ffn_hidden_size=100, vocab_size=131, num_experts=6,
    top_k=3, expert_ffn_hidden_size=20, shared_ffn_hidden_size=36, shared_expert_gate=True, moe_layers="0,2",
)  # fmt: skip
LFM2 = ModelConfig(
    name="lfm2", num_layers=4, hidden_size=48, num_heads=6, num_kv_heads=2, ffn_hidden_size=100, vocab_size=131,
    attention_layers="1,2",
)  # fmt: skip
ALL = {"llama": LLAMA, "gpt2": GPT2, "mixtral": MIXTRAL, "qwen2-moe": QWEN2_MOE, "lfm2": LFM2}


def peer(name: str) -> torch.nn.Module:
    model = ALL[name]
    if model.name == "gpt2":
        return GPT2LMHeadModel(
            GPT2Config(
                n_layer=model.num_layers, n_embd=model.hidden_size, n_head=model.num_heads, vocab_size=model.vocab_size,
                n_positions=model.max_positions, **EAGER,
            )
        )  # fmt: skip
    sizes: Any = dict(
        num_hidden_layers=model.num_layers, hidden_size=model.hidden_size, num_attention_heads=model.num_heads,
        num_key_value_heads=model.kv_heads, head_dim=model.head_size, intermediate_size=model.ffn_size,
        vocab_size=model.vocab_size, **EAGER,
    )  # fmt: skip
    experts: Any = {"num_experts_per_tok": model.top_k, "experts_implementation": "eager"}
    if name == "mixtral":
        return MixtralForCausalLM(MixtralConfig(**sizes, **experts, num_local_experts=model.num_experts))
    if name == "qwen2-moe":
        return Qwen2MoeForCausalLM(
            Qwen2MoeConfig(
                **sizes, **experts, num_experts=model.num_experts, moe_intermediate_size=model.expert_ffn_size,
                shared_expert_intermediate_size=model.shared_ffn_hidden_size, mlp_only_layers=[1],
            )
        )  # fmt: skip
    if name == "lfm2":
        kinds = ["full_attention" if model.is_attention_layer(layer) else "conv" for layer in range(model.num_layers)]
        return Lfm2ForCausalLM(Lfm2Config(**sizes, layer_types=kinds, block_auto_adjust_ff_dim=False))
    return LlamaForCausalLM(LlamaConfig(**sizes))


@pytest.mark.parametrize("name", ALL)
def test_step_flops_are_those_that_a_plain_model_runs(name: str) -> None:
    model = ALL[name]
    rows, seq_len = 3, 16
    tokens = torch.arange(rows * seq_len).reshape(rows, seq_len) % model.vocab_size
    network = peer(name)
    with FlopCounterMode(display=False) as counter:
        network(tokens, labels=tokens).loss.backward()
    full_attention = 2 * flops.attention_flops(model, seq_len)  # the peer also computes the half that is masked
    forward = 2 * flops.matmul_parameters(model) * seq_len + full_attention
    aten = torch.ops.aten
    by_kind = counter.get_flop_counts()["Global"]
    taps = sum(by_kind.get(kind, 0) for kind in (aten.convolution, aten.convolution_backward))
    assert counter.get_total_flops() - taps == 3 * rows * forward
    assert flops.step_flops(model, seq_len, rows) == 3 * rows * (forward - full_attention // 2)


def test_stages_are_balanced_by_the_experts_that_a_token_uses() -> None:
    """Dense layers first, as in DeepSeek-V3, each as dear as four MoE layers."""
    model = ModelConfig(
        num_layers=10, hidden_size=64, num_heads=4, ffn_hidden_size=2048, vocab_size=8, num_experts=32, top_k=2,
        expert_ffn_hidden_size=128, moe_layers="from:2",
    )  # fmt: skip
    cost = [flops.layer_matmul_parameters(model, layer) for layer in range(10)]
    assert cost[0] == cost[1] == 64 * (4 * 64 + 3 * 2048) and set(cost[2:]) == {64 * (4 * 64 + 3 * 256 + 32)}
    plan = make_plan("1f1b", 2, 4, 1)
    for layers_per_stage, expected in ((None, [2, 8]), ((5, 5), [5, 5])):
        stages = stage_layers(model, ParallelConfig(pp=2, layers_per_stage=layers_per_stage), plan)
        assert [len(layers) for layers in stages] == expected


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
