"""GPT-NeoX and Pythia (Black et al., 2022, arXiv:2204.06745; Biderman et al., 2023, arXiv:2304.01373).

LayerNorm, biases, exact GELU, rotary positions on a quarter of each head, and usually both blocks beside one another.
"""

from __future__ import annotations

from torch import Tensor

from megalite.kernels.chosen import Kernels
from megalite.kernels.saved import Saved
from megalite.models.hf.family import Family
from megalite.models.hf.fields import Only, Same, decoder
from megalite.models.hf.rope import Rope
from megalite.models.hf.weights import PerHead
from megalite.models.layers import ParallelResidualLayer
from megalite.models.transformer import Transformer, TransformerLayer
from megalite.mpu import ParallelState
from megalite.nn.attention import BiasedAttention
from megalite.nn.config import ModelConfig
from megalite.nn.context import Context
from megalite.nn.mlp import ExactGeluMLP
from megalite.nn.norm import LayerNorm
from megalite.nn.saved import BatchShape


class GPTNeoXLayer(ParallelResidualLayer):
    """Blocks beside one another, or one after the other."""

    norm_cls = LayerNorm
    attention_cls = BiasedAttention
    mlp_cls = ExactGeluMLP

    def __init__(self, config: ModelConfig, mpu: ParallelState, index: int, kernels: Kernels | None = None):
        super().__init__(config, mpu, index, kernels)
        self.kind = ParallelResidualLayer if config.parallel_residual else TransformerLayer

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """Same shape out as in."""
        return self.kind.forward(self, x, context)

    def saved(self, shape: BatchShape) -> Saved:
        """By the form."""
        return self.kind.saved(self, shape)


class GPTNeoX(Transformer):
    """GPT-NeoX at any size."""

    layer_cls = GPTNeoXLayer
    norm_cls = LayerNorm


GPT_NEOX = Family(
    model_type="gpt_neox", architecture="GPTNeoXForCausalLM", name="gpt_neox", model_cls=GPTNeoX,
    outside={"embedding": "gpt_neox.embed_in", "final_norm": "gpt_neox.final_layer_norm", "head": "embed_out"},
    layer={
        "attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm",
        "attention.qkv.q": PerHead("attention.query_key_value"),
        "attention.qkv.k": PerHead("attention.query_key_value"),
        "attention.qkv.v": PerHead("attention.query_key_value"), "attention.proj": "attention.dense",
        "mlp.fc1.up": "mlp.dense_h_to_4h", "mlp.fc2": "mlp.dense_4h_to_h",
    },
    layer_prefix="gpt_neox.layers.{}.", buffers=r"gpt_neox\.layers\.\d+\.attention\.bias",
    fields=(
        *decoder(eps=1e-5, norm="layer_norm_eps", kv_key=None), Rope(percent=0.25),
        Same("use_parallel_residual", "parallel_residual", default=True),
        Same("hidden_dropout", "hidden_dropout", default=0.0),
        Only("hidden_act", "gelu", "GELU is the exact one"), Only("attention_bias", True, "attention has biases"),
    ),
)  # fmt: skip
