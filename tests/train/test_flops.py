"""FLOPs counted by formula against FLOPs counted while other people's models run."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
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

from megalite.batch import MicroBatch
from megalite.mpu import ParallelConfig
from megalite.nn.config import ModelConfig
from megalite.pipeline.schedule import make_plan
from megalite.train import flops
from megalite.train.config import TrainConfig
from megalite.train.stages import stage_layers
from tests.parallel.dense_attention import causal_mask, starts_of

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
DEEPSEEK = ModelConfig(
    name="deepseek", num_layers=3, hidden_size=48, num_heads=6, ffn_hidden_size=100, vocab_size=131, kv_lora_rank=14,
    q_lora_rank=10, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=6, num_experts=6, top_k=3,
    expert_ffn_hidden_size=20, shared_ffn_hidden_size=40, moe_layers="from:1",
)  # fmt: skip
DEEPSEEK_DIRECT = dataclasses.replace(DEEPSEEK, q_lora_rank=0)
ALL = {
    "deepseek": DEEPSEEK,
    "deepseek-direct": DEEPSEEK_DIRECT,
    "llama": LLAMA,
    "gpt2": GPT2,
    "mixtral": MIXTRAL,
    "qwen2-moe": QWEN2_MOE,
    "lfm2": LFM2,
}


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
    if model.is_latent:
        del sizes["head_dim"]
        return DeepseekV3ForCausalLM(
            DeepseekV3Config(
                **sizes, **experts, kv_lora_rank=model.kv_lora_rank, q_lora_rank=model.q_lora_rank or None,
                qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=6, n_routed_experts=6, n_group=1, topk_group=1,
                moe_intermediate_size=20, n_shared_experts=2, first_k_dense_replace=1, num_mtp_layers=0,
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
    attention = flops.attention_flops(model, {0: flops.row_pairs(seq_len)})
    full_attention = attention * 2 * seq_len // (seq_len + 1)  # the peer also computes the pairs that are masked
    forward = 2 * flops.matmul_parameters(model) * seq_len + full_attention
    aten = torch.ops.aten
    by_kind = counter.get_flop_counts()["Global"]
    taps = sum(by_kind.get(kind, 0) for kind in (aten.convolution, aten.convolution_backward))
    assert counter.get_total_flops() - taps == 3 * rows * forward
    assert flops.step_flops(model, seq_len, rows) == 3 * rows * (forward - full_attention + attention)


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
    assert per_token == 6 * 7_504_658_432 + 6 * 8193 * 32 * 128 * 32
    with_full_attention = per_token + 3 * flops.attention_flops(model, {0: 8192 * 8191 // 2}) / 8192
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


def batch_of(rows: list[list[int]], padding: int = 0) -> MicroBatch:
    """Rows of documents of these lengths, of which the last `padding` tokens are padding."""
    starts = starts_of(*rows)
    place = torch.arange(len(starts))[:, None].expand_as(starts)
    return MicroBatch(
        tokens=place, labels=place, loss_mask=torch.ones_like(place).float(), positions=place,
        samples=torch.arange(starts.shape[1]), step=0, documents=starts if max(map(len, rows)) > 1 else None,
        token_mask=place < len(starts) - padding if padding else None,
    )  # fmt: skip


@pytest.mark.parametrize("window", [0, 1, 5, 24, 30])
@pytest.mark.parametrize("rows", [[[24]], [[24], [24]], [[1, 2, 7, 14], [20, 4]]])
@pytest.mark.parametrize("padding", [0, 3])
def test_pairs_are_those_that_the_mask_leaves(rows: list[list[int]], padding: int, window: int) -> None:
    batch = batch_of(rows, padding)
    allowed = causal_mask(starts_of(*rows), window)[: 24 - padding]
    assert flops.batch_pairs([batch, batch], window) == 2 * int(allowed.sum())


def test_local_layers_count_their_window() -> None:
    model = dataclasses.replace(LLAMA, window=4, window_layers="but_every:3")
    assert flops.windows(model) == (4, 0) and flops.row_pairs(16, 4) == 10 + 12 * 4
    expected = 4 * 60 * (2 * (10 + 12 * 4) + 16 * 17 // 2)
    assert flops.step_flops(model, 16, 2) == 3 * 2 * (2 * flops.matmul_parameters(model) * 16 + expected)
    assert flops.windows(dataclasses.replace(LFM2, window=4, window_layers="0,1")) == (4, 0)


def test_workload_is_that_of_the_global_batch_whatever_the_layout() -> None:
    train = TrainConfig(global_batch_size=6, micro_batch_size=2, peak_tflops=2.0)
    for num_ranks in (1, 4):
        workload = flops.workload_of(train, seq_len=16, num_ranks=num_ranks, device=torch.device("cpu"))
        assert (workload.tokens_of(3), workload.tokens_before(3), workload.num_ranks) == (96, 288, num_ranks)
        assert workload.peak_tflops == 2.0
