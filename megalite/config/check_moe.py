"""The rules of a mixture of experts: its router, its experts, and how the layout cuts them."""

from __future__ import annotations

import math

from megalite.config.sections import Config
from megalite.mpu import ParallelConfig
from megalite.nn.config import ModelConfig, MoEConfig
from megalite.pattern import pattern_problem


def moe_problems(config: Config) -> list[str]:
    """Everything about experts that keeps `config` from running."""
    model, parallel = config.model, config.parallel
    if model.num_experts < 0:
        return [f"model.num_experts={model.num_experts} must be at least 0"]
    if model.num_experts == 0:
        return _without_experts(parallel)
    found = [
        f"model.{name}={size} must be at least {least}"
        for name, size, least in (
            ("top_k", model.top_k, 1),
            ("expert_ffn_hidden_size", model.expert_ffn_size, 1),
            ("num_expert_groups", model.num_expert_groups, 1),
            ("top_k_groups", model.top_k_groups, 1),
            ("shared_ffn_hidden_size", model.shared_ffn_hidden_size, 0),
        )
        if size < least
    ]
    if found:
        return found
    return [
        *_layer_problems(model),
        *_choice_problems(model),
        *_group_problems(model),
        *_range_problems(model),
        *_capacity_problems(model),
        *_expert_cut_problems(model, parallel),
        *_dispatch_problems(parallel),
    ]


def moe_layers(model: ModelConfig) -> list[int]:
    """The layers that hold experts."""
    return [layer for layer in range(model.num_layers) if model.is_moe_layer(layer)]


def divisors(n: int, limit: int | None = None) -> str:
    """The divisors of `n`, for a message."""
    return ", ".join(str(d) for d in range(1, min(n, limit or n) + 1) if n % d == 0)


def _without_experts(parallel: ParallelConfig) -> list[str]:
    """A dense model has nothing to cut over the expert axes."""
    return [
        f"parallel.{name}={size} needs experts: set model.num_experts, or {name}=1"
        for name, size in (("ep", parallel.ep), ("etp", parallel.etp))
        if size > 1
    ]


def _layer_problems(model: ModelConfig) -> list[str]:
    """Whether the pattern names layers of the model, and any."""
    pattern, last = model.moe_layers, model.num_layers - 1
    if (problem := pattern_problem(pattern, "model.moe_layers", len(model.all_layers))) is not None:
        return [problem]
    if not moe_layers(model):
        kind = pattern.partition(":")[0]
        most = last + 1 if kind == "every" else last
        return [
            f"model.moe_layers={pattern} names none of num_layers={last + 1} layers, but"
            f" num_experts={model.num_experts}; N can be at most {most}, or num_experts=0 makes a dense model"
        ]
    return []


def _choice_problems(model: ModelConfig) -> list[str]:
    """Whether router, scores and balancing go together."""
    found: list[str] = []
    if model.top_k > model.num_experts:
        found.append(
            f"model.top_k={model.top_k} is more than num_experts={model.num_experts};"
            f" it can be 1 to {model.num_experts}"
        )
    if model.routing == "expert_choice":
        if model.router_normalize:
            found.append(
                "model.routing=expert_choice: a token may have any number of experts, also none, whose weights cannot"
                " be made to add up to 1; use router_normalize=false"
            )
    elif model.top_k == 1 and model.router_normalize:
        found.append(
            "model.top_k=1 with router_normalize=true gives every expert the weight 1, and the router no gradient from"
            " the loss; use router_normalize=false"
        )
    if model.routing == "sinkhorn" and model.aux_loss != "none" and model.aux_loss_coeff > 0:
        found.append(f"model.routing=sinkhorn balances by itself; use aux_loss=none instead of {model.aux_loss}")
    if model.routing != "top_k" and model.expert_bias:
        found.append(
            f"model.routing={model.routing} balances by itself, and expert_bias=true moves the choice of routing=top_k"
            " alone; use expert_bias=false"
        )
    if model.shared_expert_gate and not model.shared_ffn_hidden_size:
        found.append("model.shared_expert_gate=true needs a shared expert: set shared_ffn_hidden_size")
    return found


def _group_problems(model: ModelConfig) -> list[str]:
    """Whether experts fall into equal groups that hold enough of them."""
    experts, groups, kept, top_k = model.num_experts, model.num_expert_groups, model.top_k_groups, model.top_k
    found: list[str] = []
    if experts % groups:
        found.append(
            f"model.num_experts={experts} is not divisible by num_expert_groups={groups};"
            f" num_expert_groups can be {divisors(experts)}"
        )
    if kept > groups:
        found.append(f"model.top_k_groups={kept} is more than num_expert_groups={groups}; it can be 1 to {groups}")
    if groups == 1 and model.group_top_k:
        found.append(f"model.group_top_k={model.group_top_k} needs num_expert_groups above 1; leave it out")
    if found or groups == 1:
        return found
    if model.routing != "top_k":
        found.append(f"model.num_expert_groups={groups}: groups limit routing=top_k alone; use 1 with {model.routing}")
    if model.group_top_k and not 1 <= model.group_top_k <= experts // groups:
        found.append(
            f"model.group_top_k={model.group_top_k} must be 1 to {experts // groups}, the experts of a group, or 0 for"
            " top_k / top_k_groups"
        )
    elif not model.group_top_k and top_k % kept:
        found.append(
            f"model.top_k={top_k} is not divisible by top_k_groups={kept}: a group is judged by its best"
            f" top_k / top_k_groups experts; top_k_groups can be {divisors(top_k, groups)}, or set group_top_k"
        )
    if top_k > kept * experts // groups:
        found.append(
            f"model.top_k={top_k} is more than the {kept * experts // groups} experts of top_k_groups={kept} groups;"
            f" use top_k_groups >= {-(-top_k * groups // experts)}"
        )
    return found


def _range_problems(model: ModelConfig) -> list[str]:
    """Whether the numbers are in their ranges."""
    found = [
        f"model.{name}={getattr(model, name)} must be finite and at least 0"
        for name in ("aux_loss_coeff", "router_z_loss", "expert_bias_rate", "router_norm_eps", "capacity_factor")
        if not 0 <= getattr(model, name) < math.inf
    ]
    if not 0 < model.router_scale < math.inf:
        found.append(f"model.router_scale={model.router_scale} must be finite and above 0")
    for name in ("swiglu_alpha", "swiglu_limit"):
        value = getattr(model, name)
        if not 0 < value < math.inf:
            found.append(f"model.{name}={value} must be finite and above 0")
        elif model.name != "gpt_oss" and value != getattr(MoEConfig, name):
            found.append(f"model.{name}={value}: only the experts of name=gpt_oss are clamped; leave it out")
    if not 0 <= model.router_jitter < 1:
        found.append(f"model.router_jitter={model.router_jitter} must be in [0, 1)")
    return found


def _capacity_problems(model: ModelConfig) -> list[str]:
    """Whether full experts can do what is asked of them."""
    found: list[str] = []
    if model.pad_to_capacity and model.capacity_factor == 0:
        found.append("model.pad_to_capacity=true needs a capacity: set capacity_factor above 0, such as 1.25")
    if model.routing == "expert_choice" and model.drop_policy == "position":
        found.append(
            "model.drop_policy=position: under routing=expert_choice experts take the most probable tokens, and no more"
            " than they have places for; use drop_policy=probability"
        )
    return found


def _expert_cut_problems(model: ModelConfig, parallel: ParallelConfig) -> list[str]:
    """Whether the expert axes, and tp inside the shared expert, cut equal parts."""
    found: list[str] = []
    for size_name, size, axis, ranks in (
        ("num_experts", model.num_experts, "ep", parallel.ep),
        ("expert_ffn_hidden_size", model.expert_ffn_size, "etp", parallel.etp),
        ("shared_ffn_hidden_size", model.shared_ffn_hidden_size, "tp", parallel.tp),
    ):
        if ranks >= 1 and size % ranks:
            # Above 64 only num_experts is a sensible cut.
            legal = divisors(size, None if axis == "ep" else 64)
            found.append(f"model.{size_name}={size} is not divisible by parallel.{axis}={ranks}; {axis} can be {legal}")
    return found


def _dispatch_problems(parallel: ParallelConfig) -> list[str]:
    """Whether tokens can go to their experts in the way that is asked for."""
    found: list[str] = []
    if not parallel.cut_expert_tokens:
        if parallel.sequence_parallel:
            found.append(
                "parallel.cut_expert_tokens=false: sequence_parallel cuts the tokens already; use one of the two"
            )
        if parallel.etp != parallel.tp:
            found.append(
                f"parallel.cut_expert_tokens=false: every tensor-parallel rank sends all tokens, so etp={parallel.etp}"
                f" must be tp={parallel.tp}; use etp={parallel.tp}, or cut_expert_tokens=true"
            )
    node, hierarchical = parallel.expert_node_size, parallel.expert_dispatch == "hierarchical"
    if hierarchical and (node is None or node < 1 or parallel.ep % node):
        found.append(
            f"parallel.expert_dispatch=hierarchical needs expert_node_size={node} to divide ep={parallel.ep};"
            f" expert_node_size can be {divisors(parallel.ep)}"
        )
    if node is not None and not hierarchical:
        found.append(
            f"parallel.expert_node_size={node} has a meaning for expert_dispatch=hierarchical only,"
            f" not for {parallel.expert_dispatch}; leave it out"
        )
    return found
