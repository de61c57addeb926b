"""What `megalite.generate.harness` imports of the lm-evaluation-harness, as far as its interface is documented."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest


class CacheHook:
    def __init__(self, _: object):
        self.kept: list[tuple[str, Any, Any]] = []

    def add_partial(self, attr: str, req: Any, res: Any) -> None:
        self.kept.append((attr, req, res))


class LM:
    def __init__(self) -> None:
        self._rank, self._world_size = 0, 1
        self.cache_hook = CacheHook(None)

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def world_size(self) -> int:
        return self._world_size

    @classmethod
    def create_from_arg_string(cls, arg_string: str, additional_config: dict[str, Any] | None = None) -> Any:
        pairs = (pair.split("=") for pair in arg_string.split(","))
        arguments = {name: int(value) if value.isdigit() else value for name, value in pairs}
        return cls(**arguments, **{k: v for k, v in (additional_config or {}).items() if v is not None})


@dataclass
class Instance:
    """A request: what a model gets is `args`."""

    args: tuple[Any, ...]


REGISTERED: dict[str, type] = {}


def register_model(*names: str) -> Callable[[type], type]:
    def decorate(cls: type) -> type:
        REGISTERED.update(dict.fromkeys(names, cls))
        return cls

    return decorate


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes `import lm_eval.api.model` and `.registry` find these."""
    modules = {
        name: ModuleType(name) for name in ("lm_eval", "lm_eval.api", "lm_eval.api.model", "lm_eval.api.registry")
    }
    modules["lm_eval.api.model"].LM = LM  # pyright: ignore[reportAttributeAccessIssue]
    modules["lm_eval.api.registry"].register_model = register_model  # pyright: ignore[reportAttributeAccessIssue]
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "megalite.generate.harness", raising=False)
