"""Tiny models and a tiny corpus of odd sizes, for tests of whole training steps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from megalite.config import Config
from megalite.data.config import DataConfig
from megalite.data.indexed import IndexedWriter
from megalite.nn.config import ModelConfig
from megalite.optim.config import OptimConfig
from megalite.train.config import TrainConfig

VOCAB = 61

LLAMA = ModelConfig(
    name="llama", num_layers=5, hidden_size=48, num_heads=8, num_kv_heads=2, ffn_hidden_size=32, vocab_size=VOCAB,
    z_loss=1e-3, init_std=0.2,
)  # fmt: skip
GPT2 = ModelConfig(
    name="gpt2", num_layers=4, hidden_size=24, num_heads=4, ffn_hidden_size=40, vocab_size=VOCAB, max_positions=40,
    tie_embeddings=True, hidden_dropout=0.2, attention_dropout=0.1, label_smoothing=0.1, init_std=0.05,
)  # fmt: skip
TIED_LLAMA = replace(LLAMA, tie_embeddings=True, num_layers=3, hidden_dropout=0.1)

MOE = replace(
    LLAMA, num_layers=4, num_experts=4, expert_ffn_hidden_size=20, moe_layers="every:2", aux_loss_coeff=0.05,
    router_z_loss=1e-2, shared_ffn_hidden_size=24, shared_expert_gate=True,
)  # fmt: skip
MOE_BIAS = replace(
    LLAMA, num_layers=4, num_experts=8, expert_ffn_hidden_size=20, moe_layers="from:1", router_score="sigmoid",
    num_expert_groups=2, router_scale=2.5, expert_bias=True, expert_bias_rate=0.05, aux_loss="global",
    router_jitter=0.1, router_bias=True,
)  # fmt: skip
MOE_CAPACITY = replace(
    LLAMA, num_layers=2, num_experts=4, top_k=1, router_normalize=False, capacity_factor=0.75, aux_loss_coeff=0.05,
    tie_embeddings=True,
)  # fmt: skip
MOE_EXACT = replace(
    MOE_CAPACITY, top_k=2, router_normalize=True, drop_policy="position", pad_to_capacity=True, aux_loss="global_exact"
)
MOE_MICRO_BATCH = replace(MOE, aux_loss="micro_batch")
MOE_CHOICE = replace(MOE, routing="expert_choice", router_normalize=False)
MOE_SINKHORN = replace(
    MOE, routing="sinkhorn", aux_loss="none", router_score="sigmoid", top_k=1, router_normalize=False
)

MOE_GPT2 = replace(
    GPT2, num_experts=4, top_k=2, expert_ffn_hidden_size=20, moe_layers="1,2", aux_loss_coeff=0.05,
    shared_ffn_hidden_size=16,
)  # fmt: skip

LFM2 = replace(
    LLAMA,
    name="lfm2",
    num_layers=4,
    attention_layers="1,3",
    conv_kernel_size=4,
    tie_embeddings=True,
    hidden_dropout=0.1,
)
LFM2_MOE = replace(MOE, name="lfm2", attention_layers="2", moe_layers="from:2")

MTP = replace(LLAMA, num_layers=3, mtp_layers=2, mtp_loss_factor=0.4, hidden_dropout=0.1)
MTP_GPT2 = replace(GPT2, num_layers=3, mtp_layers=1)
MTP_MOE = replace(MOE, num_layers=3, moe_layers="from:1", mtp_layers=1, aux_loss="global", expert_bias=True)

MODELS = {
    "llama": LLAMA, "gpt2": GPT2, "tied-llama": TIED_LLAMA, "moe": MOE, "moe-bias": MOE_BIAS,
    "moe-capacity": MOE_CAPACITY, "moe-exact": MOE_EXACT, "moe-micro-batch": MOE_MICRO_BATCH, "moe-choice": MOE_CHOICE,
    "moe-sinkhorn": MOE_SINKHORN, "moe-gpt2": MOE_GPT2,
    "lfm2": LFM2, "lfm2-moe": LFM2_MOE,
    "mtp": MTP, "mtp-gpt2": MTP_GPT2, "mtp-moe": MTP_MOE,
}  # fmt: skip


def write_tokens(prefix: Path) -> str:
    """A token file of documents of odd lengths; returns its prefix."""
    generator = torch.Generator().manual_seed(0)
    with IndexedWriter(prefix, dtype="uint16", vocab_size=VOCAB) as writer:
        for length in torch.randint(3, 90, (60,), generator=generator).tolist():
            writer.add_document(torch.randint(VOCAB, (length,), generator=generator).numpy())
    return str(prefix)


def config_for(model: str, tokens: str, cache: Path, **train: object) -> Config:
    """Global batch of 16 rows of 32 tokens (sequence parallelism over 8 divides it)."""
    settings: dict = {"global_batch_size": 8, "micro_batch_size": 2, "seed": 11, "num_steps": 2} | train
    return Config(
        model=MODELS[model],
        data=DataConfig(paths=(tokens,), seq_len=32, split="100,0,0", cache_dir=str(cache)),
        optim=OptimConfig(lr=0.05, schedule="linear", clip_grad=0.5, weight_decay=0.1),
        train=TrainConfig(**settings),
    )
