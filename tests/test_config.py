"""Merging, types, near misses and rules of the configuration."""

import dataclasses
import math
import stat
from pathlib import Path
from typing import Any

import pytest
import yaml

from megalite.config import SECTIONS, Config, ConfigError, check, from_dict, load_config, save_config, to_dict
from megalite.layout import parse_layout
from megalite.mpu import ParallelConfig
from megalite.nn.config import ModelConfig
from megalite.testing.world import fewest_ranks
from megalite.train.config import TrainConfig

ROOT = Path(__file__).parent.parent
Fields = dict[str, Any]
LATENT: Fields = {"name": "deepseek", "kv_lora_rank": 9, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6}
PRESETS = sorted((ROOT / "configs").glob("*.yaml"))


@pytest.fixture
def write(tmp_path: Path):
    """Writes a YAML file and returns its path."""

    def write_file(text: str, name: str = "a.yaml") -> str:
        (tmp_path / name).write_text(text)
        return str(tmp_path / name)

    return write_file


def config_with(
    *,
    model: Fields | None = None,
    parallel: Fields | None = None,
    train: Fields | None = None,
    data: Fields | None = None,
) -> Config:
    config, sizes = Config(), Fields(num_heads=8, hidden_size=128, ffn_hidden_size=384)
    return dataclasses.replace(
        config,
        model=ModelConfig(**(sizes | (model or {}))),
        parallel=ParallelConfig(**(parallel or {})),
        train=TrainConfig(**(train or {})),
        data=dataclasses.replace(config.data, **(data or {})),
    )


def problems(config: Config, world_size: int) -> str:
    with pytest.raises(ConfigError) as caught:
        check(config, world_size)
    return "\n".join(caught.value.problems)


# Where values come from


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


# Rules


def test_a_sound_config_passes() -> None:
    check(config_with(), 1)
    check(config_with(parallel={"tp": 2, "pp": 2, "sequence_parallel": True}), 8)
    check(config_with(parallel={"cp": 4, "tp": 2, "sequence_parallel": True}, data={"seq_len": 101}), 8)
    check(config_with(model={"num_kv_heads": 2}, parallel={"tp": 4}), 4)  # KV heads shared by two ranks each


def test_all_violations_come_at_once_with_legal_values() -> None:
    text = problems(
        config_with(
            model={"num_heads": 12, "num_kv_heads": 5, "hidden_size": 130, "ffn_hidden_size": 100, "num_layers": 1},
            parallel={"tp": 8, "pp": 2, "sequence_parallel": True, "schedule": "1f1", "zero": 4, "vpp": 2},
            train={"global_batch_size": 30, "precision": "fp8"},
        ),
        32,
    )
    for line in (
        "model.num_heads=12 is not divisible by parallel.tp=8; tp can be 1, 2, 3, 4, 6, 12",
        "model.num_heads=12 is not divisible by num_kv_heads=5; num_kv_heads can be 1, 2, 3, 4, 6, 12",
        "model.hidden_size=130 is not divisible by num_heads=12; the nearest hidden_size are 120 and 132",
        "model.ffn_hidden_size=100 is not divisible by parallel.tp=8; tp can be 1, 2, 4, 5, 10, 20, 25, 50",
        "model.num_kv_heads=5 and parallel.tp=8 do not divide one another; tp can be 1",
        "num_layers=1 is too few for 4 pipeline stages",
        "parallel.schedule='1f1' is not known; did you mean 1f1b?",
        "parallel.zero=4",
        "train.precision=fp8",
        "train.global_batch_size=30 is not divisible by micro_batch_size * dp = 2 * 2 = 4;"
        " the nearest global batches are 28 and 32, or micro_batch_size can be 1, 3, 5, 15",
    ):
        assert line in text


@pytest.mark.parametrize(
    ("changes", "world_size", "said"),
    [
        ({"parallel": {"tp": 3}}, 4, "world size 4 is not divisible"),
        (
            {"train": {"global_batch_size": 32, "batch_ramp": (6, 2, 90), "micro_batch_size": 2}},
            2,
            "train.batch_ramp=[6, 2, 90] has batches of 6, 10, 14 and 3 more rows, not divisible by micro_batch_size *"
            " dp = 2 * 2 = 4; start and increment must be multiples of 4",
        ),
        (
            {"train": {"global_batch_size": 32, "batch_ramp": (8, 16, 90)}},
            1,
            "train.batch_ramp=[8, 16, 90]: steps of 16 do not lead from 8 to global_batch_size=32; they do to 24 and"
            " 40",
        ),
        (
            {
                "parallel": {"pp": 2, "schedule": "dualpipe"},
                "train": {"global_batch_size": 32, "micro_batch_size": 2, "batch_ramp": (6, 26, 90)},
            },
            2,
            "and 3 micro-batches (6 rows / (micro_batch_size * dp))",
        ),
        ({"parallel": {"cp": 4, "cp_mode": "ulysses_ring", "cp_ulysses": 3}}, 4, "it can be 1, 2, 4"),
        (
            {"parallel": {"cp": 4, "tp": 4, "cp_mode": "ulysses"}},
            16,
            "exchanges the 2 heads of a rank (num_heads=8 / tp=4)",
        ),
        ({"parallel": {"cp": 2, "cp_mode": "star"}}, 2, "cp_mode='star': 'star' is not a mode; there are ring"),
        ({"parallel": {"cp_mode": "rings"}}, 1, "did you mean ring?"),
        ({"parallel": {"cp_mode": "every:2=ring"}}, 1, "'every:2=ring' is not a mode; there are ring, all_gather"),
        ({"parallel": {"cp_mode": "ring,every:0=ulysses"}}, 1, "come parts such as but_every:2=all_gather"),
        ({"parallel": {"cp_mode": "ring,ulysses"}}, 1, "come parts such as but_every:2=all_gather"),
        ({"parallel": {"cp_mode": "ring,every:2="}}, 1, "'' is not a mode"),
        ({"parallel": {"cp_mode": "ring,every:2=ulises"}}, 1, "'ulises' is not a mode; did you mean ulysses?"),
        (
            {"parallel": {"cp_mode": "ring,1,9=ulysses"}},
            1,
            "layers=1,9: no layer 9 among num_layers=8; they are 0 to 7",
        ),
        (
            {"parallel": {"cp": 4, "tp": 4, "cp_mode": "ring,0,5=ulysses"}},
            16,
            "exchanges the 2 heads of a rank (num_heads=8 / tp=4)",
        ),
        ({"parallel": {"ep": 2}}, 2, "parallel.ep=2 needs experts: set model.num_experts, or ep=1"),
        ({"parallel": {"etp": 2}}, 2, "parallel.etp=2 needs experts: set model.num_experts, or etp=1"),
        ({"parallel": {"pp": 2, "layers_per_stage": (3, 4)}}, 2, "adds up to 7, but num_layers=8"),
        ({"parallel": {"pp": 3, "layers_per_stage": (4, 0, 4)}}, 3, "leaves stage 1 without parameters"),
        ({"parallel": {"pp": 2, "layers_per_stage": (8,)}}, 2, "has 1 entries for 2 stages"),
        ({"model": {"name": "gpt2", "max_positions": 64}}, 1, "longer than model.max_positions=64"),
        ({"model": {"name": "lama"}}, 1, "did you mean llama?"),
        ({"model": {"num_layers": 0}}, 1, "model.num_layers=0 must be at least 1"),
        ({"model": {"hidden_dropout": 1.0}}, 1, "must be in [0, 1)"),
        ({"model": {"head_dim": 5}}, 1, "must be even"),
        ({"model": {"kv_lora_rank": 5}}, 1, "model.kv_lora_rank=5: llama has no latent attention; leave it out"),
        ({"model": {"name": "deepseek"}}, 1, "model.v_head_dim=0 must be at least 1: deepseek has latent attention"),
        ({"model": {**LATENT, "num_kv_heads": 4}}, 1, "model.num_kv_heads=4: each of num_heads=8 makes its own keys"),
        ({"model": {**LATENT, "head_dim": 64}}, 1, "a head is qk_nope_head_dim + qk_rope_head_dim = 12 wide; leave"),
        ({"model": {**LATENT, "rope_percent": 0.5}}, 1, "qk_rope_head_dim says what is turned; leave it out"),
        ({"model": {**LATENT, "qk_rope_head_dim": 3}}, 1, "model.qk_rope_head_dim=3 must be even"),
        ({"model": {**LATENT, "q_lora_rank": -1}}, 1, "model.q_lora_rank=-1 must be at least 1, or 0 for queries"),
        ({"model": {"max_positions": 0}}, 1, "model.max_positions=0 must be at least 1"),
        ({"model": {"z_loss": -1e-4}}, 1, "model.z_loss=-0.0001 must be finite and at least 0"),
        ({"model": {"z_loss": math.nan}}, 1, "model.z_loss=nan must be finite"),
        ({"model": {"norm_eps": -1e-5}}, 1, "model.norm_eps=-1e-05 must be finite and at least 0"),
        ({"model": {"norm_eps": math.inf}}, 1, "model.norm_eps=inf must be finite"),
        ({"model": {"init_std": -0.02}}, 1, "model.init_std=-0.02 must be finite and at least 0"),
        ({"model": {"init_std": math.nan}}, 1, "model.init_std=nan must be finite"),
        ({"model": {"rope_theta": 0.0}}, 1, "model.rope_theta=0.0 must be finite and above 0"),
        ({"model": {"rope_theta": math.inf}}, 1, "model.rope_theta=inf must be finite"),
        ({"model": {"attention_layers": "2-5"}}, 1, "model.attention_layers='2-5' should be all, every:N"),
        ({"model": {"attention_layers": "1"}}, 1, "all layers of llama attend; use all, or name=lfm2"),
        ({"model": {"attention_layers": "1,99", "name": "lfm2"}}, 1, "no layer 99 among num_layers=8; they are 0 to 7"),
        ({"model": {"conv_kernel_size": 0}}, 1, "model.conv_kernel_size=0 must be at least 1"),
        ({"train": {"sequence_chunk": -1}}, 1, "train.sequence_chunk=-1 must be at least 0"),
        ({"data": {"pack": "tight"}}, 1, "should be one of concat, best_fit, none"),
        ({"model": {"name": "gpt2", "rope_theta": 5e5}}, 1, "rope_theta=500000.0: gpt2 has learned positions"),
        ({"model": {"rope_factor": 2.0}}, 1, "needs rope_scaling, one of linear"),
        ({"train": {"precision": "fp8"}}, 1, "reserved"),
        ({"train": {"recompute": "selective:loss"}}, 1, "selective: with some of attention,mlp,norm"),
        ({"train": {"recompute": "every:0"}}, 1, "train.recompute='every:0' should be none, full, every:K, block:N"),
        ({"train": {"recompute_stash": True}}, 1, "train.recompute_stash=true: nothing is computed again"),
        ({"train": {"profile_steps": (5, 3)}}, 1, "profile_steps"),
        ({"train": {"global_batch_size": 1}}, 4, "the nearest global batches are 8"),
    ],
)
def test_single_rules(changes: dict[str, Fields], world_size: int, said: str) -> None:
    assert said in problems(config_with(**changes), world_size)


def test_numbers_of_the_model_may_be_zero_where_that_means_something() -> None:
    check(config_with(model={"z_loss": 0.0, "norm_eps": 0.0, "init_std": 0.0}), 1)
    # Rotary positions have no longest sequence: only learned ones are limited by max_positions.
    check(config_with(model={"max_positions": 1}, data={"seq_len": 128}), 1)


def test_options_that_are_reserved_are_refused_and_not_ignored() -> None:
    config = config_with()
    offload = dataclasses.replace(config, optim=dataclasses.replace(config.optim, offload="cpu"))
    assert "offload" in problems(offload, 1)


def test_attention_dropout_needs_the_block_backend() -> None:
    config = config_with(model={"attention_dropout": 0.1})
    check(config, 1)
    named = dataclasses.replace(config, kernels=dataclasses.replace(config.kernels, attention="sdpa"))
    assert "kernels.attention=block or auto" in problems(named, 1)


@pytest.mark.parametrize(
    ("model", "problem"),
    [
        ({"window": -1}, "model.window=-1 must be at least 1 (a token and those before it), or 0 for no limit"),
        ({"window": 4, "window_layers": "odd"}, "model.window_layers='odd' should be all, every:N"),
        ({"window": 4, "window_layers": "1,9"}, "model.window_layers=1,9: no layer 9 among num_layers=8"),
        ({"window_layers": "every:2"}, "model.window_layers=every:2 needs a model.window"),
        ({"attention_softcap": -2.0}, "model.attention_softcap=-2.0 must be finite and above 0, or 0 for no soft"),
        ({"attention_scale": float("inf")}, "model.attention_scale=inf must be finite and above 0"),
    ],
)
def test_what_a_layer_sees(model: dict[str, Any], problem: str) -> None:
    assert problem in problems(config_with(model=model), 1)


@pytest.mark.parametrize(
    ("model", "problem"),
    [
        ({"window": 4}, "has no sliding window (window=4; 0 would do)"),
        ({"attention_softcap": 5.0}, "has no soft-capping"),
    ],
)
def test_a_named_attention_backend_can_do_it(model: dict[str, Any], problem: str) -> None:
    config = config_with(model=model)
    check(config, 1)
    named = dataclasses.replace(config, kernels=dataclasses.replace(config.kernels, attention="sdpa"))
    assert problem in problems(named, 1)


def test_every_section_has_its_say() -> None:
    config = config_with()
    wrong = dataclasses.replace(
        config,
        optim=dataclasses.replace(config.optim, lr=-1.0),
        checkpoint=dataclasses.replace(config.checkpoint, every=-1),
        data=dataclasses.replace(config.data, num_samples=0),
        train=dataclasses.replace(config.train, num_steps=0),
    )
    text = problems(wrong, 1)
    for field in ("data.num_samples=0", "optim.lr=-1.0", "checkpoint.every=-1", "train.num_steps=0"):
        assert field in text
