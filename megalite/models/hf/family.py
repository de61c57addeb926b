"""A family of Hugging Face's architectures: what its config.json means and where its tensors are."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from megalite.models.hf.canonical import canonical, differences
from megalite.models.hf.fields import HARMLESS, Content, Field, Refused
from megalite.models.hf.weights import Link, Links, Shape, Table, find_links
from megalite.models.transformer import Transformer
from megalite.mpu import ParallelState
from megalite.nn.config import ModelConfig
from megalite.parallel.shard import name_parameters, shard_of

_BUFFERS = r".*\.(inv_freq|masked_bias)"
"""Tensors of old files that are computed from the config."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """One `model_type`, with the class that runs it here and both translations.

    name: the key of `MODELS`. outside, layer: the tables of `weights.find_links`. layer_prefix: of names in a layer.
    optional_prefix: what some files leave out at the front of all names. buffers: a pattern of further tensors that
    hold nothing learned.
    """

    model_type: str
    architecture: str
    name: str
    model_cls: type[Transformer]
    fields: tuple[Field, ...]
    outside: Table
    layer: Table | Callable[[ModelConfig, int], Table]
    layer_prefix: str = "model.layers.{}."
    optional_prefix: str = ""
    buffers: str = ""

    def read(self, content: Content, ignore: Iterable[str] = ()) -> ModelConfig:
        """The model that a config.json describes; raises Refused with every key that it cannot be.

        ignore: keys to leave out, whatever they say.
        """
        left_out = set(ignore)
        content = {key: value for key, value in content.items() if key not in left_out}
        owned = {key for field in self.fields for key in field.keys}
        problems = [f"{key}={content[key]!r}: {why}" for key, why in _NEVER.items() if content.get(key)]
        problems += [
            f"{key}={content[key]!r}: this key is not known, so it might change the model"
            for key in content
            if key not in owned and key not in HARMLESS and key not in _NEVER
        ]
        values, wrong = self._values(content)
        if problems := problems + wrong:
            raise Refused(list(dict.fromkeys(problems)))
        return self._model(values)

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """The config.json of a model; raises Refused where the family has no word for a part of it."""
        content: dict[str, Any] = {"model_type": self.model_type, "architectures": [self.architecture]}
        for field in self.fields:
            content |= field.write(model)
        here = canonical(model)
        if problems := [
            f"model.{name}={getattr(here, name)!r} cannot be said in a config.json of {self.model_type}"
            for name in differences(self.read(content), model)
        ]:
            raise Refused(problems)
        return content

    def merge(self, model: ModelConfig, source: Content) -> dict[str, Any]:
        """`source`, changed only where it means another model than this one: all its other keys stay as they are."""
        fresh, merged = self.write(model), dict(source)
        before, _ = self._values(source)
        after, _ = self._values(fresh)
        for number, field in enumerate(self.fields):
            exchanged = [*before[:number], after[number], *before[number + 1 :]]
            if differences(self._model(before), self._model(exchanged)):
                merged = {key: value for key, value in merged.items() if key not in field.keys}
                merged |= field.write(model)
        return merged

    def _values(self, content: Content) -> tuple[list[dict[str, Any]], list[str]]:
        """What each field reads, and what is wrong."""
        values: list[dict[str, Any]] = []
        problems: list[str] = []
        for field in self.fields:
            found: dict[str, Any] = {}
            try:
                found = field.read(content)
            except Refused as error:
                problems += error.problems
            except (KeyError, TypeError, ValueError) as error:
                problems.append(f"{', '.join(field.keys)}: {error!r}")
            values.append(found)
        return values, problems

    def _model(self, values: Iterable[Mapping[str, Any]]) -> ModelConfig:
        return ModelConfig(name=self.name, **{key: value for one in values for key, value in one.items()})

    def shapes(self, model: ModelConfig) -> dict[str, tuple[str, Shape]]:
        """Our tensors by name: their kind (parameter or buffer) and shape; a tied head is none."""
        with torch.device("meta"):
            network = self.model_cls(model, ParallelState.single())
        name_parameters(network)
        found = {shard_of(p).name: ("parameter", tuple(p.shape)) for p in network.parameters()}
        if model.expert_bias:
            for layer in (i for i in range(model.num_layers) if model.is_moe_layer(i)):
                found[f"layers.{layer}.mlp.router.expert_bias"] = ("buffer", (model.num_experts,))
        return found

    def links(self, model: ModelConfig, known: frozenset[str] | None = None) -> Links:
        """Where the tensors are. known: the names of a file, for what it may leave out, double or stack."""
        shapes = {name: shape for name, (_, shape) in self.shapes(model).items()}
        layer = self.layer if callable(self.layer) else lambda model, number, table=self.layer: table
        strip = self._strips(known)
        if known is not None and strip:
            known = frozenset(self.optional_prefix + name for name in known)
        links = find_links(
            shapes, model, outside=self.outside, layer=layer, prefix=self.layer_prefix, known=known
        )  # fmt: skip
        if model.tie_embeddings and known is not None:
            links = self._tied(links, known)
        return self._stripped(links) if strip else links

    def _strips(self, known: frozenset[str] | None) -> bool:
        """Whether names come without the optional prefix."""
        prefix = self.optional_prefix
        return bool(prefix and known) and not any(name.startswith(prefix) for name in known or ())

    def _stripped(self, links: Links) -> Links:
        prefix = self.optional_prefix
        return Links(
            tuple(replace(link, theirs=link.theirs.removeprefix(prefix)) for link in links.links),
            {name.removeprefix(prefix): shape for name, shape in links.shapes.items()},
        )

    def _tied(self, links: Links, known: frozenset[str]) -> Links:
        """A file may have the tied weight under the name of the head, or under both."""
        head, embedding = f"{self.outside['head']}.weight", f"{self.outside['embedding']}.weight"
        if head not in known:
            return links
        shape = links.shapes[embedding]
        (own,) = (link for link in links.links if link.ours == "embedding.weight")
        double = Link(ours=own.ours, theirs=head, of_ours=own.of_ours, of_theirs=own.of_theirs)
        if embedding in known:
            return Links((*links.links, double), {**links.shapes, head: shape})
        others = tuple(link for link in links.links if link is not own)
        shapes = {name: size for name, size in links.shapes.items() if name != embedding}
        return Links((double, *others), {**shapes, head: shape})

    def is_unused(self, name: str) -> bool:
        """Whether a tensor of theirs holds nothing learned."""
        return any(pattern and re.fullmatch(pattern, name) for pattern in (_BUFFERS, self.buffers))


_NEVER = {
    "quantization_config": "quantised weights are not read; take the checkpoint that they were made from",
    "is_encoder_decoder": "there are no encoders",
    "add_cross_attention": "there is no cross attention",
    "tie_encoder_decoder": "there are no encoders",
    "pruned_heads": "all heads are there",
    "use_bidirectional_attention": "attention is causal",
    "per_layer_config": "all layers have the sizes of the model",
}


def find_family(families: Mapping[str, Family], content: Content) -> Family:
    """The family of a config.json; raises Refused with the known ones."""
    model_type = str(content.get("model_type"))
    if model_type not in families:
        raise Refused([f"model_type={model_type!r}: there are {', '.join(families)}"])
    family = families[model_type]
    named = content.get("architectures") or [family.architecture]
    if family.architecture not in named:
        raise Refused([f"architectures={named}: of {model_type} there is {family.architecture}"])
    return family


def family_of(families: Mapping[str, Family], model: ModelConfig, first: str | None = None) -> Family:
    """The family that can say what `model` is, `first` if that can; raises Refused with why the nearest cannot."""
    candidates = [family for family in families.values() if family.name == model.name]
    candidates.sort(key=lambda family: family.model_type != first)
    nearest: tuple[str, ...] | None = None
    for family in candidates:
        try:
            family.write(model)
        except Refused as error:
            nearest = error.problems if nearest is None or len(error.problems) < len(nearest) else nearest
        else:
            return family
    raise Refused(nearest if nearest is not None else [f"model.name={model.name} has no family of Hugging Face"])
