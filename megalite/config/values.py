"""YAML without its traps, and plain values turned into the types of dataclass fields."""

from __future__ import annotations

import difflib
import re
import types
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import yaml

_TAG = "tag:yaml.org,2002:"
_INT = re.compile(r"[-+]?(0b[01_]+|0x[0-9a-fA-F_]+|[0-9][0-9_]*)$")
_FLOAT = re.compile(
    r"([-+]?([0-9][0-9_]*\.?[0-9_]*|\.[0-9][0-9_]*)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN))$"
)


def _plain_scalars() -> dict[str, list[tuple[str, re.Pattern[str]]]]:
    """What an unquoted word of YAML is, by its first character, as PyYAML keeps it.

    As in YAML 1.1, with the readings that surprise left out: 010 is ten, not eight; 1:30 and 2024-05-01 are text, not
    90 and a date; 1e-3 is a number.
    """
    replaced = {_TAG + name for name in ("int", "float", "timestamp")}
    found = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag not in replaced]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    for tag, pattern in (("int", _INT), ("float", _FLOAT)):  # the first that matches counts
        for first in "-+.0123456789":
            found.setdefault(first, []).append((_TAG + tag, pattern))
    return found


class _Loader(yaml.SafeLoader):
    """Safe YAML in which a key that is given twice is an error."""

    yaml_implicit_resolvers = _plain_scalars()

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            if key_node.tag == _TAG + "merge":
                continue
            if not isinstance(key_node, yaml.ScalarNode):
                raise _error("a key must be a word; a placeholder such as {{ name }} must be filled in", key_node)
            key = self.construct_object(key_node)
            if key in seen:
                raise _error(f"key {key!r} is given twice", key_node)
            seen.add(key)
        return super().construct_mapping(node, deep)

    def construct_decimal(self, node: yaml.ScalarNode) -> int:
        """An integer in the base that its prefix names; leading zeros mean nothing."""
        text = self.construct_scalar(node).replace("_", "").lower()
        return int(text, {"0b": 2, "0x": 16}.get(text.lstrip("+-")[:2], 10))


_Loader.add_constructor(_TAG + "int", _Loader.construct_decimal)


class _Dumper(yaml.SafeDumper):
    """Puts in quotes what `_Loader` would not read back as text."""

    yaml_implicit_resolvers = _Loader.yaml_implicit_resolvers


def _error(problem: str, node: yaml.Node) -> yaml.YAMLError:
    return yaml.constructor.ConstructorError(None, None, problem, node.start_mark)


def read_yaml(path: Path) -> Any:
    """The content of a YAML file; raises OSError, and ValueError saying where it is not YAML."""
    try:
        return yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from error


def dump_yaml(content: Any) -> str:
    """The text that `read_yaml` reads as `content`, keys in their order."""
    return yaml.dump(content, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def convert(value: Any, hint: Any) -> Any:
    """`value`, as YAML gives it, as the type `hint` of a field; raises ValueError saying what it should be."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return _convert_union(value, arguments)
    if origin is Literal:
        if any(value == option and type(value) is type(option) for option in arguments):
            return value
        raise ValueError(f"should be {_choices(value, arguments)}")
    if origin is tuple:
        return _convert_tuple(value, arguments)
    if hint is float and type(value) is int:
        return float(value)
    if hint is type(None) and value is None:
        return None
    if isinstance(hint, type) and type(value) is hint:
        return value
    raise ValueError(f"should be {_describe(hint)}{_advice(value, hint)}")


def check_word(word: str, hint: Any) -> None:
    """Raises ValueError, as `convert` does, when a word of the command line is no number or choice as `hint` asks.

    Text, lists and flags pass: the command line's parser knows what to make of their words.
    """
    options = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    if not any(_may_mean(word, option) for option in options):
        convert(word, hint)


def _may_mean(word: str, hint: Any) -> bool:
    if typing.get_origin(hint) is Literal:
        return word in map(str, typing.get_args(hint))
    if hint is type(None):
        return word == "None"
    try:
        return hint not in (int, float) or hint(word) is not None
    except ValueError:
        return False


def _convert_union(value: Any, options: Sequence[Any]) -> Any:
    for option in options:
        try:
            return convert(value, option)
        except ValueError:
            continue
    names = [_describe(option) for option in options if option is not type(None)]
    raise ValueError(f"should be {' or '.join(names)}{' or null' if type(None) in options else ''}")


def _convert_tuple(value: Any, arguments: Sequence[Any]) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple):
        raise ValueError("should be a list")
    if len(arguments) == 2 and arguments[1] is Ellipsis:
        return tuple(convert(item, arguments[0]) for item in value)
    if len(value) != len(arguments):
        raise ValueError(f"should be a list of {len(arguments)}")
    return tuple(convert(item, hint) for item, hint in zip(value, arguments, strict=True))


def _choices(value: Any, options: Sequence[Any]) -> str:
    close = difflib.get_close_matches(str(value), [str(option) for option in options], n=1)
    listed = f"one of {', '.join(map(str, options))}"
    return f"{listed}; did you mean {close[0]}?" if close else listed


def _describe(hint: Any) -> str:
    names = {int: "an integer", float: "a number", str: "text", bool: "true or false", type(None): "null"}
    if typing.get_origin(hint) is tuple:
        return "a list"
    if typing.get_origin(hint) is Literal:
        return f"one of {', '.join(map(str, typing.get_args(hint)))}"
    return names.get(hint, str(hint))


def _advice(value: Any, hint: Any) -> str:
    if hint is int and isinstance(value, float) and value.is_integer():
        return f"; write {int(value)}"
    if hint is str and value is not None:
        return "; put it in quotes"
    return ""
