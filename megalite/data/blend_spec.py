"""What `data.blend` says: which datasets, by which weights, from which step on."""

from __future__ import annotations

import itertools
import json
import shlex
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from megalite.data.blended import normalise_weights

BlendWords = tuple[float | str, ...] | str
"""`data.blend` as a configuration holds it: weights of data.paths, "WEIGHT PATH ...", or the name of a file."""
FILE_SUFFIXES = (".yaml", ".yml", ".json")


@dataclass(frozen=True)
class Phase:
    """Weights, one a path, that hold from `step` on."""

    step: int
    weights: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class BlendSpec:
    """Datasets and their weights over the steps of a run. Without phases they are mixed by their tokens."""

    paths: tuple[str, ...]
    phases: tuple[Phase, ...] = ()

    @property
    def identity(self) -> list[Any]:
        """What decides the order, as JSON has it: weights alone while they never change."""
        if len(self.phases) < 2:
            return list(self.phases[0].weights) if self.phases else []
        return [[phase.step, *phase.weights] for phase in self.phases]


def parse_blend(blend: BlendWords, paths: Sequence[str], *, name: str = "data.blend") -> BlendSpec:
    """The meaning of a blend for the `paths` that stand beside it.

    Numbers alone are weights of `paths`. Otherwise `blend` brings its own: "0.7 a 0.3 b", with "@STEP" before weights
    that hold from that step on ("0.7 a 0.3 b @1000 0.2 a 0.8 c"), as one text or as a list of words; or it names a
    YAML or JSON file with such a text or list, a mapping of paths to weights, a list of [weight, path], or
    `phases`, a list of {from_step, blend}. Raises ValueError saying what is wrong, OSError for a missing file.
    """
    words = [blend] if isinstance(blend, str) else list(blend)
    words = [word for word in words if word != ""]
    if not words:
        return BlendSpec(paths=tuple(paths))
    if all(isinstance(word, int | float) for word in words):
        if len(words) != len(paths):
            raise ValueError(f"{name} has {len(words)} weights for {len(paths)} data.paths")
        return _checked(tuple(paths), [Phase(0, tuple(float(word) for word in words))], name)
    if paths:
        raise ValueError(f"{name} names its own paths, so data.paths must be left out (or give the weights alone)")
    if len(words) == 1 and str(words[0]).endswith(FILE_SUFFIXES):
        return _merged(_phases_of(_read(str(words[0]), name), str(words[0])), str(words[0]))
    return _merged(_phases_of(words[0] if len(words) == 1 else words, name), name)


def same_until(one: Sequence[Any], other: Sequence[Any], step: int) -> bool:
    """Whether two blends, as `BlendSpec.identity` has them, agree on the steps before `step`."""

    def begun(blend: Sequence[Any]) -> list[Any]:
        phases = blend if blend and isinstance(blend[0], list | tuple) else [[0, *blend]]
        return [list(phase) for phase in phases if phase[0] < max(step, 1)]

    return begun(one) == begun(other)


def is_file(blend: BlendWords) -> bool:
    """Whether a blend is the name of a file."""
    word = blend if isinstance(blend, str) else blend[0] if len(blend) == 1 else ""
    return isinstance(word, str) and word.endswith(FILE_SUFFIXES)


Pairs = list[tuple[float, str]]


def _read(path: str, name: str) -> Any:
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise FileNotFoundError(f"{name}: {path} cannot be read: {error.strerror}") from error
    try:
        if path.endswith(".json"):
            return json.loads(data.decode(), object_pairs_hook=_unrepeated)
        return yaml.load(data.decode(), _UnrepeatedKeys)
    except RepeatedKeyError as error:
        raise ValueError(f"{path}: {error}") from None
    except (ValueError, yaml.YAMLError) as error:
        raise ValueError(f"{path} is not {'JSON' if path.endswith('.json') else 'YAML'}: {error}") from error


class RepeatedKeyError(ValueError):
    """A mapping has a key twice; all but the last would be lost."""


def _unrepeated(pairs: Sequence[tuple[Any, Any]]) -> dict[Any, Any]:
    keys = [key for key, _ in pairs]
    for key in keys:
        if keys.count(key) > 1:
            raise RepeatedKeyError(f"{key!r} stands twice in a mapping; a path may in a list of [weight, path]")
    return dict(pairs)


class _UnrepeatedKeys(yaml.SafeLoader):
    """Refuses keys that stand twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        own = [key for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"]
        _unrepeated([(self.construct_object(key, deep=True), None) for key in own])
        return super().construct_mapping(node, deep)


def _phases_of(content: Any, name: str) -> list[tuple[int, Pairs]]:
    """(First step, its weights and paths) of each phase."""
    if isinstance(content, Mapping) and "phases" in content:
        if set(content) != {"phases"} or not isinstance(content["phases"], list):
            raise ValueError(f"{name} holds {content!r}; phases is a list of from_step and blend, with nothing beside")
        return [_phase(entry, place, name) for place, entry in enumerate(content["phases"])]
    if isinstance(content, Mapping):
        return [(0, [(_weight(weight, name), _path(path, name)) for path, weight in content.items()])]
    words = _split(content, name) if isinstance(content, str) else content
    if not isinstance(words, list | tuple) or not words:
        raise ValueError(f'{name} holds {content!r}, not "WEIGHT PATH WEIGHT PATH ..."')
    named = [word for word in words if isinstance(word, Mapping)]
    if len(named) == len(words):
        return [(0, [_pair(word, name) for word in named])]
    if all(isinstance(word, Sequence) and not isinstance(word, str) and len(word) == 2 for word in words):
        return [(0, [(_weight(weight, name), _path(path, name)) for weight, path in words])]
    return _from_words(words, name)


def _phase(entry: Any, place: int, name: str) -> tuple[int, Pairs]:
    if not isinstance(entry, Mapping) or set(entry) - {"from_step", "blend"} or "blend" not in entry:
        raise ValueError(f"{name}: phase {place} is {entry!r}, not from_step and blend")
    step = entry.get("from_step", 0)
    inner = _phases_of(entry["blend"], name)
    if type(step) is not int or len(inner) != 1:
        raise ValueError(f"{name}: phase {place} needs a from_step that is an integer, and one blend")
    return step, inner[0][1]


def _from_words(words: Sequence[Any], name: str) -> list[tuple[int, Pairs]]:
    phases: list[tuple[int, Pairs]] = [(0, [])]
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if isinstance(word, str) and word.startswith("@") and word[1:].isdigit():
            phases.append((int(word[1:]), []))
            continue
        weight = _weight(word, name)
        if not rest or not isinstance(rest[0], str) or rest[0].startswith("@"):
            follows = f"{rest[0]!r}, which is no path" if rest else "nothing"
            raise ValueError(f"{name}: after weight {word} comes {follows}; write WEIGHT PATH WEIGHT PATH ...")
        phases[-1][1].append((weight, rest.pop(0)))
    return phases


def _split(text: str, name: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise ValueError(f"{name} is {text!r}: {error}; put a path with spaces or quotes in quotes") from error


def _pair(entry: Mapping[Any, Any], name: str) -> tuple[float, str]:
    if set(entry) != {"weight", "path"}:
        raise ValueError(f"{name}: {dict(entry)!r} is not weight and path")
    return _weight(entry["weight"], name), _path(entry["path"], name)


def _path(word: Any, name: str) -> str:
    if not isinstance(word, str) or not word:
        raise ValueError(f"{name}: {word!r} is no path; write it as a text, in quotes if need be")
    return word


def _weight(word: Any, name: str) -> float:
    try:
        return float(word)
    except (TypeError, ValueError):
        raise ValueError(f"{name}: {word!r} is no weight; write WEIGHT PATH WEIGHT PATH ...") from None


def _merged(phases: Sequence[tuple[int, Pairs]], name: str) -> BlendSpec:
    """One list of paths for all phases; a path that stands twice in a phase is two datasets."""
    places: dict[tuple[str, int], int] = {}
    rows: list[dict[int, float]] = []
    for _, pairs in phases:
        row: dict[int, float] = {}
        for k, (weight, path) in enumerate(pairs):
            before = sum(other == path for _, other in pairs[:k])
            row[places.setdefault((path, before), len(places))] = weight
        rows.append(row)
    weights = [tuple(row.get(place, 0.0) for place in range(len(places))) for row in rows]
    steps = [step for step, _ in phases]
    return _checked(tuple(path for path, _ in places), [Phase(*p) for p in zip(steps, weights, strict=True)], name)


def _checked(paths: tuple[str, ...], phases: list[Phase], name: str) -> BlendSpec:
    steps = [phase.step for phase in phases]
    if not steps or steps[0] != 0 or any(b <= a for a, b in itertools.pairwise(steps)):
        raise ValueError(f"{name} has phases from steps {steps}; they must begin at 0 and increase")
    for phase in phases:
        normalise_weights(phase.weights, name)
    return BlendSpec(paths=paths, phases=tuple(phases))
