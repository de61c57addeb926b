"""GPT-2 (Radford et al., 2019): LayerNorm, learned positions, GELU, biases, dropout; usually with tied embeddings."""

from __future__ import annotations

from megalite.models.hf.family import Family
from megalite.models.hf.fields import Needed, Only, Same, Unused
from megalite.models.hf.weights import Transposed
from megalite.models.transformer import Transformer, TransformerLayer
from megalite.nn.attention import BiasedAttention
from megalite.nn.experts import GeluExperts
from megalite.nn.mlp import GeluMLP
from megalite.nn.moe import MoELayer
from megalite.nn.norm import LayerNorm


class GPT2MoE(MoELayer):
    """Experts with GELU and biases, too."""

    experts_cls = GeluExperts
    shared_cls = GeluMLP


class GPT2Layer(TransformerLayer):
    """Pre-norm layer with LayerNorm, biases and GELU."""

    norm_cls = LayerNorm
    attention_cls = BiasedAttention
    mlp_cls = GeluMLP
    moe_cls = GPT2MoE


class GPT2(Transformer):
    """GPT-2 at any size."""

    layer_cls = GPT2Layer
    norm_cls = LayerNorm
    learned_positions = True
    rotary_positions = False


GPT2_FAMILY = Family(
    model_type="gpt2", architecture="GPT2LMHeadModel", name="gpt2", model_cls=GPT2,
    fields=(
        Needed("vocab_size", "vocab_size"), Needed("n_embd", "hidden_size"), Needed("n_layer", "num_layers"),
        Needed("n_head", "num_heads"), Same("n_inner", "ffn_hidden_size", of="ffn_size"),
        Needed("n_positions", "max_positions"), Same("layer_norm_epsilon", "norm_eps", default=1e-5),
        Same("initializer_range", "init_std", default=0.02), Same("embd_pdrop", "hidden_dropout", default=0.1),
        Same("resid_pdrop", "hidden_dropout", default=0.1), Same("attn_pdrop", "attention_dropout", default=0.1),
        Same("tie_word_embeddings", "tie_embeddings", default=True),
        Only("activation_function", "gelu_new", "GELU is the tanh form here", others=("gelu_pytorch_tanh",)),
        Only("scale_attn_weights", True, "attention scores are scaled"),
        Only("scale_attn_by_inverse_layer_idx", False, "all layers scale attention scores alike"),
        Unused("n_ctx", "reorder_and_upcast_attn", "summary_activation", "summary_first_dropout",
               "summary_proj_to_labels", "summary_type", "summary_use_proj"),
    ),
    outside={
        "embedding": "transformer.wte", "positions": "transformer.wpe", "final_norm": "transformer.ln_f",
        "head": "lm_head",
    },
    layer={
        "attention_norm": "ln_1", "mlp_norm": "ln_2", "attention.qkv.q": Transposed("attn.c_attn"),
        "attention.qkv.k": Transposed("attn.c_attn"), "attention.qkv.v": Transposed("attn.c_attn"),
        "attention.proj": Transposed("attn.c_proj"), "mlp.fc1.up": Transposed("mlp.c_fc"),
        "mlp.fc2": Transposed("mlp.c_proj"),
    },
    layer_prefix="transformer.h.{}.", optional_prefix="transformer.", buffers=r"(transformer\.)?h\.\d+\.attn\.bias",
)  # fmt: skip
