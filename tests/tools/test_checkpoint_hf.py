"""`tools/checkpoint.py from-hf` and `to-hf`: names, configs, tokenizers, refusals, memory."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megalite.checkpoint.hf import HFFolder
from megalite.checkpoint.stored import StoredCheckpoint
from megalite.config import Config
from megalite.config.load import load_config, save_config
from megalite.data.tokenizer import ByteTokenizer, train_sentencepiece
from megalite.data.tokenizer_export import tokenizer_files
from megalite.layout import parse_layout
from megalite.models import FAMILIES
from megalite.mpu import ParallelState
from megalite.nn.config import ModelConfig
from megalite.testing.memory import LiveMemory
from megalite.testing.world import World
from megalite.train.build import build_training
from megalite.train.checkpoints import RunCheckpoints
from megalite.train.step import train_step
from tests.tiny import config_for
from tests.tools.conftest import Command

LLAMA: dict[str, Any] = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 37, "hidden_size": 24,
    "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 10,
    "intermediate_size": 40, "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "max_position_embeddings": 4096,
    "rope_theta": 500000.0, "bos_token_id": 1, "eos_token_id": [2, 7], "torch_dtype": "bfloat16", "hidden_act": "silu",
    "rope_scaling": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}  # fmt: skip
"""As files of before transformers 5 are."""
GPT2: dict[str, Any] = {
    "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "vocab_size": 37, "n_embd": 24, "n_layer": 2,
    "n_head": 4, "n_positions": 30, "n_ctx": 30, "activation_function": "gelu_new",
}  # fmt: skip


def weights(config: dict[str, Any], dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    """Random ones for a config.json."""
    family = FAMILIES[config["model_type"]]
    shapes = family.links(family.read(config)).shapes
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}


def write(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor], *, files: int = 1) -> Path:
    """A folder of Hugging Face."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    if files == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    places = {name: f"model-{i % files + 1:05d}-of-{files:05d}.safetensors" for i, name in enumerate(tensors)}
    for file in set(places.values()):
        save_file({name: tensor for name, tensor in tensors.items() if places[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return folder


def there_and_back(source: Path, tmp_path: Path, command: Command, *options: object) -> Path:
    command("from-hf", source, tmp_path / "run")
    command("to-hf", tmp_path / "run", tmp_path / "out", *options)
    return tmp_path / "out"


def contents(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def assert_same(source: Path, out: Path) -> None:
    before, after = contents(source), contents(out)
    assert before.keys() == after.keys()
    assert all(before[name].dtype == after[name].dtype and torch.equal(before[name], after[name]) for name in before)


TIES: dict[str, tuple[str, ...]] = {
    "untied": ("model.embed_tokens.weight", "lm_head.weight"), "tied": ("model.embed_tokens.weight",),
    "tied-twice": ("model.embed_tokens.weight", "lm_head.weight"), "tied-as-head": ("lm_head.weight",),
}  # fmt: skip


@pytest.mark.parametrize("tie", TIES)
def test_an_export_has_the_names_of_its_source(tie: str, tmp_path: Path, command: Command) -> None:
    """The tied weight once, twice, or under the name of the head, as it was."""
    config = LLAMA | {"tie_word_embeddings": tie != "untied"}
    tensors = weights(config)
    embedding, head = tensors.pop("model.embed_tokens.weight"), tensors.pop("lm_head.weight", None)
    for name in TIES[tie]:
        tensors[name] = head if tie == "untied" and head is not None and name == "lm_head.weight" else embedding.clone()
    source = write(tmp_path / "source", config, tensors, files=3)
    out = there_and_back(source, tmp_path, command, "--max-shard", 1)
    assert_same(source, out)
    with StoredCheckpoint(tmp_path / "run") as stored:
        assert ("parameter/head.weight" in stored.tensors) == (tie == "untied")


def test_two_weights_that_are_said_to_be_one(tmp_path: Path, command: Command) -> None:
    config = LLAMA | {"tie_word_embeddings": True}
    tensors = weights(config)
    source = write(tmp_path / "source", config, tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"] + 1})
    shown = command("from-hf", source, tmp_path / "run", code=1)
    assert "model.embed_tokens.weight and lm_head.weight differ" in shown
    assert not (tmp_path / "run/checkpoints/latest").exists()


def test_gpt2_without_its_prefix_and_with_masks(tmp_path: Path, command: Command) -> None:
    """As the first published file is."""
    tensors = {name.removeprefix("transformer."): tensor for name, tensor in weights(GPT2).items()}
    source = write(tmp_path / "source", GPT2, tensors)
    masks = {"h.0.attn.bias": torch.ones(1, 1, 30, 30), "h.1.attn.masked_bias": torch.tensor(-1e4)}
    save_file(tensors | masks, source / "model.safetensors")
    out = there_and_back(source, tmp_path, command)
    assert contents(out).keys() == tensors.keys()


def test_what_training_does_not_change_stays(tmp_path: Path, command: Command) -> None:
    """Rows here are shorter than those of the source; its config and small files come out as they were."""
    source = write(tmp_path / "source", LLAMA, weights(LLAMA))
    others = {
        "generation_config.json": b'{"temperature": 0.6}', "tokenizer.model": b"\x0a\x00", "tokenizer.json": b"{}",
        "tokenizer_config.json": b'{"chat_template": "x"}', "special_tokens_map.json": b"{}",
        "chat_template.jinja": b"{{",
    }  # fmt: skip
    for name, content in others.items():
        (source / name).write_bytes(content)
    (source / "pytorch_model.bin").write_bytes(b"not looked at")
    out = there_and_back(source, tmp_path, command)
    assert json.loads((out / "config.json").read_text()) == LLAMA
    assert {file.name for file in out.iterdir()} == {*others, "config.json", "model.safetensors"}
    assert all((out / name).read_bytes() == content for name, content in others.items())
    model = FAMILIES["llama"].read(LLAMA)
    longer = dataclasses.replace(model, rope_theta=1e6, window=0)
    merged = FAMILIES["llama"].merge(longer, LLAMA)
    assert merged["rope_parameters"]["rope_theta"] == merged["rope_theta"] == 1e6 and "rope_scaling" not in merged
    assert {key: merged[key] for key in LLAMA if not key.startswith("rope")} == {
        key: value for key, value in LLAMA.items() if not key.startswith("rope")
    }


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"model_type": "mamba2"}, "model_type='mamba2': there are gpt2, llama"),
        ({"architectures": ["LlamaForTokenClassification"]}, "architectures="),
        ({"hidden_act": "gelu", "mlp_bias": True}, "mlp_bias=True: the feed-forward has no biases"),
        ({"rope_scaling": {"type": "longrope", "short_factor": [1.0]}}, "rope_type='longrope'"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0, "surprise": 3}}, "surprise=3 is not understood"),
        ({"quantization_config": {"bits": 4}}, "quantised weights are not read"),
        ({"residual_multiplier": 0.2}, "residual_multiplier=0.2: this key is not known"),
        ({"num_hidden_layers": None}, "num_hidden_layers=None should be a number"),
    ],
)
def test_what_no_model_has_is_refused_by_name(
    changes: dict[str, Any], told: str, tmp_path: Path, command: Command
) -> None:
    source = write(tmp_path / "source", LLAMA | changes, weights(LLAMA))
    assert told in " ".join(command("from-hf", source, tmp_path / "run", code=1).split())
    assert not (tmp_path / "run").exists()


def test_all_reasons_at_once_and_ignored_keys(tmp_path: Path, command: Command) -> None:
    changes = {"hidden_act": "gelu", "mlp_bias": True, "surprise": 1}
    source = write(tmp_path / "source", LLAMA | changes, weights(LLAMA))
    shown = command("from-hf", source, tmp_path / "run", code=1)
    assert all(key in shown for key in changes)
    (source / "config.json").write_text(json.dumps(LLAMA | {"surprise": 1}))
    command("from-hf", source, tmp_path / "run", "--ignore", "surprise")


def test_tensors_that_do_not_fit(tmp_path: Path, command: Command) -> None:
    tensors = weights(LLAMA)
    tensors["model.layers.0.mlp.extra.weight"] = torch.ones(2)
    tensors["model.norm.weight"] = torch.ones(25)
    del tensors["model.layers.1.self_attn.q_proj.weight"]
    shown = command("from-hf", write(tmp_path / "source", LLAMA, tensors), tmp_path / "run", code=1)
    assert "model.layers.0.mlp.extra.weight is there, but the model has no place for it" in shown
    assert "model.norm.weight is [25], not [24]" in shown
    assert "model.layers.1.self_attn.q_proj.weight [80, 24] is missing" in shown


def test_pickles_are_not_opened(tmp_path: Path, command: Command) -> None:
    source = write(tmp_path / "source", LLAMA, {})
    (source / "model.safetensors").rename(source / "pytorch_model.bin")
    shown = command("from-hf", source, tmp_path / "run", code=1)
    assert "pytorch_model.bin" in shown and "pickles" in shown and "safe_serialization=True" in shown


def test_what_a_config_cannot_say(tmp_path: Path, command: Command) -> None:
    with pytest.raises(ValueError, match=r"attention_softcap=30\.0 cannot be said in a config.json of llama"):
        FAMILIES["llama"].write(ModelConfig(attention_softcap=30.0))


def test_memory_holds_two_tensors(tmp_path: Path, command: Command) -> None:
    config = LLAMA | {"vocab_size": 3001, "intermediate_size": 3000}
    source = write(tmp_path / "source", config, weights(config, torch.float32))
    largest = 4 * 3001 * 24
    with LiveMemory() as memory:
        out = there_and_back(source, tmp_path, command)
    assert largest <= memory.peak < 2.2 * largest
    assert_same(source, out)


def test_nothing_is_left_of_an_export_that_fails(tmp_path: Path, command: Command) -> None:
    source = write(tmp_path / "source", LLAMA, weights(LLAMA))
    command("from-hf", source, tmp_path / "run")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    assert "is there already" in command("to-hf", tmp_path / "run", tmp_path / "full", code=1)
    (file,) = (tmp_path / "run/checkpoints/step_00000000").glob("*.safetensors")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert "is damaged" in command("to-hf", tmp_path / "run", tmp_path / "out", code=1)
    assert {path.name for path in tmp_path.iterdir()} == {"source", "run", "full"}


# ---- runs


def train(mpu: ParallelState, config: Config, folder: Path) -> None:
    """Two steps, and a checkpoint."""
    training = build_training(config, mpu, torch.device("cpu"))
    for step in range(2):
        train_step(training, step)
    RunCheckpoints(config, training, folder).save(2)


def run_config(tokens: str, tmp_path: Path, **changes: Any) -> Config:
    config = config_for("llama", tokens, tmp_path / "cache", **changes)
    return dataclasses.replace(config, model=dataclasses.replace(config.model, num_layers=4, z_loss=0.0))


def test_transformers_says_the_same_after_training(tokens: str, tmp_path: Path, command: Command) -> None:
    """Greedy continuations, from float32 masters; then in bf16, and back."""
    from transformers import AutoModelForCausalLM

    from tests.models.family_ranks import one_rank

    config = run_config(tokens, tmp_path, precision="bf16")
    train(ParallelState.single(), config, tmp_path / "run")
    save_config(config, tmp_path / "run/config.yaml")
    told = command("to-hf", tmp_path / "run", tmp_path / "out")
    assert "give --tokenizer" in " ".join(told.split())
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.dtype == torch.float32 and model.config.max_position_embeddings == 32
    with StoredCheckpoint(tmp_path / "run") as stored:
        assert torch.equal(model.lm_head.weight, stored.read("master/head.weight"))
    prompt = torch.tensor([[5, 17, 3]])
    theirs = model.generate(prompt, do_sample=False, max_new_tokens=12, pad_token_id=0)[0].tolist()
    assert theirs == greedy(one_rank(tmp_path / "out"), prompt[0].tolist(), 12)
    command("to-hf", tmp_path / "run", tmp_path / "half", "--dtype", "bf16")
    command("from-hf", tmp_path / "half", tmp_path / "back")
    command("to-hf", tmp_path / "back", tmp_path / "again")
    assert_same(tmp_path / "half", tmp_path / "again")
    assert (tmp_path / "half/config.json").read_text() == (tmp_path / "again/config.json").read_text()


def greedy(network: Any, tokens: list[int], count: int) -> list[int]:
    from megalite.batch import MicroBatch

    for _ in range(count):
        column = torch.tensor(tokens)[:, None]
        batch = MicroBatch(
            tokens=column, labels=column, loss_mask=torch.ones(column.shape), samples=torch.zeros(1, dtype=torch.int64),
            positions=torch.arange(len(tokens))[:, None], step=0,
        )  # fmt: skip
        tokens = [*tokens, int(network.logits(batch)[-1, 0].argmax())]
    return tokens


@pytest.mark.full
@pytest.mark.parametrize(
    ("tied", "where"), [(False, "tp2+sp+pp2"), (True, "tp2+sp+pp2"), (True, "pp2v2:interleaved+dp2")]
)
def test_a_layout_exports_what_one_rank_does(
    tied: bool, where: str, tokens: str, tmp_path: Path, command: Command, world: World
) -> None:
    """Whichever stages have a copy of a tied weight, it is there once."""
    config = run_config(tokens, tmp_path, precision="fp64")
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, tie_embeddings=tied))
    train(ParallelState.single(), config, tmp_path / "one")
    layout = parse_layout(where)
    world.run(
        train, layout.apply(config), tmp_path / "four", layout=layout.parallel, ranks=4, timeout=120.0
    )  # fmt: skip
    for name in ("one", "four"):
        command("to-hf", tmp_path / name, tmp_path / f"{name}_out")
    one, four = contents(tmp_path / "one_out"), contents(tmp_path / "four_out")
    assert one.keys() == four.keys() and ("lm_head.weight" in one) == (not tied)
    for name, tensor in one.items():
        torch.testing.assert_close(four[name], tensor, rtol=1e-10, atol=1e-12)
    assert (tmp_path / "one_out/config.json").read_text() == (tmp_path / "four_out/config.json").read_text()


# ---- going on from a folder


def start(mpu: ParallelState, config: Config, folder: Path) -> None:
    """Takes the weights over, and saves them."""
    checkpoints = RunCheckpoints(config, build_training(config, mpu, torch.device("cpu")), folder)
    assert checkpoints.load_start() == config.model.from_hf
    checkpoints.save(0)


def test_a_run_goes_on_from_a_folder(tokens: str, tmp_path: Path, command: Command, world: World) -> None:
    """Its architecture is that of config.json; weights come on any layout; masters are exact; so is an export."""
    source = write(tmp_path / "source", LLAMA | {"vocab_size": 61}, weights(LLAMA | {"vocab_size": 61}, torch.float32))
    arguments = ["--model.from-hf", str(source), "--model.hidden-dropout", "0.1", "--train.precision", "bf16"]
    config = load_config(arguments)
    assert config.model.head_dim == 10 and config.model.rope_scaling == "llama3" and config.model.hidden_dropout == 0.1
    with pytest.raises(ValueError, match=r"model\.hidden_size=48: .* has 24; leave it out"):
        load_config([*arguments, "--model.hidden-size", "48"])
    with pytest.raises(ValueError, match="is no model of Hugging Face"):
        load_config(["--model.from-hf", str(tmp_path)])
    save_config(config, tmp_path / "merged.yaml")
    config = dataclasses.replace(config_for("llama", tokens, tmp_path / "cache", precision="bf16"), model=config.model)
    layout = parse_layout("tp2+sp")
    world.run(start, layout.apply(config), tmp_path / "two", layout=layout.parallel, ranks=2, timeout=120.0)
    command("to-hf", tmp_path / "two", tmp_path / "out")
    before, after = contents(source), contents(tmp_path / "out")
    assert all(torch.equal(before[name], after[name]) for name in before) and before.keys() == after.keys()
    written = json.loads((tmp_path / "out/config.json").read_text())
    assert written == LLAMA | {"vocab_size": 61}
    source.rename(tmp_path / "elsewhere")
    assert load_config(["--config", str(tmp_path / "merged.yaml")]).model == config.model


_SIZES: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 10, "intermediate_size": 40, "rms_norm_eps": 1e-6, "max_position_embeddings": 4096, "bos_token_id": 1,
    "eos_token_id": [2, 7], "pad_token_id": 0, "dtype": "float32",
}  # fmt: skip
LONG: dict[str, dict[str, Any]] = {
    "gpt2": GPT2 | {"n_positions": 4096, "n_ctx": 4096, "vocab_size": 61, "eos_token_id": 9, "torch_dtype": "float32"},
    "gemma3_text": _SIZES | {
        "model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"], "query_pre_attn_scalar": 10,
        "sliding_window": 1024, "sliding_window_pattern": 2, "rope_theta": 1e6, "rope_local_base_freq": 5e3,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0}, "hidden_activation": "gelu_pytorch_tanh",
    },
    "qwen3_moe": _SIZES | {
        "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 18, "norm_topk_prob": True, "sliding_window": None, "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 1024,
        },
    },
}  # fmt: skip
"""Made for rows of 4096 tokens."""


@pytest.mark.parametrize("family", LONG)
def test_training_on_short_rows_leaves_the_config_as_it_was(
    family: str, tokens: str, tmp_path: Path, command: Command
) -> None:
    """Two steps on rows of 32 tokens: row length, rotary settings, token ids and dtype are the source's."""
    source = write(tmp_path / "source", LONG[family], weights(LONG[family], torch.float32))
    config = config_for("llama", tokens, tmp_path / "cache", precision="fp32", global_batch_size=4)
    config = dataclasses.replace(config, model=load_config(["--model.from-hf", str(source)]).model)
    training = build_training(config, ParallelState.single(), torch.device("cpu"))
    checkpoints = RunCheckpoints(config, training, tmp_path / "run")
    checkpoints.load_start()
    for step in range(2):
        train_step(training, step)
    checkpoints.save(2)
    save_config(config, tmp_path / "run/config.yaml")
    command("to-hf", tmp_path / "run", tmp_path / "out")
    assert json.loads((tmp_path / "out/config.json").read_text()) == LONG[family]
    before, after = contents(source), contents(tmp_path / "out")
    assert before.keys() == after.keys() and not any(torch.equal(before[name], after[name]) for name in before)


# ---- tokenizers


@pytest.mark.parametrize("kind", ["sentencepiece", "byte"])
def test_our_tokenizers_in_transformers(kind: str, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    text = Path(__file__).read_text() + "naïve façade 漢字 \t tabs\n\n\n    indented\n" * 4
    ours = train_sentencepiece([text], tmp_path / "x.model", 600) if kind == "sentencepiece" else ByteTokenizer()
    out = tmp_path / "out"
    out.mkdir()
    (out / "config.json").write_text(json.dumps(LLAMA))
    for name, content in tokenizer_files(ours).items():
        (out / name).write_bytes(content)
    if kind == "sentencepiece":
        shutil.copy(tmp_path / "x.model", out / "tokenizer.model")
    theirs = AutoTokenizer.from_pretrained(out)
    assert theirs.eos_token_id == ours.eod and len(theirs) == ours.vocab_size
    for begin in range(0, len(text), 173):
        part = text[begin : begin + 301]
        ids = ours.encode(part)
        assert theirs.encode(part, add_special_tokens=False) == ids
        assert theirs.decode(ids) == ours.decode(ids)
    for part in ("", " ", "  a", "☃", "\u2581 \u2581\u2581"):
        assert theirs.encode(part, add_special_tokens=False) == ours.encode(part), part


def test_a_folder_is_read_from_a_url(tmp_path: Path) -> None:
    fsspec = pytest.importorskip("fsspec")
    source = write(tmp_path / "source", LLAMA, weights(LLAMA))
    fsspec.filesystem("memory").put(str(source), "/source", recursive=True)
    with HFFolder("memory://source") as there, HFFolder(source) as here:
        assert torch.equal(there.read("lm_head.weight"), here.read("lm_head.weight"))
