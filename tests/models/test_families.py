"""Every family of Hugging Face against its own tiny random model there: weights both ways, logits and gradients."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from megalite.checkpoint.stored import StoredCheckpoint
from megalite.models import FAMILIES
from megalite.models.transformer import StageSpec
from megalite.mpu import ParallelConfig, ParallelState
from megalite.testing.world import World
from tests.hugging_face import assert_equal, float64
from tests.models.families import FAMILY_IDS, TIED, build, reference
from tests.models.family_ranks import assert_gradients, batch, one_rank, ours, read, tensor_parallel
from tools.checkpoint import main

every_family = pytest.mark.parametrize("family", FAMILY_IDS)
ON_RANKS = ("phi3", "qwen2", "gemma3_text", "olmo2", "gpt_neox", "lfm2_moe", "gpt_oss", "deepseek_v3")
"""Families that are cut in `make test`: each has something that the others have not."""
some_families = pytest.mark.parametrize(
    "family", [pytest.param(name, marks=() if name in ON_RANKS else pytest.mark.full) for name in FAMILY_IDS]
)


def with_other_tie(family: str) -> bool:
    return family not in TIED


@every_family
def test_logits(family: str) -> None:
    there = reference(family)
    assert_equal(one_rank(there.folder / "weights").logits(batch()), there.logits, "logits")


def check_gradients(family: str, *, tied: bool) -> None:
    there = reference(family, tied=tied)
    network = one_rank(there.folder / "weights")
    loss = network(None, batch())
    assert_equal(loss, there.loss, "loss")
    loss.backward()
    assert_gradients(network, read(there.folder / "grads")[1], network.mpu)


@every_family
def test_gradients(family: str) -> None:
    check_gradients(family, tied=family in TIED)


@pytest.mark.full
@every_family
def test_gradients_with_the_other_tie(family: str) -> None:
    check_gradients(family, tied=with_other_tie(family))


def check_tp2(family: str, world: World, *, sequence_parallel: bool) -> None:
    there = reference(family)
    layout = ParallelConfig(tp=2, sequence_parallel=sequence_parallel)
    world.run(
        tensor_parallel, there.folder, there.loss, read(there.folder / "grads")[1], layout=layout, ranks=2, timeout=90.0
    )


@some_families
def test_tp2(family: str, world: World) -> None:
    check_tp2(family, world, sequence_parallel=True)


@pytest.mark.full
@every_family
def test_tp2_without_sequence_parallelism(family: str, world: World) -> None:
    check_tp2(family, world, sequence_parallel=False)


def check_pp2(family: str, *, tied: bool) -> None:
    there, mpu = reference(family, tied=tied), ParallelState.single()
    folder = there.folder / "weights"
    layers = read(folder)[0].num_layers
    first, last = (
        ours(folder, mpu, StageSpec(index, 2, part)) for index, part in enumerate((range(1), range(1, layers)))
    )
    loss = last(first(None, batch()), batch())
    assert_equal(loss, there.loss, "loss")
    loss.backward()
    wanted = read(there.folder / "grads")[1]
    if tied:
        assert first.embedding is not None and last.head is not None
        assert first.embedding.weight.grad is not None and last.head.weight.grad is not None
        first.embedding.weight.grad = first.embedding.weight.grad + last.head.weight.grad
        last.head = None
    for network in (first, last):
        assert_gradients(network, wanted, mpu)


@some_families
def test_pp2(family: str) -> None:
    check_pp2(family, tied=family in TIED)


@pytest.mark.full
@every_family
def test_pp2_with_the_other_tie(family: str) -> None:
    check_pp2(family, tied=with_other_tie(family))


@every_family
def test_from_hf(family: str, tmp_path: Path) -> None:
    """Each of our tensors is in the checkpoint that the command writes, bit for bit."""
    folder = reference(family).folder / "weights"
    assert main(["from-hf", str(folder), str(tmp_path / "run"), "--files", "2"]) == 0
    with StoredCheckpoint(tmp_path / "run") as stored:
        found = {key.partition("/")[2]: stored.read(key) for key in stored.tensors}
    wanted = read(folder)[1]
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name


def exported(folder: Path, tmp_path: Path, *options: str) -> Path:
    assert main(["from-hf", str(folder), str(tmp_path / "run")]) == 0
    assert main(["to-hf", str(tmp_path / "run"), str(tmp_path / "out"), *options]) == 0
    return tmp_path / "out"


def contents(folder: Path) -> dict[str, Tensor]:
    found = {}
    for file in folder.glob("*.safetensors"):
        found |= load_file(file)
    return found


@every_family
def test_to_hf(family: str, tmp_path: Path) -> None:
    """A round trip has the same tensors under the same names, bit for bit, and the same config."""
    folder = reference(family).folder / "weights"
    out = exported(folder, tmp_path, "--max-shard", "1")
    before, after = contents(folder), contents(out)
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert tensor.dtype == after[name].dtype and torch.equal(tensor, after[name]), name
    assert json.loads((out / "config.json").read_text()) == json.loads((folder / "config.json").read_text())


@every_family
def test_a_config_of_our_own_means_the_same(family: str, tmp_path: Path) -> None:
    """Written from the model alone, as after training from the beginning, it gives transformers the same model."""
    family_of = FAMILIES[family]
    content = json.loads((reference(family).folder / "weights" / "config.json").read_text())
    model = family_of.read(content)
    fresh = family_of.write(model)
    assert family_of.merge(model, content) == content
    theirs = build(family, tie_word_embeddings=family in TIED)
    again = type(theirs.config)(**{k: v for k, v in fresh.items() if k != "model_type"} | {"pad_token_id": None})
    with float64():
        twin = AutoModelForCausalLM.from_config(again, attn_implementation="eager", dtype=torch.float64).double().eval()
        twin.load_state_dict(theirs.state_dict())
        twin.set_experts_implementation("eager") if hasattr(twin, "set_experts_implementation") else None
        ids = batch().tokens.t()
        assert_equal(twin(input_ids=ids).logits, theirs(input_ids=ids).logits, "logits")


BIASED = ("llama", "qwen3", "qwen3_moe", "smollm3", "gemma2", "gemma3_text", "olmo2", "olmoe")
"""Whose attention has biases if attention_bias says so."""


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=() if name in ("qwen3", "olmo2") else pytest.mark.full) for name in BIASED]
)
def test_attention_bias(family: str, tmp_path: Path) -> None:
    there = reference(family, attention_bias=True)
    model, wanted = read(there.folder / "grads")
    assert model.attention_bias and wanted["layers.0.attention.proj.bias"].any()
    network = one_rank(there.folder / "weights")
    assert_equal(network.logits(batch()), there.logits, "logits")
    network(None, batch()).backward()
    assert_gradients(network, wanted, network.mpu)
    before, after = contents(there.folder / "weights"), contents(exported(there.folder / "weights", tmp_path))
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.full
@pytest.mark.parametrize("family", BIASED)
def test_attention_bias_on_two_ranks(family: str, world: World) -> None:
    there = reference(family, attention_bias=True)
    wanted = read(there.folder / "grads")[1]
    layout = ParallelConfig(tp=2, sequence_parallel=True)
    world.run(tensor_parallel, there.folder, there.loss, wanted, layout=layout, ranks=2, timeout=90.0)


@pytest.mark.full
@every_family
def test_as_a_plain_user_would(family: str) -> None:
    """float32 against float32."""
    there = reference(family).folder / "weights"
    theirs = AutoModelForCausalLM.from_pretrained(there, dtype=torch.float32, experts_implementation="eager").eval()
    network = one_rank(there).float()
    with torch.no_grad():
        found, wanted = network.logits(batch()), theirs(input_ids=batch().tokens.t()).logits.transpose(0, 1)
    assert float((found - wanted).abs().max() / wanted.abs().max()) < 1e-5
