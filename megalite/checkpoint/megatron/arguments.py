"""From Megatron-LM's arguments to the settings of a model of megalite, or the reasons why it has none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megalite.checkpoint.errors import CheckpointError

_DENSE = "a dense GPT alone can be read"
_REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "num_experts": ((None, 0), _DENSE),
    "multi_latent_attention": ((None, False), "there is no latent attention"),
    "mtp_num_layers": ((None, 0), "there are no layers for several tokens ahead"),
    "apply_layernorm_1p": ((None, False), "norms have the weight itself, not what it is above 1"),
    "rotary_interleaved": ((None, False), "rotary positions turn halves of a head, not neighbours"),
    "apply_residual_connection_post_layernorm": ((None, False), "residuals begin before the norm"),
    "squared_relu": ((None, False), "the activations are GELU and SwiGLU"),
    "quick_geglu": ((None, False), "the activations are GELU and SwiGLU"),
    "xlu": ((None, False), "the activations are GELU and SwiGLU"),
    "window_size": ((None,), "set model.window by hand if the rest fits"),
    "attention_output_gate": ((None, False), "attention has no gate on its output"),
    "softmax_type": ((None, "vanilla"), "other sinks than none are not read"),
    "experimental_attention_variant": ((None,), "attention is softmax attention"),
    "linear_attention_freq": ((None,), "attention is softmax attention"),
    "no_rope_freq": ((None,), "all layers have rotary positions"),
    "heterogeneous_layers_config_path": ((None,), "all layers are alike"),
    "hybrid_override_pattern": ((None,), "all layers are attention"),
    "is_hybrid_model": ((None, False), "all layers are attention"),
    "embedding_multiplier": ((None, 1, 1.0), "embeddings have no factor"),
    "use_mup": ((None, False), "there are no muP factors"),
}
"""Arguments that change what is computed: the values that can be read, and why no other."""
_BY_NORM = {
    ("LayerNorm", "learned_absolute", False, True, True, False): "gpt2",
    ("RMSNorm", "rope", True, False, False, False): "llama",
    ("RMSNorm", "rope", True, False, False, True): "qwen3",
}
"""(normalization, position_embedding_type, swiglu, add_bias_linear, bias of q, k, v, qk_layernorm) -> model.name."""
_PRECISIONS = {"bf16": "bf16", "fp16": "fp16"}


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """A model as `model:` of a configuration has it."""

    model: dict[str, Any]
    """Its fields."""
    precision: str
    """train.precision of the run."""
    seq_len: int
    """Tokens of a row, as data.seq_len."""
    notes: tuple[str, ...]
    """What is not quite the same."""


def model_settings(args: Mapping[str, Any], *, padded_vocab: int, vocab_size: int | None = None) -> ModelSettings:
    """The model that Megatron's arguments describe; CheckpointError with every reason why it is none of megalite's.

    padded_vocab: rows of the word embedding as it is stored. vocab_size: how many of them are words, if the arguments
    do not say.
    """
    problems = [
        f"{name}={args[name]!r}: {reason}"
        for name, (readable, reason) in _REFUSED.items()
        if name in args and args[name] not in readable
    ]
    name = _architecture(args, problems)
    size, notes = _vocabulary(args, padded_vocab, vocab_size, problems)
    missing = [key for key in ("num_layers", "hidden_size", "num_attention_heads") if type(args.get(key)) is not int]
    problems += [f"{key} is missing" for key in missing]
    if problems:
        raise CheckpointError("this model cannot be read:\n" + "\n".join(f"  - {problem}" for problem in problems))
    model = _sizes(args, name, size) | _positions(args, name)
    if name == "gpt2" and not args.get("bias_gelu_fusion", True) and not args.get("openai_gelu"):
        notes.append("its GELU is the exact one, megalite's the tanh form: activations differ by up to 5e-4")
    precision = next((value for key, value in _PRECISIONS.items() if args.get(key)), "fp32")
    seq_len = args.get("seq_length") or args.get("max_position_embeddings") or 1024
    return ModelSettings(model=model, precision=precision, seq_len=seq_len, notes=tuple(notes))


def _architecture(args: Mapping[str, Any], problems: list[str]) -> str:
    position = args.get("position_embedding_type") or "learned_absolute"
    bias = bool(args.get("add_bias_linear", True))
    found = (
        args.get("normalization") or "LayerNorm",
        "rope" if args.get("use_rotary_position_embeddings") else getattr(position, "name", position),
        bool(args.get("swiglu")),
        bias,
        bias or bool(args.get("add_qkv_bias")),
        bool(args.get("qk_layernorm")),
    )
    if found in _BY_NORM:
        return _BY_NORM[found]
    names = ("normalization", "position_embedding_type", "swiglu", "add_bias_linear", "add_qkv_bias", "qk_layernorm")

    def shown(values: tuple[Any, ...]) -> str:
        return ", ".join(f"{name} {value}" for name, value in zip(names, values, strict=True))

    known = "; ".join(f"{model} has {shown(values)}" for values, model in _BY_NORM.items())
    problems.append(f"{shown(found)}: no architecture is like that ({known})")
    return ""


def _vocabulary(args: Mapping[str, Any], padded: int, given: int | None, problems: list[str]) -> tuple[int, list[str]]:
    """How many rows of the embedding are words."""
    told = args.get("vocab_size")
    size = given if given is not None else told if type(told) is int and told > 0 else None
    if size is None:
        return padded, [
            f"the vocabulary is taken to be all {padded} rows of the embedding, padding included; give --vocab-size"
            " with the size of the tokenizer to leave that out"
        ]
    if not 0 < size <= padded:
        problems.append(f"vocab_size={size}: the embedding has {padded} rows")
    return size, []


def _sizes(args: Mapping[str, Any], name: str, vocab_size: int) -> dict[str, Any]:
    heads, hidden = args["num_attention_heads"], args["hidden_size"]
    groups = args.get("num_query_groups") if args.get("group_query_attention") else None
    head_dim = args.get("kv_channels") or hidden // heads
    model: dict[str, Any] = {
        "name": name,
        "num_layers": args["num_layers"],
        "hidden_size": hidden,
        "num_heads": heads,
        "num_kv_heads": groups or heads,
        "head_dim": head_dim,
        "ffn_hidden_size": args.get("ffn_hidden_size") or 4 * hidden,
        "vocab_size": vocab_size,
        "tie_embeddings": not args.get("untie_embeddings_and_output_weights", False),
        "norm_eps": float(args.get("norm_epsilon") or args.get("layernorm_epsilon") or 1e-5),
        "init_std": float(args.get("init_method_std") or 0.02),
        "hidden_dropout": float(args.get("hidden_dropout") or 0.0),
        "attention_dropout": float(args.get("attention_dropout") or 0.0),
    }
    if model["num_kv_heads"] == heads:
        del model["num_kv_heads"]
    if head_dim * heads == hidden:
        del model["head_dim"]
    return model


def _positions(args: Mapping[str, Any], name: str) -> dict[str, Any]:
    if name == "gpt2":
        return {"max_positions": args.get("max_position_embeddings") or args.get("seq_length") or 1024}
    found: dict[str, Any] = {"rope_theta": float(args.get("rotary_base") or 10000)}
    if (percent := args.get("rotary_percent")) not in (None, 1.0):
        found["rope_percent"] = percent
    if args.get("use_rope_scaling"):  # the constants of Llama 3.1 are Megatron's own
        found |= {
            "rope_scaling": "llama3",
            "rope_factor": float(args.get("rope_scaling_factor") or 8.0),
            "rope_original_positions": 8192,
        }
    elif (factor := args.get("rotary_seq_len_interpolation_factor")) not in (None, 1):
        found |= {"rope_scaling": "linear", "rope_factor": float(factor)}
    return found
