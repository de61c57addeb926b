"""What a configuration may not say, each told with what it may."""

import dataclasses
import math
from typing import Any

import pytest

from megalite.config import Config, ConfigError, check
from megalite.mpu import ParallelConfig
from megalite.nn.config import ModelConfig
from megalite.train.config import TrainConfig

Fields = dict[str, Any]
LATENT: Fields = {"name": "deepseek", "kv_lora_rank": 9, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6}


def config_with(
    *,
    model: Fields | None = None,
    parallel: Fields | None = None,
    train: Fields | None = None,
    data: Fields | None = None,
) -> Config:
    config, sizes = Config(), Fields(num_heads=8, hidden_size=128, ffn_hidden_size=384)
    return dataclasses.replace(
        config,
        model=ModelConfig(**(sizes | (model or {}))),
        parallel=ParallelConfig(**(parallel or {})),
        train=TrainConfig(**(train or {})),
        data=dataclasses.replace(config.data, **(data or {})),
    )


def problems(config: Config, world_size: int) -> str:
    with pytest.raises(ConfigError) as caught:
        check(config, world_size)
    return "\n".join(caught.value.problems)


def test_a_sound_config_passes() -> None:
    check(config_with(), 1)
    check(config_with(parallel={"tp": 2, "pp": 2, "sequence_parallel": True}), 8)
    check(config_with(parallel={"cp": 4, "tp": 2, "sequence_parallel": True}, data={"seq_len": 101}), 8)
    check(config_with(model={"num_kv_heads": 2}, parallel={"tp": 4}), 4)  # KV heads shared by two ranks each


def test_all_violations_come_at_once_with_legal_values() -> None:
    text = problems(
        config_with(
            model={"num_heads": 12, "num_kv_heads": 5, "hidden_size": 130, "ffn_hidden_size": 100, "num_layers": 1},
            parallel={"tp": 8, "pp": 2, "sequence_parallel": True, "schedule": "1f1", "zero": 4, "vpp": 2},
            train={"global_batch_size": 30, "precision": "fp8"},
        ),
        32,
    )
    for line in (
        "model.num_heads=12 is not divisible by parallel.tp=8; tp can be 1, 2, 3, 4, 6, 12",
        "model.num_heads=12 is not divisible by num_kv_heads=5; num_kv_heads can be 1, 2, 3, 4, 6, 12",
        "model.hidden_size=130 is not divisible by num_heads=12; the nearest hidden_size are 120 and 132",
        "model.ffn_hidden_size=100 is not divisible by parallel.tp=8; tp can be 1, 2, 4, 5, 10, 20, 25, 50",
        "model.num_kv_heads=5 and parallel.tp=8 do not divide one another; tp can be 1",
        "num_layers=1 is too few for 4 pipeline stages",
        "parallel.schedule='1f1' is not known; did you mean 1f1b?",
        "parallel.zero=4",
        "train.precision=fp8",
        "train.global_batch_size=30 is not divisible by micro_batch_size * dp = 2 * 2 = 4;"
        " the nearest global batches are 28 and 32, or micro_batch_size can be 1, 3, 5, 15",
    ):
        assert line in text


@pytest.mark.parametrize(
    ("changes", "world_size", "said"),
    [
        ({"parallel": {"tp": 3}}, 4, "world size 4 is not divisible"),
        (
            {"train": {"global_batch_size": 32, "batch_ramp": (6, 2, 90), "micro_batch_size": 2}},
            2,
            "train.batch_ramp=[6, 2, 90] has batches of 6, 10, 14 and 3 more rows, not divisible by micro_batch_size *"
            " dp = 2 * 2 = 4; start and increment must be multiples of 4",
        ),
        (
            {"train": {"global_batch_size": 32, "batch_ramp": (8, 16, 90)}},
            1,
            "train.batch_ramp=[8, 16, 90]: steps of 16 do not lead from 8 to global_batch_size=32; they do to 24 and"
            " 40",
        ),
        (
            {
                "parallel": {"pp": 2, "schedule": "dualpipe"},
                "train": {"global_batch_size": 32, "micro_batch_size": 2, "batch_ramp": (6, 26, 90)},
            },
            2,
            "and 3 micro-batches (6 rows / (micro_batch_size * dp))",
        ),
        ({"parallel": {"cp": 4, "cp_mode": "ulysses_ring", "cp_ulysses": 3}}, 4, "it can be 1, 2, 4"),
        (
            {"parallel": {"cp": 4, "tp": 4, "cp_mode": "ulysses"}},
            16,
            "exchanges the 2 heads of a rank (num_heads=8 / tp=4)",
        ),
        ({"parallel": {"cp": 2, "cp_mode": "star"}}, 2, "cp_mode='star': 'star' is not a mode; there are ring"),
        ({"parallel": {"cp_mode": "rings"}}, 1, "did you mean ring?"),
        ({"parallel": {"cp_mode": "every:2=ring"}}, 1, "'every:2=ring' is not a mode; there are ring, all_gather"),
        ({"parallel": {"cp_mode": "ring,every:0=ulysses"}}, 1, "come parts such as but_every:2=all_gather"),
        ({"parallel": {"cp_mode": "ring,ulysses"}}, 1, "come parts such as but_every:2=all_gather"),
        ({"parallel": {"cp_mode": "ring,every:2="}}, 1, "'' is not a mode"),
        ({"parallel": {"cp_mode": "ring,every:2=ulises"}}, 1, "'ulises' is not a mode; did you mean ulysses?"),
        (
            {"parallel": {"cp_mode": "ring,1,9=ulysses"}},
            1,
            "layers=1,9: no layer 9 among num_layers=8; they are 0 to 7",
        ),
        (
            {"parallel": {"cp": 4, "tp": 4, "cp_mode": "ring,0,5=ulysses"}},
            16,
            "exchanges the 2 heads of a rank (num_heads=8 / tp=4)",
        ),
        ({"parallel": {"ep": 2}}, 2, "parallel.ep=2 needs experts: set model.num_experts, or ep=1"),
        ({"parallel": {"etp": 2}}, 2, "parallel.etp=2 needs experts: set model.num_experts, or etp=1"),
        ({"parallel": {"pp": 2, "layers_per_stage": (3, 4)}}, 2, "adds up to 7, but num_layers=8"),
        ({"parallel": {"pp": 3, "layers_per_stage": (4, 0, 4)}}, 3, "leaves stage 1 without parameters"),
        ({"parallel": {"pp": 2, "layers_per_stage": (8,)}}, 2, "has 1 entries for 2 stages"),
        ({"model": {"name": "gpt2", "max_positions": 64}}, 1, "longer than model.max_positions=64"),
        ({"model": {"name": "lama"}}, 1, "did you mean llama?"),
        ({"model": {"num_layers": 0}}, 1, "model.num_layers=0 must be at least 1"),
        ({"model": {"hidden_dropout": 1.0}}, 1, "must be in [0, 1)"),
        ({"model": {"head_dim": 5}}, 1, "must be even"),
        ({"model": {"name": "gpt2", "attention_bias": True}}, 1, "attention of gpt2 has biases; leave it out"),
        ({"model": {**LATENT, "attention_bias": True}}, 1, "attention of deepseek has no biases; leave it out"),
        ({"model": {"kv_lora_rank": 5}}, 1, "model.kv_lora_rank=5: llama has no latent attention; leave it out"),
        ({"model": {"name": "deepseek"}}, 1, "model.v_head_dim=0 must be at least 1: deepseek has latent attention"),
        ({"model": {**LATENT, "num_kv_heads": 4}}, 1, "model.num_kv_heads=4: each of num_heads=8 makes its own keys"),
        ({"model": {**LATENT, "head_dim": 64}}, 1, "a head is qk_nope_head_dim + qk_rope_head_dim = 12 wide; leave"),
        ({"model": {**LATENT, "rope_percent": 0.5}}, 1, "qk_rope_head_dim says what is turned; leave it out"),
        ({"model": {**LATENT, "qk_rope_head_dim": 3}}, 1, "model.qk_rope_head_dim=3 must be even"),
        ({"model": {**LATENT, "q_lora_rank": -1}}, 1, "model.q_lora_rank=-1 must be at least 1, or 0 for queries"),
        ({"model": {"max_positions": 0}}, 1, "model.max_positions=0 must be at least 1"),
        ({"model": {"z_loss": -1e-4}}, 1, "model.z_loss=-0.0001 must be finite and at least 0"),
        ({"model": {"z_loss": math.nan}}, 1, "model.z_loss=nan must be finite"),
        ({"model": {"norm_eps": -1e-5}}, 1, "model.norm_eps=-1e-05 must be finite and at least 0"),
        ({"model": {"norm_eps": math.inf}}, 1, "model.norm_eps=inf must be finite"),
        ({"model": {"init_std": -0.02}}, 1, "model.init_std=-0.02 must be finite and at least 0"),
        ({"model": {"init_std": math.nan}}, 1, "model.init_std=nan must be finite"),
        ({"model": {"rope_theta": 0.0}}, 1, "model.rope_theta=0.0 must be finite and above 0"),
        ({"model": {"rope_theta": math.inf}}, 1, "model.rope_theta=inf must be finite"),
        ({"model": {"attention_layers": "2-5"}}, 1, "model.attention_layers='2-5' should be all, every:N"),
        ({"model": {"attention_layers": "1"}}, 1, "all layers of llama attend; use all, or name=lfm2"),
        ({"model": {"attention_layers": "1,99", "name": "lfm2"}}, 1, "no layer 99 among num_layers=8; they are 0 to 7"),
        ({"model": {"conv_kernel_size": 0}}, 1, "model.conv_kernel_size=0 must be at least 1"),
        ({"train": {"sequence_chunk": -1}}, 1, "train.sequence_chunk=-1 must be at least 0"),
        ({"data": {"pack": "tight"}}, 1, "should be one of concat, best_fit, none"),
        ({"model": {"name": "gpt2", "rope_theta": 5e5}}, 1, "rope_theta=500000.0: gpt2 has learned positions"),
        ({"model": {"rope_factor": 2.0}}, 1, "needs rope_scaling, one of linear"),
        ({"train": {"precision": "fp8"}}, 1, "reserved"),
        ({"train": {"recompute": "selective:loss"}}, 1, "selective: with some of attention,mlp,norm"),
        ({"train": {"recompute": "every:0"}}, 1, "train.recompute='every:0' should be none, full, every:K, block:N"),
        ({"train": {"recompute_stash": True}}, 1, "train.recompute_stash=true: nothing is computed again"),
        ({"train": {"profile_steps": (5, 3)}}, 1, "profile_steps"),
        ({"train": {"global_batch_size": 1}}, 4, "the nearest global batches are 8"),
    ],
)
def test_single_rules(changes: dict[str, Fields], world_size: int, said: str) -> None:
    assert said in problems(config_with(**changes), world_size)


def test_numbers_of_the_model_may_be_zero_where_that_means_something() -> None:
    check(config_with(model={"z_loss": 0.0, "norm_eps": 0.0, "init_std": 0.0}), 1)
    # Rotary positions have no longest sequence: only learned ones are limited by max_positions.
    check(config_with(model={"max_positions": 1}, data={"seq_len": 128}), 1)


def test_options_that_are_reserved_are_refused_and_not_ignored() -> None:
    config = config_with()
    offload = dataclasses.replace(config, optim=dataclasses.replace(config.optim, offload="cpu"))
    assert "offload" in problems(offload, 1)


def test_attention_dropout_needs_the_block_backend() -> None:
    config = config_with(model={"attention_dropout": 0.1})
    check(config, 1)
    named = dataclasses.replace(config, kernels=dataclasses.replace(config.kernels, attention="sdpa"))
    assert "kernels.attention=block or auto" in problems(named, 1)


@pytest.mark.parametrize(
    ("model", "problem"),
    [
        ({"window": -1}, "model.window=-1 must be at least 1 (a token and those before it), or 0 for no limit"),
        ({"window": 4, "window_layers": "odd"}, "model.window_layers='odd' should be all, every:N"),
        ({"window": 4, "window_layers": "1,9"}, "model.window_layers=1,9: no layer 9 among num_layers=8"),
        ({"window_layers": "every:2"}, "model.window_layers=every:2 needs a model.window"),
        ({"attention_softcap": -2.0}, "model.attention_softcap=-2.0 must be finite and above 0, or 0 for no soft"),
        ({"attention_scale": float("inf")}, "model.attention_scale=inf must be finite and above 0"),
    ],
)
def test_what_a_layer_sees(model: dict[str, Any], problem: str) -> None:
    assert problem in problems(config_with(model=model), 1)


@pytest.mark.parametrize(
    ("model", "problem"),
    [
        ({"window": 4}, "has no sliding window (window=4; 0 would do)"),
        ({"attention_softcap": 5.0}, "has no soft-capping"),
    ],
)
def test_a_named_attention_backend_can_do_it(model: dict[str, Any], problem: str) -> None:
    config = config_with(model=model)
    check(config, 1)
    named = dataclasses.replace(config, kernels=dataclasses.replace(config.kernels, attention="sdpa"))
    assert problem in problems(named, 1)


def test_every_section_has_its_say() -> None:
    config = config_with()
    wrong = dataclasses.replace(
        config,
        optim=dataclasses.replace(config.optim, lr=-1.0),
        checkpoint=dataclasses.replace(config.checkpoint, every=-1),
        data=dataclasses.replace(config.data, num_samples=0),
        train=dataclasses.replace(config.train, num_steps=0),
    )
    text = problems(wrong, 1)
    for field in ("data.num_samples=0", "optim.lr=-1.0", "checkpoint.every=-1", "train.num_steps=0"):
        assert field in text
