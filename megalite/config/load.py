"""Defaults, then the files of `--config` from left to right, then `--section.field value`; and back into a file."""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from megalite.config import from_hf
from megalite.config.sections import (
    SECTIONS,
    Config,
    ConfigError,
    field_types,
    nearest_anywhere,
    nearest_field,
    nearest_section,
)
from megalite.config.values import check_word, convert, dump_yaml, read_yaml
from megalite.files import replace_text
from megalite.nn.config import ModelConfig

Values = dict[str, dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class _CommandLine(Config):
    """What the command line offers: the sections, and the files below them."""

    config: tuple[str, ...] = ()
    """YAML files, merged from left to right over the defaults; options on the command line win over them."""


def load_config(argv: Sequence[str], *, prog: str | None = None, description: str | None = None) -> Config:
    """The configuration that the arguments `argv` (without the program name) describe.

    Raises ConfigError with every unknown name and wrong type in the files and on the command line. `--help` and
    options with too few or too many values print and raise SystemExit, as command lines do.
    """
    files = config_files(argv)
    values, problems = _merge_files(files)
    problems += [*_option_problems(argv), *_value_problems(argv)]
    if problems:
        raise ConfigError(problems)
    found = _from_hf(argv, values["model"])
    parsed = tyro.cli(
        _CommandLine,
        prog=prog,
        description=description or "Trains a model. Every option may also stand in a YAML file under its section.",
        default=_CommandLine(**_build(values), config=tuple(files)),
        args=_plain_flags(argv),
    )
    config = Config(**{name: getattr(parsed, name) for name in SECTIONS})
    if found is not None and (problems := from_hf.problems(found, config.model)):
        raise ConfigError(problems)
    if config.train.run_dir is None:
        name = Path(files[0]).stem if files else "default"
        config = dataclasses.replace(config, train=dataclasses.replace(config.train, run_dir=f"runs/{name}"))
    return config


def _from_hf(argv: Sequence[str], model: dict[str, Any]) -> ModelConfig | None:
    """The model that another folder describes, if one is named; its fields go below those of `model`."""
    folder = from_hf.folder_of(argv, model)
    if folder is None:
        return None
    try:
        found = from_hf.found_model(folder, model)
    except ValueError as error:
        raise ConfigError([str(error)]) from error
    if found is not None:
        model |= dataclasses.asdict(found) | model
    return found


def config_files(argv: Sequence[str]) -> list[str]:
    """The operands of every `--config` in `argv`."""
    files: list[str] = []
    collecting = False
    for word in argv:
        if word.startswith("--"):
            collecting = word == "--config"
            if word.startswith("--config="):
                files.append(word.removeprefix("--config="))
        elif collecting:
            files.append(word)
    return files


def _build(values: Values) -> dict[str, Any]:
    return {name: SECTIONS[name](**values[name]) for name in SECTIONS}


def _merge_files(files: Sequence[str]) -> tuple[Values, list[str]]:
    """The fields that `files` set, the last one winning, and everything wrong with them."""
    values: Values = {name: {} for name in SECTIONS}
    problems: list[str] = []
    for path in files:
        try:
            content = read_yaml(Path(path))
        except OSError as error:
            problems.append(f"--config {path}: {error.strerror}")
        except ValueError as error:
            problems.append(f"{path} is not YAML: {error}")
        else:
            problems += [f"{path}: {problem}" for problem in _merge(content, values)]
    return values, problems


def _merge(content: Any, values: Values) -> list[str]:
    """Lays the sections in `content` over `values`; returns what is wrong with them."""
    if content is None:
        return []
    if not isinstance(content, Mapping):
        return [f"holds {content!r}, not sections such as model: and train:"]
    problems: list[str] = []
    for section, fields in content.items():
        if section not in SECTIONS:
            problems.append(f"unknown section {section!r}; {nearest_section(str(section))}")
        elif isinstance(fields, Mapping):
            problems += _merge_section(section, fields, values[section])
        elif fields is not None:
            problems.append(f"{section}={fields!r} should hold fields")
    return problems


def _merge_section(section: str, fields: Mapping[Any, Any], values: dict[str, Any]) -> list[str]:
    problems: list[str] = []
    hints = field_types(section)
    for name, value in fields.items():
        if name not in hints:
            problems.append(f"unknown field {section}.{name}; {nearest_field(section, str(name))}")
            continue
        try:
            values[name] = convert(value, hints[name])
        except ValueError as error:
            problems.append(f"{section}.{name}={value!r} {error}")
    return problems


def _option_problems(argv: Sequence[str]) -> list[str]:
    """Options of `argv` that name no field."""
    found: list[str] = []
    for word in argv:
        option = word.partition("=")[0]
        section, dot, name = option.removeprefix("--").replace("-", "_").partition(".")
        if not word.startswith("--") or (section in ("config", "help") and not dot):
            continue
        if not dot:
            found.append(f"unknown option {option}; {nearest_anywhere(section)}")
        elif section not in SECTIONS:
            found.append(f"unknown option {option}; {nearest_section(section)}")
        elif name not in field_types(section) and name.removeprefix("no_") not in _flags(section):
            found.append(f"unknown option {option}; {nearest_field(section, name)}")
    return found


def _value_problems(argv: Sequence[str]) -> list[str]:
    """Values in `argv` that are no number, or none of the choices, where their options take one; tyro stops at one."""
    found: list[str] = []
    for word, following in itertools.pairwise([*argv, "--"]):
        option, equals, value = word.partition("=")
        section, _, name = option.removeprefix("--").replace("-", "_").partition(".")
        value = value if equals else following
        hint = field_types(section).get(name) if word.startswith("--") and section in SECTIONS else None
        if hint is None or value.startswith("--"):
            continue
        try:
            check_word(value, hint)
        except ValueError as error:
            found.append(f"{section}.{name}={value!r} {error}")
    return found


def _flags(section: str) -> list[str]:
    """The true-or-false fields of a section."""
    return [name for name, hint in field_types(section).items() if hint is bool]


def _plain_flags(argv: Sequence[str]) -> list[str]:
    """`argv` with `--section.flag true|false` in the form that tyro takes: `--section.flag`, `--section.no-flag`."""
    words: list[str] = []
    for word in argv:
        option, equals, value = word.partition("=")
        if equals and _is_flag(option):
            words.append(_flag(option, value))
        elif words and _is_flag(words[-1]) and word.lower() in ("true", "false"):
            words[-1] = _flag(words[-1], word)
        else:
            words.append(word)
    return words


def _is_flag(word: str) -> bool:
    section, _, name = word.removeprefix("--").replace("-", "_").partition(".")
    return word.startswith("--") and section in SECTIONS and name in _flags(section)


def _flag(option: str, value: str) -> str:
    section, _, name = option.partition(".")
    if value.lower() == "true":
        return option
    return f"{section}.no-{name}" if value.lower() == "false" else f"{option}={value}"


def to_dict(config: Config) -> Values:
    """`config` as plain dicts, lists and scalars, fit for YAML and JSON."""
    return _plain(dataclasses.asdict(config))


def from_dict(content: Mapping[str, Any]) -> Config:
    """The inverse of `to_dict`; fields that are absent take their defaults. Raises ConfigError as a file would."""
    values: Values = {name: {} for name in SECTIONS}
    if problems := _merge(content, values):
        raise ConfigError(problems)
    return Config(**_build(values))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def save_config(config: Config, path: str | os.PathLike[str]) -> None:
    """Writes `config` as YAML that is itself a valid --config; the file appears whole or not at all."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    replace_text(target, dump_yaml(to_dict(config)))
