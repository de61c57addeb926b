"""A model with a cache: the logits of every step equal those of the whole row, and of each row alone."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megalite.batch import MicroBatch
from megalite.kernels.chosen import Kernels
from megalite.kernels.config import KernelConfig
from megalite.models import MODELS
from megalite.models.transformer import Transformer
from megalite.mpu import ParallelState
from megalite.nn.attention import HeadSinks
from megalite.nn.cache import Cache
from megalite.nn.config import ModelConfig
from megalite.parallel.random import initialize

V = 37
BASE = ModelConfig(
    num_layers=3, hidden_size=24, num_heads=4, num_kv_heads=2, ffn_hidden_size=20, vocab_size=V, init_std=0.3
)
EXPERTS = replace(BASE, num_experts=6, top_k=2, expert_ffn_hidden_size=12)
CONFIGS = {
    "llama": BASE,
    "gpt2": replace(BASE, name="gpt2", num_kv_heads=None, max_positions=32, tie_embeddings=True),
    "qwen3": replace(BASE, name="qwen3", head_dim=10, rope_percent=0.6),
    "window": replace(BASE, window=4, window_layers="but_every:2"),
    "softcap": replace(BASE, attention_softcap=3.0, window=5, attention_scale=0.7),
    "sinks": replace(BASE, name="gpt2", attention_sinks=True, max_positions=32, window=3, window_layers="0,2"),
    "lfm2": replace(BASE, name="lfm2", num_layers=4, attention_layers="1,3", conv_kernel_size=4),
    "experts": replace(EXPERTS, moe_layers="every:2", shared_ffn_hidden_size=8, shared_expert_gate=True),
    "lfm2-moe": replace(
        EXPERTS, name="lfm2", attention_layers="1", router_score="sigmoid", expert_bias=True, num_expert_groups=2
    ),
    "gpt-oss": replace(EXPERTS, name="gpt_oss", attention_sinks=True, window=3, window_layers="but_every:2"),
    "deepseek": replace(
        EXPERTS,
        name="deepseek",
        num_kv_heads=None,
        kv_lora_rank=9,
        q_lora_rank=7,
        qk_nope_head_dim=5,
        qk_rope_head_dim=4,
        v_head_dim=6,
        rope_interleaved=True,
    ),
    "yarn": replace(BASE, rope_scaling="yarn", rope_factor=4.0, rope_original_positions=16),
}


def build(config: ModelConfig) -> Transformer:
    """The model in float64, with weights that nothing can hide behind."""
    kernels = Kernels.resolve(KernelConfig(), device=torch.device("cpu"), dtype=torch.float64, width=24)
    model = MODELS[config.name](config, ParallelState.single(), kernels=kernels).double().eval()
    initialize(model, seed=3)
    for module in model.modules():
        if isinstance(module, HeadSinks):
            torch.nn.init.normal_(module.weight, generator=torch.Generator().manual_seed(1))
    return model


def whole_rows(tokens: Tensor) -> MicroBatch:
    """Rows [s, b] for the model as it trains."""
    s, b = tokens.shape
    return MicroBatch(
        tokens=tokens, labels=tokens, loss_mask=torch.ones(s, b), positions=torch.arange(s)[:, None].expand(s, b),
        samples=torch.arange(b), step=0,
    )  # fmt: skip


def random_tokens(length: int, rows: int) -> Tensor:
    return torch.randint(V, (length, rows), generator=torch.Generator().manual_seed(5))


def in_steps(model: Transformer, tokens: Tensor, cache: Cache, sizes: list[int]) -> Tensor:
    """Logits [s, b, vocab] of tokens that come in steps of these sizes."""
    return torch.cat([model.infer(None, cache.batch(part), cache) for part in tokens.split(sizes)])


@pytest.mark.parametrize("name", CONFIGS)
@torch.inference_mode()
def test_every_step_equals_the_whole_row(name: str) -> None:
    model, tokens = build(CONFIGS[name]), random_tokens(16, 2)
    wanted = model.logits(whole_rows(tokens))
    assert wanted.std() > 0.1
    cache = Cache(torch.zeros(2, dtype=torch.int64), capacity=16)
    found = in_steps(model, tokens, cache, [5, 1, 1, 1, 3, 1, 1, 2, 1])
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", CONFIGS)
@torch.inference_mode()
def test_a_row_of_a_padded_batch_equals_the_row_alone(name: str) -> None:
    model, lengths, steps = build(CONFIGS[name]), [7, 2, 5, 1], 9
    tokens = random_tokens(max(lengths) + steps, len(lengths))
    cache = Cache.padded(torch.tensor(lengths), capacity=20)
    for row, padding in enumerate(cache.padding.tolist()):
        tokens[:padding, row] = 36 - row  # whatever it is
    found = in_steps(model, tokens, cache, [max(lengths), *[1] * steps])
    for row, padding in enumerate(cache.padding.tolist()):
        alone = model.logits(whole_rows(tokens[padding:, row : row + 1]))
        torch.testing.assert_close(found[padding:, row : row + 1], alone, rtol=0, atol=1e-10)


@torch.inference_mode()
def test_padding_may_come_in_several_steps() -> None:
    for name in ("window", "lfm2-moe", "sinks"):
        model, lengths = build(CONFIGS[name]), [11, 2]
        tokens = random_tokens(14, 2)
        cache = Cache.padded(torch.tensor(lengths), capacity=14)
        found = in_steps(model, tokens, cache, [3, 4, 1, 3, 2, 1])
        alone = model.logits(whole_rows(tokens[9:, 1:]))
        torch.testing.assert_close(found[9:, 1:], alone, rtol=0, atol=1e-10)


@torch.inference_mode()
def test_rows_may_leave() -> None:
    model, tokens = build(CONFIGS["lfm2"]), random_tokens(12, 3)
    wanted = model.logits(whole_rows(tokens))
    cache = Cache(torch.zeros(3, dtype=torch.int64), capacity=12)
    in_steps(model, tokens[:6], cache, [4, 1, 1])
    kept = torch.tensor([2, 0])
    cache.select(kept)
    found = in_steps(model, tokens[6:, kept], cache, [1] * 6)
    torch.testing.assert_close(found, wanted[6:, kept], rtol=0, atol=1e-10)


@torch.inference_mode()
def test_a_window_bounds_the_memory() -> None:
    model, tokens = build(replace(CONFIGS["softcap"], window=4)), random_tokens(30, 2)
    cache = Cache(torch.zeros(2, dtype=torch.int64), capacity=30)
    in_steps(model, tokens, cache, [20, *[1] * 10])
    assert cache.nbytes == 3 * 2 * (4 * 2 * 2 * 6) * 8  # layers, keys and values, places x rows x heads x features


@torch.inference_mode()
def test_the_last_logits_alone() -> None:
    model, tokens = build(BASE), random_tokens(6, 2)
    cache = Cache(torch.zeros(2, dtype=torch.int64), capacity=6)
    last = model.infer(None, cache.batch(tokens), cache, keep=lambda hidden: hidden[-1:])
    torch.testing.assert_close(last, model.logits(whole_rows(tokens))[-1:], rtol=0, atol=1e-12)


def test_a_full_cache_says_so() -> None:
    cache = Cache(torch.zeros(1, dtype=torch.int64), capacity=3)
    with pytest.raises(AssertionError, match="0 and 4 tokens in a cache of 3"):
        cache.batch(random_tokens(4, 1))
