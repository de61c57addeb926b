"""The rules that a configuration must keep, checked together before anything is built."""

from __future__ import annotations

import dataclasses
import difflib
import math
from pathlib import Path

import torch

from megalite.config.check_latent import latent_problems
from megalite.config.check_moe import divisors, moe_layers, moe_problems
from megalite.config.sections import SECTIONS, Config, ConfigError, field_types
from megalite.config.values import convert
from megalite.data.config import problems as data_problems
from megalite.kernels.backends import Traits
from megalite.kernels.registry import config_problems
from megalite.models import MODELS
from megalite.mpu import ParallelConfig, RankGrid
from megalite.nn.config import ModelConfig, rope_problems
from megalite.nn.lora import target_problems
from megalite.parallel.shard import is_like, shard_of
from megalite.pattern import is_pattern, pattern_problem
from megalite.pipeline.lower import lower
from megalite.pipeline.measured import TRACE
from megalite.pipeline.partition import partition
from megalite.pipeline.plan import Plan, PlanError
from megalite.pipeline.schedule import SCHEDULES, min_chunks
from megalite.train.build import describe_model, plan_of
from megalite.train.distributed import device_type
from megalite.train.stages import MEASURED, stage_layers, trace_of


def check(config: Config, world_size: int) -> None:
    """Raises one ConfigError that lists everything which keeps `config` from running on `world_size` ranks."""
    problems = _type_problems(config)
    if not problems:
        grid = RankGrid.problems(world_size, config.parallel)
        dp = None if grid else config.parallel.data_parallel_size(world_size)
        problems = [
            *grid,
            *_not_built(config),
            *_model_problems(config.model),
            *moe_problems(config),
            *_cut_problems(config),
            *_pipeline_problems(config, dp),
            *_zero_problems(config.parallel),
            *_kernel_problems(config),
            *config.train.problems(dp),
            *data_problems(config.data),
            *config.optim.problems(),
            *_precision_problems(config),
            *_recompute_problems(config),
            *_frozen_problems(config),
            *config.checkpoint.problems(),
        ]
    if problems:
        raise ConfigError(problems)


def _type_problems(config: Config) -> list[str]:
    """Fields whose value is not of their type: code that builds a Config can set anything."""
    found: list[str] = []
    for section in SECTIONS:
        for name, hint in field_types(section).items():
            value = getattr(getattr(config, section), name)
            try:
                convert(value, hint)
            except ValueError as error:
                found.append(f"{section}.{name}={value!r} {error}")
    return found


def _not_built(config: Config) -> list[str]:
    """Options that are reserved: refused, never ignored."""
    found: list[str] = []
    if config.optim.offload != "none":
        found.append(f"optim.offload={config.optim.offload!r}: offloading is not built yet; use none")
    return found


def _precision_problems(config: Config) -> list[str]:
    """Whether the weights can be updated in the precision of the model."""
    if config.optim.master_weights == "none" and config.train.precision != "bf16":
        return [
            f"optim.master_weights=none is for train.precision=bf16, not {config.train.precision}: fp16 cannot hold"
            " small updates, and wider weights have no masters"
        ]
    return []


def _recompute_problems(config: Config) -> list[str]:
    """Whether the inputs of recomputed layers are there to be cut."""
    if config.train.recompute_cut_input and config.parallel.sequence_parallel:
        return [
            "train.recompute_cut_input=true: parallel.sequence_parallel has cut the inputs of layers already; leave"
            " one out"
        ]
    return []


def _frozen_problems(config: Config) -> list[str]:
    """Whether what is frozen is there, and something learns."""
    lora = config.lora
    if problems := lora.problems():
        return problems
    if not (config.train.freeze or lora.rank) or _model_problems(config.model) or moe_problems(config):
        return []
    model = describe_model(config)
    problems = target_problems(model, lora) if lora.rank else []
    if lora.rank and config.train.sequence_chunk:
        problems.append(
            f"train.sequence_chunk={config.train.sequence_chunk} computes feed-forward layers without adapters; leave"
            " it out, or lora.rank=0"
        )
    if lora.separate and config.checkpoint.load is None:
        problems.append("lora.separate=true: checkpoint.load must say where the frozen weights are")
    frozen, parameters = config.train.freeze, list(model.parameters())
    found = problems + [
        f"train.freeze={pattern}: no parameter has such a name; they look like"
        f" {', '.join(shard_of(p).name for p in (parameters[0], parameters[len(parameters) // 2], parameters[-1]))}"
        for pattern in frozen
        if not any(is_like(p, [pattern]) for p in parameters)
    ]
    if not found and not any(p.requires_grad for p in parameters):
        found.append(f"train.freeze={', '.join(frozen)} freezes every parameter: nothing would learn")
    return found


def _zero_problems(parallel: ParallelConfig) -> list[str]:
    found: list[str] = []
    if parallel.zero not in range(4):
        found.append(f"parallel.zero={parallel.zero} must be 0, 1, 2 or 3")
    if parallel.zero_persistent < 0:
        found.append(f"parallel.zero_persistent={parallel.zero_persistent} must be at least 0")
    elif parallel.zero_persistent and parallel.zero != 3:
        found.append(
            f"parallel.zero_persistent={parallel.zero_persistent}: parameters are divided under zero=3 only,"
            f" not under zero={parallel.zero}; use 0"
        )
    if parallel.zero_shard_size is not None and parallel.zero == 0:
        found.append(
            f"parallel.zero_shard_size={parallel.zero_shard_size}: nothing is divided under zero=0; set zero, or leave"
            " it out"
        )
    return found


def _model_problems(model: ModelConfig) -> list[str]:
    """Whether the model makes sense on one rank."""
    if model.name not in MODELS:
        close = difflib.get_close_matches(model.name, list(MODELS), n=1)
        hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(MODELS)}"
        return [f"model.name={model.name!r} is not a model; {hint}"]
    sizes = {
        name: getattr(model, name)
        for name in (
            "num_layers",
            "hidden_size",
            "num_heads",
            "kv_heads",
            "head_size",
            "ffn_size",
            "vocab_size",
            "max_positions",
        )
    }
    found = latent_problems(model)
    found += [f"model.{name}={size} must be at least 1" for name, size in sizes.items() if size < 1]
    if found:
        return found
    if model.head_dim is None and not model.is_latent and model.hidden_size % model.num_heads:
        found.append(
            f"model.hidden_size={model.hidden_size} is not divisible by num_heads={model.num_heads};"
            f" {_nearest(model.hidden_size, model.num_heads, 'hidden_size')}, or set head_dim"
        )
    if model.num_heads % model.kv_heads:
        found.append(
            f"model.num_heads={model.num_heads} is not divisible by num_kv_heads={model.kv_heads};"
            f" num_kv_heads can be {divisors(model.num_heads)}"
        )
    for name in ("hidden_dropout", "attention_dropout", "label_smoothing"):
        if not 0 <= getattr(model, name) < 1:
            found.append(f"model.{name}={getattr(model, name)} must be in [0, 1)")
    for name in ("norm_eps", "z_loss", "init_std"):
        if not 0 <= getattr(model, name) < math.inf:
            found.append(f"model.{name}={getattr(model, name)} must be finite and at least 0")
    found += rope_problems(model) if MODELS[model.name].rotary_positions else _unused_rope(model)
    if model.mtp_layers < 0:
        found.append(f"model.mtp_layers={model.mtp_layers} must be at least 1, or 0 for no multi-token prediction")
    if not 0 < model.mtp_loss_factor < math.inf:
        found.append(
            f"model.mtp_loss_factor={model.mtp_loss_factor} must be finite and above 0; mtp_layers=0 leaves"
            " multi-token prediction out"
        )
    if model.mtp_layers and MODELS[model.name].scaled_embeddings:
        found.append(f"model.mtp_layers={model.mtp_layers}: {model.name} scales its embeddings; use mtp_layers=0")
    has_own = getattr(MODELS[model.name].layer_cls.attention_cls, "output_bias", False)
    if model.attention_bias and (has_own or model.is_latent):
        found.append(
            f"model.attention_bias=true: attention of {model.name} has {'' if has_own else 'no '}biases; leave it out"
        )
    if model.parallel_residual and model.name != "gpt_neox":
        found.append(f"model.parallel_residual=true: {model.name} adds its blocks one after another; use name=gpt_neox")
    if model.vocab_size < 2 and model.label_smoothing > 0:
        found.append(f"model.label_smoothing={model.label_smoothing} needs a vocab_size of at least 2")
    return found + _operator_problems(model)


def _unused_rope(model: ModelConfig) -> list[str]:
    """The rope_ fields that are set for a model without rotary positions."""
    return [
        f"model.{field.name}={getattr(model, field.name)}: {model.name} has learned positions; leave it out"
        for field in dataclasses.fields(model)
        if field.name.startswith("rope_") and getattr(model, field.name) != field.default
    ]


def _operator_problems(model: ModelConfig) -> list[str]:
    """Whether the layers that attend can be told from the convolutions, and what they see is something."""
    names = ("attention_layers", "window_layers", "rope_layers")
    patterns = {name: getattr(model, name) for name in names}
    problems = (pattern_problem(text, f"model.{name}", len(model.all_layers)) for name, text in patterns.items())
    found = [problem for problem in problems if problem is not None]
    pattern = model.attention_layers
    if pattern != "all" and model.name != "lfm2" and is_pattern(pattern):
        found.append(f"model.attention_layers={pattern}: all layers of {model.name} attend; use all, or name=lfm2")
    if model.conv_kernel_size < 1:
        found.append(f"model.conv_kernel_size={model.conv_kernel_size} must be at least 1")
    if model.window < 0:
        found.append(f"model.window={model.window} must be at least 1 (a token and those before it), or 0 for no limit")
    if model.window_layers != "all" and not model.window:
        found.append(f"model.window_layers={model.window_layers} needs a model.window; set it, or window_layers=all")
    caps = [(name, "no soft-capping") for name in ("attention_softcap", "logit_softcap")]
    for name, without in (*caps, ("attention_scale", "1 / sqrt(head_dim)")):
        if not 0 <= getattr(model, name) < math.inf:
            found.append(f"model.{name}={getattr(model, name)} must be finite and above 0, or 0 for {without}")
    return found


def _cut_problems(config: Config) -> list[str]:
    """Whether tensor parallelism cuts every dim into equal parts."""
    model, tp = config.model, config.parallel.tp
    if min(tp, model.num_heads, model.kv_heads, model.ffn_size) < 1:
        return []  # reported already
    found: list[str] = []
    sizes = {"num_heads": model.num_heads}
    if not model.num_experts or not is_pattern(model.moe_layers) or len(moe_layers(model)) < model.num_layers:
        sizes["ffn_hidden_size"] = model.ffn_size  # of the dense layers
    for name, size in sizes.items():
        if size % tp:
            found.append(f"model.{name}={size} is not divisible by parallel.tp={tp}; {_tp_can_be(size)}")
    kv = model.kv_heads
    if kv % tp and tp % kv:
        sizes = [t for t in range(1, model.num_heads + 1) if model.num_heads % t == 0 and (kv % t == 0 or t % kv == 0)]
        found.append(
            f"model.num_kv_heads={kv} and parallel.tp={tp} do not divide one another;"
            f" tp can be {', '.join(map(str, sizes))}"
        )
    if model.vocab_size < tp:
        found.append(f"model.vocab_size={model.vocab_size} is less than parallel.tp={tp}: a rank would hold no row")
    found += _context_problems(config)
    seq_len = config.data.seq_len
    if 0 < seq_len <= model.mtp_layers:
        found.append(
            f"model.mtp_layers={model.mtp_layers} looks further ahead than rows of data.seq_len={seq_len} tokens are"
            f" long; use mtp_layers < {seq_len}"
        )
    if model.rope_scaling == "ntk" and seq_len > model.rope.length:
        found.append(
            f"data.seq_len={seq_len} is longer than the rows of {model.rope.length} tokens that rope_scaling=ntk is set"
            f" for; set model.rope_length={seq_len}"
        )
    if model.name == "gpt2" and seq_len > model.max_positions:
        found.append(
            f"data.seq_len={seq_len} is longer than model.max_positions={model.max_positions}, the learned positions;"
            f" use seq_len <= {model.max_positions} or max_positions >= {seq_len}"
        )
    return found


def _context_problems(config: Config) -> list[str]:
    """Whether the layers that cp_mode sets apart are there, and have heads enough for their mode."""
    model, parallel, found = config.model, config.parallel, []
    for pattern, _ in parallel.cp_exceptions:
        problem = pattern_problem(pattern, f"parallel.cp_mode={parallel.cp_mode}: layers", len(model.all_layers))
        found += [problem] if problem is not None else []
    tp, heads = parallel.tp, model.num_heads // parallel.tp
    for mode in parallel.cp_modes:
        exchanged = parallel.head_exchange_size(mode)
        if exchanged > 1 and model.num_heads % tp == 0 and heads % exchanged:
            found.append(
                f"parallel.cp_mode={parallel.cp_mode} exchanges the {heads} heads of a rank (num_heads="
                f"{model.num_heads} / tp={tp}) over {exchanged} ranks, which must divide them: they can be"
                f" {divisors(heads)}; or use ring"
            )
    return found


def _pipeline_problems(config: Config, dp: int | None) -> list[str]:
    """Whether the schedule has a plan for these sizes that can be executed, and the layers fill its stages."""
    parallel = config.parallel
    if config.model.num_layers < 1 or min(parallel.pp, parallel.vpp) < 1:
        return []  # reported already
    found: list[str] = []
    plan = None
    try:
        plan = _plan(config, dp, config.train.global_batch_size)
        for rows in _ramp(config):
            _plan(config, dp, rows)
    except (PlanError, OSError) as error:
        found.append(str(error))
    found += _stage_problems(config, plan)
    return found + (_end_problems(config, plan) if plan is not None else [])


def _stage_problems(config: Config, plan: Plan | None) -> list[str]:
    """Whether the layers can be divided among the stages, as far as these are known."""
    parallel, train, found = config.parallel, config.train, []
    try:
        if plan is not None and not _model_problems(config.model) and not moe_problems(config):
            stage_layers(config.model, parallel, plan)
        elif plan is not None or not parallel.schedule.startswith("csv:"):
            partition(
                config.model.num_layers,
                plan.num_stages if plan is not None else parallel.pp * max(parallel.vpp, min_chunks(parallel.schedule)),
                layer_cost=1,
                embedding_cost=0,
                head_cost=0,
                layers_per_stage=parallel.layers_per_stage,
            )
    except ValueError as error:
        found.append(str(error))
    own = (Path(train.run_dir) / TRACE).resolve() if train.run_dir is not None and train.trace_pipeline else None
    if parallel.partition.startswith(MEASURED) and own == trace_of(parallel.partition).resolve():
        found.append(f"parallel.partition={parallel.partition}: train.trace_pipeline would overwrite that trace")
    return found


def _ramp(config: Config) -> tuple[int, ...]:
    """The batches of a ramp that makes sense, without the last size."""
    sizes = config.train.batch_sizes
    return () if sizes.problems() else sizes.all[:-1]


def _plan(config: Config, dp: int | None, rows: int) -> Plan | None:
    """The plan of a step of so many rows, lowered and so proved; None when its sizes are not known.

    Raises PlanError where there is none.
    """
    parallel, train = config.parallel, config.train
    if parallel.schedule not in SCHEDULES and not parallel.schedule.startswith("csv:"):
        close = difflib.get_close_matches(parallel.schedule, SCHEDULES, n=1)
        hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(SCHEDULES)} and csv:FILE"
        raise PlanError(f"parallel.schedule={parallel.schedule!r} is not known; {hint}")
    if dp is None or train.micro_batch_size < 1:
        return None
    num_microbatches, rest = divmod(rows, train.micro_batch_size * dp)
    if num_microbatches < 1 or rest:
        return None
    try:
        return lower(plan_of(parallel, num_microbatches))
    except PlanError as error:
        raise PlanError(
            f"parallel.schedule={parallel.schedule} has no plan for parallel.pp={parallel.pp}, vpp={parallel.vpp} and"
            f" {num_microbatches} micro-batches ({rows} rows / (micro_batch_size * dp)): {error}"
        ) from error


def _end_problems(config: Config, plan: Plan) -> list[str]:
    """Whether tied weights at both ends of the model can be summed, and an update may come before the global norm."""
    ends = {plan.placement[0], plan.placement[plan.num_stages - 1]}
    if config.optim.post_validation and plan.num_chains > 1:
        return [f"optim.post_validation=true: under {plan.name} ranks share weights, and meet before the update anyway"]
    model = config.model
    tying = "tie_embeddings" if model.tie_embeddings else f"mtp_layers={model.mtp_layers}"
    if config.optim.post_validation and model.shares_embedding and len(ends) > 1:
        return [
            f"optim.post_validation=true: model.{tying} ties weights of pipeline ranks {sorted(ends)}, which must meet"
            " before the update; use zb_v, which has both ends on one rank, or"
            f" {'tie_embeddings=false' if model.tie_embeddings else 'mtp_layers=0'}"
        ]
    if not model.shares_embedding or len(ends) == 1 or ends == {0, plan.num_ranks - 1}:
        return []
    return [
        f"parallel.schedule={config.parallel.schedule} places the first and the last stage on pipeline ranks"
        f" {sorted(ends)}; model.{tying} needs both on one rank, or on the first and the last"
    ]


def _kernel_problems(config: Config) -> list[str]:
    """Whether the named backends can do what some layer of the model asks of them."""
    model = config.model
    if not is_pattern(model.window_layers):
        return []  # reported already
    window = max((model.window_of(layer) for layer in model.all_layers), default=0)
    traits = Traits(
        device=torch.device(device_type(config.train.device)),
        dtype=None if config.train.precision == "fp8" else config.train.dtype,
        width=model.hidden_size,
        compile=config.kernels.compile,
        dropout=model.attention_dropout,
        softcap=model.attention_softcap,
        window=max(window, 0),
        head_size=model.head_size,
        value_size=model.value_size,
    )
    return config_problems(config.kernels, traits, experts=bool(model.num_experts))


def _tp_can_be(size: int) -> str:
    """The tp that divide `size`, the useful ones: at most 64."""
    return f"tp can be {divisors(size, 64)}"


def _nearest(value: int, divisor: int, name: str) -> str:
    """The multiples of `divisor` around `value`."""
    below = value // divisor * divisor
    legal = [below, below + divisor] if below > 0 else [below + divisor]
    return f"the nearest {name} {'are' if len(legal) > 1 else 'is'} {' and '.join(map(str, legal))}"
