"""Weights out of Megatron-LM checkpoints: every row in its place, and nothing of a pickle runs."""

from __future__ import annotations

import os
import pickle
import sys
import types
from argparse import Namespace
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from megalite.batch import MicroBatch
from megalite.checkpoint import store
from megalite.checkpoint.errors import CheckpointError
from megalite.checkpoint.megatron.convert import Imported, import_megatron
from megalite.checkpoint.rewrite import cut_evenly, write_checkpoint
from megalite.config.load import from_dict
from megalite.models.transformer import StageSpec
from megalite.mpu import ParallelState
from megalite.parallel.shard import shard_of
from megalite.train.build import build_stage
from tests.checkpoint.megatron_files import (
    ARGS,
    GPT2,
    LLAMA,
    VOCAB,
    Layout,
    make_weights,
    megatron_logits,
    write_legacy,
    write_torch_dist,
)

TOKENS = torch.tensor([3, 60, 7, 7, 0, 41, 12, 59, 5])


def _logits(found: Imported, run_dir: Path) -> Tensor:
    """Of the imported model, through a checkpoint on disk."""
    write_checkpoint(run_dir, found.step, found.tensors, cut_evenly(found.tensors, 3, 600), state={}, layout={})
    config = from_dict({"model": found.settings.model, "train": {"precision": "fp64"}})
    mpu, cpu = ParallelState.single(), torch.device("cpu")
    model = build_stage(config, mpu, StageSpec(0, 1, range(config.model.num_layers)), cpu).eval()
    store.load(run_dir, {"parameter": [(shard_of(p), p.data) for p in model.parameters()]}, mpu)
    column = TOKENS[:, None]
    batch = MicroBatch(
        tokens=column, labels=torch.zeros_like(column), loss_mask=torch.zeros(column.shape),
        positions=torch.arange(len(TOKENS))[:, None], samples=torch.zeros(1, dtype=torch.int64), step=0,
    )  # fmt: skip
    with torch.no_grad():
        return model.logits(batch)[:, 0]


def _check(model: str, place: Path, tmp_path: Path) -> None:
    found = import_megatron(place)
    assert found.step == 30 and found.settings.model["name"] == model
    expected = megatron_logits(make_weights(ARGS[model]), ARGS[model], TOKENS)[:, :VOCAB]
    torch.testing.assert_close(_logits(found, tmp_path / "run"), expected, rtol=0, atol=1e-11)


LEGACY = {
    "llama-tp2-pp2": ("llama", Layout()),
    "llama-uneven-te": ("llama", Layout(pp=3, layers=(2, 1, 1), names="te")),
    "llama-old": ("llama", Layout(names="old")),
    "llama-one-rank": ("llama", Layout(tp=1, pp=1, layers=(4,))),
    "qwen3-tp4-more-than-a-group": ("qwen3", Layout(tp=4)),
    "gpt2-tied": ("gpt2", Layout()),
    "gpt2-old-vpp": ("gpt2", Layout(vpp=2, layers=(1, 1, 1, 1), names="old")),
}


@pytest.mark.parametrize(("model", "layout"), LEGACY.values(), ids=LEGACY)
def test_legacy_gives_megatrons_logits(model: str, layout: Layout, tmp_path: Path) -> None:
    write_legacy(tmp_path / "there", make_weights(ARGS[model]), ARGS[model], layout)
    _check(model, tmp_path / "there", tmp_path)


TORCH_DIST = {
    "llama": ("llama", Layout(), True),
    "llama-te-layers-apart": ("llama", Layout(names="te"), False),
    "qwen3-tp4": ("qwen3", Layout(tp=4), True),
    "gpt2": ("gpt2", Layout(names="te"), True),
}


@pytest.mark.parametrize(("model", "layout", "stacked"), TORCH_DIST.values(), ids=TORCH_DIST)
def test_torch_dist_gives_megatrons_logits(model: str, layout: Layout, stacked: bool, tmp_path: Path) -> None:
    place = write_torch_dist(tmp_path / "there", make_weights(ARGS[model]), ARGS[model], layout, stacked=stacked)
    _check(model, place, tmp_path)


def test_what_torch_itself_writes(tmp_path: Path) -> None:
    """torch's own writer, whole stacks as one chunk; gate and up as tensors of their own (single local shards)."""
    weights = make_weights(LLAMA)
    place = write_torch_dist(tmp_path / "there", weights, LLAMA, Layout())
    common = (place / "common.pt").read_bytes()
    stacks: dict[str, Any] = {"optimizer.state.exp_avg": torch.ones(3), "rng_state": [1, "text"]}
    for name, tensor in weights.items():
        if not name.startswith("decoder.layers."):
            stacks[name] = tensor
            continue
        rest = name.split(".", 3)[3]
        same = torch.stack([weights[f"decoder.layers.{layer}.{rest}"] for layer in range(LLAMA.num_layers)])
        if "linear_fc1" in rest:
            stacks[f"decoder.layers.{rest}_w"], stacks[f"decoder.layers.{rest}_v"] = (
                half.contiguous() for half in same.chunk(2, 1)
            )
        else:
            stacks[f"decoder.layers.{rest}"] = same
    for file in place.iterdir():
        file.unlink()
    dcp.save(stacks, checkpoint_id=place, no_dist=True)  # pyright: ignore[reportPrivateImportUsage]
    (place / "common.pt").write_bytes(common)
    _check("llama", place, tmp_path)


@pytest.mark.parametrize("write", [write_legacy, write_torch_dist])
def test_each_row_is_where_it_belongs(write: Callable[..., Path], tmp_path: Path) -> None:
    """Elements are their own numbers; the places are counted by hand, not by views."""
    weights = make_weights(LLAMA)
    for number, tensor in enumerate(weights.values()):
        tensor.copy_(torch.arange(tensor.numel(), dtype=torch.float64).view(tensor.shape) + number * 10_000)
    write(tmp_path / "there", weights, LLAMA, Layout())
    ours = {
        tensor.key.removeprefix("parameter/"): tensor.make() for tensor in import_megatron(tmp_path / "there").tensors
    }
    per_group, size, ffn = 2, LLAMA.kv_channels, LLAMA.ffn_hidden_size
    for layer in range(LLAMA.num_layers):
        fused = weights[f"decoder.layers.{layer}.self_attention.linear_qkv.weight"]
        for head in range(LLAMA.num_attention_heads):
            group, inside = divmod(head, per_group)
            begin = (group * (per_group + 2) + inside) * size
            mine = ours[f"layers.{layer}.attention.qkv.q.weight"][head * size : (head + 1) * size]
            assert torch.equal(mine, fused[begin : begin + size])
        for group in range(LLAMA.num_query_groups):
            for number, name in enumerate("kv"):
                begin = (group * (per_group + 2) + per_group + number) * size
                mine = ours[f"layers.{layer}.attention.qkv.{name}.weight"][group * size : (group + 1) * size]
                assert torch.equal(mine, fused[begin : begin + size])
        fc1 = weights[f"decoder.layers.{layer}.mlp.linear_fc1.weight"]
        assert torch.equal(ours[f"layers.{layer}.mlp.fc1.gate.weight"], fc1[:ffn])
        assert torch.equal(ours[f"layers.{layer}.mlp.fc1.up.weight"], fc1[ffn:])
        for mine, theirs in (
            ("attention.proj", "self_attention.linear_proj"), ("mlp.fc2", "mlp.linear_fc2"),
            ("attention_norm", "input_layernorm"), ("mlp_norm", "pre_mlp_layernorm"),
        ):  # fmt: skip
            there = weights[f"decoder.layers.{layer}.{theirs}.weight"]
            assert torch.equal(ours[f"layers.{layer}.{mine}.weight"], there)
    assert torch.equal(ours["embedding.weight"], weights["embedding.word_embeddings.weight"][:VOCAB])
    assert torch.equal(ours["head.weight"], weights["output_layer.weight"][:VOCAB])


def test_padding_stays_unless_the_vocabulary_is_known(tmp_path: Path) -> None:
    args = Namespace(**vars(GPT2) | {"vocab_size": None})
    write_legacy(tmp_path, make_weights(args), args, Layout())
    found = import_megatron(tmp_path)
    assert found.settings.model["vocab_size"] == 64 and "--vocab-size" in found.settings.notes[0]
    told = import_megatron(tmp_path, vocab_size=50, dtype=torch.float32)
    assert told.settings.model["vocab_size"] == 50 and not told.settings.notes
    assert told.tensors[0].shape == (50, 16) and told.tensors[0].make().dtype == torch.float32
    with pytest.raises(CheckpointError, match="vocab_size=65: the embedding has 64 rows"):
        import_megatron(tmp_path, vocab_size=65)


def test_settings_of_a_scaled_llama(tmp_path: Path) -> None:
    args = Namespace(
        **vars(LLAMA) | {"use_rope_scaling": True, "bf16": True, "rotary_percent": 0.5, "norm_epsilon": 1e-6}
    )
    write_legacy(tmp_path, make_weights(args), args, Layout())
    settings = import_megatron(tmp_path).settings
    config = from_dict({"model": settings.model, "train": {"precision": settings.precision}})
    assert (config.model.rope_scaling, config.model.rope_factor, config.model.rope_percent) == ("llama3", 8.0, 0.5)
    assert config.model.rope_original_positions == 8192 and config.model.norm_eps == 1e-6
    assert config.model.rope_theta == 500 and config.model.head_dim == 6 and config.train.precision == "bf16"


class Payload:
    """What an attacker plants: unpickling it makes a folder."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("where", ["rank", "common", "metadata", "chunk"])
def test_a_planted_pickle_never_runs(where: str, tmp_path: Path) -> None:
    marker = tmp_path / "was_run"
    payload: Any = {"note": Payload(marker)}
    weights = make_weights(LLAMA)
    if where == "rank":
        write_legacy(tmp_path / "there", weights, LLAMA, Layout(), **payload)
    else:
        place = write_torch_dist(tmp_path / "there", weights, LLAMA, Layout(), **(payload if where == "common" else {}))
        if where == "metadata":
            metadata = pickle.loads((place / ".metadata").read_bytes())
            metadata.planner_data = payload
            (place / ".metadata").write_bytes(pickle.dumps(metadata))
        if where == "chunk":
            # In the place of the first tensor of the second file, padded to its length.
            file = place / "__1_0.distcp"
            metadata = pickle.loads((place / ".metadata").read_bytes())
            name, info = next(
                (index.fqn, info) for index, info in metadata.storage_data.items() if info.relative_path == file.name
            )
            torch.save(payload, tmp_path / "planted")
            planted = (tmp_path / "planted").read_bytes()
            content = bytearray(file.read_bytes())
            info.offset, info.length = len(content), len(planted)
            file.write_bytes(content + planted)
            (place / ".metadata").write_bytes(pickle.dumps(metadata))
            assert name
    with pytest.raises(CheckpointError, match=r"asks for posix\.mkdir, .* it is refused"):
        for tensor in import_megatron(tmp_path / "there").tensors:
            tensor.make()
    assert not marker.exists()


def test_megatrons_own_classes_are_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Arguments hold enums of Megatron: they are read without it, and a module of that name is never looked for."""
    module = types.ModuleType("megatron.core.enums")

    class ModelType(Enum):
        encoder_or_decoder = 1

    ModelType.__module__, ModelType.__qualname__ = "megatron.core.enums", "ModelType"
    module.ModelType = ModelType  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setitem(sys.modules, "megatron", types.ModuleType("megatron"))
    monkeypatch.setitem(sys.modules, "megatron.core", types.ModuleType("megatron.core"))
    monkeypatch.setitem(sys.modules, "megatron.core.enums", module)
    args = Namespace(**vars(LLAMA) | {"model_type": ModelType.encoder_or_decoder})
    write_legacy(tmp_path, make_weights(args), args, Layout())
    for name in ("megatron.core.enums", "megatron.core", "megatron"):
        monkeypatch.delitem(sys.modules, name)
    assert import_megatron(tmp_path).settings.model["num_heads"] == 8


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"num_experts": 8}, "num_experts=8: a dense GPT alone"),
        ({"normalization": "LayerNorm"}, "no architecture is like that"),
        ({"rotary_interleaved": True, "apply_layernorm_1p": True}, r"rotary_interleaved=True(.|\n)*not neighbours"),
        ({"num_layers": 5}, r"it has no decoder\.layers\.4\."),
        ({"num_layers": 3}, r"it holds decoder\.layers\.3\..* which the model that its args describe has not"),
        ({"num_query_groups": 2}, r"with its args, layers\.0\.attention\.qkv\.q\.weight \[48, 16\] is no part of that"),
        ({"ffn_hidden_size": 6}, r"layers\.0\.mlp\.fc1\.gate\.weight \[6, 16\] is no part"),
        ({"untie_embeddings_and_output_weights": False, "swiglu": False}, "no architecture"),
    ],
)
def test_what_cannot_be_read_is_named(changed: dict[str, Any], said: str, tmp_path: Path) -> None:
    write_legacy(tmp_path, make_weights(LLAMA), Namespace(**vars(LLAMA) | changed), Layout())
    with pytest.raises(CheckpointError, match=said):
        import_megatron(tmp_path)


def test_damage_is_named(tmp_path: Path) -> None:
    weights = make_weights(LLAMA)
    legacy = write_legacy(tmp_path / "legacy", weights, LLAMA, Layout())
    file = legacy / "mp_rank_01_001" / "model_optim_rng.pt"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"mp_rank_01_001/model_optim_rng\.pt is no zip file .* or was cut short"):
        import_megatron(tmp_path / "legacy")
    file.unlink()
    with pytest.raises(CheckpointError, match=r"mp_rank_01_001 has neither model_optim_rng\.pt nor model_rng\.pt"):
        import_megatron(tmp_path / "legacy")
    file.parent.rmdir()
    with pytest.raises(CheckpointError, match="2 tensor-parallel by 2 pipeline ranks, but none of mp_rank_01_001"):
        import_megatron(tmp_path / "legacy")
    place = write_torch_dist(tmp_path / "dist", weights, LLAMA, Layout())
    last = place / "__1_0.distcp"
    last.write_bytes(last.read_bytes()[:-100])
    found = import_megatron(place)
    with pytest.raises(CheckpointError, match="cut short"):
        for tensor in found.tensors:
            tensor.make()
    with pytest.raises(CheckpointError, match=r"is no checkpoint of Megatron-LM: it has neither \.metadata"):
        import_megatron(tmp_path)


def test_an_object_store(tmp_path: Path) -> None:
    import fsspec

    weights = make_weights(LLAMA)
    for write in (write_legacy, write_torch_dist):
        place = tmp_path / write.__name__
        write(place, weights, LLAMA, Layout())
        files = fsspec.filesystem("memory")
        files.put(str(place), f"/{write.__name__}", recursive=True)
        there = {tensor.key: tensor.make() for tensor in import_megatron(f"memory://{write.__name__}").tensors}
        here = {tensor.key: tensor.make() for tensor in import_megatron(place).tensors}
        assert there.keys() == here.keys() and all(torch.equal(there[key], here[key]) for key in here)
