"""What LFM2's config.json and layers have of their own."""

from __future__ import annotations

from typing import Any

from megalite.models.hf.fields import Content, Field, Layers, Refused, Same, Unused
from megalite.models.hf.weights import Experts, Table, Viewed
from megalite.nn.config import ModelConfig


class AdjustedWidth(Field):
    """The width of the feed-forward layer, which a file may give as what it is made from."""

    keys = ("intermediate_size", "block_ff_dim", "block_auto_adjust_ff_dim", "block_ffn_dim_multiplier",
            "block_multiple_of")  # fmt: skip

    def read(self, content: Content) -> dict[str, Any]:
        """Two thirds of it, times a factor, rounded up."""
        width = content.get("block_ff_dim", content.get("intermediate_size"))
        if type(width) is not int:
            raise Refused([f"intermediate_size={width!r} should be a number"])
        if content.get("block_auto_adjust_ff_dim", True):
            width = int(2 * width / 3)
            if (factor := content.get("block_ffn_dim_multiplier", 1.0)) is not None:
                multiple = content.get("block_multiple_of", 256)
                width = -(-int(factor * width) // multiple) * multiple
        return {"ffn_hidden_size": width}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """The width itself."""
        return {"intermediate_size": model.ffn_size, "block_auto_adjust_ff_dim": False}


class Operators(Field):
    """Which layers attend: layer_types, or full_attn_idxs."""

    keys = ("layer_types", "full_attn_idxs")

    def read(self, content: Content) -> dict[str, Any]:
        """attention_layers."""
        num_layers, types = content["num_hidden_layers"], content.get("layer_types")
        if types is None:
            attending = content.get("full_attn_idxs")
            attending = list(range(num_layers)) if attending is None else attending
        elif len(types) == num_layers and set(types) <= {"conv", "full_attention"}:
            attending = [layer for layer, kind in enumerate(types) if kind == "full_attention"]
        else:
            raise Refused([f"layer_types={types}: there are conv and full_attention, one for each layer"])
        if not attending:
            raise Refused(["layer_types: no layer attends"])
        return {"attention_layers": Layers(num_layers=num_layers).pattern(lambda layer: layer in attending)}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """Both."""
        kinds = ["full_attention" if model.is_attention_layer(i) else "conv" for i in range(model.num_layers)]
        return {"layer_types": kinds, "full_attn_idxs": [i for i, kind in enumerate(kinds) if kind != "conv"]}


class OldTie(Same):
    """An older name of tie_word_embeddings, which wins over it and is not written."""

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """Nothing."""
        return {}


UNREAD = Unused(
    "block_dim", "block_mlp_init_scale", "block_norm_eps", "block_out_init_scale", "block_use_swiglu",
    "block_use_xavier_init", "conv_dim", "conv_dim_out", "conv_use_xavier_init", "num_heads", "use_pos_enc",
)  # fmt: skip
"""In published files; transformers does not look at them."""


def layer_table(model: ModelConfig, layer: int) -> Table:
    """Where the tensors of a layer are, by what mixes positions in it."""
    operator: Table = {
        "attention.in_proj.b": "conv.in_proj", "attention.in_proj.c": "conv.in_proj",
        "attention.in_proj.x": "conv.in_proj", "attention.proj": "conv.out_proj",
        "attention.conv": Viewed("conv.conv.weight", view=lambda tensor: tensor.unsqueeze(1)),
    }  # fmt: skip
    if model.is_attention_layer(layer):
        operator = {
            "attention.qkv.q": "self_attn.q_proj", "attention.qkv.k": "self_attn.k_proj",
            "attention.qkv.v": "self_attn.v_proj", "attention.proj": "self_attn.out_proj",
            "attention.q_norm": "self_attn.q_layernorm", "attention.k_norm": "self_attn.k_layernorm",
        }  # fmt: skip
    experts = "feed_forward.experts.{}"
    return {
        **operator, "attention_norm": "operator_norm", "mlp_norm": "ffn_norm",
        "mlp.fc1.gate": "feed_forward.w1", "mlp.fc1.up": "feed_forward.w3", "mlp.fc2": "feed_forward.w2",
        "mlp.router": "feed_forward.gate", "mlp.router.expert_bias": "feed_forward.expert_bias",
        "mlp.experts.fc1": Experts(
            (f"{experts}.w1.weight", f"{experts}.w3.weight"), "feed_forward.experts.gate_up_proj"
        ),
        "mlp.experts.fc2": Experts((f"{experts}.w2.weight",), "feed_forward.experts.down_proj"),
    }  # fmt: skip
