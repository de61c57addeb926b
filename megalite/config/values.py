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


class _Loader(yaml.SafeLoader):
    """YAML 1.1 with two of its traps closed: 1e-3 is a number, and a key given twice is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} is given twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
)


def read_yaml(path: Path) -> Any:
    """The content of a YAML file; raises OSError, yaml.YAMLError or UnicodeDecodeError."""
    return yaml.load(path.read_text(), _Loader)


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
