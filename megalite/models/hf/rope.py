"""Rotary positions in a config.json: rope_parameters of today, rope_theta and rope_scaling of before."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megalite.models.hf.fields import Content, Field, Layers, Refused
from megalite.nn.config import ModelConfig

_KINDS = {"default": "none", "linear": "linear", "dynamic": "ntk", "yarn": "yarn", "llama3": "llama3"}
_VALUES = {
    "factor": "rope_factor", "original_max_position_embeddings": "rope_original_positions",
    "low_freq_factor": "rope_low_freq_factor", "high_freq_factor": "rope_high_freq_factor",
    "beta_fast": "rope_beta_fast", "beta_slow": "rope_beta_slow", "mscale": "rope_mscale",
    "mscale_all_dim": "rope_mscale_all_dim", "attention_factor": "rope_attention_factor", "truncate": "rope_truncate",
}  # fmt: skip
_OF_KIND = {
    "default": (), "linear": ("factor",), "dynamic": ("factor", "original_max_position_embeddings"),
    "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim",
             "attention_factor", "truncate"),
}  # fmt: skip


class Rope(Field):
    """Base, share of a head and scaling. theta: what a file means that leaves it out.

    percent: the same of the share; None for a family that turns whole heads whatever a file says. kinds: the scalings
    that the family has in transformers.
    """

    keys = ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor", "rotary_emb_base", "rotary_pct",
            "original_max_position_embeddings", "rope_interleaved")  # fmt: skip

    def __init__(self, theta: float = 10000.0, percent: float | None = None, kinds: tuple[str, ...] = tuple(_KINDS)):
        self.theta, self.percent, self.kinds = theta, percent, kinds

    def read(self, content: Content) -> dict[str, Any]:
        """The rope_ fields."""
        if content.get("rope_interleaved"):
            raise Refused(["rope_interleaved=true: rotary positions turn halves of a head, not neighbours"])
        return self.read_parameters(self.parameters(content), content)

    def parameters(self, content: Content) -> dict[str, Any]:
        """All that a file says of rotary positions, in today's form."""
        found = dict(content.get("rope_scaling") or content.get("rope_parameters") or {})
        kind = found.pop("type", "default")
        kind = found.setdefault("rope_type", kind)
        if kind in ("yarn", "llama3") and content.get("original_max_position_embeddings"):
            found["original_max_position_embeddings"] = content["original_max_position_embeddings"]
        for key, default, names in (
            ("rope_theta", self.theta, ("rope_theta", "rotary_emb_base")),
            ("partial_rotary_factor", self.percent or 1.0, ("partial_rotary_factor", "rotary_pct")),
        ):
            given = next((content[name] for name in names if content.get(name) is not None), default)
            found.setdefault(key, given)
        return found

    def read_parameters(self, parameters: Mapping[str, Any], content: Content) -> dict[str, Any]:
        """The rope_ fields of one set of parameters."""
        kind = parameters["rope_type"]
        if kind not in self.kinds:
            raise Refused([f"rope_parameters.rope_type={kind!r}: here are {', '.join(self.kinds)}"])
        if self.percent is None and parameters["partial_rotary_factor"] != 1:
            share = parameters["partial_rotary_factor"]
            raise Refused([f"partial_rotary_factor={share}: whole heads are turned in this family"])
        found: dict[str, Any] = {
            "rope_theta": float(parameters["rope_theta"]),
            "rope_percent": float(parameters["partial_rotary_factor"]),
        }
        if kind == "default":
            return found
        values = {key: value for key, value in parameters.items() if value is not None}
        unknown = set(values) - set(_OF_KIND[kind]) - {"rope_type", "rope_theta", "partial_rotary_factor"}
        if kind in ("linear", "dynamic", "llama3"):
            unknown -= {"original_max_position_embeddings"}  # not asked by some, harmless
        if unknown or "factor" not in values:
            what = ", ".join(f"{key}={values[key]!r}" for key in sorted(unknown)) or "no factor"
            raise Refused([f"rope_parameters of {kind}: {what} is not understood"])
        found |= {"rope_scaling": _KINDS[kind]}
        found |= {_VALUES[key]: values[key] for key in _OF_KIND[kind] if key in values}
        if kind != "linear" and "rope_original_positions" not in found:
            if not content.get("max_position_embeddings"):
                raise Refused([f"rope_parameters of {kind}: original_max_position_embeddings is missing"])
            found["rope_original_positions"] = content["max_position_embeddings"]
        if kind == "dynamic":  # theirs grows with the row; of rows that the model was trained for it is none
            found["rope_length"] = found["rope_original_positions"]
        return found

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """Both forms: older versions of transformers would fall back on their default base without rope_theta."""
        parameters = self.write_parameters(model)
        found: dict[str, Any] = {"rope_parameters": parameters, "rope_theta": model.rope_theta}
        if model.rope_percent != 1.0 or (self.percent or 1.0) != 1.0:
            parameters["partial_rotary_factor"] = found["partial_rotary_factor"] = model.rope_percent
        return found

    def write_parameters(self, model: ModelConfig) -> dict[str, Any]:
        """rope_parameters."""
        kind = next(theirs for theirs, ours in _KINDS.items() if ours == model.rope_scaling)
        values = {key: getattr(model, _VALUES[key]) for key in _OF_KIND[kind]}
        kept = {key: value for key, value in values.items() if value is not None}
        if not model.rope_mscale or not model.rope_mscale_all_dim:  # a lone one means nothing
            kept = {key: value for key, value in kept.items() if key not in ("mscale", "mscale_all_dim")}
        return {"rope_type": kind, "rope_theta": model.rope_theta} | kept


class TwoRopes(Rope):
    """One set of parameters for layers with a window and one for the others (Gemma 3)."""

    keys = (*Rope.keys, "rope_local_base_freq")

    def __init__(self, theta: float, local: float):
        super().__init__(theta)
        self.local = local

    def read(self, content: Content) -> dict[str, Any]:
        """The rope_ fields."""
        both = dict(content.get("rope_parameters") or {})
        first = dict(content.get("rope_scaling") or {}) | dict(both.get("full_attention") or {})
        local = {"rope_type": "default"} | dict(both.get("sliding_attention") or {})
        if unknown := set(both) - {"full_attention", "sliding_attention"}:
            raise Refused([f"rope_parameters: {', '.join(sorted(unknown))} is not understood"])
        if local["rope_type"] != "default" or set(local) - {"rope_type", "rope_theta"}:
            raise Refused([f"rope_parameters.sliding_attention={local}: layers with a window have no scaling"])
        first.setdefault("rope_type", first.pop("type", "default"))
        first.setdefault("rope_theta", content.get("rope_theta", self.theta))
        found = self.read_parameters(first | {"partial_rotary_factor": 1.0}, content)
        theta = local.get("rope_theta", content.get("rope_local_base_freq", self.local))
        windows = [kind == "sliding_attention" for kind in content.get("layer_types") or ["sliding_attention"]]
        return found | ({"rope_local_theta": float(theta)} if any(windows) else {})

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """Both forms."""
        first, theta = self.write_parameters(model), model.rope_local_theta or self.local
        local = {"rope_type": "default", "rope_theta": theta}
        found = {"rope_theta": model.rope_theta, "rope_local_base_freq": theta}
        return {"rope_parameters": {"full_attention": first, "sliding_attention": local}} | found


class RopeLayers(Field):
    """Which layers have rotary positions (SmolLM3)."""

    keys = ("no_rope_layers", "no_rope_layer_interval")

    def read(self, content: Content) -> dict[str, Any]:
        """rope_layers."""
        num_layers = content["num_hidden_layers"]
        turning = [layer for layer in range(num_layers) if has_rope(content, layer)]
        if not turning:
            raise Refused(["no_rope_layers: no layer has rotary positions"])
        return {"rope_layers": Layers(num_layers=num_layers).pattern(lambda layer: layer in turning)}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """1 where they are."""
        return {"no_rope_layers": [int(model.turns(layer)) for layer in range(model.num_layers)]}


def has_rope(content: Content, layer: int) -> bool:
    """Whether a layer has rotary positions in SmolLM3."""
    given = content.get("no_rope_layers")
    return bool(given[layer]) if given is not None else (layer + 1) % content.get("no_rope_layer_interval", 4) != 0
