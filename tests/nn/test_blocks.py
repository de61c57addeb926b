"""`MoELayer`, configured as the mixture-of-experts blocks of the field, against Hugging Face's own blocks.

Output, the gradient of the input and of every weight, on equal weights in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    DeepseekV3Config,
    GptOssConfig,
    Lfm2MoeConfig,
    MixtralConfig,
    OlmoeConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP
from transformers.models.lfm2_moe.modeling_lfm2_moe import Lfm2MoeSparseMoeBlock
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
from transformers.models.olmoe.modeling_olmoe import OlmoeSparseMoeBlock
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeSparseMoeBlock
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from megalite.batch import MicroBatch
from megalite.mpu import ParallelState
from megalite.nn.config import ModelConfig
from megalite.nn.context import Context
from megalite.nn.experts import ClampedSwigluExperts
from megalite.nn.moe import MoELayer
from tests.hugging_face import assert_equal, fill, float64

S, B, H, F = 17, 3, 12, 10
COMMON: dict[str, Any] = {"hidden_size": H, "experts_implementation": "eager"}


class GptOssMoE(MoELayer):
    """A mixture of clamped experts."""

    experts_cls = ClampedSwigluExperts


def _without_interleaving(gate_up: Tensor) -> Tensor:
    """gpt-oss stores gate and up of one feature side by side."""
    return torch.cat((gate_up[..., ::2], gate_up[..., 1::2]), -1)


@dataclass(frozen=True)
class Block:
    """One family: our settings, its block, and what our weights are among its tensors (by name, or as a function)."""

    build: Callable[[], nn.Module]
    settings: dict[str, Any]
    names: dict[str, str | Callable[[Mapping[str, Tensor]], Tensor]] = field(default_factory=dict)
    bias: str | None = None
    layer_cls: type[MoELayer] = MoELayer

    def theirs(self, name: str, tensors: Mapping[str, Tensor]) -> Tensor:
        """The tensor that is ours called `name`."""
        where = (PLAIN | self.names)[name]
        return tensors[where] if isinstance(where, str) else where(tensors)


PLAIN: dict[str, str | Callable[[Mapping[str, Tensor]], Tensor]] = {
    "router.weight": "gate.weight",
    "experts.fc1": "experts.gate_up_proj",
    "experts.fc2": "experts.down_proj",
}


def _shared(prefix: str) -> dict[str, str | Callable[[Mapping[str, Tensor]], Tensor]]:
    return {
        "shared.fc1.gate.weight": f"{prefix}.gate_proj.weight",
        "shared.fc1.up.weight": f"{prefix}.up_proj.weight",
        "shared.fc2.weight": f"{prefix}.down_proj.weight",
    }


BLOCKS = {
    "mixtral": Block(
        lambda: MixtralSparseMoeBlock(
            MixtralConfig(num_local_experts=8, num_experts_per_tok=2, intermediate_size=F, **COMMON)
        ),
        {"num_experts": 8, "top_k": 2},
    ),
    "qwen2-moe": Block(
        lambda: Qwen2MoeSparseMoeBlock(
            Qwen2MoeConfig(
                num_experts=9, num_experts_per_tok=4, moe_intermediate_size=F, shared_expert_intermediate_size=14,
                norm_topk_prob=False, **COMMON,
            )
        ),
        {
            "num_experts": 9, "top_k": 4, "router_normalize": False, "shared_ffn_hidden_size": 14,
            "shared_expert_gate": True,
        },
        _shared("shared_expert") | {"shared_gate.weight": "shared_expert_gate.weight"},
    ),
    "qwen3-moe": Block(
        lambda: Qwen3MoeSparseMoeBlock(
            Qwen3MoeConfig(
                num_experts=12, num_experts_per_tok=5, moe_intermediate_size=F, norm_topk_prob=True, **COMMON
            )
        ),
        {"num_experts": 12, "top_k": 5},
    ),
    "olmoe": Block(
        lambda: OlmoeSparseMoeBlock(
            OlmoeConfig(num_experts=16, num_experts_per_tok=8, intermediate_size=F, norm_topk_prob=False, **COMMON)
        ),
        {"num_experts": 16, "top_k": 8, "router_normalize": False},
    ),
    "deepseek-v3": Block(
        lambda: DeepseekV3MoE(
            DeepseekV3Config(
                n_routed_experts=16, num_experts_per_tok=4, n_group=4, topk_group=2, moe_intermediate_size=F,
                n_shared_experts=2, routed_scaling_factor=2.5, **COMMON,
            )
        ),
        {
            "num_experts": 16, "top_k": 4, "num_expert_groups": 4, "top_k_groups": 2, "router_score": "sigmoid",
            "router_scale": 2.5, "expert_bias": True, "shared_ffn_hidden_size": 2 * F,
        },
        _shared("shared_experts"),
        bias="gate.e_score_correction_bias",
    ),
    "gpt-oss": Block(
        lambda: GptOssMLP(
            GptOssConfig(
                num_local_experts=8, num_experts_per_tok=4, intermediate_size=F, swiglu_limit=7.0, num_hidden_layers=1,
                **COMMON,
            )
        ),
        {"num_experts": 8, "top_k": 4, "router_bias": True},
        {
            "router.weight": "router.weight",
            "router.bias": "router.bias",
            "experts.fc1": lambda tensors: _without_interleaving(tensors["experts.gate_up_proj"]).mT,
            "experts.fc2": lambda tensors: tensors["experts.down_proj"].mT,
            "experts.fc1_bias": lambda tensors: _without_interleaving(tensors["experts.gate_up_proj_bias"]),
            "experts.fc2_bias": "experts.down_proj_bias",
        },
        layer_cls=GptOssMoE,
    ),
    "lfm2-moe": Block(
        lambda: Lfm2MoeSparseMoeBlock(
            Lfm2MoeConfig(num_experts=8, num_experts_per_tok=3, moe_intermediate_size=F, **COMMON)
        ),
        {"num_experts": 8, "top_k": 3, "router_score": "sigmoid", "router_norm_eps": 1e-6, "expert_bias": True},
        bias="expert_bias",
    ),
}  # fmt: skip


def build_pair(block: Block) -> tuple[MoELayer, nn.Module]:
    """Ours and theirs, with the same weights."""
    with float64():
        theirs = block.build().double()
    fill(theirs, std=1.0)
    config = ModelConfig(
        hidden_size=H, num_heads=2, expert_ffn_hidden_size=F, aux_loss="none", aux_loss_coeff=0.0, **block.settings
    )
    ours = block.layer_cls(config, ParallelState.single(), 0).double()
    with torch.no_grad():
        tensors = dict(theirs.named_parameters())
        for name, parameter in ours.named_parameters():
            parameter.copy_(block.theirs(name, tensors))
        if block.bias is not None:
            bias = torch.randn(config.num_experts, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
            dict(theirs.named_buffers())[block.bias].copy_(bias)
            ours.router.expert_bias.copy_(bias)
    return ours, theirs


def context() -> Context:
    ids = torch.zeros(S, B, dtype=torch.int64)
    batch = MicroBatch(
        tokens=ids, labels=ids, loss_mask=torch.ones(S, B), positions=ids, samples=torch.arange(B), step=0
    )
    return Context.uncut(batch)


@pytest.mark.parametrize("name", BLOCKS)
def test_equals_the_block_of_hugging_face(name: str) -> None:
    block = BLOCKS[name]
    ours, theirs = build_pair(block)
    generator = torch.Generator().manual_seed(1)
    data, dy = torch.randn(2, S, B, H, generator=generator, dtype=torch.float64)
    x, x_theirs = data.clone().requires_grad_(), data.transpose(0, 1).contiguous().requires_grad_()
    with float64():
        wanted = theirs(x_theirs)
        wanted = wanted[0] if isinstance(wanted, tuple) else wanted
        wanted.backward(dy.transpose(0, 1))
    y, bias = ours(x, context())
    y.backward(dy)
    assert bias is None and x.grad is not None
    assert_equal(y, wanted.transpose(0, 1), "output")
    assert_equal(x.grad.transpose(0, 1), x_theirs.grad, "gradient of the input")
    grads = {key: parameter.grad for key, parameter in theirs.named_parameters() if parameter.grad is not None}
    for key, parameter in ours.named_parameters():
        assert_equal(parameter.grad, block.theirs(key, grads), key)
    assert len(grads) == len(list(ours.parameters()))


def test_the_bias_chooses_but_does_not_weigh() -> None:
    """Without it the sigmoid families choose otherwise: the parity above would not hold by chance."""
    for name in ("deepseek-v3", "lfm2-moe"):
        ours, _ = build_pair(BLOCKS[name])
        x = torch.randn(S, B, H, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        y, _ = ours(x, context())
        ours.router.expert_bias.zero_()
        assert not torch.allclose(y, ours(x, context())[0])
