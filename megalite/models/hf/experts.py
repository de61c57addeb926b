"""Words of mixtures of experts in a config.json, and places of their tensors, that few families have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from megalite.models.hf.fields import Content, Field, Refused
from megalite.models.hf.rope import Rope
from megalite.models.hf.weights import Place, Shape
from megalite.nn.config import ModelConfig


def shared_expert(theirs: str) -> Mapping[str, str]:
    """Where the shared expert is, called `theirs`."""
    parts = {"fc1.gate": "gate_proj", "fc1.up": "up_proj", "fc2": "down_proj"}
    return {f"mlp.shared.{ours}": f"mlp.{theirs}.{name}" for ours, name in parts.items()}


class InTurns(Place):
    """Gate and up of one feature side by side, the last dim of theirs [E, in, 2 f] and [E, 2 f] (gpt-oss)."""

    def of_ours(self, tensor: Tensor, model: ModelConfig) -> Tensor:
        """[E, 2, f, ..]."""
        return tensor.unflatten(1, (2, -1))

    def of_theirs(self, tensor: Tensor, model: ModelConfig) -> Tensor:
        """[E, 2, f, ..]."""
        rows = tensor.mT if tensor.dim() == 3 else tensor
        return rows.unflatten(1, (-1, 2)).transpose(1, 2)

    def shape(self, view: Shape) -> Shape:
        """[E, in, 2 f] or [E, 2 f]."""
        experts, parts, width, *inputs = view
        return (experts, *inputs, parts * width)


class InputsFirst(Place):
    """Each expert's matrix as [in, out] (gpt-oss)."""

    def of_theirs(self, tensor: Tensor, model: ModelConfig) -> Tensor:
        """[E, out, in]."""
        return tensor.mT

    def shape(self, view: Shape) -> Shape:
        """[E, in, out]."""
        return view[0], view[2], view[1]


class RopeOrYarn(Rope):
    """What a file that says nothing means is yarn for rows of 32 times 4096 tokens (gpt-oss)."""

    def parameters(self, content: Content) -> dict[str, Any]:
        """With these, if there are none."""
        if not content.get("rope_parameters") and not content.get("rope_scaling"):
            yarn = {"rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096}
            content = {**content, "rope_parameters": yarn}
        return super().parameters(content)


class SharedExperts(Field):
    """How many experts every token uses, each as wide as the others (DeepSeek)."""

    keys = ("n_shared_experts",)

    def __init__(self, default: int):
        self.default = default

    def read(self, content: Content) -> dict[str, Any]:
        """shared_ffn_hidden_size, of all together."""
        count = content.get("n_shared_experts", self.default)
        if not count:
            raise Refused([f"n_shared_experts={count!r}: transformers always has at least one"])
        return {"shared_ffn_hidden_size": count * content["moe_intermediate_size"]}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """Their number; reading it again tells whether it is whole."""
        return {"n_shared_experts": model.shared_ffn_hidden_size // model.expert_ffn_size}


class Groups(Field):
    """Groups of experts, judged by their `best` (DeepSeek). method: the topk_method that has them, and one without."""

    keys = ("n_group", "topk_group", "topk_method")

    def __init__(self, best: int, *, groups: int, kept: int, method: str, plain: str | None = None):
        self.best, self.defaults, self.method, self.plain = best, (groups, kept), method, plain

    def read(self, content: Content) -> dict[str, Any]:
        """num_expert_groups, top_k_groups and group_top_k."""
        method = content.get("topk_method", self.plain if self.plain is not None else self.method)
        if method not in (self.method, self.plain):
            raise Refused([f"topk_method={method!r}: it should be {self.method} in this family"])
        if method != self.method:
            return {}
        groups, kept = (content.get(key, value) for key, value in zip(self.keys, self.defaults, strict=False))
        if (groups or 1) == 1:
            return {}
        return {"num_expert_groups": groups, "top_k_groups": kept, "group_top_k": self.best}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """All of them."""
        found: dict[str, Any] = {"n_group": model.num_expert_groups, "topk_group": model.top_k_groups}
        if self.plain is not None:
            found["topk_method"] = self.method if model.num_expert_groups > 1 else self.plain
        return found
