"""Checkpoints as Megatron-LM writes them, made by hand, and what its model computes from such weights."""

from __future__ import annotations

import io
import pickle
import random
from argparse import Namespace
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

PADDED_VOCAB, VOCAB = 64, 61

LLAMA = Namespace(
    num_layers=4, hidden_size=16, num_attention_heads=8, num_query_groups=4, group_query_attention=True, kv_channels=6,
    ffn_hidden_size=12, normalization="RMSNorm", position_embedding_type="rope", rotary_base=500, rotary_percent=1.0,
    swiglu=True, add_bias_linear=False, add_qkv_bias=False, qk_layernorm=False, norm_epsilon=1e-5, vocab_size=VOCAB,
    padded_vocab_size=PADDED_VOCAB, untie_embeddings_and_output_weights=True, max_position_embeddings=32, seq_length=16,
    hidden_dropout=0.0, attention_dropout=0.0, init_method_std=0.02, params_dtype=torch.float64, bf16=False, fp16=False,
    num_experts=None, window_size=None, iteration=30,
)  # fmt: skip
QWEN = Namespace(**vars(LLAMA) | {"qk_layernorm": True, "rotary_percent": 1.0})
GPT2 = Namespace(
    **vars(LLAMA)
    | {
        "normalization": "LayerNorm", "position_embedding_type": "learned_absolute", "swiglu": False,
        "add_bias_linear": True, "untie_embeddings_and_output_weights": False, "group_query_attention": False,
        "num_query_groups": 1, "kv_channels": 2, "bias_gelu_fusion": True,
    }
)  # fmt: skip
ARGS = {"llama": LLAMA, "qwen3": QWEN, "gpt2": GPT2}


def make_weights(args: Namespace) -> dict[str, Tensor]:
    """Random float64 weights of the whole model, each element a number of its own, named as in Megatron Core."""
    generator = torch.Generator().manual_seed(3)
    hidden, ffn, size = args.hidden_size, args.ffn_hidden_size, args.kv_channels
    heads = args.num_attention_heads
    groups = args.num_query_groups if args.group_query_attention else heads
    biased, norm = args.add_bias_linear, args.normalization == "LayerNorm"
    shapes: dict[str, tuple[int, ...]] = {"embedding.word_embeddings.weight": (PADDED_VOCAB, hidden)}
    if args.position_embedding_type == "learned_absolute":
        shapes["embedding.position_embeddings.weight"] = (args.max_position_embeddings, hidden)
    linears = {
        "self_attention.linear_qkv": ((heads + 2 * groups) * size, hidden),
        "self_attention.linear_proj": (hidden, heads * size),
        "mlp.linear_fc1": ((2 if args.swiglu else 1) * ffn, hidden),
        "mlp.linear_fc2": (hidden, ffn),
    }
    for layer in range(args.num_layers):
        prefix = f"decoder.layers.{layer}"
        for name in ("input_layernorm", "pre_mlp_layernorm"):
            shapes[f"{prefix}.{name}.weight"] = (hidden,)
            if norm:
                shapes[f"{prefix}.{name}.bias"] = (hidden,)
        for name, shape in linears.items():
            shapes[f"{prefix}.{name}.weight"] = shape
            if biased:
                shapes[f"{prefix}.{name}.bias"] = shape[:1]
        if args.qk_layernorm:
            for name in ("q_layernorm", "k_layernorm"):
                shapes[f"{prefix}.self_attention.{name}.weight"] = (size,)
    shapes["decoder.final_layernorm.weight"] = (hidden,)
    if norm:
        shapes["decoder.final_layernorm.bias"] = (hidden,)
    if args.untie_embeddings_and_output_weights:
        shapes["output_layer.weight"] = (PADDED_VOCAB, hidden)
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64) * 0.3 + ("norm.weight" in name)
        for name, shape in shapes.items()
    }


def megatron_logits(weights: dict[str, Tensor], args: Namespace, tokens: Tensor) -> Tensor:
    """What Megatron's GPT computes for one row of tokens [s]: logits [s, padded vocabulary]."""
    heads, size = args.num_attention_heads, args.kv_channels
    groups = args.num_query_groups if args.group_query_attention else heads

    def norm(x: Tensor, name: str, width: int = args.hidden_size) -> Tensor:
        weight = weights[f"{name}.weight"]
        if args.normalization == "LayerNorm":
            return F.layer_norm(x, (width,), weight, weights[f"{name}.bias"], args.norm_epsilon)
        return F.rms_norm(x, (width,), weight, args.norm_epsilon)

    def linear(x: Tensor, name: str) -> Tensor:
        return F.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))

    def rotate(x: Tensor) -> Tensor:  # [s, heads, size]
        if args.position_embedding_type != "rope":
            return x
        inverse = args.rotary_base ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
        angles = torch.arange(x.shape[0], dtype=torch.float64)[:, None] * inverse
        angles = torch.cat([angles, angles], -1)[:, None]
        first, second = x.chunk(2, -1)
        return x * angles.cos() + torch.cat([-second, first], -1) * angles.sin()

    def attention(x: Tensor, name: str) -> Tensor:
        mixed = linear(x, f"{name}.linear_qkv").view(x.shape[0], groups, (heads // groups + 2) * size)
        q, k, v = mixed.split([heads // groups * size, size, size], -1)
        q = q.reshape(x.shape[0], heads, size)
        if args.qk_layernorm:
            q, k = norm(q, f"{name}.q_layernorm", size), norm(k, f"{name}.k_layernorm", size)
        q, k = rotate(q), rotate(k)
        k, v = (part.repeat_interleave(heads // groups, 1) for part in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) / size**0.5
        ahead = torch.ones(x.shape[0], x.shape[0], dtype=torch.bool).triu(1)
        mixed = torch.einsum("hqk,khd->qhd", scores.masked_fill(ahead, float("-inf")).softmax(-1), v)
        return linear(mixed.reshape(x.shape[0], -1), f"{name}.linear_proj")

    def mlp(x: Tensor, name: str) -> Tensor:
        x = linear(x, f"{name}.linear_fc1")
        if args.swiglu:
            gate, up = x.chunk(2, -1)
            return linear(F.silu(gate) * up, f"{name}.linear_fc2")
        return linear(F.gelu(x, approximate="tanh"), f"{name}.linear_fc2")

    x = weights["embedding.word_embeddings.weight"][tokens]
    if args.position_embedding_type == "learned_absolute":
        x = x + weights["embedding.position_embeddings.weight"][: len(tokens)]
    for layer in range(args.num_layers):
        prefix = f"decoder.layers.{layer}"
        x = x + attention(norm(x, f"{prefix}.input_layernorm"), f"{prefix}.self_attention")
        x = x + mlp(norm(x, f"{prefix}.pre_mlp_layernorm"), f"{prefix}.mlp")
    x = norm(x, "decoder.final_layernorm")
    return x @ weights.get("output_layer.weight", weights["embedding.word_embeddings.weight"]).T


def shard(name: str, whole: Tensor, rank: int, tp: int, *, gated: bool) -> Tensor:
    """What tensor-parallel rank `rank` holds of a tensor."""
    if gated and ".linear_fc1." in name:
        return torch.cat([half.chunk(tp)[rank] for half in whole.chunk(2)])
    if ".linear_qkv." in name or ".linear_fc1." in name or "word_embeddings" in name or "output_layer" in name:
        return whole.chunk(tp)[rank].clone()
    if name.endswith(("linear_proj.weight", "linear_fc2.weight")):
        return whole.chunk(tp, 1)[rank].clone()
    return whole


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How a run was cut."""

    tp: int = 2
    pp: int = 2
    vpp: int = 1
    layers: tuple[int, ...] = (2, 2)
    """Of each stage of the model."""
    names: str = "core"
    """core: Megatron Core; te: with norms inside of linears; old: the model classes before."""


_TE = {"input_layernorm.": "self_attention.linear_qkv.layer_norm_", "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"}
_OLD = {
    "self_attention.linear_qkv": "self_attention.query_key_value", "self_attention.linear_proj": "self_attention.dense",
    "mlp.linear_fc1": "mlp.dense_h_to_4h", "mlp.linear_fc2": "mlp.dense_4h_to_h", "input_layernorm": "input_norm",
    "pre_mlp_layernorm": "post_attention_norm", "decoder.final_layernorm": "decoder.final_norm",
}  # fmt: skip


def _renamed(name: str, names: str) -> str:
    for old, new in {"core": {}, "te": _TE, "old": _OLD}[names].items():
        name = name.replace(old, new)
    return name


def _nested(flat: dict[str, Any]) -> dict[str, Any]:
    """The old model classes save a dict of dicts."""
    found: dict[str, Any] = {"embedding": {}, "encoder": OrderedDict(), "output_layer": OrderedDict()}
    for name, tensor in flat.items():
        if name.startswith("embedding."):
            _, kind, leaf = name.split(".")
            found["embedding"].setdefault(kind, OrderedDict())[leaf] = tensor
        elif name.startswith("output_layer."):
            found["output_layer"][name.removeprefix("output_layer.")] = tensor
        else:
            found["encoder"][name.removeprefix("decoder.")] = tensor
    return {"language_model": {name: part for name, part in found.items() if part}}


def write_legacy(root: Path, weights: dict[str, Tensor], args: Namespace, layout: Layout, **extra: Any) -> Path:
    """A folder of `--ckpt-format torch`; returns that of the iteration."""
    folder = root / "iter_0000030"
    root.mkdir(parents=True, exist_ok=True)
    (root / "latest_checkpointed_iteration.txt").write_text("30")
    begins = [sum(layout.layers[:stage]) for stage in range(len(layout.layers))]
    for tp in range(layout.tp):
        for pp in range(layout.pp):
            chunks = []
            for chunk in range(layout.vpp):
                stage = chunk * layout.pp + pp
                chunks.append(_stage(weights, args, layout, tp, stage, begins[stage]))
            models = {"model": chunks[0]} if layout.vpp == 1 else {f"model{i}": model for i, model in enumerate(chunks)}
            state = {
                "args": args, "checkpoint_version": 3.0, "iteration": 30, **models,
                "optimizer": {"state": [torch.zeros(5)], "fp32": [[torch.nn.Parameter(torch.ones(3))]]},
                "rng_state": [
                    {"random_rng_state": random.getstate(), "np_rng_state": np.random.get_state(),
                     "torch_rng_state": torch.get_rng_state()}
                ],
                **extra,
            }  # fmt: skip
            rank = folder / (f"mp_rank_{tp:02d}" + (f"_{pp:03d}" if layout.pp > 1 else ""))
            rank.mkdir(parents=True)
            torch.save(state, rank / "model_optim_rng.pt")
    return folder


def _stage(
    weights: dict[str, Tensor], args: Namespace, layout: Layout, tp: int, stage: int, begin: int
) -> dict[str, Any]:
    is_first, is_last = stage == 0, stage == len(layout.layers) - 1
    flat: dict[str, Any] = OrderedDict()
    for name, whole in weights.items():
        part = shard(name, whole, tp, layout.tp, gated=args.swiglu)
        if name.startswith("decoder.layers."):
            _, _, number, rest = name.split(".", 3)
            if not begin <= int(number) < begin + layout.layers[stage]:
                continue
            name = f"decoder.layers.{int(number) - begin}.{rest}"
        elif not (is_first if name.startswith("embedding.") else is_last):
            continue
        flat[_renamed(name, layout.names)] = part
    if is_last and not is_first and not args.untie_embeddings_and_output_weights:
        name = "embedding.word_embeddings.weight"
        flat["output_layer.weight"] = shard(name, weights[name], tp, layout.tp, gated=False)
    if layout.names == "old":
        nested = _nested(flat)
        if "output_layer.weight" in flat and not args.untie_embeddings_and_output_weights:
            copied = nested["language_model"].pop("output_layer")
            nested["word_embeddings_for_head"] = copied
        return nested
    flat["decoder.layers.0.self_attention.core_attention._extra_state"] = io.BytesIO(b"fp8")
    return flat


def write_torch_dist(
    root: Path, weights: dict[str, Tensor], args: Namespace, layout: Layout, *, stacked: bool = True, **extra: Any
) -> Path:
    """A folder of `--ckpt-format torch_dist`, cut as ranks of `layout` save it; returns that of the iteration."""
    folder = root / "iter_0000030"
    folder.mkdir(parents=True)
    (root / "latest_checkpointed_iteration.txt").write_text("30")
    torch.save({"args": args, "checkpoint_version": 3.0, "iteration": 30, **extra}, folder / "common.pt")
    tensors = {_renamed(name, layout.names): tensor for name, tensor in weights.items()}
    if stacked:
        tensors = _stack(tensors, args.num_layers)
    described: dict[str, Any] = {"rng_state/shard_0_1": BytesStorageMetadata()}
    places: dict[Any, Any] = {MetadataIndex("rng_state/shard_0_1"): _StorageInfo("__0_0.distcp", 0, 7)}
    files = [bytearray(b"!random") for _ in range(layout.tp)]
    for name, whole in tensors.items():
        chunks = list(_chunks(name, whole, layout.tp, gated=args.swiglu, stacked=stacked))
        described[name] = TensorStorageMetadata(
            TensorProperties(dtype=whole.dtype), whole.size(),
            [ChunkStorageMetadata(torch.Size(offset), chunk.size()) for _, offset, chunk in chunks],
        )  # fmt: skip
        for rank, offset, chunk in chunks:
            stream = io.BytesIO()
            torch.save(chunk.clone(), stream)
            file = files[rank]
            index = MetadataIndex(name, offset)
            places[index] = _StorageInfo(f"__{rank}_0.distcp", len(file), stream.tell())
            file += stream.getvalue()
    for rank, content in enumerate(files):
        (folder / f"__{rank}_0.distcp").write_bytes(content)
    with (folder / ".metadata").open("wb") as file:
        pickle.dump(Metadata(described, None, places), file)
    return folder


def _stack(tensors: dict[str, Tensor], num_layers: int) -> dict[str, Tensor]:
    """Layers that are alike are one tensor, with the layer in front."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if not name.startswith("decoder.layers."):
            found[name] = tensor
            continue
        rest = name.split(".", 3)[3]
        same = [tensors[f"decoder.layers.{layer}.{rest}"] for layer in range(num_layers)]
        found[f"decoder.layers.{rest}"] = torch.stack(same)
    return found


def _chunks(name: str, whole: Tensor, tp: int, *, gated: bool, stacked: bool) -> Any:
    """(tp rank, offset, chunk): layer by layer, and each as its ranks hold it; gate and up are two chunks."""
    if stacked and name.startswith("decoder.layers."):
        for layer in range(whole.shape[0]):
            for rank, offset, chunk in _chunks(name, whole[layer], tp, gated=gated, stacked=False):
                yield rank, (layer, *offset), chunk[None]
        return
    if gated and ".linear_fc1." in name and "layer_norm" not in name:
        half = whole.shape[0] // 2
        for number, part in enumerate(whole.chunk(2)):
            for rank, chunk in enumerate(part.chunk(tp)):
                at = number * half + rank * chunk.shape[0]
                yield rank, (at, *(0 for _ in whole.shape[1:])), chunk
        return
    probe = shard(name, whole, 0, tp, gated=False) if "layer_norm" not in name else whole
    if probe.shape == whole.shape:
        yield 0, (0,) * whole.dim(), whole
        return
    dim = 0 if probe.shape[0] != whole.shape[0] else 1
    for rank, chunk in enumerate(whole.chunk(tp, dim)):
        offset = [0] * whole.dim()
        offset[dim] = rank * chunk.shape[dim]
        yield rank, tuple(offset), chunk
