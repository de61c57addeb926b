"""The keys of a config.json and the fields of a model that they mean, read and written by the same object.

Every key of a file is owned by a field of its family, or known not to change what is computed, or refused by name.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megalite.nn.config import ModelConfig

Content = Mapping[str, Any]

HARMLESS = frozenset({
    "_attn_implementation_autoset", "_name_or_path", "architectures", "attn_implementation", "auto_map",
    "bad_words_ids", "begin_suppress_tokens", "bos_token_id", "cache_implementation", "chunk_size_feed_forward",
    "classifier_dropout", "decoder_start_token_id", "diversity_penalty", "do_sample", "dtype", "early_stopping",
    "encoder_no_repeat_ngram_size", "eos_token_id", "exponential_decay_length_penalty", "finetuning_task",
    "forced_bos_token_id", "forced_eos_token_id", "gradient_checkpointing", "id2label", "is_decoder", "label2id",
    "length_penalty", "max_length", "max_position_embeddings", "min_length", "model_type", "no_repeat_ngram_size",
    "num_beam_groups", "num_beams", "num_return_sequences", "output_attentions", "output_hidden_states",
    "output_router_logits", "output_scores", "pad_token_id", "prefix", "pretraining_tp", "problem_type",
    "remove_invalid_values", "repetition_penalty", "return_dict", "return_dict_in_generate", "sep_token_id",
    "suppress_tokens", "task_specific_params", "temperature", "tokenizer_class", "top_k", "top_p", "torch_dtype",
    "torchscript", "transformers_version", "typical_p", "unsloth_version", "use_bfloat16", "use_cache",
})  # fmt: skip
"""Keys that change nothing of the logits: names, token ids, dtypes, what generation begins with."""


class Refused(ValueError):
    """What a config.json asks for and no model here has; `problems` names each key."""

    def __init__(self, problems: Sequence[str]):
        self.problems = tuple(problems)
        super().__init__("\n".join(problems))


class Field(ABC):
    """Some keys of theirs and what they mean."""

    keys: tuple[str, ...]

    @abstractmethod
    def read(self, content: Content) -> dict[str, Any]:
        """Fields of `ModelConfig`; raises Refused for what they cannot say."""

    @abstractmethod
    def write(self, model: ModelConfig) -> dict[str, Any]:
        """Keys of a config.json."""


class Same(Field):
    """One of theirs is one of ours, under another name.

    theirs: the key, or several of which the first is written. default: what a file that leaves it out means (None:
    our default). of: our property with the value to write, where the field itself may be None.
    """

    def __init__(self, theirs: str | tuple[str, ...], ours: str, *, default: Any = None, of: str | None = None):
        self.keys = (theirs,) if isinstance(theirs, str) else theirs
        self.ours, self.default, self.of = ours, default, of if of is not None else ours

    def read(self, content: Content) -> dict[str, Any]:
        """The first key that is there; null is our default, whatever the default of a file is."""
        found = next((content[key] for key in self.keys if key in content), self.default)
        return {self.ours: found} if found is not None else {}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """The first key."""
        return {self.keys[0]: getattr(model, self.of)}


class Cap(Same):
    """A soft cap; null is none, as theirs divides by any number."""

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """The number, or null."""
        return {self.keys[0]: getattr(model, self.of) or None}


class Needed(Same):
    """One that no file may leave out."""

    def read(self, content: Content) -> dict[str, Any]:
        """An integer."""
        found = super().read(content)
        if type(found.get(self.ours)) is not int:
            raise Refused([f"{self.keys[0]}={found.get(self.ours)!r} should be a number"])
        return found


class Only(Field):
    """A key with values that are what is computed here; `value` is what a file means that leaves it out."""

    def __init__(self, theirs: str, value: Any, why: str, *, others: Sequence[Any] = ()):
        self.keys, self.value, self.why, self.others = (theirs,), value, why, tuple(others)

    def read(self, content: Content) -> dict[str, Any]:
        """Nothing."""
        found = content.get(self.keys[0], self.value)
        if found != self.value and found not in self.others:
            raise Refused([f"{self.keys[0]}={found!r}: {self.why}"])
        return {}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """The value."""
        return {self.keys[0]: self.value}


class Ours(Field):
    """What the family always has; no key says it."""

    keys = ()

    def __init__(self, **values: Any):
        self.values = values

    def read(self, content: Content) -> dict[str, Any]:
        """The same for each file."""
        return dict(self.values)

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """Nothing."""
        return {}


class Unused(Field):
    """Keys that change nothing of the logits in this family."""

    def __init__(self, *keys: str):
        self.keys = keys

    def read(self, content: Content) -> dict[str, Any]:
        """Nothing."""
        return {}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """Nothing."""
        return {}


@dataclass(frozen=True, kw_only=True)
class Layers:
    """A pattern of layers (see `megalite.pattern`) from a predicate."""

    num_layers: int

    def pattern(self, holds: Callable[[int], bool]) -> str:
        """The shortest word for the layers where it holds; at least one must."""
        chosen = [layer for layer in range(self.num_layers) if holds(layer)]
        if len(chosen) == self.num_layers:
            return "all"
        if chosen == list(range(chosen[0], self.num_layers)):
            return f"from:{chosen[0]}"
        return ",".join(map(str, chosen))


class Windows(Field):
    """sliding_window, and which layers have it: all, those of layer_types, or what a family does without them.

    default: the window of a file without the key. switch: whether use_sliding_window must be true. local: which layers
    have it where layer_types are not given; a function of the file and the layer's number. by_layer: whether the family
    knows layer_types.
    """

    keys = ("sliding_window", "use_sliding_window", "max_window_layers", "layer_types", "sliding_window_pattern",
            "_sliding_window_pattern")  # fmt: skip
    kinds = ("full_attention", "sliding_attention")

    def __init__(
        self,
        *,
        default: int | None = None,
        switch: bool = False,
        local: Callable[[Content, int], bool] = lambda content, layer: True,
        by_layer: bool = True,
    ):
        self.default, self.switch, self.local, self.by_layer = default, switch, local, by_layer
        if not by_layer:
            self.keys = ("sliding_window", "use_sliding_window", "max_window_layers") if switch else ("sliding_window",)

    def read(self, content: Content) -> dict[str, Any]:
        """window and window_layers."""
        window = content.get("sliding_window", self.default)
        num_layers = content["num_hidden_layers"]
        types = content.get("layer_types") if self.by_layer else None
        if types is not None and (len(types) != num_layers or not set(types) <= set(self.kinds)):
            raise Refused([f"layer_types={types}: there are {', '.join(self.kinds)}, one for each layer"])
        if not window or (self.switch and not content.get("use_sliding_window", False)):
            if types is not None and "sliding_attention" in types:
                raise Refused([f"layer_types={types} has layers with a window, sliding_window={window!r} is none"])
            return {}

        def holds(layer: int) -> bool:
            return types[layer] == "sliding_attention" if types is not None else self.local(content, layer)

        if not any(holds(layer) for layer in range(num_layers)):
            return {}
        return {"window": window, "window_layers": Layers(num_layers=num_layers).pattern(holds)}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """sliding_window; of families where layers differ, layer_types, too."""
        # Where layer_types alone say that no layer has a window, theirs still wants a number.
        by_layer_alone = self.by_layer and not self.switch
        found: dict[str, Any] = {"sliding_window": model.window or (self.default if by_layer_alone else None)}
        if self.switch:
            found["use_sliding_window"] = bool(model.window)
            # Versions that know no layer_types go by the first layer with the window.
            first = next((i for i in range(model.num_layers) if model.window_of(i)), model.num_layers)
            found["max_window_layers"] = first
        if self.by_layer:
            found["layer_types"] = [self.kinds[bool(model.window_of(i))] for i in range(model.num_layers)]
        return found


class Scale(Field):
    """The factor on attention scores, given as what it is one over the root of."""

    def __init__(self, key: str, *, default: float):
        self.keys, self.default = (key,), default

    def read(self, content: Content) -> dict[str, Any]:
        """attention_scale."""
        return {"attention_scale": content.get(self.keys[0], self.default) ** -0.5}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """The number, whole if it was."""
        exact = model.score_scale**-2
        return {self.keys[0]: round(exact) if round(exact) ** -0.5 == model.score_scale else exact}


class SparseLayers(Field):
    """Which layers hold experts: decoder_sparse_step and mlp_only_layers (Qwen)."""

    keys = ("decoder_sparse_step", "mlp_only_layers")

    def read(self, content: Content) -> dict[str, Any]:
        """moe_layers."""
        step, dense = content.get("decoder_sparse_step", 1), content.get("mlp_only_layers") or []
        num_layers = content["num_hidden_layers"]
        chosen = [i for i in range(num_layers) if i not in dense and (i + 1) % step == 0]
        if not chosen:
            raise Refused([f"decoder_sparse_step={step}, mlp_only_layers={dense}: no layer holds experts"])
        return {"moe_layers": Layers(num_layers=num_layers).pattern(lambda layer: layer in chosen)}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """Every layer may; some are named as dense."""
        dense = [i for i in range(model.num_layers) if not model.is_moe_layer(i)]
        return {"decoder_sparse_step": 1, "mlp_only_layers": dense}


class DenseFirst(Field):
    """How many layers at the front hold no experts."""

    def __init__(self, key: str, *, default: int):
        self.keys, self.default = (key,), default

    def read(self, content: Content) -> dict[str, Any]:
        """moe_layers."""
        dense = content.get(self.keys[0], self.default)
        if not 0 <= dense < content["num_hidden_layers"]:
            raise Refused([f"{self.keys[0]}={dense}: no layer holds experts"])
        return {"moe_layers": f"from:{dense}" if dense else "all"}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """The number of the first layer with experts."""
        return {self.keys[0]: next((i for i in range(model.num_layers) if model.is_moe_layer(i)), model.num_layers)}


def decoder(
    *,
    eps: float,
    kv: int | None = None,
    head: int | None = None,
    tied: bool = False,
    norm: str = "rms_norm_eps",
    width: bool = True,
    kv_key: str | None = "num_key_value_heads",
) -> tuple[Field, ...]:
    """The sizes that nearly all configs name alike. eps, kv, head, tied: what a file means that leaves them out.

    norm: the key of eps. kv_key: that of KV heads, None where there are as many as others. width: whether
    intermediate_size is the width of the feed-forward layer.
    """
    heads = (Same(kv_key, "num_kv_heads", default=kv, of="kv_heads"),) if kv_key is not None else ()
    widths = (Needed("intermediate_size", "ffn_hidden_size", of="ffn_size"),) if width else ()
    return (
        Needed("vocab_size", "vocab_size"),
        Needed("hidden_size", "hidden_size"),
        Needed("num_hidden_layers", "num_layers"),
        Needed("num_attention_heads", "num_heads"),
        *heads,
        Same("head_dim", "head_dim", default=head, of="head_size"),
        *widths,
        Same(norm, "norm_eps", default=eps),
        Same("tie_word_embeddings", "tie_embeddings", default=tied),
        Same("initializer_range", "init_std", default=0.02),
        Same("attention_dropout", "attention_dropout", default=0.0),
    )


SILU = Only("hidden_act", "silu", "the activation of a gated feed-forward is silu", others=("swish",))
ATTENTION_BIAS = Same("attention_bias", "attention_bias", default=False)
NO_ATTENTION_BIAS = Only("attention_bias", False, "attention has no biases in this architecture")
NO_MLP_BIAS = Only("mlp_bias", False, "the feed-forward has no biases in this architecture")


def experts(*, count: tuple[str, ...], width: str | None, coeff: float, per_token: int) -> tuple[Field, ...]:
    """What mixtures of experts say alike. count: keys of their number. width: the key of an expert's width.

    coeff, per_token: what a file means that leaves router_aux_loss_coef or num_experts_per_tok out.
    """
    sizes = (Needed(width, "expert_ffn_hidden_size", of="expert_ffn_size"),) if width is not None else ()
    return (
        Needed(count, "num_experts"),
        Same("num_experts_per_tok", "top_k", default=per_token),
        *sizes,
        Same("router_aux_loss_coef", "aux_loss_coeff", default=coeff),
    )
