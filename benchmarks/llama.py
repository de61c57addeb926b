"""The Llama that whole steps are measured on: megalite's training of it, and transformers' model of the same sizes."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from megalite.config import Config
from megalite.data.build import Datasets
from megalite.data.config import DataConfig
from megalite.data.gpt_dataset import Sample
from megalite.kernels.config import KernelConfig
from megalite.layout import parse_layout
from megalite.mpu import ParallelState
from megalite.nn.config import ModelConfig
from megalite.optim.config import OptimConfig
from megalite.train.build import build_training
from megalite.train.config import TrainConfig
from megalite.train.run import choose_kernels
from megalite.train.step import Training

LLAMA_32M = ModelConfig(
    num_layers=8, hidden_size=512, num_heads=8, num_kv_heads=4, ffn_hidden_size=1408, vocab_size=8192
)
LEARNING_RATE = 1e-4


class RandomTokens:
    """Uniform random rows; `num_rows` different ones."""

    def __init__(self, vocab_size: int, seq_len: int, num_rows: int = 1 << 20):
        self.vocab_size, self.seq_len, self.num_rows = vocab_size, seq_len, num_rows

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, i: int, /) -> Sample:
        row = np.random.default_rng(i % self.num_rows).integers(0, self.vocab_size, self.seq_len + 1)
        return Sample(row[:-1], row[1:], np.ones(self.seq_len, np.float32), np.arange(self.seq_len))


def megalite_training(
    model: ModelConfig,
    layout: str,
    *,
    precision: str,
    seq_len: int,
    micro_batch_size: int,
    global_batch_size: int,
    tune_malloc: bool = True,
    num_rows: int = 1 << 20,
) -> Training:
    """This rank's part of a training, in a process that is set up as that of a run."""
    config = parse_layout(layout).apply(
        Config(
            model=model,
            data=DataConfig(seq_len=seq_len),
            optim=OptimConfig(lr=LEARNING_RATE, schedule="constant"),
            train=TrainConfig(
                precision=precision,  # pyright: ignore[reportArgumentType]
                micro_batch_size=micro_batch_size,
                global_batch_size=global_batch_size,
            ),
            kernels=KernelConfig(malloc_tuning=tune_malloc),
        )
    )
    device, mpu = torch.device("cpu"), ParallelState.build(config.parallel)
    choose_kernels(config, device)
    samples = RandomTokens(model.vocab_size, seq_len, num_rows)
    datasets = Datasets(train=samples, validation=None, tokenizer=None, summary=[], fingerprint="")
    return build_training(config, mpu, device, datasets=datasets)


def huggingface_llama(model: ModelConfig, seq_len: int) -> Any:
    """transformers' LlamaForCausalLM of the same sizes, in float32."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=model.vocab_size,
            hidden_size=model.hidden_size,
            intermediate_size=model.ffn_size,
            num_hidden_layers=model.num_layers,
            num_attention_heads=model.num_heads,
            num_key_value_heads=model.kv_heads,
            max_position_embeddings=seq_len,
            rms_norm_eps=model.norm_eps,
            tie_word_embeddings=False,
            use_cache=False,
        )
    )
