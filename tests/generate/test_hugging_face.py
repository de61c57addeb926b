"""Folders of Hugging Face, continued as transformers' own generate does."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing

from megalite.data.tokenizer import train_sentencepiece
from megalite.generate.generator import Generator
from megalite.generate.load import find_source, find_words, inference_layout, load_stage
from megalite.generate.row import Stop
from megalite.generate.sampling import Sampling
from megalite.generate.words import hugging_face_words
from megalite.layout import parse_layout
from megalite.mpu import ParallelState
from megalite.testing.world import World
from tests.hugging_face import float64
from tests.models.families import FAMILY_IDS, V, build
from tools.checkpoint import main as checkpoint
from tools.generate import main

NEW = 7
PROMPTS = [[5, 30, 2, 9, 11, 4, 17, 33], [8, 1, 30], [12]]
COVER = ("llama", "lfm2_moe")
WORDS = ["</s>", "<s>", *(f"w{i}" for i in range(V - 2))]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, list[list[int]]]]:
    """By family, filled when asked for: a folder, and what transformers' model says to each prompt."""
    return {}


def of_family(
    name: str, saved: dict[str, tuple[Path, list[list[int]]]], factory: pytest.TempPathFactory
) -> tuple[Path, list[list[int]]]:
    if name not in saved:
        path, model = factory.mktemp(name), build(name, tie_word_embeddings=False)
        model.save_pretrained(path)
        model.generation_config.eos_token_id = None
        with float64(), torch.inference_mode():
            rows = [_continued(model, prompt) for prompt in PROMPTS]
        saved[name] = path, rows
    return saved[name]


def _continued(model: Any, prompt: list[int]) -> list[int]:
    ids = torch.tensor([prompt])
    settings = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0, "use_cache": True}
    return model.generate(ids, attention_mask=torch.ones_like(ids), **settings)[0, len(prompt) :].tolist()


def say(mpu: ParallelState, folder: str) -> list[list[int]]:
    """What this rank's part of the model in `folder` says, in float64."""
    source, device = find_source(folder), torch.device("cpu")
    stage = load_stage(source, mpu, device, "fp64").stage
    generator = Generator(stage, mpu, device, context=source.context)
    rows = generator.generate(PROMPTS, Sampling(temperature=0.0), Stop(max_new_tokens=NEW))
    return [list(row.tokens) for row in rows]


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=() if name in COVER else pytest.mark.full) for name in FAMILY_IDS]
)
def test_says_what_transformers_says(
    family: str, saved: dict[str, tuple[Path, list[list[int]]]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder, wanted = of_family(family, saved, tmp_path_factory)
    found = say(ParallelState.single(), str(folder))
    assert found == wanted
    assert len({token for row in found for token in row}) > 1


@pytest.mark.parametrize("layout", ["tp2+pp2", pytest.param("ep2", marks=pytest.mark.full)])
def test_on_several_ranks(
    layout: str,
    saved: dict[str, tuple[Path, list[list[int]]]],
    tmp_path_factory: pytest.TempPathFactory,
    world: World,
) -> None:
    folder, wanted = of_family("lfm2_moe", saved, tmp_path_factory)
    asked = parse_layout(layout)
    parallel = inference_layout(asked.parallel, asked.num_ranks)
    for rank in world.run(say, str(folder), layout=parallel, ranks=asked.num_ranks):
        assert rank == wanted


def write_tokenizer(folder: Path) -> None:
    """A vocabulary of words, whose texts begin with <s>."""
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="w0"))
    tokenizer.pre_tokenizer = Whitespace()  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.add_special_tokens(["</s>", "<s>"])
    tokenizer.save(str(folder / "tokenizer.json"))


def test_the_command_takes_folders_and_what_they_become(
    saved: dict[str, tuple[Path, list[list[int]]]],
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder, _ = of_family("llama", saved, tmp_path_factory)
    write_tokenizer(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 6]}))
    words = find_words(find_source(folder))
    assert words.prompt("w3 w4") == [1, 5, 6] and words.document("w3") == [1, 5] and words.ends == (5, 6, 0)
    options = ["--prompt", "w3 w4", "--temperature", "0", "--max-new-tokens", "4", "--json"]
    assert main([str(folder), *options]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["reason"] in ("length", "stop_token")
    assert checkpoint(["from-hf", str(folder), str(tmp_path / "run")]) == 0
    capsys.readouterr()
    assert main([str(tmp_path / "run"), *options]) == 0
    assert json.loads(capsys.readouterr().out) == printed


def test_a_sentencepiece_model_alone(tmp_path: Path) -> None:
    train_sentencepiece(["some text " * 30], tmp_path / "tokenizer.model", 280)
    (tmp_path / "config.json").write_text(json.dumps({"bos_token_id": 7, "eos_token_id": 1}))
    words = hugging_face_words(tmp_path)
    assert words is not None and words.prefix == (7,) and words.ends == (1,)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"add_bos_token": False}))
    words = hugging_face_words(tmp_path)
    assert words is not None and words.prefix == () and words.prompt("") == [1]
    (tmp_path / "tokenizer.model").unlink()
    assert hugging_face_words(tmp_path) is None


def test_what_no_model_here_has_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "some_new_key": 3}))
    assert main([str(tmp_path)]) == 1
    assert "some_new_key=3: this key is not known" in capsys.readouterr().err


def test_an_import_says_the_same(
    saved: dict[str, tuple[Path, list[list[int]]]], tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Its routers have a bias, and nothing of a step before."""
    folder, wanted = of_family("lfm2_moe", saved, tmp_path_factory)
    assert checkpoint(["from-hf", str(folder), str(tmp_path / "run")]) == 0
    assert say(ParallelState.single(), str(tmp_path / "run")) == wanted
