"""What layers declare that they keep for backward is what they keep, to the byte, whatever is computed again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from megalite.kernels.chosen import Kernels
from megalite.kernels.saved import Saved
from megalite.layout import parse_layout
from megalite.models.llama import Llama
from megalite.mpu import ParallelState
from megalite.nn.config import ModelConfig
from megalite.testing.world import World
from tests.nn.saved_layers import CPU, Case, kept_by_layers, kept_for_weights
from tests.tiny import MODELS

SINGLE = ParallelState.single()
KINDS = ("none", "full", "every:2", "block:1", "selective", "selective:mlp", "selective:norm", "selective:mlp,norm",
         "selective:attention,mlp,norm")  # fmt: skip
SMALL = {name: replace(model, num_layers=min(model.num_layers, 3)) for name, model in MODELS.items()}
SMALL["qwen3"] = replace(SMALL["llama"], name="qwen3", head_dim=10)
SMALL["window"] = replace(SMALL["llama"], window=5, window_layers="but_every:2", attention_softcap=30.0)
SMALL["sinks"] = replace(SMALL["llama"], attention_sinks=True)
SMALL["gpt-oss"] = replace(
    SMALL["moe"], name="gpt_oss", attention_sinks=True, router_bias=True, shared_ffn_hidden_size=0,
    shared_expert_gate=False,
)  # fmt: skip
SMALL["deepseek"] = replace(
    SMALL["moe-bias"], name="deepseek", num_kv_heads=None, kv_lora_rank=11, q_lora_rank=9, qk_nope_head_dim=5,
    qk_rope_head_dim=4, v_head_dim=6, rope_interleaved=True,
)  # fmt: skip
SMALL["deepseek-direct"] = replace(SMALL["deepseek"], q_lora_rank=0, v_head_dim=13)
SMALL["gemma2"] = replace(
    SMALL["llama"], name="gemma2", window=5, window_layers="but_every:2", attention_softcap=9.0, logit_softcap=7.0
)
SMALL["gemma3"] = replace(SMALL["gemma2"], name="gemma3", attention_softcap=0.0, rope_local_theta=100.0)
SMALL["olmo2"] = replace(SMALL["llama"], name="olmo2", rope_layers="from:1", attention_bias=True)
SMALL["gpt_neox"] = replace(
    SMALL["gpt2"], name="gpt_neox", parallel_residual=True, rope_percent=0.34, attention_dropout=0.0
)
EXACT = [name for name in SMALL if name not in ("moe-capacity", "moe-exact")]  # dropped choices depend on the data


def _rows(models: Sequence[str], telling: Sequence[str]) -> list[object]:
    """All but the telling ones run by `make test-all` only."""
    return [name if name in telling else pytest.param(name, marks=pytest.mark.full) for name in models]


@pytest.mark.parametrize("model", _rows(EXACT, ("llama", "gpt2", "moe", "lfm2-moe", "gpt_neox")))
def test_layers_keep_what_they_declare(model: str) -> None:
    dtypes = (torch.float32, torch.bfloat16, torch.float64)
    cases = [
        Case(model=SMALL[model], dtype=dtype, documents=documents) for dtype in dtypes for documents in (False, True)
    ]
    cases += [Case(model=SMALL[model], sequence_chunk=12, dtype=torch.bfloat16)]
    for case in cases:
        kept, declared = kept_by_layers(SINGLE, case)
        assert kept == declared, case


def test_values_that_are_filled_up_are_kept_so() -> None:
    cases = [
        Case(model=SMALL[model], attention="sdpa", dtype=torch.bfloat16)
        for model in ("llama", "deepseek", "deepseek-direct")
    ]
    for case in (*cases, Case(model=SMALL["deepseek"], attention="block", dtype=torch.bfloat16)):
        kept, declared = kept_by_layers(SINGLE, case)
        assert kept == declared, case


@pytest.mark.parametrize(
    "model", _rows(("llama", "gpt2", "moe-gpt2", "moe-bias", "lfm2-moe", "qwen3", "deepseek"), ("moe-bias",))
)
def test_so_it_is_under_recompute(model: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        for kind in KINDS:
            kept, declared = kept_by_layers(SINGLE, Case(model=SMALL[model], recompute=kind, dtype=dtype))
            assert kept == declared, kind


# The first linear of olmo2 keeps what enters the first layer, which is made before the count.
@pytest.mark.parametrize(
    "model", _rows([name for name in EXACT if name != "olmo2"], ("llama", "gpt2", "moe-bias", "lfm2-moe"))
)
def test_weight_gradients_that_are_put_off_keep_what_was_declared(model: str) -> None:
    for kind in ("none", "full", "selective:attention,mlp,norm"):
        kept, declared = kept_for_weights(SINGLE, Case(model=SMALL[model], recompute=kind, dtype=torch.bfloat16))
        assert kept == declared, kind


@pytest.mark.parametrize("model", ["moe-capacity", "moe-exact"])
def test_dropped_choices_keep_less(model: str) -> None:
    kept, declared = kept_by_layers(SINGLE, Case(model=SMALL[model]))
    assert 0.8 * declared < kept <= declared


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        pytest.param("gpt2", "tp2+sp", marks=pytest.mark.full),
        ("qwen3", "cp2"), ("llama", "cp2:ulysses"), ("moe-gpt2", "tp2+sp+etp2"),
        ("deepseek", "tp2+sp"),
        pytest.param("llama", "tp4", marks=pytest.mark.full),
        pytest.param("moe", "etp2+tp2", marks=pytest.mark.full),
        pytest.param("deepseek", "tp2+cp2:ulysses", marks=pytest.mark.full),
    ],
)  # fmt: skip
def test_so_it_is_on_each_of_several_ranks(model: str, layout: str, world: World) -> None:
    place = parse_layout(layout)
    cases = [Case(model=SMALL[model], dtype=torch.bfloat16)]
    cases += [Case(model=SMALL[model], recompute="full", stash=stash) for stash in (False, True)]
    for case in cases:
        for kept, declared in world.run(
            kept_by_layers, case, layout=place.parallel, ranks=place.num_ranks, timeout=300.0
        ):
            assert kept == declared, case


class _Silent(torch.nn.Module):
    """A norm that does not say what it keeps."""

    def __init__(self, config: ModelConfig, mpu: ParallelState, kernels: Kernels):
        super().__init__()


class _SilentLlama(Llama):
    norm_cls = _Silent


def test_a_block_that_declares_nothing_is_named() -> None:
    stage = _SilentLlama(SMALL["llama"], SINGLE)
    with pytest.raises(TypeError, match=r"_Silent does not say what it keeps .* saved\(self, shape: BatchShape\)"):
        stage.saved(stage.batch_shape(16, 1, device=CPU))
    assert stage.loss_saved(stage.batch_shape(16, 1, device=CPU)) != Saved()
