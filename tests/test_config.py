"""Where the values of a configuration come from: merging, types, near misses, presets."""

import dataclasses
import math
import stat
from pathlib import Path

import pytest
import yaml

from megalite.config import SECTIONS, Config, ConfigError, check, from_dict, load_config, save_config, to_dict
from megalite.layout import parse_layout
from megalite.testing.world import fewest_ranks

ROOT = Path(__file__).parent.parent
PRESETS = sorted((ROOT / "configs").glob("*.yaml"))


@pytest.fixture
def write(tmp_path: Path):
    """Writes a YAML file and returns its path."""

    def write_file(text: str, name: str = "a.yaml") -> str:
        (tmp_path / name).write_text(text)
        return str(tmp_path / name)

    return write_file


def test_defaults_files_and_options_are_merged_in_this_order(write) -> None:
    first = write("model: {num_layers: 3, hidden_size: 64}\ntrain:\n  seed: 5\n")
    second = write("model:\n  hidden_size: 96\n", "b.yaml")
    config = load_config(["--config", first, second, "--train.seed", "6", "--model.num_heads=4"])
    assert (config.model.num_layers, config.model.hidden_size, config.model.num_heads) == (3, 96, 4)
    assert config.train.seed == 6
    assert config.optim == Config().optim


@pytest.mark.parametrize("option", ["--train.num-steps", "--train.num_steps"])
def test_a_dash_may_stand_for_an_underscore(option: str) -> None:
    assert load_config([option, "7"]).train.num_steps == 7


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--parallel.sequence-parallel"], True),
        (["--parallel.sequence_parallel", "True"], True),
        (["--parallel.sequence-parallel=true"], True),
        (["--parallel.no-sequence-parallel"], False),
        (["--parallel.sequence_parallel", "false"], False),
        (["--parallel.sequence-parallel=False"], False),
    ],
)
def test_flags_take_a_word_too(write, words: list[str], expected: bool) -> None:
    file = write(f"parallel: {{sequence_parallel: {not expected}}}")
    assert load_config(["--config", file, *words]).parallel.sequence_parallel is expected


def test_lists_and_optional_fields(write) -> None:
    file = write("parallel: {pp: 2, layers_per_stage: [3, 5]}\nmodel: {num_kv_heads: 2, head_dim: null}\n")
    config = load_config(["--config", file])
    assert config.parallel.layers_per_stage == (3, 5)
    assert (config.model.num_kv_heads, config.model.head_dim) == (2, None)
    options = load_config(["--parallel.layers-per-stage", "1", "7", "--data.paths", "x", "y"])
    assert options.parallel.layers_per_stage == (1, 7)
    assert options.data.paths == ("x", "y")


@pytest.mark.parametrize("written", ["1e-3", "1E-3", "1.0e-3", "0.001", "+1e-3"])
def test_yaml_numbers_with_an_exponent_are_numbers(write, written: str) -> None:
    assert load_config(["--config", write(f"optim: {{lr: {written}}}")]).optim.lr == 1e-3


@pytest.mark.parametrize(
    ("written", "meant"), [("010", 10), ("-08", -8), ("1_000", 1000), ("0x10", 16), ("+7", 7), ("0", 0)]
)
def test_yaml_integers_are_decimal_unless_a_prefix_says_otherwise(write, written: str, meant: int) -> None:
    assert load_config(["--config", write(f"train: {{seed: {written}}}")]).train.seed == meant


@pytest.mark.parametrize("written", [".5", "1.", "0.5e+3", "-.inf", "1_0.5", "08.5"])
def test_yaml_numbers_with_a_point_are_numbers(write, written: str) -> None:
    text = written.replace(".inf", "inf")
    assert load_config(["--config", write(f"optim: {{lr: {written}}}")]).optim.lr == float(text)


@pytest.mark.parametrize("written", ["2024-05-01", "1:30", "2024-13-45", "1.2.3", "0o17"])
def test_yaml_words_that_only_look_like_numbers_are_text(write, written: str) -> None:
    assert load_config(["--config", write(f"train: {{run_dir: {written}}}")]).train.run_dir == written


def test_yaml_merge_keys_work(write) -> None:
    file = write("model: &sizes {num_layers: 3, hidden_size: 64}\nmodel2: {<<: *sizes}\n")
    with pytest.raises(ConfigError, match="unknown section 'model2'") as caught:
        load_config(["--config", file])
    assert len(caught.value.problems) == 1
    config = load_config(["--config", write("train: {<<: {seed: 3}, num_steps: 2}")])
    assert (config.train.seed, config.train.num_steps) == (3, 2)


def test_an_integer_will_do_for_a_float(write) -> None:
    lr = load_config(["--config", write("optim: {clip_grad: 1}")]).optim.clip_grad
    assert lr == 1.0
    assert type(lr) is float


def test_run_dir_follows_the_first_config_file(write) -> None:
    first, second = write("", "small.yaml"), write("", "more.yaml")
    assert load_config(["--config", first, second]).train.run_dir == "runs/small"
    assert load_config([]).train.run_dir == "runs/default"
    assert load_config(["--config", first, "--train.run-dir", "elsewhere"]).train.run_dir == "elsewhere"


def test_help_lists_every_field_with_its_docstring(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        load_config(["--help"])
    assert left.value.code == 0
    text = capsys.readouterr().out
    for section, cls in SECTIONS.items():
        assert f"{section} options" in text
        for name in (field.name for field in dataclasses.fields(cls)):
            assert f"--{section}.{name.replace('_', '-')}" in text
    assert "Query heads." in text
    assert "--config" in text


# What is refused


def test_every_unknown_name_is_reported_at_once_with_its_near_miss(write) -> None:
    file = write("model: {num_layer: 3}\noptm: {lr: 1}\ntrain: {lr: 1}\n")
    with pytest.raises(ConfigError) as caught:
        load_config(["--config", file, "--parallel.tpp", "2", "--tp", "2", "--modle.num-heads", "3"])
    text = str(caught.value)
    assert len(caught.value.problems) == 6
    for hint in ("model.num_layers?", "mean optim?", "optim.lr?", "parallel.tp?", "--parallel.tp?", "mean model?"):
        assert f"did you mean {hint}" in text or hint in text
    assert file in text


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("model: {num_layers: many}", "model.num_layers='many' should be an integer"),
        ("model: {num_layers: 1e3}", "write 1000"),
        ("model: {num_layers: true}", "should be an integer"),
        ("optim: {lr: '1e-3'}", "optim.lr='1e-3' should be a number"),
        ("train: {precision: bf61}", "did you mean bf16?"),
        ("train: {tensorboard: 1}", "should be true or false"),
        ("train: {resume: no}", "put it in quotes"),
        ("data: {paths: one}", "should be a list"),
        ("train: {profile_steps: [1]}", "should be a list or null"),
        ("model: 3", "model=3 should hold fields"),
        ("- model", "not sections"),
        ("model: {num_layers: 1, num_layers: 2}", "'num_layers' is given twice"),
        ("model: {", "is not YAML"),
        ("model: {{ layers }}", "a key must be a word; a placeholder such as {{ name }}"),
        ("train: {seed: {{ seed }}}", "a key must be a word"),
        ("[1, 2]: 3", "a key must be a word"),
        ("model: " + "[" * 5000, "nested too deeply"),
        ("train: {seed: !!int x}", "is not YAML: invalid literal"),
        ("train: {num_steps: 1:30}", "train.num_steps='1:30' should be an integer"),
        ("train: {num_steps: 1.5:30}", "train.num_steps='1.5:30' should be an integer"),
    ],
)
def test_wrong_types_are_refused(write, text: str, said: str) -> None:
    with pytest.raises(ConfigError, match="problem") as caught:
        load_config(["--config", write(text)])
    assert said in str(caught.value)


def test_a_missing_file_is_named() -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml: No such file"):
        load_config(["--config", "nowhere.yaml"])


def test_every_wrong_value_on_the_command_line_is_reported_at_once(write) -> None:
    words = ["--model.num-layers", "abc", "--optim.lr=fast", "--train.precision", "bf61", "--model.head-dim", "none"]
    with pytest.raises(ConfigError) as caught:
        load_config(["--config", write("train: {seed: x}"), *words, "--train.num-steps", "1.5", "--tp", "2"])
    text = str(caught.value)
    assert len(caught.value.problems) == 7
    for said in (
        "train.seed='x' should be an integer",
        "model.num_layers='abc' should be an integer",
        "optim.lr='fast' should be a number",
        "train.precision='bf61' should be one of fp32, bf16, fp16, fp64, fp8; did you mean bf16?",
        "model.head_dim='none' should be an integer or null",
        "train.num_steps='1.5' should be an integer",
        "did you mean --parallel.tp?",
    ):
        assert said in text


@pytest.mark.parametrize(
    ("words", "section", "name", "meant"),
    [
        (["--model.head-dim", "None"], "model", "head_dim", None),
        (["--model.head-dim=64"], "model", "head_dim", 64),
        (["--train.seed", "-1"], "train", "seed", -1),
        (["--optim.lr", "-1e-3"], "optim", "lr", -1e-3),
        (["--optim.lr", "inf"], "optim", "lr", math.inf),
        (["--train.precision", "fp64"], "train", "precision", "fp64"),
        (["--train.run-dir", "17"], "train", "run_dir", "17"),
        (["--train.run-dir", "a=b"], "train", "run_dir", "a=b"),
        (["--data.blend", "1", "2.5"], "data", "blend", (1.0, 2.5)),
        (["--train.profile-steps", "2", "3"], "train", "profile_steps", (2, 3)),
        (["--parallel.layers-per-stage", "None"], "parallel", "layers_per_stage", None),
    ],
)
def test_values_on_the_command_line(words: list[str], section: str, name: str, meant: object) -> None:
    assert getattr(getattr(load_config(words), section), name) == meant


@pytest.mark.parametrize("words", [["--model.num-layers"], ["--model.num-layers", "--train.seed", "1"]])
def test_a_missing_option_value_is_refused(capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    with pytest.raises(SystemExit) as left:
        load_config(words)
    assert left.value.code == 2
    assert "num-layers" in capsys.readouterr().err


# Saving


def test_the_saved_config_is_a_valid_config(tmp_path: Path) -> None:
    config = load_config(["--config", str(ROOT / "configs/demo.yaml"), "--parallel.layers-per-stage", "3", "5"])
    save_config(config, tmp_path / "run" / "config.yaml")
    assert load_config(["--config", str(tmp_path / "run" / "config.yaml")]) == config
    assert from_dict(yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())) == config
    assert from_dict(to_dict(config)) == config
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["config.yaml"]
    assert stat.S_IMODE((tmp_path / "run" / "config.yaml").stat().st_mode) == 0o644


@pytest.mark.parametrize("word", ["1e3", "08", "1:30", "2024-05-01", "no", "null", "-.5", "{{ x }}", "0x1f", "0o17"])
def test_text_that_looks_like_something_else_is_saved_as_text(tmp_path: Path, word: str) -> None:
    config = load_config(["--train.run-dir", word])
    save_config(config, tmp_path / "config.yaml")
    assert load_config(["--config", str(tmp_path / "config.yaml")]) == config


def test_from_dict_refuses_what_a_file_would() -> None:
    with pytest.raises(ConfigError, match="2 problems"):
        from_dict({"model": {"num_layers": "x"}, "moddel": {}})


# Presets


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_presets_load_and_run_on_their_own_replica(path: Path) -> None:
    config = load_config(["--config", str(path)])
    check(config, fewest_ranks(config.parallel))
    assert len(path.read_text().splitlines()) < 30


@pytest.mark.parametrize(
    ("name", "billions"), [("gpt2_124m", 0.124), ("llama_1b", 1.236), ("llama3_8b", 8.03), ("gpt3_175b", 174.6)]
)
def test_presets_have_the_published_sizes(name: str, billions: float) -> None:
    model = load_config(["--config", str(ROOT / "configs" / f"{name}.yaml")]).model
    attention = model.hidden_size * model.head_size * 2 * (model.num_heads + model.kv_heads)
    mlp = (2 if model.name == "gpt2" else 3) * model.hidden_size * model.ffn_size
    embeddings = (1 if model.tie_embeddings else 2) * model.vocab_size * model.hidden_size
    if model.name == "gpt2":
        embeddings += model.max_positions * model.hidden_size
    assert model.num_layers * (attention + mlp) + embeddings == pytest.approx(billions * 1e9, rel=4e-3)


def test_the_demo_fits_the_layout_tables() -> None:
    config = load_config(["--config", str(ROOT / "configs/demo.yaml")])
    assert config.model.num_layers >= 8
    assert config.model.num_heads % 8 == 0
    assert config.model.kv_heads % 4 == 0
    assert config.model.vocab_size % 2 == 1
    assert config.train.micro_batch_size == 2
    assert config.train.global_batch_size >= 32
    assert config.optim.decay_steps is not None
    assert config.data.num_samples is not None
    for layout in ("tp8+sp", "pp8", "tp2+pp2+dp2", "dp8"):
        check(parse_layout(layout).apply(config), 8)
