"""The GEMM floor counts every product of the step, once."""

from __future__ import annotations

import pytest
import torch

from benchmarks.floor import GemmFloor, gemm_floor
from megalite.nn.config import ModelConfig
from megalite.train.flops import step_flops

LLAMA = ModelConfig(num_layers=3, hidden_size=24, num_heads=6, num_kv_heads=2, ffn_hidden_size=40, vocab_size=101)
GPT = ModelConfig(name="gpt2", num_layers=2, hidden_size=24, num_heads=3, vocab_size=77)


@pytest.mark.parametrize("model", [LLAMA, GPT], ids=["llama", "gpt2"])
def test_counts_the_flops_of_a_step(model: ModelConfig) -> None:
    floor = GemmFloor(model, seq_len=16, batch=2, dtype=torch.float32)
    assert floor.flops == step_flops(model, seq_len=16, global_batch_size=2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_way_computes_its_product(dtype: torch.dtype) -> None:
    """All ways of a product give one result, of the size that its FLOPs say."""
    for product in GemmFloor(LLAMA, seq_len=16, batch=2, dtype=dtype).products:
        first, *others = (way() for way in product.ways)
        assert isinstance(first, torch.Tensor)
        for other in others:
            torch.testing.assert_close(other, first)


def test_measures_and_leaves_threads_and_precision_alone() -> None:
    before = torch.get_num_threads(), torch.backends.mkldnn.matmul.fp32_precision  # pyright: ignore[reportAttributeAccessIssue]
    assert 0 < gemm_floor(LLAMA, seq_len=8, batch=1, dtype=torch.float32, threads=1, rounds=1) < 60
    after = torch.get_num_threads(), torch.backends.mkldnn.matmul.fp32_precision  # pyright: ignore[reportAttributeAccessIssue]
    assert after == before
